"""What the benchmark tells SimGrid: read by hand in closed form, it gives the engine's own step times."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.programs import simgrid_program
from benchmarks.speed import simgrid
from benchmarks.speed.simgrid import Network
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.environment import Tenant
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.engine import layout
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.simulator import Simulator, episode_keys


def recorded(config: Cluster, iterations: int) -> tuple[Simulator, Recording]:
    keys = episode_keys([3])
    simulator = Simulator(derive(config, keys), keys)
    return simulator.fork(np.arange(1)), simulator.record(simulator.off(), iterations)


@pytest.mark.parametrize("network", ["flow", "ring", "ring_together"])
def test_a_barrier_job_as_told_has_the_engine_s_steps(network: Network) -> None:
    config = simgrid.barrier(8, simgrid.NOISE)
    before, recording = recorded(config, 50)
    told = json.loads(json.dumps(simgrid.described(config, network, before, recording)))
    net = told["flow" if network == "flow" else "ring"]
    if network == "flow":
        after_s = net["bytes"] / net["Bps"] + net["after_s"]
    else:
        after_s = 14 * (net["bytes"] / 8 / net["Bps"] + net["hop_s"])
    expected_T = np.max(told["compute_s"], axis=1) + after_s + told["barrier_s"]
    np.testing.assert_allclose(recording.step_ET[0], expected_T, rtol=1e-6)


def test_post_work_work_and_tenants_are_told_in_the_uplink_s_unit() -> None:
    config = simgrid.shared(4, 2, post_work_s=0.12, tenants=[Tenant(period_ratio=0.7, comm_share=0.4, rate_share=0.5)])
    before, recording = recorded(config, 30)
    flow = simgrid.described(config, "flow", before, recording)
    ring = simgrid.described(config, "ring", before, recording)
    assert np.sort(np.mean(flow["post_work_s"], axis=0)).tolist() == pytest.approx([0, 0, 0, 0.12])
    for told, flows, uplink_Bps in ((flow, 1, simgrid.FLOW_BPS), (ring, 2, 0.3e9 / 8)):
        (tenant,) = told["tenants"]
        assert (tenant["flows"], told["uplink_Bps"]) == (flows, pytest.approx(uplink_Bps))
        assert tenant["Bps"] == pytest.approx(0.5 * uplink_Bps)
        assert len(tenant["compute_s"]) * tenant["bytes"] / tenant["Bps"] + sum(tenant["compute_s"]) > sum(
            recording.step_ET[0]
        ), "it must not run out of them"
    cycles = before.state.tenant_ENK[0, layout.CYCLES, 0]
    assert cycles == 0, "what is told leaves the simulator's state alone"
    # four groups' rings, every hop over the uplink: the same work whichever way it is told
    assert flow["flow"]["bytes"] / flow["uplink_Bps"] == pytest.approx(2 * ring["ring"]["bytes"] / ring["uplink_Bps"])


def test_only_what_messages_can_show_is_told() -> None:
    config = simgrid.shared(4, 2).changed(["fabric.nodes_per_leaf=2"])
    before, recording = recorded(config, 1)
    with pytest.raises(ValueError, match="one or all nodes under a leaf"):
        simgrid.described(config, "ring", before, recording)


def test_a_program_as_told_has_the_engine_s_steps() -> None:
    """Two communicators behind free ports: compute, and what is needed at once, in half of a port."""
    config = simgrid_program.layers(4, 1, "reduce_scatter", cv=0.03).changed(["fabric.latency_us=0"])
    _, recording = recorded(config, 20)
    told = json.loads(json.dumps(simgrid_program.described(config, recording, is_together=True)))
    data, experts = told["communicators"]
    assert told["step"] == [
        {"compute": 0},
        {"start": 0},
        {"start": 1},
        {"wait": 1, "number": 0},
        {"wait": 0, "number": 0},
    ]
    rounds_s = [one["passes"] * 3 * one["bytes"] / 4 / told["Bps"] for one in (data[0], experts[0])]
    assert np.shape(told["compute_s"]) == (20, 4, 1)
    expected_T = np.max(told["compute_s"], axis=(1, 2)) + sum(rounds_s)
    np.testing.assert_allclose(recording.step_ET[0], expected_T, rtol=1e-6)
