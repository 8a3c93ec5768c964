"""Described workloads: parameters, memory, buckets, pipeline, ZeRO, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from described_steps import Step, step_of
from hypothesis import given
from hypothesis import strategies as st

from paceenv.core.errors import InputError
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.architecture import Tensor
from paceenv.sim.cluster.collectives import Algorithm
from paceenv.sim.cluster.pipeline import in_flight, interleaved
from paceenv.sim.cluster.program.footprint import Topology, laid
from paceenv.sim.cluster.program.layer_passes import buckets
from paceenv.sim.cluster.workload import Workload
from paceenv.ui import config_files

A100 = {"peak_tflops": 312, "achievable_tflops": 200, "memory_gb": 80}
BIG = A100 | {"memory_gb": 1e6}
WAYS: tuple[Algorithm, ...] = ("ring", "tree", "hierarchical")
SMALL = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 1000, "sequence": 32}


def workload(**changes: Any) -> Workload:
    data: dict[str, Any] = {"model": SMALL, "batch": 8}
    return config_files.parse(Workload, data | changes, "test")


def step(gpus: int, per_node: int, *, gpu: dict[str, Any] = BIG, node_Bps: float = 1e14, **changes: Any) -> Step:
    """Of GPUs with fast links inside their nodes, latency nowhere."""
    fabric = {"nic_gbps": node_Bps * 8e-9, "nodes_per_leaf": 1000, "oversubscription": 1, "latency_us": 0}
    inside = {"intra_node_gbps": changes.pop("inside_Bps", 1e14) * 8e-9}
    job = {"nodes": gpus // per_node, "ranks_per_node": per_node, "algorithm": changes.pop("algorithm", "auto")}
    data = {"name": "x", "job": job, "fabric": fabric | inside, "gpu": gpu}
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
        ("resnet18-cifar", 11_173_962),
    ],
)
def test_parameters_are_the_published_ones(name: str, parameters: float) -> None:
    model = workload(model=name).model
    assert model.parameters == parameters
    # what backward makes ready is all of it, once
    assert sum(t.parameters for t in workload(model=name).gradients(0)) == pytest.approx(parameters)
    assert sum(t.flops for t in workload(model=name).gradients(0)) == pytest.approx(model.flops, rel=1e-3)


def test_recomputed_flops_are_narayanan_2021_equation_3() -> None:
    opt = step(8, 8, model="opt-175b", recompute="full", tensor_parallel=8)
    layers, h, s, vocab, batch = 96, 12288, 2048, 50272, 8
    expected = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert opt.kernel_s * 8 * 200e12 == pytest.approx(expected, rel=1e-6)
    assert opt.efficiency == pytest.approx(1.0, rel=1e-3)


# Operations other than matrix products


def test_bytes_of_a_layer_in_memory_are_those_of_its_operations() -> None:
    """By hand, each operand once an operation, 16 bit: what Megatron-LM fuses is one operation."""
    h, heads, tokens = 64, 4, 32
    wide, score, inner = 2 * h, 2 * heads * tokens, 2 * 4 * h
    mask, score_mask = h, heads * tokens
    norm, dropout = 2 * wide, 3 * wide + mask
    forward = workload().moved(backward=False)
    assert forward.outer == 2 * norm + 2 * dropout
    assert forward.scores == 2 * score + (2 * score + score_mask)
    assert forward.inner == 2 * inner
    backward = workload().moved(backward=True)
    assert backward.outer == 2 * (3 * wide) + 2 * (2 * wide + mask) + 2 * (3 * wide)
    assert backward.scores == 3 * score + (2 * score + score_mask)
    assert backward.inner == 3 * inner


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_memory_adds_its_time_to_that_of_products(recompute: str) -> None:
    some, rate = workload(recompute=recompute), 1e9
    fast, own = (step(1, 1, recompute=recompute, gpu=BIG | more) for more in ({}, {"memory_bytes_per_s": rate}))
    forward, backward = (sum(some.moved(backward=b)) for b in (False, True))
    layer = forward + backward + (forward if recompute == "full" else 0.0)
    tokens, adam = 8 * 32, some.stage_parameters(0) * (2 + 2 * 8 + 2 * 4 + 2)
    moved_s = (tokens * (4 * layer + 20 * 1000) + adam) / rate
    assert own.step_s - fast.step_s == pytest.approx(moved_s)
    assert own.kernel_flops == fast.kernel_flops


# Memory


@pytest.mark.parametrize(("zero_stage", "gb"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_memory_is_that_of_the_paper(zero_stage: int, gb: float) -> None:
    """7.5 B parameters on 64 GPUs: Rajbhandari et al. 2020, figure 1; many layers make what is gathered small."""
    model = {"kind": "generic", "layers": 10**5, "parameters": 7.5e9, "flops": 1.0}
    assert workload(model=model, zero_stage=zero_stage).memory(64).total / 1e9 == pytest.approx(gb, rel=0.02)


def kept_bytes(**changes: Any) -> float:
    """Activations of all layers, almost without an output layer."""
    return workload(**{"model": SMALL | {"vocab": 1}} | changes).memory(1).activations


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("p", "v", "m"), [(2, 2, 2), (2, 2, 8), (4, 2, 4), (4, 4, 16), (8, 2, 32), (8, 4, 32), (8, 1, 32)]
)
def test_interleaved_stages_keep_what_is_live_in_their_schedule(p: int, v: int, m: int, recompute: str) -> None:
    """With few micro-batches all of them; in the first stage L (1 + (p - 1) / (p v)) layers (Korthikanti 2022)."""
    peaks = []
    for stage in range(p):
        live = np.cumsum([-1 if backward else 1 for backward, _, _ in interleaved(stage, p, m, v)])
        peaks.append(live.max() / v)
        assert in_flight(stage, p, m, v) == peaks[-1]
    if m > p and v > 1:
        assert peaks[0] / p == pytest.approx(1 + (p - 1) / (p * v))
    deep: dict[str, Any] = {"model": SMALL | {"vocab": 1, "layers": 32}, "recompute": recompute}
    found = kept_bytes(**deep, batch=m, micro_batches=m, pipeline_parallel=p, virtual_stages=v)
    once, layer = (kept_bytes(**{**deep, "batch": 1, "model": deep["model"] | {"layers": n}}) for n in (32, 31))
    layer = once - layer
    one_whole = once - 32 * layer - 10 * 32  # of a layer that is computed anew; the last stage's logits
    assert found == pytest.approx(peaks[0] * 32 / p * layer + one_whole, rel=1e-3)


@pytest.mark.parametrize("t", [1, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_kept_activations_follow_the_width_of_the_mlp_and_the_experts_of_a_token(
    t: int, sequence_parallel: bool
) -> None:
    """Korthikanti 2022 by hand, 16 bit: of 34 bytes a width, two operands of the MLP are 4 bytes each inner width."""
    h, tokens, attention, split = 64, 8 * 32, 5 * 4 * 32 / 64, t if sequence_parallel else 1
    for mlp, experts, top_k in ((64, 1, 1), (256, 1, 1), (512, 1, 1), (256, 8, 3)):
        inner = 4 * mlp / h * top_k
        layer = tokens * h * (10 / split + (8 + inner + attention) / t)
        keys = {"experts": experts, "top_k": top_k, "model": SMALL | {"mlp_hidden": mlp}}
        some = workload(**keys, tensor_parallel=t, sequence_parallel=sequence_parallel)
        assert some.memory(1).activations == pytest.approx(4 * layer + tokens * 1000 / t * 10)
    full = workload(**keys, tensor_parallel=t, sequence_parallel=sequence_parallel, recompute="full")
    widest = tokens * h * (10 / split + (8 + 16 * 3 + attention) / t)
    assert full.memory(1).activations == pytest.approx(4 * 2 * tokens * h / split + widest + tokens * 1000 / t * 10), (
        "one layer with experts is whole at a time"
    )


def test_memory_holds_what_was_measured_to_fit() -> None:
    """Two-node cluster of 48 GB GPUs: 16 sequences fit and 32 do not; the largest model does not fit on one GPU."""

    def fits(model: str, batch: int, gpus: int = 1, **changes: Any) -> bool:
        data = {"model": model, "batch": batch, "parameter_dtype": "fp32", "gradient_dtype": "fp32"} | changes
        try:
            step(gpus, gpus, gpu={"peak_tflops": 150, "achievable_tflops": 30, "memory_gb": 48}, **data)
        except InputError as error:
            return "allowed: at most gpu.memory_gb = 48" not in str(error)
        return True

    assert fits("gpt2-small", 16)
    assert not fits("gpt2-small", 32)
    assert fits("gpt2-large", 4)
    assert not fits("gpt2-xl", 4)
    assert fits("gpt2-xl", 16, 2, pipeline_parallel=2, micro_batches=16)


# Refusals


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": SMALL | {"heads": 5}}, "heads to divide hidden (5 and 64)"),
        ({"model": SMALL | {"parameters_total": 1e9}}, "parameters_total within 2% of the"),
        ({"pipeline_parallel": 3}, "pipeline_parallel to divide the 4 layers (3)"),
        ({"tensor_parallel": 3}, "tensor_parallel to divide the 4 heads"),
        ({"micro_batches": 3}, "micro_batches to divide the batch (3 and 8)"),
        ({"pipeline_parallel": 2, "zero_stage": 2}, "zero_stage 0, 1 or 3 with pipeline_parallel"),
        ({"zero_stage": 3, "overlap": False}, "overlap: true"),
    ],
)
def test_impossible_workloads_are_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=re.escape(expected)):
        workload(**changes)


def test_generic_tensors_must_add_up() -> None:
    model = {"kind": "generic", "layers": 1, "parameters": 10.0, "flops": 5.0, "tensors": [[4, 5], [5, 0]]}
    with pytest.raises(InputError, match=r"tensors whose parameters add up to 10 within 2% \(9\)"):
        workload(model=model)


@pytest.mark.parametrize(
    ("gpus", "per_node", "changes", "expected"),
    [
        (8, 8, {"data_parallel": 3}, "3 x 1 x 1 on 8 GPUs; allowed: a product of exactly that many"),
        (
            8,
            8,
            {"data_parallel": 4, "context_parallel": 2},
            "4 x 1 x 1 on 8 GPUs, where data_parallel counts the 2 GPUs of context_parallel one by one; allowed: a",
        ),
        (8, 4, {"tensor_parallel": 4, "pipeline_parallel": 4}, "4 x 4 on 8 GPUs; allowed: a product that divides"),
        (6, 6, {"tensor_parallel": 4}, "tensor_parallel = 4; allowed: a divisor or a multiple of the 6 GPUs"),
    ],
)
def test_impossible_placements_are_refused(gpus: int, per_node: int, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=re.escape(expected)):
        step(gpus, per_node, **changes)


def test_a_model_that_does_not_fit_says_what_takes_the_space() -> None:
    with pytest.raises(InputError, match=r"GB on the fullest of 64 x 1 x 1 GPUs \(weights 20.6, gradients 20.6, opt"):
        step(64, 8, gpu=A100, model="gpt-10b")


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
    size = 2.0 * workload().model.parameters
    passes = 3.0 * micro_batches if zero_stage == 3 else 2.0
    assert some.nic_bytes == pytest.approx(passes * (nodes - 1) / nodes * size)


def test_what_a_node_sends_depends_on_the_way_through_it() -> None:
    """2 nodes of 2: a ring of four crosses with 1.5 S, a tree and a hierarchy with S."""
    place = Topology(2, 2, 2, 1)
    sent = {way: laid(place, "all_reduce", range(4), 100e6, way).load[place.nic_links].max() for way in WAYS}
    assert sent == pytest.approx({"ring": 150e6, "tree": 100e6, "hierarchical": 100e6})
