"""Traces that others recorded, with what ours never have: odd operations, clocks, hosts, durations and shapes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from traced_jobs import changed, job_of, json_of, phases_of, trace_of

from paceenv.calibration.fit_trace import fit_stamps, fit_trace
from paceenv.calibration.heldout import check_fit
from paceenv.calibration.job_stamps import read_job
from paceenv.calibration.noise_fit import fit_noise, stage_times
from paceenv.core.errors import InputError
from paceenv.core.operation_matrix import read_matrix
from paceenv.core.trace import Trace, TraceMetadata, write_trace
from paceenv.importers.clocks import matrix_on_one_clock
from paceenv.sim.cluster import Cluster
from paceenv.ui import config_files
from paceenv.whatif.baseline import of_config, of_trace
from paceenv.whatif.change import Change
from paceenv.whatif.simulated import predict

STEPS, RANKS = 60, 4
RNG_SEED = 5


def compute_TR(steps: int = STEPS, ranks: int = RANKS, cv: float = 0.05) -> NDArray[np.float64]:
    return 0.1 * (1.0 + cv * np.random.default_rng(RNG_SEED).standard_normal((steps, ranks)))


def phased(*transfers: tuple[str, float, Any], hosts: str = "", slow: float = 1.0) -> Trace:
    """Ranks compute, rank 2 longer by ``slow``, and then reduce, for each transfer: its operation, bytes, and seconds.

    ``hosts`` has a letter for the host of each rank.
    """
    noise_TKR = 0.02 * np.random.default_rng(RNG_SEED).standard_normal((STEPS, len(transfers), RANKS))
    work_TKR = 0.05 * (1.0 + noise_TKR) * np.where(np.arange(RANKS) == 2, slow, 1.0)
    trace = phases_of(*((work_TKR[:, k], op, 0, lasts) for k, (op, _, lasts) in enumerate(transfers)))
    size_K, seq = np.array([int(size) for _, size, _ in transfers]), trace.column("seq")
    described = tuple({"rank": r} | ({"host": hosts[r]} if hosts else {}) for r in range(RANKS))
    table = changed(trace, bytes=np.where(seq % 2, size_K[seq // 2], 0)).table
    return Trace(table, TraceMetadata({"name": "foreign"}, described, "test"))


@pytest.mark.parametrize(
    "lasts_T",
    [np.where(np.arange(STEPS) % 5 < 3, 1e-5, 5e-3), 2e-3 * (1.0 + np.sin(np.arange(200) / 6.0))],
    ids=["mostly nothing", "now and then nothing"],
)
def test_payloads_that_take_next_to_no_time_limit_nothing(lasts_T: NDArray[np.float64]) -> None:
    trace = job_of(compute_TR(len(lasts_T), 8, cv=0.001), lasts_T[:, None])
    assert fit_trace(trace).cluster.fabric.nic_gbps is not None


def test_an_operation_of_an_unknown_name_is_no_collective() -> None:
    """Without a process group it is work, such as waiting for data."""
    trace = phased(("all_reduce", 1e8, 0.01), ("dataloader", 0, 0.02))
    group = np.where(trace.isin("op", "dataloader"), -1, trace.column("group"))
    found = fit_trace(changed(trace, group=group), program=False)
    (evidence,) = (p.evidence for p in found.parameters if p.key == "job.barrier")
    assert "all_reduce" in evidence
    assert "dataloader" not in evidence
    assert found.cluster.job.gradient_bytes == 1e8


def test_clocks_that_differ_are_set_right_before_anything_is_fitted(tmp_path: Path) -> None:
    plain, path = job_of(compute_TR(), 0.02), tmp_path / "t.parquet"
    for off_s, said in ((-0.02, "20 ms behind"), (0.02, "20 ms ahead")):
        by_s = np.where(plain.column("rank") == 2, off_s, 0.0)
        ahead = changed(plain, **{name: plain.column(name) + by_s for name in ("start_s", "end_s")})
        right, note = matrix_on_one_clock(ahead)
        assert f"rank 2, at most {said}" in note
        np.testing.assert_allclose(right.clock_2NT, read_matrix(plain).clock_2NT, atol=1e-9)
    assert not matrix_on_one_clock(plain)[1]
    baseline = of_trace(ahead, "ahead", None, None)
    assert note in baseline.notes
    assert not baseline.slow
    write_trace(ahead, path)
    fitted = json_of("calibrate", path, "-o", tmp_path / "c.yaml")
    assert note in fitted["notes"]
    assert fitted["cluster"]["noise"].get("slow_ranks", 0) == 0
    diagnosed = json_of("diagnose", path, "--no-simulate")
    assert note in diagnosed["notes"]
    assert diagnosed["bare_step_s"] > 0.0


@pytest.mark.parametrize("slow", [1.2, 1.5])
def test_a_rank_that_comes_late_to_a_bucket_that_is_through_has_no_other_clock(slow: float) -> None:
    """A live trace has a transfer in the background where a rank waits for it: of one that is over, when it came."""
    work_TR, rows, now_s = compute_TR(cv=0.01), [], 0.0
    work_TR[:, 3] *= slow
    for t in range(STEPS):
        end_s = now_s + work_TR[t].max() + 0.005
        for r in range(RANKS):
            there_s = now_s + work_TR[t, r]
            rows.append((r, t, 0, "compute", -1, now_s, there_s, 0))
            rows.append((r, t, 1, "all_reduce", 0, there_s, there_s + 1e-5, 10**6))
            rows.append((r, t, 2, "all_reduce", 0, there_s + 1e-5, end_s, 10**6))
        now_s = end_s
    assert not matrix_on_one_clock(trace_of(rows))[1]


def test_a_slow_rank_is_no_slow_link_of_a_known_program() -> None:
    """Where phases do not name ranks, what one rank computes longer is its own."""
    sizes = (("all_reduce", 1e7, 0.012), ("all_gather", 4e7, 0.012))
    base = fit_trace(phased(*sizes), program=True).cluster
    healthy, slow = (fit_trace(phased(*sizes, slow=by), base=base) for by in (1.0, 1.2))
    assert slow.cluster.fabric.nic_gbps == pytest.approx(healthy.cluster.fabric.nic_gbps, rel=0.05)
    named = {p.key: p for p in slow.parameters}
    assert named["noise.slow_factor"].value == pytest.approx(1.2, rel=0.03)
    assert "rank 2" in named["noise.slow_ranks"].evidence
    assert slow.simulated.mean_s == pytest.approx(slow.measured.mean_s, rel=0.02)


def test_transfers_that_take_no_time_are_refused_as_a_program() -> None:
    with pytest.raises(InputError, match="its transfers take no time"):
        fit_trace(phased(("all_reduce", 1e6, 0.0), ("all_reduce", 2e6, 0.0)), program=True)


def test_the_trace_s_numbers_of_ranks_stay_with_the_config(tmp_path: Path) -> None:
    work_TR = compute_TR()
    work_TR[:, 3] *= 1.3
    numbers = np.tile(np.arange(RANKS) + 1000, 2 * STEPS)
    found = fit_trace(job_of(work_TR, 0.02, rank=numbers))
    config_files.write_yaml(tmp_path / "c.yaml", found.cluster.model_dump(exclude_defaults=True))
    baseline = of_config(str(tmp_path / "c.yaml"))
    assert baseline.ranks == (1000, 1001, 1002, 1003)
    assert baseline.slow == {1003}
    baseline.check([Change(replaced=frozenset({1003}))])
    with pytest.raises(InputError, match="allowed: ranks 1000-1003"):
        baseline.check([Change(replaced=frozenset({3}))])


def test_throughput_of_a_trace_counts_batches_of_ranks() -> None:
    trace = phased(("all_reduce", 1e7, 0.01), ("all_gather", 2e7, 0.02), hosts="aabb")
    baseline = of_trace(trace, "aabb", None, None)
    assert isinstance(baseline.cluster, Cluster)
    assert baseline.counts_batches
    answer = predict(baseline, [Change()], seeds=4, iterations=50)
    step_s = answer.today.job.step.value
    assert answer.unit == "batches of a rank"
    assert answer.today.job.throughput.value == pytest.approx(RANKS / step_s, rel=0.02)


@st.composite
def odd_traces(draw: st.DrawFn) -> Trace:
    """Ranks compute and then meet in a payload, group by group; with several groups a barrier follows."""
    groups = draw(st.sampled_from([1, 1, 2]))
    T, R = draw(st.sampled_from([1, 3, 8, 17, 18, 30])), groups * draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    scale_s, spread = draw(st.sampled_from([0.0, 1e-9, 0.1, 1e6])), draw(st.sampled_from([0.0, 1e-12, 0.05, 2.0]))
    payload_s = draw(st.sampled_from([0.0, 1e-7, 0.02, 30.0]))
    compute_s_TR = scale_s * np.exp(spread * rng.standard_normal((T, R)))
    if draw(st.booleans()):
        compute_s_TR[:, 0] *= draw(st.sampled_from([0.0, 3.0]))
    payload_T1 = payload_s * (1.0 + draw(st.sampled_from([0.0, 0.3])) * rng.random((T, 1)))
    op, group_R = draw(st.sampled_from(["all_reduce", "gather", "all_to_all"])), np.arange(R) * groups // R
    barrier = [(None, "barrier", -1, 1e-3)] if groups > 1 else []
    return phases_of((compute_s_TR, op, group_R, payload_T1), *barrier)


@given(odd_traces())
@settings(derandomize=True)
def test_no_shape_of_a_trace_crashes_calibration(trace: Trace) -> None:
    """Any other error than a refusal, and any warning, fails."""
    with contextlib.suppress(InputError):
        fit = fit_trace(trace, program=False)
        assert np.isfinite([fit.simulated.mean_s, fit.simulated.cv]).all()
    with contextlib.suppress(InputError):
        (mean, *_), _ = fit_noise(stage_times(trace)[0])
        assert np.isfinite([mean.value, mean.se]).all()


def test_stamps_that_never_vary_agree_with_themselves() -> None:
    stamps = read_job(read_matrix(phases_of((np.full((60, 4), 0.1), "all_reduce", 0, 0.02))))
    assert check_fit(stamps, lambda part: fit_stamps(part).cluster)["good"]
