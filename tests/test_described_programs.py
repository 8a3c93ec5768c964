"""Described workloads as programs: by hand, folded against event by event, and what each cut of a model adds."""

from __future__ import annotations

from typing import Any

import pytest
from described_steps import ideal_s

from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.layer_passes import MAX_SEGMENTS, segments
from paceenv.sim.cluster.program.program_run import program_alone_s
from paceenv.sim.cluster.program.program_tables import Start, tables
from paceenv.sim.cluster.transfers import use_of
from paceenv.ui import config_files

FABRIC = {"nic_gbps": 100, "intra_node_gbps": 2000, "nodes_per_leaf": 64, "uplink_gbps": 1e6, "latency_us": 5}
MODEL = {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 1024, "sequence": 1024, "tied_embeddings": False}


def cluster(nodes: int = 4, ranks_per_node: int = 1, fabric: Any = (), **more: Any) -> Cluster:
    """A small transformer as a program; ``more`` are keys of the workload."""
    data: dict[str, Any] = {
        "name": "described",
        "job": {"nodes": nodes, "ranks_per_node": ranks_per_node, "algorithm": "ring"},
        "workload": {"model": MODEL, "batch": 4, **more},
        "gpu": {"achievable_tflops": 100},
        "fabric": FABRIC | dict(fabric),
    }
    return config_files.parse(Cluster, data, "test")


@pytest.mark.parametrize("nic_gbps", [10, 400])
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"bucket_bytes": 4e6}, id="buckets that overlap"),
        pytest.param({"overlap": False}, id="buckets at the end"),
        pytest.param({"zero_stage": 1, "micro_batches": 2}, id="ZeRO-1"),
        pytest.param({"zero_stage": 2, "recompute": "full"}, id="ZeRO-2"),
    ],
)
def test_a_folded_step_is_as_long_as_event_by_event(keys: dict[str, Any], nic_gbps: float) -> None:
    one = cluster(fabric={"nic_gbps": nic_gbps}, **keys)
    assert one.folded is not None
    plan = one.plan()
    program = tables(plan, use_of(one.fabric, one.job), has_tenants=False)
    assert ideal_s(one) == pytest.approx(program_alone_s(program, plan.compute_s), rel=2e-3)


def test_only_plain_data_parallelism_folds() -> None:
    for keys in ({"zero_stage": 3}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        assert cluster(**keys).has_program, keys
    inside = cluster(2, 4, tensor_parallel=4)
    assert {one.communicator for one in inside.plan().roles[0] if isinstance(one, Start)} == {"data"}
    assert (inside.has_program, inside.groups) == (False, 4), "tensor parallelism inside a node only costs time"


@pytest.mark.parametrize("m", [2, 4, 8])
def test_bubble_of_a_pipeline(m: int) -> None:
    """(m + p - 1) (f + b), with free transfers and an output layer of nothing."""
    p, fabric = 4, {"nic_gbps": 1e6, "latency_us": 0}
    one = cluster(4, model={**MODEL, "vocab": 1}, batch=m, micro_batches=m, pipeline_parallel=p, fabric=fabric)
    each = one.plan().compute_s / m
    assert ideal_s(one) == pytest.approx((m + p - 1) * each, rel=0.01)


def test_fully_sharded_weights_hide_behind_compute_or_set_the_step() -> None:
    fast, slow = (cluster(zero_stage=3, fabric={"nic_gbps": gbps, "latency_us": 0}) for gbps in (800, 2))
    compute_s, gradients = fast.plan().compute_s, slow.workload.stage_parameters(0) * 2  # type: ignore[union-attr]
    assert ideal_s(fast) == pytest.approx(compute_s, rel=0.05)
    moved_s = 3.0 * 0.75 * gradients / (2e9 / 8.0)
    assert ideal_s(slow) == pytest.approx(moved_s, rel=0.1)


@pytest.mark.parametrize("layers", [1, 5, 32, 33, 96, 1000])
def test_segments_keep_every_layer_and_the_ends_alone(layers: int) -> None:
    found = segments(layers, MAX_SEGMENTS)
    assert sum(found) == layers
    assert len(found) <= MAX_SEGMENTS
    assert found[0] == found[-1] == 1
