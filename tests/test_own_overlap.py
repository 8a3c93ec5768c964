"""A job's own reduction in the background that slows what its ranks stand still for: found, measured, or not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_program_calibration import traced, typed

from paceenv.diagnosis import causes
from paceenv.diagnosis.diagnose import diagnose
from paceenv.diagnosis.verdict import Diagnosis
from paceenv.sim.cluster.model import Cluster

COMPUTE = {"compute": {"seconds": 0.03}}
REDUCE = {"all_reduce": {"bytes": 2e8, "background": True, "can_wait": True}}
LONG = {"compute": {"seconds": 0.06}}
EXCHANGE = {"all_to_all": {"bytes": 1.5e8, "communicator": "experts"}}
GATHER = {"all_gather": {"bytes": 1.5e8, "communicator": "experts"}}


def diagnosis(cluster: Cluster, path: Path) -> Diagnosis:
    return diagnose(traced(cluster, path, 60))


def own(step: list[dict[str, Any]], nodes: int = 4, **fabric: Any) -> Cluster:
    return typed([{"repeat": 3, "step": step}], {"experts": {"size": 2}}, nodes=nodes, **fabric)


@pytest.mark.parametrize(("needed", "op"), [(EXCHANGE, "all_to_all"), (GATHER, "all_gather")])
def test_the_partner_is_the_job_s_own_reduction(needed: dict[str, Any], op: str, tmp_path: Path) -> None:
    found = diagnosis(own([COMPUTE, REDUCE, needed]), tmp_path / "trace.parquet")
    (cause,) = found.causes
    assert cause.cause == causes.CONTENTION
    assert f"{op} runs beside the job's own all_reduce on another communicator" in cause.evidence
    assert "never runs without it; with equal shares of a link it takes" in cause.evidence
    assert "side by side" not in cause.evidence
    assert f"hold the all_reduce back while the {op} runs (rule defer)" in cause.advice
    assert "priority" in cause.advice
    assert cause.pacing == "pacing (defer)"
    alone = diagnosis(own([COMPUTE, needed]), tmp_path / "alone.parquet")
    assert not alone.causes
    # each takes twice as long as alone, and the last one's excess is hidden behind its all-reduce, which ends the step
    alone_s = (alone.step_time_s - 3 * 0.03) / 3
    assert cause.lost_s == pytest.approx(2 * alone_s, rel=0.15)


def test_the_difference_is_measured_where_some_run_alone(tmp_path: Path) -> None:
    step = [COMPUTE, REDUCE, EXCHANGE, LONG, EXCHANGE]
    found = diagnosis(own(step), tmp_path / "trace.parquet")
    (cause,) = found.causes
    assert "times as long as without it" in cause.evidence
    assert "never" not in cause.evidence


def test_other_links_are_no_partner(tmp_path: Path) -> None:
    """Exchanges inside a node beside a reduction between nodes."""
    cluster = own([COMPUTE, REDUCE, EXCHANGE], intra_node_gbps=2400.0)
    inside = cluster.changed(["job.nodes=2", "job.ranks_per_node=2"])
    found = diagnosis(inside, tmp_path / "trace.parquet")
    assert not [cause for cause in found.causes if "own all_reduce" in cause.evidence]
