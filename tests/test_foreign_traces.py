"""Traces that others recorded, with what ours never have: odd operations, clocks, hosts and durations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from traced_jobs import changed, job_of, phases_of

from paceenv.calibration.fit_trace import fit_trace
from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.core.trace import Trace, TraceMetadata, write_trace
from paceenv.diagnosis.clocks import trace_on_one_clock
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
    """Ranks compute, and then reduce, for each of ``transfers``: its operation, bytes, and seconds.

    Args:
        transfers: one after the other, of all ranks.
        hosts: a letter for the host of each rank.
        slow: by how much rank 2 computes longer.
    """
    noise_TKR = 0.02 * np.random.default_rng(RNG_SEED).standard_normal((STEPS, len(transfers), RANKS))
    work_TKR = 0.05 * (1.0 + noise_TKR) * np.where(np.arange(RANKS) == 2, slow, 1.0)
    trace = phases_of(*((work_TKR[:, k], op, 0, lasts) for k, (op, _, lasts) in enumerate(transfers)))
    columns = {name: trace.column(name) for name in trace.table.column_names}
    size_K, seq = np.array([int(size) for _, size, _ in transfers]), columns["seq"]
    columns["bytes"] = np.where(seq % 2, size_K[seq // 2], 0)
    described = tuple({"rank": r} | ({"host": hosts[r]} if hosts else {}) for r in range(RANKS))
    return Trace.from_columns(columns, TraceMetadata({"name": "foreign"}, described, "test"))


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
    assert "all_reduce" in next(p.evidence for p in found.parameters if p.key == "job.barrier")
    assert "dataloader" not in next(p.evidence for p in found.parameters if p.key == "job.barrier")
    assert found.cluster.job.gradient_bytes == 1e8


def with_clock(trace: Trace, rank: int, ahead_s: float) -> Trace:
    off_s = np.where(trace.column("rank") == rank, ahead_s, 0.0)
    return changed(trace, **{name: trace.column(name) + off_s for name in ("start_s", "end_s")})


def test_clocks_that_differ_are_set_right_before_anything_is_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = job_of(compute_TR(), 0.02)
    for off_s, said in ((-0.02, "20 ms behind"), (0.02, "20 ms ahead")):
        ahead = with_clock(plain, 2, off_s)
        right, note = trace_on_one_clock(ahead)
        assert f"rank 2, at most {said}" in note
        np.testing.assert_allclose(right.column("end_s"), plain.column("end_s"), atol=1e-9)
    assert trace_on_one_clock(plain) == (plain, "")
    baseline = of_trace(ahead, "ahead", None, None)
    assert note in baseline.notes
    assert not baseline.slow
    write_trace(ahead, tmp_path / "t.parquet")
    application.run(["calibrate", str(tmp_path / "t.parquet"), "-o", str(tmp_path / "c.yaml"), "--json", "-"])
    written = json.loads(capsys.readouterr().out)
    assert note in written["notes"]
    assert written["cluster"]["noise"].get("slow_ranks", 0) == 0
    application.run(["diagnose", str(tmp_path / "t.parquet"), "--no-simulate", "--json", "-"])
    written = json.loads(capsys.readouterr().out)
    assert note in written["notes"]
    assert written["bare_step_s"] > 0.0


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
    names = ("rank", "iteration", "seq", "op", "group", "start_s", "end_s", "bytes")
    columns = {key: list(values) for key, values in zip(names, zip(*rows, strict=True), strict=True)}
    trace = Trace.from_columns({"job": "waits", **columns}, TraceMetadata({"name": "waits"}, (), "test"))
    assert trace_on_one_clock(trace)[1] == ""


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
