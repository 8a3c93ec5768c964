"""Published steps of real jobs against described programs: what the page says is met stays met."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from traced_jobs import STRAGGLER_DIR

from paceenv.policies.clairvoyant import grid, settings_of
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.program_tables import Compute
from paceenv.sim.engine.simulator import Simulator, episode_keys
from paceenv.ui import config_files

DATA = Path(os.environ.get("PACEENV_DATA_DIR") or STRAGGLER_DIR.parent)
A100_GPU: dict[str, float] = {"peak_tflops": 312, "achievable_tflops": 200}
BF16 = {"parameter_dtype": "bf16", "gradient_dtype": "bf16"}


def described(
    nodes: int, per_node: int, workload: dict[str, Any], gpu: dict[str, float], fabric: dict[str, Any]
) -> Cluster:
    """A job as a program. Whether it fits into memory is not asked here."""
    usual = {"nodes_per_leaf": 1024, "oversubscription": 1, "latency_us": 10, "intra_node_latency_us": 3.4}
    data = {"name": "published", "job": {"nodes": nodes, "ranks_per_node": per_node, "algorithm": "auto"}}
    data |= {"workload": workload, "gpu": {"memory_gb": 1e4, **gpu}, "fabric": usual | fabric}
    return config_files.parse(Cluster, data, "published")


def step_s(one: Cluster) -> float:
    """The step without noise, seconds."""
    return float(derive(one, episode_keys([0])).jobs["ideal_step_s"][0])


class Log(NamedTuple):
    """A log of Megatron-LM at steady state, milliseconds."""

    layers: int
    hidden: int
    stages: int
    step_ms: float
    compute_ms: float
    """Forward and backward of the first stage, all micro-batches."""
    after_ms: float
    """Optimizer and copying of gradients."""

    @classmethod
    def read(cls, path: Path) -> Log:
        text = path.read_text(encoding="utf-8", errors="replace")
        names = ("num_layers", "hidden_size", "pipeline_model_parallel_size")
        layers, hidden, stages = (int(re.findall(rf"^\s*{n} \.+ (\d+)\s*$", text, re.MULTILINE)[0]) for n in names)

        def median(timer: str) -> float:
            return float(np.median([float(v) for v in re.findall(rf"{timer}: ([\d.]+)", text)][2:]))

        passes_ms = median(r"\| forward-compute") + median(r"\| backward-compute")
        after_ms = median(r"\| optimizer") + median(r"\| backward-params-all-reduce")
        return cls(layers, hidden, stages, median(r"elapsed time per iteration \(ms\)"), passes_ms, after_ms)

    def predicted_ms(self) -> float:
        """The step, from its first stage's compute and its time after the passes."""
        model = {"layers": self.layers, "hidden": self.hidden, "heads": 32, "vocab": 50688, "sequence": 1024}
        workload = {"model": model, "batch": 4, "micro_batches": 4, "tensor_parallel": 4, "recompute": "full"}
        workload |= {"pipeline_parallel": self.stages, "overlap": False}
        fabric = {"nic_gbps": 84.7, "intra_node_gbps": 991}

        def made(rate: float) -> Cluster:
            return described(self.stages, 4, workload, {"peak_tflops": 125, "achievable_tflops": rate}, fabric)

        def first_ms(rate: float) -> float:
            return 1e3 * sum(one.seconds for one in made(rate).plan().roles[0] if isinstance(one, Compute))

        kernels = (first_ms(50) - first_ms(100)) * 100.0
        rest_ms = first_ms(100) - kernels / 100.0
        return step_s(made(kernels / (self.compute_ms - rest_ms))) * 1e3 + self.after_ms


@pytest.mark.skipif(not (DATA / "jean-zay").is_dir(), reason="set PACEENV_DATA_DIR to data recorded by others")
def test_pipelines_of_a_university_cluster_follow_from_their_first_stage() -> None:
    logs = sorted(map(Log.read, (DATA / "jean-zay").glob("meg_*.out")), key=lambda log: log.stages)
    assert [log.stages for log in logs] == [4, 8, 16]
    for log in logs:
        assert log.predicted_ms() == pytest.approx(log.step_ms, rel=0.15)


LLAMA_8B: dict[str, Any] = {
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "mlp_hidden": 18432,
    "vocab": 128256,
    "sequence": 8192,
}
LLAMA_8B |= {"positions": 0, "tied_embeddings": False, "parameters_total": 8.03e9}


def tokens_per_s(nodes: int, tflops: float) -> float:
    """Of torchtitan's 8 B model on H100, per GPU."""
    workload = {"model": LLAMA_8B, "batch": 2, "zero_stage": 3, "recompute": "selective"}
    workload |= BF16 | {"gradient_dtype": "fp32", "activation_dtype": "bf16"}
    h100 = {"nic_gbps": 400, "nics_per_node": 8, "intra_node_gbps": 3600}
    return 2 * 8192 / step_s(described(nodes, 8, workload, {"peak_tflops": 5000, "achievable_tflops": tflops}, h100))


@pytest.mark.slow
@pytest.mark.parametrize(("eight", "many"), [(5762, 5605), (6667, 6514), (8532, 8380)])
def test_fully_sharded_steps_follow_from_one_node(eight: float, many: float) -> None:
    """torchtitan, December 2024: the rate of kernels from its row of 8 GPUs; plain, compiled, in float8."""
    low, high = 10.0, 5000.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if tokens_per_s(1, middle) < eight else (low, middle)
    assert tokens_per_s(16, low) == pytest.approx(many, rel=0.05)


@pytest.mark.slow
def test_a_fully_sharded_step_follows_from_one_gather() -> None:
    """pytorch PR #106080: six encoder and six decoder layers of width 8192 on 32 A100; only transfers count."""
    width, inner = 8192, 2048
    encoder, decoder = 4 * width**2 + 2 * width * inner, 8 * width**2 + 2 * width * inner
    node_gbps = encoder * 2 * 31 / 32 / 23e-3 * 8 / 1e9  # 23 ms for an encoder layer
    model = {"kind": "generic", "layers": 12, "parameters": 6.0 * (encoder + decoder), "flops": 1e9}
    fabric = {"nic_gbps": node_gbps / 4, "nics_per_node": 4, "intra_node_gbps": 2240}
    one = described(4, 8, {"model": model, "batch": 1, "zero_stage": 3, **BF16}, A100_GPU, fabric)
    assert step_s(one) == pytest.approx(1.160, rel=0.05)


MEGATRON = {
    # hidden: layers, heads, model-parallel size, GPUs, batch, TFLOP/s per GPU
    2304: (24, 24, 1, 32, 512, 137.0),
    4096: (36, 32, 4, 128, 512, 142.0),
    8192: (48, 64, 16, 512, 1536, 138.0),
}
"""Of Megatron-LM's table of April 2021: GPT models on A100, each GPU's rate with recomputation counted."""


def megatron_tflops(hidden: int, rate: float) -> float:
    """The rate of each GPU that a row comes out with, by that of its matrix products and of its memory."""
    layers, heads, width, gpus, batch, _published = MEGATRON[hidden]
    model = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": 51200, "sequence": 2048}
    share = batch // (gpus // width)
    workload = {"model": model, "batch": share, "micro_batches": share if width > 8 else min(share, 8)}
    workload |= {"tensor_parallel": min(width, 8), "pipeline_parallel": max(width // 8, 1)}
    gpu = {**A100_GPU, "achievable_tflops": rate, "memory_bytes_per_s": 2.039e12}
    fabric = {"nic_gbps": 200, "nics_per_node": 8, "intra_node_gbps": 2240}
    one = described(gpus // 8, 8, workload | {"recompute": "full", "overlap": False}, gpu, fabric)
    assert one.workload is not None
    return batch * one.workload.model.flops * 4.0 / 3.0 / step_s(one) / gpus / 1e12


@pytest.mark.slow
def test_rates_of_narrow_layers_follow_from_those_of_wide_ones_and_the_bytes_in_memory() -> None:
    """A step grows linearly with the time of a product, so two steps tell the rate of products of the wide row."""
    products = (1.0 / 150.0, 1.0 / 300.0)
    steps = [1.0 / megatron_tflops(8192, 1.0 / one) for one in products]
    slope = (steps[0] - steps[1]) / (products[0] - products[1])
    rate = 1.0 / (products[1] + (1.0 / MEGATRON[8192][-1] - steps[1]) / slope)
    assert megatron_tflops(8192, rate) == pytest.approx(MEGATRON[8192][-1], rel=0.005)
    for hidden in (2304, 4096):
        assert megatron_tflops(hidden, rate) == pytest.approx(MEGATRON[hidden][-1], rel=0.15)


def test_exchanges_of_experts_are_slowed_by_gradients_and_gain_from_going_first() -> None:
    model = {"layers": 12, "hidden": 1024, "heads": 16, "vocab": 50257, "sequence": 1024}
    workload = {"model": model, "batch": 8, "experts": 8, "expert_parallel": 8, "top_k": 2}
    keys = episode_keys([0])
    batch = derive(described(4, 4, workload, A100_GPU, {"nic_gbps": 100, "intra_node_gbps": 2240}), keys)
    job, program = Simulator(batch, keys), batch.program
    free, is_exchange = job.record(job.off(), 2), ~program.can_wait_O
    took_O, alone_O = (free.through_ETO - free.start_ETO)[0, -1], program.alone_O + program.latency_O
    assert (took_O[is_exchange] / alone_O[is_exchange]).max() > 2.0
    tried = settings_of(grid(["defer"]))[1:]
    held_s = min(float(Simulator(batch, keys).run(setting[None, None], 12)[0, -1]) for setting in tried)
    ahead = Simulator(replace(batch, program=program._replace(weight_O=np.where(is_exchange, 1e6, 1.0))), keys)
    first_s = float(ahead.run(ahead.off(), 2)[0, -1])  # exchanges strictly first on every link
    assert free.step_ET[0, -1] > 1.05 * first_s
    assert first_s <= held_s
