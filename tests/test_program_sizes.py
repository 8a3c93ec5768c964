"""A program at other sizes: which groups grow, what a fitted one predicts, and where nothing can be predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_program_calibration import EXPERTS, STEPS, typed
from traced_jobs import H100_DIR, mean_step_s, needs_h100

from benchmarks._common import recorded
from paceenv.calibration import step_phases
from paceenv.calibration.fit_trace import fit_trace
from paceenv.core.errors import InputError
from paceenv.importers.inputs import read_inputs
from paceenv.sim.cluster.model import Cluster
from paceenv.ui import config_files
from paceenv.whatif.baseline import Baseline, of_trace
from paceenv.whatif.change import Change
from paceenv.whatif.predictions import Row
from paceenv.whatif.simulated import check, predict

TENSOR = typed(
    """
- repeat: 4
  step:
  - compute: {seconds: 0.01}
  - all_reduce: {bytes: 4.0e+7, communicator: tensor}
  - compute: {seconds: 0.01}
  - all_reduce: {bytes: 1.0e+8, communicator: data, background: true, can_wait: true}
- compute: {seconds: 0.03}
""",
    {"tensor": {"size": 2}, "data": {"size": 4, "stride": 2, "grows": True}},
)
"""Sums of activations of pairs, and of gradients of every second rank."""
STAGES = typed(
    """
- compute: {seconds: 0.02, ranks: [0, 1]}
- send: {bytes: 1.0e+6, communicator: ahead, background: true}
- compute: {seconds: 0.03, ranks: [2, 3]}
- all_reduce: {bytes: 1.0e+8, communicator: data}
""",
    {"ahead": {"size": 2, "stride": 2}, "data": {"size": 2, "grows": True}},
    nodes=4,
)
"""Two pipeline stages of two replicas."""


def predicted(cluster: Cluster, nodes: int) -> Row:
    """What a trace of a cluster predicts for more nodes."""
    baseline = of_trace(recorded(cluster, 0, STEPS), "typed", None, None)
    answer = predict(baseline, [Change(nodes=nodes)], seeds=4, iterations=100)
    return answer.changed[0]


def test_groups_that_grow_have_more_members_and_others_become_more() -> None:
    plan = TENSOR.with_nodes(12).plan()
    assert plan.communicators["tensor"] == [[k, k + 1] for k in range(0, 12, 2)]
    assert plan.communicators["data"] == [list(range(0, 12, 2)), list(range(1, 12, 2))]


def test_stages_stay_apart() -> None:
    plan = STAGES.with_nodes(6).plan()
    assert plan.communicators["data"] == [[0, 1, 2], [3, 4, 5]]
    assert plan.communicators["ahead"] == [[0, 3], [1, 4], [2, 5]]
    assert len(set(plan.role_R[:3])) == len(set(plan.role_R[3:])) == 1
    assert STAGES.with_nodes(2).plan().communicators["ahead"] == [[0, 1]]
    assert mean_step_s(STAGES.with_nodes(8)) > mean_step_s(STAGES)


@pytest.mark.parametrize(
    ("cluster", "nodes", "said"),
    [
        (TENSOR, 9, "9 ranks: no whole number of replicas, as process groups that keep their size span 2 ranks"),
        (STAGES, 5, "5 ranks: no whole number of replicas, as process groups that keep their size span 1 ranks"),
        (
            typed([{"compute": {"seconds": 0.1, "ranks": [0]}}, {"all_reduce": {"bytes": 1e6}}], {"two": {"size": 2}}),
            16,
            "16 ranks: a phase of ranks 0 is not that of every replica of 2 ranks",
        ),
    ],
)
def test_sizes_that_no_whole_replicas_make_are_refused(cluster: Cluster, nodes: int, said: str) -> None:
    with pytest.raises(InputError, match=f"^{said}"):
        cluster.with_nodes(nodes)


def test_a_fitted_program_knows_which_groups_grow() -> None:
    program = fit_trace(recorded(TENSOR, 0, STEPS), program=True).cluster.program
    assert program is not None
    found = {(one.size, one.stride, one.grows) for one in program.communicators.values()}
    assert found == {(2, 1, False), (4, 2, True)}


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [TENSOR, EXPERTS], ids=["tensor", "experts"])
def test_a_trace_predicts_the_program_at_another_size(cluster: Cluster) -> None:
    case = predicted(cluster, 16)
    assert case.job.step.value == pytest.approx(mean_step_s(cluster.with_nodes(16)), rel=0.02)


@pytest.mark.slow
def test_rounds_that_nobody_saw_are_in_the_interval() -> None:
    """Each all-reduce has a round more for every rank, which one size cannot tell from bytes."""
    slow = EXPERTS.changed(["fabric.latency_us=600"])
    case = predicted(slow, 32)
    truth_s = mean_step_s(slow.with_nodes(32))
    assert truth_s > 1.02 * case.job.step.value
    assert case.job.step.low <= truth_s <= case.job.step.high


@pytest.mark.slow
def test_a_size_is_refused_where_nothing_says_what_grows(tmp_path: Path) -> None:
    step = """
- compute: {seconds: 0.02}
- all_to_all: {bytes: 6.0e+7, communicator: experts, background: true, name: a}
- all_gather: {bytes: 6.0e+7, communicator: gathers}
- wait: a
- compute: {seconds: 0.02}
"""
    base = typed(step, {"experts": {"size": 4}, "gathers": {"size": 2}})
    trace, path = recorded(base, 0, STEPS), tmp_path / "base.yaml"
    baseline = of_trace(trace, "typed", None, None)
    with pytest.raises(InputError, match="all_gather: of gradients or of activations") as refused:
        check(baseline, [Change(nodes=16)])
    assert f"depends on {step_phases.KEY}" in str(refused.value)
    check(baseline, [Change(settings=("fabric.nic_gbps=400",))])
    config_files.write_yaml(path, base.model_dump(exclude_defaults=True))
    check(of_trace(trace, "typed", str(path), None), [Change(nodes=16)])  # a typed program says it


def test_a_rank_with_phases_of_its_own_is_not_replaced_in_silence() -> None:
    with pytest.raises(InputError, match="ranks differ by phases of the program"):
        check(Baseline("typed", STAGES, None, (0, 1, 2, 3)), [Change(replaced=(0,))])


@needs_h100
def test_a_real_profile_without_hosts_predicts_no_size() -> None:
    fitted = fit_trace(read_inputs(sorted(H100_DIR.glob("*.json.gz"))).require_trace(), program=True)
    baseline = Baseline("profile", fitted.cluster, None, tuple(range(8)), fitted.parameters, fit=fitted)
    with pytest.raises(InputError, match="the trace names no hosts"):
        check(baseline, [Change(nodes=16)])


def test_collectives_that_one_collective_leaves_out_are_named() -> None:
    """As in a live trace, where transfers in the background are seen only where a rank waits for them."""
    step: list[dict[str, Any]] = [
        {"compute": {"seconds": 0.03}},
        {"all_to_all": {"bytes": 2e8, "communicator": "experts"}},
        {"compute": {"seconds": 0.03}},
        {"all_reduce": {"bytes": 1e8}},
    ]
    baseline = of_trace(recorded(typed(step, {"experts": {"size": 4}}), 0, 40), "typed", None, None)
    assert not baseline.cluster.has_program
    assert [line for line in baseline.notes if line.startswith("other collectives take 14% of a step and count as")]
    alone = of_trace(recorded(typed([step[0], step[3]], {}), 0, 40), "typed", None, None)
    assert not any("other collectives" in line for line in alone.notes)
