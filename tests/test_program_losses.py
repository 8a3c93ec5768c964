"""Fabrics under steps as programs that lose packets: by hand, in both engines."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from paceenv.core import pacing
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.engine.simulator import Simulator, episode_keys
from paceenv.sim.reference import Reference
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
    reference_T = Reference(one, [0]).run(OFF, 100)[0]
    np.testing.assert_allclose(reference_T, step_T[:100], rtol=1e-9)


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
