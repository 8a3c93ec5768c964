"""How operations of a program share a link, and lose packets on it: efficiency, what it leaves for others, flows.

All by hand, in both engines. Four ranks on links of 100 Gb/s; an operation of 0.1 s moves what its links carry in that.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from paceenv.core import pacing
from paceenv.core.errors import InputError
from paceenv.sim.cluster.derive import derive, start
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.footprint import Tiers, use
from paceenv.sim.engine.simulator import Simulator, episode_keys
from paceenv.sim.reference import Reference
from paceenv.ui import config_files

LINK_BPS = 12.5e9
WITHIN = 0.02
RING_BYTES = 0.1 * LINK_BPS * 4 / 6
"""An all-reduce of four ranks sends 1.5 times its payload."""
EXCHANGE_BYTES = 0.1 * LINK_BPS * 4 / 3
"""An all-to-all of four ranks sends 3/4 of its payload."""


def side_by_side(nodes: int = 4, **fabric: Any) -> dict[str, float]:
    """Seconds of an all-reduce and an all-to-all that start together, by engine and operation."""
    ring = {"bytes": RING_BYTES, "communicator": "a", "background": True}
    exchange = {"bytes": EXCHANGE_BYTES, "communicator": "b"}
    data = {
        "name": "both",
        "job": {"nodes": nodes},
        "program": {"communicators": {"a": {}, "b": {}}, "step": [{"all_reduce": ring}, {"all_to_all": exchange}]},
        "fabric": {"nic_gbps": 100.0, "nodes_per_leaf": 64, "uplink_gbps": 1e5, "latency_us": 0, **fabric},
    }
    config, keys = config_files.parse(Cluster, data, "test"), episode_keys([0])
    fast, slow = Simulator(derive(config, keys), keys), Reference(config, 0)
    found = {}
    for name, recording in (("fast", fast.record(fast.off(), 1)), ("slow", slow.record(fast.off(), 1))):
        through_O = recording.through_ETO[0, 0]
        found |= {f"{name} all_reduce": float(through_O[0]), f"{name} all_to_all": float(through_O[1])}
    return found


@pytest.mark.parametrize(
    ("fabric", "all_reduce_s", "all_to_all_s"),
    [
        ({}, 0.2, 0.2),
        # half of the link each, so neither slows the other
        ({"efficiency": {"all_reduce": 0.5, "all_to_all": 0.5}}, 0.2, 0.2),
        # the exchange has the half that the ring leaves: 0.2 s, as long as the ring
        ({"efficiency": {"all_reduce": 0.5}}, 0.2, 0.2),
        # it needs a quarter of the link: 0.4 s; the ring takes the rest, 0.1 / 0.75
        ({"efficiency": {"all_to_all": 0.25}}, 0.1 / 0.75, 0.4),
        # what it leaves is lost: both share the link, 0.1 s and 0.4 s of it
        ({"efficiency": {"all_to_all": 0.25}, "unused_rate": "lost"}, 0.2, 0.5),
        # three flows against one: the exchange is through after 0.1 / 0.75, and the link is full until the end
        ({"sharing": "flows"}, 0.2, 0.1 / 0.75),
        # as measured on sockets: 0.16 s of link at three quarters, then the rest of 0.26 s
        ({"sharing": "flows", "efficiency": {"all_to_all": 0.625}, "unused_rate": "lost"}, 0.26, 0.16 / 0.75),
    ],
)
def test_side_by_side(fabric: dict[str, Any], all_reduce_s: float, all_to_all_s: float) -> None:
    found = side_by_side(**fabric)
    for name in ("fast", "slow"):
        assert found[f"{name} all_reduce"] == pytest.approx(all_reduce_s, rel=WITHIN)
        assert found[f"{name} all_to_all"] == pytest.approx(all_to_all_s, rel=WITHIN)


def test_an_efficiency_counts_where_nothing_is_shared() -> None:
    """An operation alone takes its time over its efficiency, whether the rest is lost or not."""
    for unused_rate in ("free", "lost"):
        together = side_by_side(efficiency={"all_reduce": 0.01, "all_to_all": 0.01}, unused_rate=unused_rate)
        expected_s = 20.0 if unused_rate == "lost" else 10.0
        assert together["fast all_reduce"] == pytest.approx(expected_s, rel=WITHIN)
        assert together["slow all_reduce"] == pytest.approx(expected_s, rel=WITHIN)


@pytest.mark.parametrize(
    ("op", "members", "expected"),
    [
        ("all_to_all", [0, 2, 4, 6], 3),  # one rank on each node: to three others
        ("all_to_all", [0, 1, 2, 3], 4),  # two on each of two nodes: 2 x 2 pairs
        ("all_to_all", [0, 1], 1),  # inside a node, on a rank's own link
        ("all_reduce", [0, 1, 2, 3], 1),  # a ring leaves each node once
        ("broadcast", [0, 2, 4, 6], 1),
    ],
)
def test_flows(op: Any, members: list[int], expected: int) -> None:
    tiers = Tiers(4, 2, 4, 1, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0)
    assert use(tiers, op, members, 1e6).flows == expected


@pytest.mark.parametrize(
    ("key", "value"), [("efficiency", {"all_reduce": 0.5}), ("sharing", "flows"), ("protocol", "ll"), ("channels", 2)]
)
def test_keys_of_programs_are_refused_without_one(key: str, value: Any) -> None:
    data: dict[str, Any] = {
        "name": "one",
        "job": {"nodes": 4, "compute_s": 0.1, "gradient_bytes": 1e9},
        "fabric": {"nic_gbps": 100.0, "nodes_per_leaf": 4, "uplink_gbps": 1e3},
    }
    one = config_files.parse(Cluster, data, "test")
    with pytest.raises(InputError, match=f"allowed: fabric.{key} by default without a workload or a program"):
        one.changed([f"fabric.{key}={json.dumps(value)}"])


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


def lossy(nodes: int, buffer_kb: float | None) -> Cluster:
    """An all-to-all of 100 ms whose ports hold so much.

    Args:
        nodes: one rank each.
        buffer_kb: of a port; None: lossless.
    """
    step = [{"all_to_all": {"bytes": 1.25e9 * nodes / (nodes - 1), "communicator": "all"}}]
    return cluster(step, nodes, oversubscription=1, nodes_per_leaf=8, buffer_kb=buffer_kb, timeout_ms=200)


def test_an_all_to_all_loses_windows_where_its_senders_overflow_a_port() -> None:
    one = lossy(8, 5.5 * 14.48)
    simulator = start(one, [0])
    step_T = simulator.run(simulator.off(), 4000)[0]
    kept = math.prod(1.0 - max(1.0 - 5.5 / m, 0.0) ** 3 for m in range(1, 8)) ** 8
    assert 0.1 < kept < 0.95
    assert set(np.round(step_T, 6).tolist()) == {0.1, 0.3}
    assert (step_T < 0.2).mean() == pytest.approx(kept, abs=0.03)
    reference_T = Reference(one, 0).run(OFF, 100)[0]
    np.testing.assert_allclose(reference_T, step_T[:100], rtol=1e-9)


def test_nothing_is_lost_without_a_buffer_or_in_one_that_is_deep_enough() -> None:
    for buffer_kb in (None, 7.01 * 14.48):
        simulator = start(lossy(8, buffer_kb), [0])
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
