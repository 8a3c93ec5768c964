"""NCCL's protocols and channels: closed forms, what is chosen, and both engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceenv.core.errors import InputError
from paceenv.sim.cluster.derive import start
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.program_tables import Start
from paceenv.sim.cluster.transfers import choice_of, tiers_of
from paceenv.sim.reference import Reference
from paceenv.ui import config_files

NIC_BPS = 12.5e9
MODEL = {"kind": "transformer", "layers": 4, "hidden": 1024, "heads": 16, "vocab": 32000, "sequence": 512}
WORKLOAD = {"model": MODEL, "batch": 8, "tensor_parallel": 8}
GPU = {"peak_tflops": 300.0, "achievable_tflops": 150.0, "memory_gb": 80.0}
WITHIN = 0.02


def cluster(step: list[dict[str, Any]], nodes: int = 4, per_node: int = 1, **more: Any) -> Cluster:
    """Ranks on 100 Gb/s NICs under one leaf; a hop takes 14 us between nodes and 3.4 us inside, as in NCCL's model."""
    data: dict[str, Any] = {
        "name": "protocols",
        "job": {"nodes": nodes, "ranks_per_node": per_node, "algorithm": "ring"},
        "program": {"communicators": {"a": {}, "b": {}}, "step": step},
        "fabric": {
            "nic_gbps": 100.0,
            "nodes_per_leaf": 64,
            "uplink_gbps": 1e5,
            "latency_us": 14.0,
            "intra_node_latency_us": 3.4,
        },
    }
    for key, value in more.items():
        data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) else value
    return config_files.parse(Cluster, data, "test")


def fast_s(config: Cluster) -> float:
    """Mean step of the fast engine."""
    engine = start(config, [0])
    return float(engine.record(engine.off(), 1).step_ET.mean())


def both_s(config: Cluster) -> tuple[float, float]:
    """The step of the reference and of the fast engine."""
    reference = Reference(config, 0)
    settings = start(config, [0]).off()
    return float(reference.record(settings, 1).step_ET.mean()), fast_s(config)


def transfer(size_bytes: float, kind: str = "all_reduce", **more: Any) -> dict[str, Any]:
    return {kind: {"bytes": size_bytes, **more}}


# One operation alone, by hand: a ring of 4 nodes passes 1.5 payloads on in 6 hops


@pytest.mark.parametrize(
    ("protocol", "hop_us", "rate"), [("simple", 14.0, 1.0), ("ll128", 4.0, 120 / 128), ("ll", 2.7, 0.5)]
)
@pytest.mark.parametrize("size_bytes", [1e3, 1e8])
def test_a_protocol_has_its_own_latency_and_rate(protocol: str, hop_us: float, rate: float, size_bytes: float) -> None:
    by_hand_s = 6 * hop_us * 1e-6 + 1.5 * size_bytes / (NIC_BPS * rate)
    assert fast_s(cluster([transfer(size_bytes)], fabric={"protocol": protocol})) == pytest.approx(by_hand_s, rel=1e-9)


@pytest.mark.parametrize(("protocol", "fixed_us"), [("simple", 8.4), ("ll128", 14.0), ("ll", 6.6)])
def test_an_operation_takes_a_time_of_its_own(protocol: str, fixed_us: float) -> None:
    """Once an operation, in both engines."""
    ways = [([transfer(1e3)], 1), ([transfer(1e3)] * 3, 3), ([transfer(1e4, "all_to_all")], 1)]
    for step, times in [*ways, ([transfer(5e6, "broadcast")], 1), ([transfer(5e6)], 1)]:
        without, with_it = (
            both_s(cluster(step, fabric={"protocol": protocol, "operation_us": us})) for us in (0.0, 8.4)
        )
        us = 8.4 if "all_to_all" in step[0] and protocol == "ll128" else fixed_us
        for a, b in zip(without, with_it, strict=True):
            assert b - a == pytest.approx(times * us * 1e-6, rel=0.02), step


# Which one is chosen


def chosen(config: Cluster, size_bytes: float, op: Any = "all_reduce") -> tuple[str, str]:
    tiers = tiers_of(config.fabric, config.job)
    members = list(range(config.ranks))[: 2 if op == "send" else None]
    found = choice_of(config.fabric, config.job, tiers)(Start("a", op, size_bytes), members)
    return found.algorithm, found.protocol


@pytest.mark.parametrize(("per_node", "small"), [(1, "ring"), (8, "tree")])
def test_auto_takes_ll_for_small_and_simple_for_large_operations(per_node: int, small: str) -> None:
    """Of 4 ranks a ring has 6 hops at 2.7 us and a tree 4 at 5 us; of 32 the ring has 62."""
    config = cluster([transfer(1e3)], 4, per_node, job={"algorithm": "auto"}, fabric={"protocol": "auto"})
    assert chosen(config, 1e3) == (small, "ll")
    assert chosen(config, 1e9) == ("ring", "simple")
    assert chosen(config, 1e8)[1] == "simple"
    assert chosen(config, 1e8, "all_gather") == ("ring", "simple")
    sizes = np.geomspace(1e3, 1e9, 40)
    order = [("ll", "ll128", "simple").index(chosen(config, size, "all_gather")[1]) for size in sizes]
    assert order == sorted(order), "from LL over LL128 to Simple, each once"
    assert set(order) == {0, 1, 2}


def test_ll128_is_not_for_sends_and_not_for_pcie() -> None:
    assert chosen(cluster([transfer(1e3)], fabric={"protocol": "ll128"}), 1e6, "send") == ("ring", "simple")
    on_pcie = cluster([transfer(1e3)], 4, 2, fabric={"protocol": "auto", "intra_node": "pcie"})
    assert "ll128" not in {chosen(on_pcie, size)[1] for size in np.geomspace(1e3, 1e9, 40)}


# Channels


def test_channels_limit_an_operation_and_leave_room_for_another() -> None:
    """Two channels of 25 Gb/s are half of a NIC: two operations side by side take no longer than one."""
    fabric = {"channels": 2, "channel_gbps": 25.0, "latency_us": 0.0}
    alone_s = 1.5 * 1e8 / (NIC_BPS / 2)
    assert fast_s(cluster([transfer(1e8)], fabric=fabric)) == pytest.approx(alone_s, rel=1e-9)
    two = [transfer(1e8, communicator="a", background=True), transfer(1e8, communicator="b")]
    assert fast_s(cluster(two, fabric=fabric)) == pytest.approx(alone_s, rel=1e-9)
    assert fast_s(cluster(two, fabric={"latency_us": 0.0})) == pytest.approx(alone_s, rel=1e-9), "a whole NIC for both"
    three = [*two, transfer(1e8, communicator="c", background=True)]
    groups = {"communicators": {"a": {}, "b": {}, "c": {}}, "step": [three[2], *two]}
    slow_s, quick_s = both_s(cluster(three, program=groups, fabric=fabric))
    assert quick_s == pytest.approx(1.5 * alone_s, rel=1e-9), "the third does not fit beside two"
    assert slow_s == pytest.approx(quick_s, rel=WITHIN)


# Described jobs


def test_tensor_groups_that_cost_only_time_have_the_protocol_too() -> None:
    times = []
    for protocol in ("simple", "ll", "auto"):
        data = cluster([transfer(1e3)], 2, 8, fabric={"protocol": protocol}).model_dump(exclude={"program"})
        one = config_files.parse(Cluster, data | {"workload": WORKLOAD, "gpu": GPU}, "test")
        times.append(one.plan().compute_s)
    assert times[1] > times[0] >= times[2]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"fabric": {"channel_gbps": 100.0}}, "channels with channel_gbps"),
        ({"fabric": {"protocol": "ll64"}}, "protocol"),
        ({"fabric": {"channels": 0}}, "channels"),
    ],
)
def test_keys_that_do_not_fit_are_refused(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        cluster([transfer(1e3)], **change)


# Beside nccl-tests


L40S_US = {
    "simple": {2**18: 64.87, 2**20: 131.74, 2**24: 1768.54, 2**27: 13780.1},
    "ll": {2**18: 66.09, 2**20: 247.71, 2**24: 3974.75, 2**27: 31835.2},
}
"""Measured all-reduces of four L40S on PCIe; only the rate of the largest one by Simple was taken from them."""


@pytest.mark.parametrize("protocol", ["simple", "ll"])
def test_large_all_reduces_take_as_long_as_nccl_tests_measured_them(protocol: str) -> None:
    pcie = {"intra_node": "pcie", "intra_node_gbps": 116.9, "intra_node_latency_us": 5.7, "operation_us": 8.4}
    for size_bytes, measured_us in L40S_US[protocol].items():
        step = [transfer(float(size_bytes))]
        one = cluster(step, 1, 4, job={"algorithm": "auto"}, fabric={**pcie, "protocol": protocol})
        assert fast_s(one) == pytest.approx(measured_us * 1e-6, rel=0.15)
