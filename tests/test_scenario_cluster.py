"""What a loop takes a testbed's job for: its program, and what gloo makes of it on the links."""

from __future__ import annotations

from typing import Any

import pytest

from paceenv.core.errors import InputError
from paceenv.live.testbed.testbed_scenario import Scenario
from paceenv.sim.cluster import Cluster
from paceenv.trainers.closed_loop.scenario_cluster import known_cluster, left_out
from paceenv.ui import config_files

COMPUTE = {"compute": {"seconds": 0.05, "micro_batch": 0}}
REDUCED = {"all_reduce": {"bytes": 4e5, "background": True, "can_wait": True, "communicator": "gradients"}}


def scenario(
    *step: dict[str, Any], on: tuple[int, ...] = (0, 1, 2, 3), of_job: dict[str, Any] | None = None, **network: Any
) -> Scenario:
    """A job of four hosts at 150 Mbit/s, unless told otherwise."""
    program = {"length_cv": 0.02, "communicators": {"gradients": {}}, "step": list(step)}
    job = {"name": "one", "hosts": list(on), "program": program} | (of_job or {})
    data = {"name": "test", "description": "A test.", "network": {"hosts": 4, "host_mbps": 150, **network}}
    data |= {"jobs": [job], "loop": {"job": "one", "mechanism": "defer", "expect": "helps"}}
    return config_files.parse(Scenario, data, "test")


def known(of: Scenario) -> Cluster:
    found = known_cluster(of)
    assert found is not None
    return found


def test_a_job_with_transfers_in_the_background_has_its_own_program_without_noise() -> None:
    of = scenario(COMPUTE, REDUCED)
    program = known(of).program
    assert program == of.jobs[0].program.model_copy(update={"length_cv": 0.0})
    assert known_cluster(scenario(COMPUTE, {"all_reduce": {"bytes": 4e5}})) is None
    with pytest.raises(InputError, match="no gather in a program"):
        known_cluster(scenario(COMPUTE, {"gather": {"bytes": 8e5}}, REDUCED))


def test_what_a_program_leaves_out_is_said() -> None:
    racks = {"hosts": 8, "racks": 2, "uplink_mbps": 100}
    apart = "in the simulation every transfer between hosts leaves its rack"
    for on, a_leaf, said in (((0, 2, 4, 6), 4, []), ((0, 1, 2, 3), 1, [apart])):
        of = scenario(COMPUTE, REDUCED, on=on, **racks)
        assert known(of).fabric.nodes_per_leaf == a_leaf
        assert left_out(of) == said
    pauses = {"pause": {"every": 10, "at_most_s": 0.2}}
    [said] = left_out(scenario(COMPUTE, REDUCED, of_job=pauses))
    assert said == "pauses and ranks that are slow at times are not in the simulated program"
    plain = {"all_reduce": {"bytes": 8e5}}
    assert left_out(scenario(COMPUTE, plain, of_job=pauses)) == [], "noise that is measured"
