"""How operations of a program share a link: efficiency, what it leaves for others, flows.

All by hand, in both engines. Four ranks on links of 100 Gb/s; an operation of 0.1 s moves what its links carry in that.
"""

from __future__ import annotations

from typing import Any

import pytest

from paceenv.sim.cluster.derive import derive
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
        # each has all of the link it needs, or both share one that is full
        ({"efficiency": {"all_reduce": 0.01, "all_to_all": 0.01}}, 10.0, 10.0),
        ({"efficiency": {"all_reduce": 0.01, "all_to_all": 0.01}, "unused_rate": "lost"}, 20.0, 20.0),
    ],
)
def test_side_by_side(fabric: dict[str, Any], all_reduce_s: float, all_to_all_s: float) -> None:
    found = side_by_side(**fabric)
    for name in ("fast", "slow"):
        assert found[f"{name} all_reduce"] == pytest.approx(all_reduce_s, rel=WITHIN)
        assert found[f"{name} all_to_all"] == pytest.approx(all_to_all_s, rel=WITHIN)


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
