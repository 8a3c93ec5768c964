"""Described workloads: parameters, buckets, volumes, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from described_steps import Step, step_of
from hypothesis import given
from hypothesis import strategies as st

from paceenv.core.errors import InputError
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.architecture import Tensor
from paceenv.sim.cluster.collectives import Algorithm
from paceenv.sim.cluster.program.footprint import Topology, laid
from paceenv.sim.cluster.program.layer_passes import buckets
from paceenv.sim.cluster.workload import Workload
from paceenv.ui import config_files

A100 = {"achievable_tflops": 200}
WAYS: tuple[Algorithm, ...] = ("ring", "tree", "hierarchical")
SMALL = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 1000, "sequence": 32}


def workload(**changes: Any) -> Workload:
    data: dict[str, Any] = {"model": SMALL, "batch": 8}
    return config_files.parse(Workload, data | changes, "test")


def step(gpus: int, per_node: int, *, node_Bps: float = 1e14, **changes: Any) -> Step:
    """Of GPUs with fast links inside their nodes, latency nowhere."""
    fabric = {"nic_gbps": node_Bps * 8e-9, "nodes_per_leaf": 1000, "oversubscription": 1, "latency_us": 0}
    inside = {"intra_node_gbps": changes.pop("inside_Bps", 1e14) * 8e-9}
    job = {"nodes": gpus // per_node, "ranks_per_node": per_node, "algorithm": changes.pop("algorithm", "auto")}
    data = {"name": "x", "job": job, "fabric": fabric | inside, "gpu": A100}
    data["workload"] = {"model": SMALL, "batch": 8} | changes
    return step_of(config_files.parse(Cluster, data, "test"))


# Models


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("gpt3-175b", pytest.approx(174.6e9, rel=1e-3)),
        ("gpt-1t", pytest.approx(1008e9, rel=1e-3)),
    ],
)
def test_parameters_are_the_published_ones(name: str, parameters: float) -> None:
    """What backward makes ready is all of it, once; its flops are ``6 N s + 12 L h s^2``."""
    some = workload(model=name)
    model, tensors = some.model, some.gradients(0)
    assert some.stage_parameters(0) == parameters
    weights = some.stage_parameters(0) - model.position_parameters
    expected = 6 * weights * model.sequence + 12 * model.layers * model.hidden * model.sequence**2
    assert sum(t.flops for t in tensors) == pytest.approx(expected, rel=1e-3)


def test_recomputed_flops_are_narayanan_2021_equation_3() -> None:
    opt = step(8, 8, model="opt-175b", recompute="full", tensor_parallel=8)
    layers, h, s, vocab, batch = 96, 12288, 2048, 50272, 8
    expected = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert opt.kernel_s * 8 * 200e12 == pytest.approx(expected, rel=1e-6)
    assert opt.efficiency == pytest.approx(1.0, rel=1e-3)


# Refusals


@pytest.mark.parametrize(
    ("gpus", "per_node", "changes", "expected"),
    [
        (8, 8, {"model": SMALL | {"heads": 5}}, "heads to divide hidden (5 and 64)"),
        (8, 8, {"pipeline_parallel": 3}, "pipeline_parallel to divide the 4 layers (3)"),
        (8, 8, {"tensor_parallel": 3}, "tensor_parallel to divide the 4 heads"),
        (8, 8, {"micro_batches": 3}, "micro_batches to divide the batch (3 and 8)"),
        (8, 8, {"pipeline_parallel": 2, "zero_stage": 2}, "zero_stage 0 or 1 with pipeline_parallel"),
        (8, 8, {"zero_stage": 3, "overlap": False}, "overlap: true"),
        (8, 4, {"tensor_parallel": 4, "pipeline_parallel": 4}, "4 x 4 on 8 GPUs; allowed: a product that divides"),
        (6, 6, {"tensor_parallel": 4}, "tensor_parallel = 4; allowed: a divisor or a multiple of the 6 GPUs"),
    ],
)
def test_impossible_workloads_and_placements_are_refused(
    gpus: int, per_node: int, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InputError, match=re.escape(expected)):
        step(gpus, per_node, **changes)


# Buckets


def test_buckets_close_when_full_and_keep_tensors_whole() -> None:
    tensors = [Tensor(n, f) for n, f in [(5, 1), (40, 2), (70, 3), (30, 2), (3, 2), (200, 0)]]
    found = buckets(tensors, 1, first_bytes=4, cap_bytes=100)
    assert [(one.payload_bytes, one.ready) for one in found] == [(5, 0.1), (110, 0.6), (233, 1.0)]


# Volumes


@given(st.sampled_from([2, 3, 8]), st.sampled_from([0, 1, 2, 3]), st.sampled_from([1, 2]))
def test_zero_volumes(nodes: int, zero_stage: int, micro_batches: int) -> None:
    """Rajbhandari et al. 2020, section 7: stages 0 to 2 move twice the weights, stage 3 three times, 16 bit each."""
    some = step(nodes, 1, algorithm="ring", zero_stage=zero_stage, micro_batches=micro_batches)
    size = 2.0 * workload().stage_parameters(0)
    passes = 3.0 * micro_batches if zero_stage == 3 else 2.0
    assert some.nic_bytes == pytest.approx(passes * (nodes - 1) / nodes * size)


def test_what_a_node_sends_depends_on_the_way_through_it() -> None:
    """2 nodes of 2: a ring of four crosses with 1.5 S, a tree and a hierarchy with S."""
    place = Topology(2, 2, 2, 1)
    sent = {way: laid(place, "all_reduce", range(4), 100e6, way).load[place.nic_links].max() for way in WAYS}
    assert sent == pytest.approx({"ring": 150e6, "tree": 100e6, "hierarchical": 100e6})
