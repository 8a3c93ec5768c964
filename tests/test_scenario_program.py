"""What a loop takes a testbed's job for: its phases as a program, and what gloo makes of them on the links."""

from __future__ import annotations

from typing import Any

import pytest

from paceenv.core.errors import InputError
from paceenv.live.testbed.testbed_scenario import Scenario
from paceenv.sim.cluster import Cluster
from paceenv.trainers.closed_loop.scenario_program import known_cluster, left_out
from paceenv.ui import config_files

COMPUTE = {"compute": {"mean_s": 0.05}}
BACKGROUND = {"background": True, "deferrable": True, "communicator": "gradients"}


def scenario(*phases: dict[str, Any], on: tuple[int, ...] = (0, 1, 2, 3), **network: Any) -> Scenario:
    """A job of four hosts at 150 Mbit/s, unless told otherwise."""
    job = {"name": "one", "hosts": list(on), "iteration": list(phases)}
    data = {"name": "test", "description": "A test.", "network": {"hosts": 4, "host_mbps": 150, **network}}
    data |= {"jobs": [job], "loop": {"job": "one", "mechanism": "defer", "expect": "helps"}}
    return config_files.parse(Scenario, data, "test")


def base_of(*phases: dict[str, Any], **given: Any) -> Cluster:
    """The program of such a job."""
    found = known_cluster(scenario(*phases, **given))
    assert found is not None
    assert found.program is not None
    return found


REDUCED = {"all_reduce": {"bytes": 8e5, "buckets": 2, **BACKGROUND}}


@pytest.mark.parametrize("kind", ["all_reduce", "all_to_all"])
def test_transfers_are_what_they_are_called(kind: str) -> None:
    program = base_of(COMPUTE, {kind: REDUCED["all_reduce"]}).program
    transfers = [phase.transfer() for phase in program.step if phase.compute is None]  # type: ignore[union-attr]
    assert [(op, one.bytes, one.background) for op, one in filter(None, transfers)] == [(kind, 4e5, True)] * 2
    with pytest.raises(InputError, match="job one: gather beside transfers in the background; allowed: none of it"):
        base_of(COMPUTE, {"gather": {"bytes": 8e5}}, {kind: REDUCED["all_reduce"]})


def test_communicators_keep_their_names_apart() -> None:
    names = ["tensor-parallel-groups-of-one-a", "tensor-parallel-groups-of-one-b", "shared"]
    phases = [{"all_reduce": {"bytes": 8e5, **BACKGROUND, "communicator": n, "group_size": 2}} for n in names]
    found = base_of(COMPUTE, *phases, {"all_reduce": {"bytes": 8e5, "group_size": 2}})
    assert len(found.program.communicators) == 4  # type: ignore[union-attr]


def test_what_a_program_leaves_out_is_said() -> None:
    racks = {"hosts": 8, "racks": 2, "uplink_mbps": 100}
    apart = "in the simulation every transfer between hosts leaves its rack"
    for on, a_leaf, said in (((0, 2, 4, 6), 4, []), ((0, 1, 2, 3), 1, [apart])):
        assert base_of(COMPUTE, REDUCED, on=on, **racks).fabric.nodes_per_leaf == a_leaf
        assert left_out(scenario(COMPUTE, REDUCED, on=on, **racks)) == said
    pauses = {"compute": {"mean_s": 0.05, "pause": {"every": 10, "at_most_s": 0.2}}}
    [said] = left_out(scenario(pauses, REDUCED))
    assert said == "pauses and ranks that are slow at times are not in the simulated program"
    plain = {"all_reduce": {"bytes": 8e5}}
    assert left_out(scenario(pauses, plain)) == [], "noise that is measured"
