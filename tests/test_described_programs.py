"""Described workloads as programs: by hand, folded against event by event, and what each cut of a model adds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from described_steps import node_bytes

from paceenv.core.errors import InputError
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.layer_passes import MAX_SEGMENTS, segments
from paceenv.sim.cluster.program.program_run import program_alone_s
from paceenv.sim.cluster.program.program_tables import Start, tables
from paceenv.sim.cluster.transfers import use_of
from paceenv.sim.cluster.workload import ADAM_BYTES, MASTER_BYTES
from paceenv.sim.engine.simulator import episode_keys
from paceenv.ui import config_files

MODEL = {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 1024, "sequence": 1024, "tied_embeddings": False}


def cluster(nodes: int = 4, ranks_per_node: int = 1, **more: Any) -> Cluster:
    """A small transformer as a program; ``more`` are keys of the workload, or sections."""
    sections = {key: more.pop(key) for key in ("fabric", "noise", "gpu") if key in more}
    data: dict[str, Any] = {
        "name": "described",
        "job": {"nodes": nodes, "ranks_per_node": ranks_per_node, "algorithm": "ring"},
        "workload": {"model": MODEL, "batch": 4, **more},
        "gpu": {"peak_tflops": 100, "achievable_tflops": 100, "memory_gb": 80, **sections.get("gpu", {})},
        "fabric": {
            "nic_gbps": 100,
            "intra_node_gbps": 2000,
            "nodes_per_leaf": 64,
            "uplink_gbps": 1e6,
            "latency_us": 5,
            **sections.get("fabric", {}),
        },
        "noise": sections.get("noise", {}),
    }
    return config_files.parse(Cluster, data, "test")


def step_s(one: Cluster) -> float:
    return float(derive(one, episode_keys([0])).jobs["ideal_step_s"][0])


def alone_s(one: Cluster) -> float:
    """The step event by event, whether it folds or not."""
    plan = one.plan()
    program = tables(plan, use_of(one.fabric, one.job), has_tenants=False)
    return program_alone_s(program, plan.compute_s)


def ops(one: Cluster, role: int = 0) -> Counter[tuple[str, str]]:
    return Counter((s.communicator, s.op) for s in one.plan().roles[role] if isinstance(s, Start))


def nic_bytes(one: Cluster) -> float:
    return node_bytes(one.plan(), one.fabric, one.job)


@pytest.mark.parametrize("nic_gbps", [10, 400])
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"bucket_bytes": 4e6}, id="buckets that overlap"),
        pytest.param({"overlap": False}, id="buckets at the end"),
        pytest.param({"zero_stage": 1, "micro_batches": 2}, id="ZeRO-1"),
        pytest.param({"zero_stage": 2, "recompute": "full", "gpu": {"memory_bytes_per_s": 5e11}}, id="ZeRO-2"),
    ],
)
def test_a_folded_step_is_as_long_as_event_by_event(keys: dict[str, Any], nic_gbps: float) -> None:
    one = cluster(fabric={"nic_gbps": nic_gbps}, **keys)
    assert one.folded is not None
    assert step_s(one) == pytest.approx(alone_s(one), rel=2e-3)


def test_only_plain_data_parallelism_folds() -> None:
    for keys in ({"zero_stage": 3}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"experts": 2}):
        assert cluster(**keys).has_program, keys
    inside = cluster(2, 4, tensor_parallel=4)
    assert {name for name, _ in ops(inside)} == {"data"}
    assert (inside.has_program, inside.groups) == (False, 4), "tensor parallelism inside a node only costs time"


@pytest.mark.parametrize(("m", "v"), [(4, 1), (8, 1), (4, 2), (8, 2), (8, 4)])
def test_bubble_of_a_pipeline(m: int, v: int) -> None:
    """(m + (p - 1) / v) (f + b), with free transfers and an output layer of nothing."""
    p, model = 4, {**MODEL, "layers": 16, "vocab": 1}
    one = cluster(
        4, model=model, batch=m, micro_batches=m, pipeline_parallel=p, virtual_stages=v,
        fabric={"nic_gbps": 1e6, "latency_us": 0},
    )  # fmt: skip
    each = one.plan().compute_s / m
    assert step_s(one) == pytest.approx((m + (p - 1) / v) * each, rel=0.01)


def test_fully_sharded_weights_hide_behind_compute_or_set_the_step() -> None:
    fast, slow = (cluster(zero_stage=3, fabric={"nic_gbps": gbps, "latency_us": 0}) for gbps in (800, 2))
    compute_s, gradients = fast.plan().compute_s, slow.workload.stage_parameters(0) * 2  # type: ignore[union-attr]
    assert step_s(fast) == pytest.approx(compute_s, rel=0.05)
    moved_s = 3.0 * 0.75 * gradients / (2e9 / 8.0)
    assert step_s(slow) == pytest.approx(moved_s, rel=0.1)


def test_hybrid_sharding_reduces_shards_between_replicas() -> None:
    one = cluster(2, 4, zero_stage=3, shard_group=4)
    found = ops(one)
    assert found["shards", "all_gather"] == 16
    assert found["replicas", "all_reduce"] == 8
    groups = one.plan().communicators
    assert groups["shards"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups["replicas"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    whole = cluster(2, 4, zero_stage=3)
    assert nic_bytes(one) < nic_bytes(whole)
    gradients = one.workload.stage_parameters(0) * 2  # type: ignore[union-attr]
    assert nic_bytes(one) == pytest.approx(gradients), "4 shards, each all-reduced by two nodes"


def test_experts_under_zero_3_are_gathered_from_their_own_replicas() -> None:
    one = cluster(8, zero_stage=3, experts=8, expert_parallel=4)
    found = ops(one)
    assert found["data", "all_gather"] == found["expert_data", "all_gather"] == 16
    assert found["data", "reduce_scatter"] == found["expert_data", "reduce_scatter"] == 8
    workload = one.workload
    assert workload is not None
    bytes_of = {name: 0.0 for name in ("data", "expert_data")}
    for start in one.plan().roles[0]:
        if isinstance(start, Start) and start.op == "reduce_scatter":
            bytes_of[start.communicator] += start.payload_bytes
    assert sum(bytes_of.values()) == pytest.approx(2 * workload.stage_parameters(0))
    assert bytes_of["expert_data"] == pytest.approx(2 * 8 * workload.sparse_parameters)
    assert ops(cluster(8, zero_stage=3, experts=8, expert_parallel=8))["expert_data", "all_gather"] == 0
    sparse = 8 * workload.sparse_parameters
    shared = (workload.stage_parameters(0) - sparse) / 8 + sparse / 2
    states = ADAM_BYTES + MASTER_BYTES
    assert workload.memory(8).optimizer == pytest.approx(shared * states)


def test_weights_of_a_sharded_pipeline_are_gathered_once_a_step() -> None:
    """As torchtitan does: every micro-batch after the first finds them, and gradients are scattered after the last."""
    one = cluster(8, pipeline_parallel=2, micro_batches=4, zero_stage=3)
    workload = one.workload
    assert workload is not None
    for stage, role in enumerate(one.plan().roles):
        bytes_of = {"all_gather": 0.0, "reduce_scatter": 0.0}
        for start in role:
            if isinstance(start, Start) and start.communicator == "data":
                bytes_of[start.op] += start.payload_bytes
        wanted = 2 * workload.stage_parameters(stage)
        assert bytes_of == {op: pytest.approx(wanted) for op in bytes_of}
    assert step_s(one) > step_s(cluster(8, pipeline_parallel=2, micro_batches=4, zero_stage=1)) * 0.99
    whole, sharded = workload.memory(4), cluster(8, pipeline_parallel=2, micro_batches=4).workload
    assert sharded is not None
    assert whole.weights == pytest.approx(1.25 * sharded.memory(4).weights), "all of them, and the own quarter"
    assert whole.optimizer == pytest.approx(sharded.memory(4).optimizer / 4)


def test_experts_exchange_tokens_twice_a_layer_and_pass_and_reduce_among_their_own() -> None:
    one = cluster(8, experts=8, expert_parallel=4, top_k=2, bucket_bytes=1e12, first_bucket_bytes=1e12)
    found = ops(one)
    assert found["experts", "all_to_all"] == 4 * MODEL["layers"]
    assert found["data", "all_reduce"] == found["expert_data", "all_reduce"] == 1
    groups = one.plan().communicators
    assert groups["experts"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups["expert_data"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    payloads = {s.communicator: s.payload_bytes for s in one.plan().roles[0] if isinstance(s, Start)}
    parameters = one.workload.stage_parameters(0)  # type: ignore[union-attr]
    router = 8 * 8 * MODEL["hidden"]
    assert payloads["data"] + payloads["expert_data"] == pytest.approx(2 * parameters, rel=1e-9), router


def test_context_parallel_rings_run_beside_attention() -> None:
    one = cluster(4, context_parallel=4)
    found = ops(one)
    assert found["context", "all_gather"] == 2 * MODEL["layers"]
    assert one.plan().compute_s == pytest.approx(cluster(1).plan().compute_s / 4, rel=1e-6)
    assert one.samples_per_step == 4


@pytest.mark.parametrize("layers", [1, 5, 32, 33, 96, 1000])
def test_segments_keep_every_layer_and_the_ends_alone(layers: int) -> None:
    found = segments(layers, MAX_SEGMENTS)
    assert sum(found) == layers
    assert len(found) <= MAX_SEGMENTS
    assert found[0] == found[-1] == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pipeline_parallel": 4, "micro_batches": 4, "virtual_stages": 3}, "virtual_stages to divide the 8 layers"),
        ({"expert_parallel": 2}, "experts with expert_parallel"),
        ({"experts": 4, "expert_parallel": 3}, "expert_parallel to divide the 4 experts"),
        ({"experts": 4, "zero_stage": 3, "shard_group": 2}, "no shard_group with experts"),
        ({"shard_group": 2}, "zero_stage 3 with shard_group"),
        ({"zero_stage": 3, "pipeline_parallel": 2, "shard_group": 2}, "no shard_group with pipeline_parallel"),
        ({"context_parallel": 3}, "to divide the 1024 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cluster(**keys)
