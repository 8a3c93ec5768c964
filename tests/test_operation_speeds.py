"""Efficiencies of operations from traces of a known program: what is simulated is found again, else none is claimed."""

from __future__ import annotations

from typing import Any

import pytest
from traced_jobs import awaited

from benchmarks._common import recorded
from paceenv.calibration.fit_trace import fit_trace
from paceenv.sim.cluster.model import Cluster
from paceenv.ui import config_files

SOCKETS = {"sharing": "flows", "unused_rate": "lost"}


def layers(order: str = "overlap", noise: float = 0.01, **fabric: Any) -> Cluster:
    """Four hosts at 100 Mbit/s: two layers of compute, an all-reduce (32 ms) and an all-to-all (20 ms).

    Args:
        order: ``overlap``: the all-reduce in the background of the all-to-all; ``apart``: after it;
            ``hidden``: in the background, with compute behind it, so that nobody waits for it.
        noise: coefficient of variation of compute.
        fabric: keys of the fabric.
    """
    ring: dict[str, Any] = {"all_reduce": {"bytes": 2.67e5, "communicator": "gradients", "background": True}}
    exchange = {"all_to_all": {"bytes": 3.33e5, "communicator": "experts"}}
    compute = {"compute": {"seconds": 0.04}}
    if order == "apart":
        step = [compute, exchange, compute, exchange, ring, ring]
    else:
        step = [compute, ring, exchange, compute, ring, exchange]
        if order == "hidden":
            step.append({"compute": {"seconds": 0.2}})
    data = {
        "name": "layers",
        "job": {"nodes": 4},
        "program": {"communicators": {"gradients": {}, "experts": {}}, "step": step},
        "fabric": {"nic_gbps": 0.1, "nodes_per_leaf": 4, "uplink_gbps": 400.0, "latency_us": 0} | fabric,
        "noise": {"jitter_cv": noise},
    }
    return config_files.parse(Cluster, data, "test")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("efficiency", "fabric", "order", "is_live"),
    # behind a slow exchange with room beside it, nobody waits for an all-reduce
    [
        ({"all_to_all": 0.6}, SOCKETS, "overlap", False),
        ({"all_reduce": 0.5}, SOCKETS, "overlap", True),
        ({"all_reduce": 0.7}, {"sharing": "flows"}, "overlap", False),
        ({}, SOCKETS, "apart", False),
    ],
)
def test_an_efficiency_is_found_again(
    efficiency: dict[str, float], fabric: dict[str, Any], order: str, is_live: bool
) -> None:
    truth = layers(order, efficiency=efficiency, **fabric)
    base = layers(order, noise=0.0, **fabric, nic_gbps=0.12)
    trace = recorded(truth, 0, 60)
    fit = fit_trace(awaited(trace) if is_live else trace, base=base)
    assert dict(fit.cluster.fabric.efficiency) == pytest.approx(efficiency, rel=0.05)
    assert fit.cluster.fabric.nic_gbps == pytest.approx(0.1, rel=0.03)
    assert abs(fit.mean_error) < 0.01
    keys = {one.key for one in fit.parameters if one.is_identified}
    assert {f"fabric.efficiency.{kind}" for kind in efficiency} <= keys


@pytest.mark.parametrize(
    ("order", "fabric"),
    [
        ("hidden", {"efficiency": {"all_reduce": 0.5}, **SOCKETS}),  # nobody waits for the all-reduces
        ("overlap", {"efficiency": {"all_to_all": 0.7}}),  # half of the link is less than it could use
    ],
)
def test_no_efficiency_is_claimed_where_the_trace_does_not_show_it(order: str, fabric: dict[str, Any]) -> None:
    truth = layers(order, **fabric)
    known = {key: value for key, value in fabric.items() if key != "efficiency"}
    base = layers(order, noise=0.0, **known)
    fit = fit_trace(awaited(recorded(truth, 0, 60)), base=base)
    assert not fit.cluster.fabric.efficiency
