"""Fabrics under steps as programs, which block, lose packets or have rails: by hand, and message by message."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.programs.pauses import CASES, fluid, packets
from benchmarks.programs.random_programs import random_program
from paceenv.core import pacing
from paceenv.core.errors import InputError
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.engine.simulator import Simulator, episode_keys
from paceenv.sim.reference.program_job import ProgramReference
from paceenv.ui import config_files

OFF = pacing.off(1, 1)


def cluster(step: list[dict[str, Any]], nodes: int = 8, **fabric: Any) -> Cluster:
    """Leaves of four nodes whose uplinks carry a quarter of their NICs; groups of all, and of a leaf.

    Args:
        step: what every rank does.
        nodes: one rank each.
        **fabric: keys of the fabric.
    """
    data = {
        "name": "test",
        "job": {"nodes": nodes},
        "program": {"communicators": {"all": {}, "leaf": {"size": 4}}, "step": step},
        "fabric": {"nic_gbps": 100, "nodes_per_leaf": 4, "oversubscription": 4, "latency_us": 0, **fabric},
    }
    return config_files.parse(Cluster, data, "test")


def side_by_side(**fabric: Any) -> Cluster:
    """An all-to-all of all, alone 200 ms on the uplinks, beside ring all-reduces inside leaves, alone 150 ms on NICs.

    Args:
        **fabric: keys of the fabric.
    """
    reduce = {"all_reduce": {"bytes": 1.25e9, "communicator": "leaf", "background": True}}
    return cluster([reduce, {"all_to_all": {"bytes": 1.25e9, "communicator": "all"}}], **fabric)


def through_s(one: Cluster) -> list[float]:
    """When the all-to-all and the all-reduce are through, seconds.

    Args:
        one: from :func:`side_by_side`.
    """
    keys = episode_keys([0])
    simulator = Simulator(derive(one, keys), keys)
    recording = simulator.record(simulator.off(), 1)
    return sorted(set(np.round(recording.through_ETO[0, 0], 6).tolist()))


EXCHANGE_S, NIC_SHARE = 0.2, 0.4375
"""Of the all-to-all: alone, and its share of a NIC meanwhile: seven eighths of its bytes in 87.5 ms of 200."""


def test_fair_links_leave_others_the_rest_of_a_nic() -> None:
    done_s = EXCHANGE_S * (1.0 - NIC_SHARE)
    assert through_s(side_by_side()) == pytest.approx([0.2, EXCHANGE_S + 0.15 - done_s])


@pytest.mark.parametrize("kind", ["pauses", "credits"])
def test_behind_a_full_uplink_others_go_no_faster_than_what_queues(kind: str) -> None:
    done_s = EXCHANGE_S * NIC_SHARE
    assert through_s(side_by_side(flow_control=kind)) == pytest.approx([0.2, EXCHANGE_S + 0.15 - done_s])


def test_senders_that_slow_down_block_for_their_reaction_only() -> None:
    blocked_s = 0.004
    done_s = blocked_s * NIC_SHARE + (EXCHANGE_S - blocked_s) * (1.0 - NIC_SHARE)
    found = through_s(side_by_side(flow_control="ecn", ecn_reaction_us=blocked_s * 1e6))
    assert found == pytest.approx([0.2, EXCHANGE_S + 0.15 - done_s])


def test_nothing_is_blocked_where_nothing_queues() -> None:
    wide = {"oversubscription": 1}
    assert through_s(side_by_side(**wide)) == through_s(side_by_side(flow_control="pauses", **wide))


@pytest.mark.parametrize("kind", ["fair", "pauses", "ecn"])
def test_the_reference_engine_blocks_message_by_message(kind: str) -> None:
    one = side_by_side(flow_control=kind)
    reference = ProgramReference(one, 0, is_together=True).record(OFF, 1)
    assert through_s(one) == pytest.approx(sorted(set(np.round(reference.through_ETO[0, 0], 6).tolist())), rel=1e-3)


@pytest.mark.parametrize("seed", range(0, 24, 2))
def test_random_programs_agree_with_the_reference_engine(seed: int) -> None:
    keys = episode_keys([0])
    for kind in ("pauses", "ecn"):
        one = random_program(seed, tenants=seed % 3 == 0, flow_control=kind)
        simulator = Simulator(derive(one, keys), keys)
        fast = simulator.run(simulator.off(), 5).mean()
        assert fast == pytest.approx(ProgramReference(one, 0, is_together=True).run(OFF, 5).mean(), rel=0.025)


def test_packets_wait_as_the_fluid_says_and_as_published() -> None:
    for name in ("4 hosts, uplink of one", "4 hosts, uplink of three", "Figure 4, no sender at T3"):
        paths, rates, whose, _, _ = CASES[name]
        one = packets(paths, rates)[whose]
        assert one == pytest.approx(fluid(paths, rates, queues_block=True)[whose], rel=0.03)
    assert one * 40.0 == pytest.approx(10.0, rel=0.03)


def lossy(nodes: int, buffer_kb: float | None) -> Cluster:
    """An all-to-all of 100 ms whose ports hold so much.

    Args:
        nodes: one rank each.
        buffer_kb: of a port; None: lossless.
    """
    step = [{"all_to_all": {"bytes": 1.25e9 * nodes / (nodes - 1), "communicator": "all"}}]
    return cluster(step, nodes, oversubscription=1, nodes_per_leaf=8, buffer_kb=buffer_kb, timeout_ms=200)


def test_an_all_to_all_loses_windows_where_its_senders_overflow_a_port() -> None:
    keys = episode_keys([0])
    one = lossy(8, 5.5 * 14.48)
    simulator = Simulator(derive(one, keys), keys)
    step_T = simulator.run(simulator.off(), 4000)[0]
    kept = math.prod(1.0 - max(1.0 - 5.5 / m, 0.0) ** 3 for m in range(1, 8)) ** 8
    assert 0.1 < kept < 0.95
    assert set(np.round(step_T, 6).tolist()) == {0.1, 0.3}
    assert (step_T < 0.2).mean() == pytest.approx(kept, abs=0.03)
    reference_T = ProgramReference(one, 0, is_together=True).run(OFF, 400)[0]
    assert (reference_T < 0.2).mean() == pytest.approx(kept, abs=0.08)


def test_nothing_is_lost_without_a_buffer_or_in_one_that_is_deep_enough() -> None:
    keys = episode_keys([0])
    for buffer_kb in (None, 7.01 * 14.48):
        simulator = Simulator(derive(lossy(8, buffer_kb), keys), keys)
        assert simulator.run(simulator.off(), 50).max() == pytest.approx(0.1)


def test_another_transfer_on_the_port_makes_windows_lose_their_end() -> None:
    keys = episode_keys([0])
    background = {"all_reduce": {"bytes": 1e9, "communicator": "leaf", "background": True}}
    exchange = {"all_to_all": {"bytes": 1e9, "communicator": "all"}}
    fabric = {"oversubscription": 1, "nodes_per_leaf": 8, "buffer_kb": 7.01 * 14.48}
    lost = []
    for step in ([exchange], [background, exchange]):
        simulator = Simulator(derive(cluster(step, **fabric), keys), keys)
        step_T = simulator.run(simulator.off(), 2000)[0]
        lost.append(float((step_T > step_T.min() + 0.1).mean()))
    assert lost[0] == 0.0
    assert lost[1] == pytest.approx(1.0 - (1.0 - (1.0 - 7.01 / 8.0) ** 3) ** 8, abs=0.01)


def test_a_fabric_loses_packets_or_holds_them_back() -> None:
    with pytest.raises(InputError, match="buffer_kb, whose packets are lost, or flow_control pauses, not both"):
        cluster([{"compute": {"seconds": 0.1}}], buffer_kb=64, flow_control="pauses")


def exchange_on_first_gpus(**fabric: Any) -> Cluster:
    """The first GPUs of 4 nodes of 2 GPUs and 2 NICs, two nodes a leaf, exchange what takes 75 ms on their own NICs.

    Args:
        **fabric: keys of the fabric.
    """
    data = {
        "name": "test",
        "job": {"nodes": 4, "ranks_per_node": 2},
        "program": {
            "communicators": {"first": {"size": 4, "stride": 2}},
            "step": [{"all_to_all": {"bytes": 1.25e9, "communicator": "first", "ranks": [0, 2, 4, 6]}}],
        },
        "fabric": {
            "nic_gbps": 100,
            "nics_per_node": 2,
            "nodes_per_leaf": 2,
            "oversubscription": 2,
            "latency_us": 0,
            **fabric,
        },
    }
    return config_files.parse(Cluster, data, "test")


def test_a_rail_has_uplinks_of_its_own() -> None:
    """Half of what the first NICs of a leaf's two nodes send crosses: 1.25 GB over 25 GB/s, or over the rail's 12.5."""
    keys = episode_keys([0])
    for rails, alone_s in ((False, 0.075), (True, 0.1)):
        one = exchange_on_first_gpus(rails=rails)
        simulator = Simulator(derive(one, keys), keys)
        assert simulator.run(simulator.off(), 1)[0, 0] == pytest.approx(alone_s)
        reference = ProgramReference(one, 0, is_together=True)
        assert reference.run(OFF, 1)[0, 0] == pytest.approx(alone_s, rel=1e-6)


@pytest.mark.parametrize("seed", range(0, 16, 2))
def test_random_programs_on_rails_agree_with_the_reference_engine(seed: int) -> None:
    keys = episode_keys([0])
    one = random_program(seed, rails=True)
    simulator = Simulator(derive(one, keys), keys)
    fast = simulator.run(simulator.off(), 5).mean()
    assert fast == pytest.approx(ProgramReference(one, 0, is_together=True).run(OFF, 5).mean(), rel=0.025)
