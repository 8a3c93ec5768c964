"""What a group's own links carry and what groups cost each other on an uplink: as calibration fits it, whose error bars
hold the truth as often as they say, and as diagnosis tells it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_program_calibration import typed
from traced_jobs import job_of, paced, phases_of

from benchmarks._common import recorded
from paceenv.calibration.job_stamps import read_job
from paceenv.calibration.link_replay import fit_links, share_uplink
from paceenv.core.operation_matrix import read_matrix
from paceenv.core.probing import Plan, unit_of
from paceenv.diagnosis import causes as names
from paceenv.diagnosis.dependency_graph import build_graph
from paceenv.diagnosis.diagnose import diagnose, diagnose_matrix
from paceenv.diagnosis.replay import own_durations
from paceenv.diagnosis.transfer_attribution import attribute_transfers
from paceenv.diagnosis.uplink_contention import contention, fit_uplink
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import episode_keys

GROUPS, STEPS, COMPUTE_S, SPREAD_S = 4, 200, 1.0, 0.04
EVERYWHERE = np.ones(STEPS, np.bool_)
WORK_S = 0.05
"""Of the whole uplink, for a group's payload."""

Array = NDArray[np.float64]


@pytest.mark.slow
def test_error_bars_hold_the_truth() -> None:
    """Of 90 %. Noise of some ten iterations leaves hardly thirty independent numbers in a trace, and less to tell."""
    cluster, found = load_cluster("unequal-slack"), []
    record, ranks, groups = derive(cluster, episode_keys([0])).jobs[0], cluster.ranks, cluster.groups
    units = [unit_of(rank, rank * groups // ranks, ranks // groups, ranks) for rank in range(ranks)]
    for seed in range(40):
        plan = Plan(1000 + seed, 20)
        level_TR = np.array([[plan.level(i, *unit) for unit in units] for i in range(300)])
        stamps = read_job(read_matrix(paced(cluster, seed, 0.012 * level_TR)))
        # payloads last 3 % longer or shorter by chance, and nine tenths of that go on in the next iteration
        noise_TG = np.random.default_rng(seed).normal(0.0, 0.03, stamps.finish_TG.shape)
        for t in range(1, len(noise_TG)):
            noise_TG[t] = 0.9 * noise_TG[t - 1] + np.sqrt(1.0 - 0.9**2) * noise_TG[t]
        noisy = replace(stamps, finish_TG=stamps.finish_TG + stamps.duration_TG * noise_TG)
        found.append(fit_links(noisy, float(record["latency_s"])))
    assert all(fit.probed for fit in found)
    alone = [((fit.alone_s - record["transfer_alone_s"]) / fit.alone_se, fit.alone_se) for fit in found]
    work = [((fit.work_s - record["uplink_work_s"]) / fit.work_se, fit.work_se) for fit in found]
    for fits in (alone, work):
        told = [abs(z) <= 1.645 for z, error in fits if np.isfinite(error)]
        assert len(told) > 0.6 * len(found)
        assert 0.75 <= np.mean(told) <= 0.98


def test_a_cap_that_is_not_there_is_not_told() -> None:
    """Alone a group has the whole uplink, its own links being twice as fast. In one of these jobs chance puts the cap
    two standard errors below 1, and a rate told from that would be half of the true one, 33 standard errors off."""
    groups = np.concatenate([np.full(603, -1), np.tile([0, 1, 2], 201)])
    stamps = read_job(read_matrix(job_of(np.ones((201, 3)), group=groups)))  # from its second iteration on
    for seed in range(26, 32):
        rng = np.random.default_rng(seed)
        arrival_TG = 0.1 + 0.006 * rng.standard_normal((200, 3))
        lasts_TG = share_uplink(arrival_TG, 0.03, 0.06) - arrival_TG
        finish_TG = arrival_TG + lasts_TG * (1.0 + 0.02 * rng.standard_normal(arrival_TG.shape))  # 2 % by chance
        found = fit_links(replace(stamps, entry_TR=arrival_TG, finish_TG=finish_TG), 0.0)
        assert np.isinf(found.alone_se)
        assert np.isfinite(found.work_se)
        assert found.alone_most_s is not None
        assert found.alone_most_s > 0.03


def transfers(cap: float, seed: int, *, noise: float = 0.03, late_K: Array | float = 0.0) -> tuple[Array, Array]:
    """When groups start and how long each takes, ``(K, T)``; a group alone can use ``cap`` of the uplink."""
    rng = np.random.default_rng(seed)
    start_TK = np.ascontiguousarray(COMPUTE_S + late_K + rng.normal(0.0, SPREAD_S, (STEPS, GROUPS)))
    lasts_TK = share_uplink(start_TK, WORK_S / cap, WORK_S) - start_TK
    return start_TK.T, (lasts_TK * (1.0 + rng.normal(0.0, noise, lasts_TK.shape))).T


@pytest.mark.parametrize(
    ("cap", "seed", "late_s", "link"), [(0.6, 0, 0.0, 1.0), (0.6, 1, 0.0, 1.0), (0.8, 1, 0.1, 1.0), (0.6, 2, 0.0, 1.4)]
)
def test_what_groups_cost_each_other_is_found(cap: float, seed: int, late_s: float, link: float) -> None:
    """Also where one group is late, and so meets the others less, or has a slower link."""
    start_KT, lasts_KT = transfers(cap, seed, late_K=np.array([0.0, 0.0, 0.0, late_s]))
    lasts_KT[3] *= link
    fit = fit_uplink(start_KT, lasts_KT, EVERYWHERE)
    assert fit.contended
    assert fit.work_s / fit.alone_s == pytest.approx(cap, abs=0.06)
    if not late_s and link == 1.0:
        true = float((transfers(cap, seed, noise=0.0)[1] / (WORK_S / cap)).mean())
        assert float(contention(start_KT, fit.alone_s, fit.work_s).mean()) == pytest.approx(true, rel=0.06)


def test_groups_that_do_not_feel_each_other_are_not_said_to() -> None:
    told = [fit_uplink(*transfers(1.0 / GROUPS, seed), EVERYWHERE).contended for seed in range(12)]
    assert not any(told)


def test_buckets_one_after_the_other_are_one_payload() -> None:
    """In its second bucket a group meets those that are still at their first: taken by itself, no bucket shows it."""
    cap, buckets, pair_R = 0.6, 5, np.arange(2 * GROUPS) // 2
    start_KT, lasts_KT = transfers(cap, 3)
    start_TR, part_TR = start_KT.T[:, pair_R], lasts_KT.T[:, pair_R] / buckets
    rest = [(None, "all_reduce", pair_R, part_TR)] * (buckets - 1)
    cells = read_matrix(phases_of((start_TR, "all_reduce", pair_R, part_TR), *rest, (None, "barrier", 99, 0.0)))
    assert diagnose_matrix(cells).causes[0].cause == names.CONTENTION
    graph = build_graph(cells)
    classes = attribute_transfers(cells, graph, own_durations(cells, graph), 1.0).classes
    assert len(classes) == buckets
    assert [found.contention for found in classes] == pytest.approx([(lasts_KT * cap / WORK_S).mean()] * 5, rel=0.05)


COMPUTE, LONG = {"compute": {"seconds": 0.03}}, {"compute": {"seconds": 0.06}}
REDUCE = {"all_reduce": {"bytes": 2e8, "background": True, "can_wait": True}}
NEEDED = {"bytes": 1.5e8, "communicator": "experts"}
EXCHANGE = {"all_to_all": NEEDED}


def own(*step: dict[str, Any], **fabric: Any) -> Cluster:
    return typed([{"repeat": 3, "step": [*step]}], {"experts": {"size": 2}}, nodes=4, **fabric)


@pytest.mark.parametrize("op", ["all_to_all", "all_gather"])
def test_the_partner_is_the_job_s_own_reduction(op: str) -> None:
    found = diagnose(recorded(own(COMPUTE, REDUCE, {op: NEEDED}), 0, 60))
    (cause,) = found.causes
    assert cause.cause == names.CONTENTION
    assert f"{op} runs beside the job's own all_reduce on another communicator" in cause.evidence
    assert "never runs without it; with equal shares of a link it takes" in cause.evidence
    assert "side by side" not in cause.evidence
    assert f"hold the all_reduce back while the {op} runs (rule defer)" in cause.advice
    assert "priority" in cause.advice
    assert cause.pacing == "pacing (defer)"
    alone = diagnose(recorded(own(COMPUTE, {op: NEEDED}), 0, 60))
    assert not alone.causes
    # each takes twice as long as alone, and the last one's excess is hidden behind its all-reduce, which ends the step
    alone_s = (alone.step_time_s - 3 * 0.03) / 3
    assert cause.lost_s == pytest.approx(2 * alone_s, rel=0.15)


def test_the_difference_is_measured_where_some_run_alone() -> None:
    (cause,) = diagnose(recorded(own(COMPUTE, REDUCE, EXCHANGE, LONG, EXCHANGE), 0, 60)).causes
    assert "times as long as without it" in cause.evidence
    assert "never" not in cause.evidence


def test_other_links_are_no_partner() -> None:
    """Exchanges inside a node beside a reduction between nodes."""
    cluster = own(COMPUTE, REDUCE, EXCHANGE, intra_node_gbps=2400.0)
    found = diagnose(recorded(cluster.changed(["job.nodes=2", "job.ranks_per_node=2"]), 0, 60))
    assert not [cause for cause in found.causes if "own all_reduce" in cause.evidence]
