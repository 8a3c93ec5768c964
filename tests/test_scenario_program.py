"""What a loop takes a testbed's job for: its phases as a program, and what gloo makes of them on the links."""

from __future__ import annotations

from typing import Any

import pytest

from paceenv.core.errors import InputError
from paceenv.live.testbed.testbed_scenario import Backend, Scenario
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.program.program_run import use_of
from paceenv.sim.cluster.program.program_tables import Start
from paceenv.trainers.closed_loop.scenario_program import left_out, program_base
from paceenv.ui import config_files

COMPUTE = {"compute": {"mean_s": 0.05}}
BACKGROUND = {"background": True, "deferrable": True, "communicator": "gradients"}


def scenario(
    *phases: dict[str, Any], backend: Backend = "gloo", on: tuple[int, ...] = (0, 1, 2, 3), **network: Any
) -> Scenario:
    """A job of four hosts at 150 Mbit/s, unless told otherwise."""
    job = {"name": "one", "hosts": list(on), "iteration": list(phases)}
    data = {"name": "test", "description": "A test.", "network": {"hosts": 4, "host_mbps": 150, **network}}
    data |= {"backend": backend, "jobs": [job], "loop": {"job": "one", "mechanism": "defer", "expect": "helps"}}
    return config_files.parse(Scenario, data, "test")


def base_of(*phases: dict[str, Any], backend: Backend = "gloo", **given: Any) -> Cluster:
    """The program of such a job."""
    return config_files.parse(Cluster, program_base(scenario(*phases, backend=backend, **given)), "test")


def alone_s(cluster: Cluster, op: Any, payload_bytes: float) -> float:
    """How long the links need for a transfer of all ranks."""
    return use_of(cluster.fabric, cluster.job)(Start("world", op, payload_bytes, True), [0, 1, 2, 3]).alone_s


def test_gloo_sums_a_reduce_scatter_as_all_reduces() -> None:
    phases = COMPUTE, {"reduce_scatter": {"bytes": 8e5, **BACKGROUND}}
    on_gloo, on_nccl = base_of(*phases), base_of(*phases, backend="nccl")
    assert on_gloo.program is not None
    assert on_nccl.program is not None
    sizes = [one.program.step[1].transfer()[1].bytes for one in (on_gloo, on_nccl)]  # type: ignore[union-attr,index]
    assert sizes == [1.6e6, 8e5]
    assert alone_s(on_gloo, "reduce_scatter", sizes[0]) == pytest.approx(alone_s(on_gloo, "all_reduce", 8e5))


def test_parts_of_a_reduce_scatter_in_groups() -> None:
    given = {"bytes": 8e5, "buckets": 2, "group_size": 2, **BACKGROUND}
    found = base_of(COMPUTE, {"reduce_scatter": given}, {"reduce_scatter": {"bytes": 4096, **BACKGROUND}})
    assert found.program is not None
    transfers = [phase.transfer() for phase in found.program.step if phase.compute is None]
    # what only synchronises has no bytes that count
    assert [(op, one.bytes) for op, one in filter(None, transfers)] == [("reduce_scatter", s) for s in (8e5, 8e5, 4096)]
    assert found.program.communicators["gradients-2"].size == 2


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
def test_other_transfers_are_what_they_are_called(kind: str) -> None:
    found = base_of(COMPUTE, {kind: {"bytes": 8e5, "buckets": 2, **BACKGROUND}})
    assert found.program is not None
    transfers = [phase.transfer() for phase in found.program.step if phase.compute is None]
    assert [(op, one.bytes, one.background) for op, one in filter(None, transfers)] == [(kind, 4e5, True)] * 2


def test_what_a_program_has_not_is_refused() -> None:
    with pytest.raises(InputError, match="job one: gather beside transfers in the background; allowed: none of it"):
        base_of(COMPUTE, {"gather": {"bytes": 8e5}}, {"all_reduce": {"bytes": 8e5, **BACKGROUND}})


REDUCED = {"all_reduce": {"bytes": 8e5, **BACKGROUND}}


def test_hosts_of_one_rack_share_it_and_have_their_own_rates() -> None:
    racks = {"hosts": 8, "racks": 2, "uplink_mbps": 100}
    inside = base_of(COMPUTE, REDUCED, on=(0, 2, 4, 6), **racks)
    assert inside.fabric.nodes_per_leaf == 4
    assert left_out(scenario(COMPUTE, REDUCED, on=(0, 2, 4, 6), **racks)) == []
    assert base_of(COMPUTE, REDUCED, on=(0, 1, 2, 3), **racks).fabric.nodes_per_leaf == 1
    [said] = left_out(scenario(COMPUTE, REDUCED, on=(0, 1, 2, 3), **racks))
    assert "every transfer between hosts leaves its rack" in said
    faster = base_of(COMPUTE, REDUCED, host_mbps_of=dict.fromkeys(range(4), 1000.0))
    assert faster.fabric.nic_gbps == pytest.approx(1.0)


def test_communicators_keep_their_names_apart() -> None:
    names = ["tensor-parallel-groups-of-one-a", "tensor-parallel-groups-of-one-b", "shared"]
    phases = [{"all_reduce": {"bytes": 8e5, **BACKGROUND, "communicator": n, "group_size": 2}} for n in names]
    found = base_of(COMPUTE, *phases, {"all_reduce": {"bytes": 8e5, "group_size": 2}})
    assert found.program is not None
    assert len(found.program.communicators) == 4


def test_what_a_program_leaves_out_is_said() -> None:
    stalls = {"compute": {"mean_s": 0.05, "stall_rate": 0.1, "stall_mean_s": 0.2}}
    [said] = left_out(scenario(stalls, REDUCED))
    assert said == "pauses, stalls and ranks that are slow at times are not in the simulated program"
    plain = {"all_reduce": {"bytes": 8e5}}
    assert left_out(scenario(stalls, plain)) == [], "noise that is measured"
    [said] = left_out(scenario(COMPUTE, plain, {"checkpoint": {"every": 15, "seconds": 0.5}}))
    assert said.startswith("checkpoints are in the measured steps")
