"""Calibration of a whole cluster: traces simulated from known clusters give their parameters back."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from traced_jobs import changed, paced, trace_of

from benchmarks._common import recorded
from benchmarks.evidence.recovery import UNKNOWN, truth, with_bytes
from paceenv.calibration.cluster_builder import GOOD_CV, GOOD_MEAN
from paceenv.calibration.fit_trace import JobFit, fit_trace
from paceenv.calibration.job_stamps import read_job
from paceenv.calibration.link_replay import fit_links, share_uplink
from paceenv.calibration.parameters import Parameter
from paceenv.core.errors import InputError
from paceenv.core.operation_matrix import read_matrix
from paceenv.core.trace import COLLECTIVE_OPS, Trace, TraceMetadata
from paceenv.policies.rollout import run
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.cluster.derive import start

ITERATIONS = 300
ROUNDING = 1e-6
"""Relative: rows of a simulated trace tell a time to that, however narrow the interval."""


def simulated(cluster: Cluster, iterations: int = ITERATIONS) -> Trace:
    return recorded(cluster, 1, iterations)


def probed(cluster: Cluster, longest_s: float, iterations: int = ITERATIONS) -> Trace:
    """The trace of a run that delays every process group by chance."""
    delay_TG = np.random.default_rng(1).uniform(0.0, longest_s, (iterations, cluster.groups))
    return paced(cluster, 1, np.repeat(delay_TG, cluster.ranks // cluster.groups, axis=1))


def noisy(trace: Trace, sd_s: float, seed: int = 0) -> Trace:
    """The trace with every stamp off by a little, the order of a rank's operations kept."""
    rng = np.random.default_rng(seed)
    start_s, end_s = (
        trace.column(name) + sd_s * rng.standard_normal(trace.table.num_rows) for name in ("start_s", "end_s")
    )
    return changed(trace, start_s=start_s, end_s=np.maximum(end_s, start_s))


def by_key(fit: JobFit) -> dict[str, Parameter]:
    return {p.key: p for p in fit.parameters}


def missed(fit: JobFit, cluster: Cluster, keys: list[str]) -> list[str]:
    """Keys that are not told, or whose interval, widened to four standard errors, leaves the truth out."""
    found, wrong = by_key(fit), []
    for key in keys:
        p, true = found[key], truth(cluster, key)
        assert p.is_identified, p.evidence
        more = 0.5 * (p.hi - p.lo) + ROUNDING * abs(true)
        if not p.lo - more <= true <= p.hi + more:
            wrong.append(f"{key}: {true} not in [{p.lo}, {p.hi}]")
    return wrong


def assert_good(fit: JobFit) -> None:
    assert abs(fit.mean_error) < GOOD_MEAN
    assert abs(fit.simulated.cv - fit.measured.cv) < GOOD_CV


def gain(cluster: Cluster) -> float:
    """What the cluster's own pacing rule does to its mean step."""
    runs = (run(select_policy(name, cluster), start(cluster, np.arange(8)), 400) for name in ("static", "passive"))
    paced_s, plain_s = (one.step_ET[:, 200:].mean() for one in runs)
    return float(paced_s / plain_s - 1.0)


NOISE = ["job.compute_s", "noise.jitter_cv"]
LINKS = ["fabric.nic_gbps", "fabric.uplink_gbps", "fabric.barrier_us"]
CASES = {
    "unequal-slack": [*NOISE, *LINKS, "post_collective_work.groups", "post_collective_work.work_s"],
    "incast-shallow": [*NOISE, "fabric.nic_gbps", "fabric.buffer_kb"],
    "sockets-null-jitter": ["job.compute_s", "noise.imbalance_cv", "noise.imbalance_skew", "fabric.nic_gbps"],
}


@pytest.mark.parametrize("name", CASES)
def test_a_simulated_job_gives_its_cluster_back(name: str) -> None:
    cluster = load_cluster(name)
    fit = fit_trace(with_bytes(simulated(cluster), cluster), base=cluster.changed(list(UNKNOWN)), program=False)
    assert not missed(fit, cluster, CASES[name])
    assert (fit.cluster.ranks, fit.cluster.groups) == (cluster.ranks, cluster.groups)
    assert fit.cluster.job.collective == cluster.job.collective
    assert fit.cluster.barrier == cluster.barrier
    assert_good(fit)
    # its own rule, which the fit has from the base, does the same to it
    assert gain(fit.cluster) == pytest.approx(gain(cluster), abs=0.02)


def test_noise_of_the_stamps() -> None:
    """It hides how payloads respond to starts as they happen to vary, but not how they respond to random delays."""
    cluster = load_cluster("unequal-slack")
    trace = noisy(with_bytes(simulated(cluster), cluster), 1e-3)
    probe = noisy(with_bytes(probed(cluster, 0.03), cluster), 1e-3, 1)
    fit = fit_trace(trace, base=cluster.changed(list(UNKNOWN)), probe=probe, program=False)
    assert fit.cluster.fabric.uplink_gbps == pytest.approx(0.4, rel=0.02)
    assert fit.cluster.post_collective_work.groups == 1
    assert fit.cluster.post_collective_work.work_s == pytest.approx(0.12, rel=0.02)
    assert_good(fit)
    assert gain(fit.cluster) == pytest.approx(gain(cluster), abs=0.03)


EPISODES = ("share", "mean_iterations", "episode_s")
FAIL_SLOW = ("fail_slow_share", "fail_slow_mean_iterations", "fail_slow_factor")
FOUND = {
    "unequal shares of a link": ("sockets-null-jitter", {"noise": {"transfer_cv": 0.3}}),
    "a slow rank": ("sockets-null-jitter", {"noise": {"slow_ranks": 1, "slow_factor": 2.0}}),
    "fail-slow episodes": ("equal-slack", {"noise": dict(zip(FAIL_SLOW, (0.1, 40.0, 1.6), strict=True))}),
    "work in episodes": ("equal-slack", {"post_collective_work": dict(zip(EPISODES, (0.2, 40.0, 0.1), strict=True))}),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_is_put_into_a_job_is_found(what: str) -> None:
    name, sections = FOUND[what]
    put = {f"{section}.{key}": value for section, of in sections.items() for key, value in of.items()}
    cluster = load_cluster(name).changed([f"{key}={value}" for key, value in put.items()])
    fit = fit_trace(with_bytes(simulated(cluster, iterations=1000), cluster), program=False)
    assert not missed(fit, cluster, [*put, "job.compute_s"])
    assert fit.cluster.noise.slow_ranks == cluster.noise.slow_ranks
    assert fit.cluster.post_collective_work.groups == cluster.post_collective_work.groups
    if name == "sockets-null-jitter":  # episodes are too few for the mean step
        assert_good(fit)


def test_what_delays_starts_and_transfers_alike_does_not_bias_a_probe() -> None:
    """A busy host that starts late and then transfers longer: least squares would call it contention the wrong way."""
    stamps = read_job(read_matrix(probed(load_cluster("equal-slack"), 0.02, 600)))
    rng = np.random.default_rng(3)
    late_TG = 0.006 * rng.standard_normal(stamps.finish_TG.shape)
    late_TR = np.repeat(late_TG, stamps.ranks // stamps.groups, axis=1)
    busy = dataclasses.replace(stamps, entry_TR=stamps.entry_TR + late_TR)
    busy = dataclasses.replace(busy, finish_TG=share_uplink(busy.arrival_TG, 0.08, 0.04) + 1e-3 + late_TG)
    found = fit_links(busy, 1e-3)
    assert found.probed
    assert abs(found.alone_s - 0.08) < 3.0 * found.alone_se
    blind = fit_links(dataclasses.replace(busy, delay_TR=np.zeros_like(busy.delay_TR)), 1e-3)
    assert abs(blind.alone_s - 0.08) > abs(found.alone_s - 0.08)


def test_every_step_collapsing_needs_a_known_link() -> None:
    cluster = load_cluster("all-to-all-shallow")
    trace = with_bytes(simulated(cluster), cluster)
    blind, known = fit_trace(trace, program=False), fit_trace(trace, base=cluster, program=False)
    assert not by_key(blind)["fabric.buffer_kb"].is_identified
    assert blind.cluster.fabric.buffer_kb is None
    assert by_key(known)["fabric.timeout_ms"].value == pytest.approx(200.0, rel=0.01)
    assert known.cluster.fabric.buffer_kb == 32.0
    for fit in (blind, known):
        assert_good(fit)


@pytest.mark.slow
def test_a_tenant_of_another_period() -> None:
    settings = ["tenants.0.period_ratio=1.1", "tenants.0.comm_share=0.3"]
    cluster = load_cluster("sockets-two-jobs").changed(settings)
    fit = fit_trace(with_bytes(simulated(cluster), cluster), base=cluster.changed(["tenants=[]"]), program=False)
    assert not missed(fit, cluster, ["tenants.0.period_ratio", "tenants.0.comm_share", "fabric.uplink_gbps"])
    assert_good(fit)


def test_no_tenant_is_no_tenant() -> None:
    cluster = load_cluster("sockets-two-jobs").changed(["tenants=[]"])
    fit = fit_trace(noisy(simulated(cluster), 2e-3), program=False)
    assert fit.cluster.tenants == []
    assert not by_key(fit)["tenants"].is_identified


def test_what_a_trace_cannot_tell_keeps_the_base_and_says_why() -> None:
    cluster = load_cluster("sockets-null-jitter")
    fit = fit_trace(simulated(cluster), base=cluster, name="mine", program=False)
    uplink, payload = by_key(fit)["fabric.uplink_gbps"], by_key(fit)["job.gradient_bytes"]
    assert not uplink.is_identified
    assert "one process group" in uplink.evidence
    assert uplink.evidence.endswith("from base")
    assert fit.cluster.fabric.uplink_gbps == cluster.fabric.uplink_gbps
    assert not payload.is_identified
    assert payload.value == cluster.job.gradient_bytes
    assert set(fit.cluster.calibration["cannot_tell"]) == {p.key for p in fit.parameters if not p.is_identified}
    assert fit.cluster.name == "mine"


def test_links_that_a_trace_leaves_open_are_known_to_where_they_stop_to_matter() -> None:
    """Groups that always start together show how long all take, and not whether the others hold one up."""
    noise = ["noise.jitter_cv=0.01", "noise.common_cv=0.0", "noise.transfer_cv=0.06"]
    cluster = load_cluster("unequal-slack").changed(["fabric.nic_gbps=1.0", *noise])
    nic = by_key(fit_trace(with_bytes(simulated(cluster), cluster), program=False))["fabric.nic_gbps"]
    assert nic.se is None
    assert nic.hi is None, "a rate has no upper bound"
    assert nic.top == pytest.approx(0.2, rel=0.02)  # half of the uplink's: the bytes of two ranks cross it


def test_groups_and_payload_of_a_live_trace_in_buckets() -> None:
    """Two buckets in each of two strided groups, tensor-parallel traffic before, a barrier after, one odd iteration."""
    stamps = read_job(read_matrix(_live_trace()))
    assert stamps.members == ((0, 2), (1, 3))
    assert (stamps.collective, stamps.barrier, stamps.payload_bytes) == ("all_reduce", True, 2000)
    assert 20 not in stamps.iteration_T
    assert 0 not in stamps.iteration_T
    assert len(stamps.iteration_T) == 38
    np.testing.assert_allclose(stamps.compute_TR, 0.03, atol=1e-9)
    np.testing.assert_allclose(stamps.delay_TR, np.broadcast_to([0.0, 0.0, 0.01, 0.01], stamps.delay_TR.shape))
    np.testing.assert_allclose(stamps.duration_TG, 0.02)
    np.testing.assert_allclose((stamps.ready_TG - stamps.finish_TG)[:, 0], 0.05)


def test_the_payload_of_a_group_of_one_rank_is_its_compute() -> None:
    """Nobody takes part in it, so that no link could take that time, and a step that left it out would be too short."""
    trace = _live_trace()
    rank, group = trace.column("rank"), trace.column("group")
    alone = changed(trace, group=np.where(group > 2, 10 + rank, group))
    stamps = read_job(read_matrix(alone))
    assert stamps.members == ((0,), (1,), (2,), (3,))
    np.testing.assert_allclose(stamps.compute_TR, 0.05, atol=1e-9)
    assert fit_trace(alone, program=False).mean_error == pytest.approx(0.0, abs=1e-3)


def _live_trace() -> Trace:
    """Rows as the recorder writes them: compute is what lies between; iteration 20 of 40 lacks a collective."""
    rows, begin_s = list[tuple[Any, ...]](), 0.0
    for t in range(40):
        for rank in range(4):
            at_s = begin_s
            for op, group, size, seconds in (
                ("pace", -1, 0, 0.01 * (rank % 2)),
                ("compute", -1, 0, 0.01),
                ("all_reduce", 1 + rank // 2, 500, 0.005),
                ("compute", -1, 0, 0.015),
                *[("all_reduce", 3 + rank % 2, 1000, 0.01)] * 2,
                ("compute", -1, 0, 0.05 * (1 - rank % 2)),
                ("barrier", 0, 0, 0.002 + 0.04 * (rank % 2)),
            ):
                if seconds and not (t == 20 and op == "all_reduce" and group > 2):
                    rows.append((rank, t, len(rows), op, group, at_s, at_s + seconds, size))
                    at_s += seconds
        begin_s += 0.082 if t == 20 else 0.102
    ranks = tuple({"rank": r, "dp_rank": r, "stage": 0} for r in range(4))
    return Trace(trace_of(rows, "live").table, TraceMetadata({}, ranks, "paceenv live"))


@pytest.mark.parametrize(("drop", "said"), [(COLLECTIVE_OPS, "no collective"), ((), "at least 16")])
def test_a_trace_that_is_no_job_is_refused(drop: tuple[str, ...], said: str) -> None:
    trace = simulated(load_cluster("equal-slack"), iterations=12)
    keep: NDArray[np.bool_] = ~trace.isin("op", *drop) if drop else np.ones(trace.table.num_rows, np.bool_)
    with pytest.raises(InputError, match=said):
        fit_trace(Trace(trace.table.filter(pa.array(keep)), trace.metadata), program=False)


def test_where_ranks_often_leave_late_a_step_ends_with_the_first() -> None:
    """As on hosts with more ranks than cores, where all wait for each other though some begin before others are out."""
    trace = simulated(load_cluster("equal-slack"))
    iteration, rank, end_s = trace.column("iteration"), trace.column("rank"), trace.column("end_s").copy()
    end_s[trace.isin("op", "barrier") & (iteration % 8 == rank)] += 0.2
    late, plain = (read_job(read_matrix(one)) for one in (changed(trace, end_s=end_s), trace))
    for name in ("iteration_T", "step_T", "entry_TR", "finish_TG", "ready_TG"):
        np.testing.assert_allclose(getattr(late, name), getattr(plain, name), atol=1e-9)


def test_groups_that_never_wait_for_each_other_are_refused() -> None:
    trace = simulated(load_cluster("equal-slack"))
    factor = np.where(trace.column("rank") % 8 < 4, 1.0, 1.5)
    apart = changed(trace, **{name: trace.column(name) * factor for name in ("start_s", "end_s")})
    alone = Trace(apart.table.filter(pa.array(~apart.isin("op", "barrier"))), apart.metadata)
    with pytest.raises(InputError, match=r"allowed: a job whose ranks wait for each other$"):
        fit_trace(alone, program=False)
