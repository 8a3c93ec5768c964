"""What groups cost each other on an uplink, as diagnosis tells it from a trace: size, error bars, limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_program_calibration import typed
from traced_jobs import phases_of

from benchmarks._common import recorded
from paceenv.calibration.link_replay import share_uplink
from paceenv.core.trace import Trace
from paceenv.diagnosis import causes
from paceenv.diagnosis import causes as names
from paceenv.diagnosis.dependency_graph import build_graph
from paceenv.diagnosis.diagnose import diagnose, diagnose_matrix
from paceenv.diagnosis.operation_matrix import read_matrix
from paceenv.diagnosis.replay import own_durations
from paceenv.diagnosis.transfer_attribution import attribute_transfers
from paceenv.diagnosis.uplink_contention import contention, fit_uplink
from paceenv.diagnosis.verdict import Diagnosis
from paceenv.sim.cluster.model import Cluster

GROUPS, STEPS, COMPUTE_S, SPREAD_S = 4, 200, 1.0, 0.04
WORK_S = 0.05
"""Of the whole uplink, for a group's payload."""

Array = NDArray[np.float64]


def transfers(cap: float, seed: int, *, noise: float = 0.03, late_K: Array | float = 0.0) -> tuple[Array, Array]:
    """When groups start and how long each takes, ``(K, T)``; a group alone can use ``cap`` of the uplink."""
    rng = np.random.default_rng(seed)
    start_TK = np.ascontiguousarray(COMPUTE_S + late_K + rng.normal(0.0, SPREAD_S, (STEPS, GROUPS)))
    lasts_TK = share_uplink(start_TK, WORK_S / cap, WORK_S) - start_TK
    return start_TK.T, (lasts_TK * (1.0 + rng.normal(0.0, noise, lasts_TK.shape))).T


def everywhere() -> NDArray[np.bool_]:
    return np.ones(STEPS, np.bool_)


@pytest.mark.parametrize(
    ("cap", "seed", "late_s", "link"), [(0.6, 0, 0.0, 1.0), (0.6, 1, 0.0, 1.0), (0.8, 1, 0.1, 1.0), (0.6, 2, 0.0, 1.4)]
)
def test_what_groups_cost_each_other_is_found(cap: float, seed: int, late_s: float, link: float) -> None:
    """Also where one group is late, and so meets the others less, or has a slower link."""
    start_KT, lasts_KT = transfers(cap, seed, late_K=np.array([0.0, 0.0, 0.0, late_s]))
    lasts_KT[3] *= link
    fit = fit_uplink(start_KT, lasts_KT, everywhere())
    assert fit.contended
    assert fit.work_s / fit.alone_s == pytest.approx(cap, abs=0.06)
    if not late_s and link == 1.0:
        true = float((transfers(cap, seed, noise=0.0)[1] / (WORK_S / cap)).mean())
        assert float(contention(start_KT, fit.alone_s, fit.work_s).mean()) == pytest.approx(true, rel=0.06)


def test_groups_that_do_not_feel_each_other_are_not_said_to() -> None:
    told = [fit_uplink(*transfers(1.0 / GROUPS, seed), everywhere()).contended for seed in range(12)]
    assert not any(told)


def test_buckets_one_after_the_other_are_one_payload() -> None:
    """In its second bucket a group meets those that are still at their first: taken by itself, no bucket shows it."""
    cap = 0.6
    start_KT, lasts_KT = transfers(cap, 3)
    cells = read_matrix(bucketed(start_KT, lasts_KT, buckets=5))
    assert diagnose_matrix(cells).causes[0].cause == names.CONTENTION
    graph = build_graph(cells)
    classes = attribute_transfers(cells, graph, own_durations(cells, graph), 1.0).classes
    assert len(classes) == 5
    assert [found.contention for found in classes] == pytest.approx([(lasts_KT * cap / WORK_S).mean()] * 5, rel=0.05)


def bucketed(start_KT: Array, lasts_KT: Array, *, buckets: int) -> Trace:
    """Pairs of ranks that start and take as given, in so many equal parts, then meet in a barrier."""
    pair_R = np.arange(2 * len(start_KT)) // 2
    start_TR, part_TR = start_KT.T[:, pair_R], lasts_KT.T[:, pair_R] / buckets
    rest = [(None, "all_reduce", pair_R, part_TR)] * (buckets - 1)
    return phases_of((start_TR, "all_reduce", pair_R, part_TR), *rest, (None, "barrier", 99, 0.0))


COMPUTE = {"compute": {"seconds": 0.03}}
REDUCE = {"all_reduce": {"bytes": 2e8, "background": True, "can_wait": True}}
LONG = {"compute": {"seconds": 0.06}}
EXCHANGE = {"all_to_all": {"bytes": 1.5e8, "communicator": "experts"}}
GATHER = {"all_gather": {"bytes": 1.5e8, "communicator": "experts"}}


def diagnosis(cluster: Cluster) -> Diagnosis:
    return diagnose(recorded(cluster, 0, 60))


def own(step: list[dict[str, Any]], nodes: int = 4, **fabric: Any) -> Cluster:
    return typed([{"repeat": 3, "step": step}], {"experts": {"size": 2}}, nodes=nodes, **fabric)


@pytest.mark.parametrize(("needed", "op"), [(EXCHANGE, "all_to_all"), (GATHER, "all_gather")])
def test_the_partner_is_the_job_s_own_reduction(needed: dict[str, Any], op: str) -> None:
    found = diagnosis(own([COMPUTE, REDUCE, needed]))
    (cause,) = found.causes
    assert cause.cause == causes.CONTENTION
    assert f"{op} runs beside the job's own all_reduce on another communicator" in cause.evidence
    assert "never runs without it; with equal shares of a link it takes" in cause.evidence
    assert "side by side" not in cause.evidence
    assert f"hold the all_reduce back while the {op} runs (rule defer)" in cause.advice
    assert "priority" in cause.advice
    assert cause.pacing == "pacing (defer)"
    alone = diagnosis(own([COMPUTE, needed]))
    assert not alone.causes
    # each takes twice as long as alone, and the last one's excess is hidden behind its all-reduce, which ends the step
    alone_s = (alone.step_time_s - 3 * 0.03) / 3
    assert cause.lost_s == pytest.approx(2 * alone_s, rel=0.15)


def test_the_difference_is_measured_where_some_run_alone() -> None:
    step = [COMPUTE, REDUCE, EXCHANGE, LONG, EXCHANGE]
    found = diagnosis(own(step))
    (cause,) = found.causes
    assert "times as long as without it" in cause.evidence
    assert "never" not in cause.evidence


def test_other_links_are_no_partner() -> None:
    """Exchanges inside a node beside a reduction between nodes."""
    cluster = own([COMPUTE, REDUCE, EXCHANGE], intra_node_gbps=2400.0)
    inside = cluster.changed(["job.nodes=2", "job.ranks_per_node=2"])
    found = diagnosis(inside)
    assert not [cause for cause in found.causes if "own all_reduce" in cause.evidence]
