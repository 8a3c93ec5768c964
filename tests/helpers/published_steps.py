"""Published steps of real jobs, described: the inputs of each and where they were taken from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceenv.core import pacing
from paceenv.policies.clairvoyant import candidates
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.program_tables import Compute
from paceenv.sim.engine.simulator import Simulator, episode_keys
from paceenv.ui import config_files

TOLERANCE = 0.15


class Row(NamedTuple):
    """A published number beside the predicted one."""

    case: str
    published: float
    predicted: float
    unit: str
    remark: str = ""

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what is published."""
        return self.predicted / self.published - 1.0


def described(
    nodes: int,
    ranks_per_node: int,
    workload: dict[str, Any],
    gpu: dict[str, float],
    fabric: dict[str, Any],
) -> Cluster:
    """A job as a program. Whether it fits into memory is not asked here."""
    data = {
        "name": "published",
        "job": {"nodes": nodes, "ranks_per_node": ranks_per_node, "algorithm": "auto"},
        "workload": workload,
        "gpu": {"memory_gb": 1e4, **gpu},
        "fabric": {
            "nodes_per_leaf": 1024,
            "oversubscription": 1,
            "latency_us": 10,
            "intra_node_latency_us": 3.4,
            **fabric,
        },
    }
    return config_files.parse(Cluster, data, "published")


def step_s(one: Cluster) -> float:
    """The step without noise, seconds."""
    return float(derive(one, episode_keys([0])).jobs["ideal_step_s"][0])


A100_GPU: dict[str, float] = {"peak_tflops": 312, "achievable_tflops": 200}
A100_BYTES_PER_S = 2.039e12
"""Memory of the A100 80 GB, as its data sheet has it."""
A100 = {"nic_gbps": 200, "nics_per_node": 8, "intra_node_gbps": 2240}
MEGATRON = (
    # layers, hidden, heads, model-parallel size, GPUs, batch, TFLOP/s per GPU
    (24, 2304, 24, 1, 32, 512, 137.0),
    (30, 3072, 32, 2, 64, 512, 138.0),
    (36, 4096, 32, 4, 128, 512, 142.0),
    (40, 6144, 48, 8, 256, 1024, 135.0),
    (48, 8192, 64, 16, 512, 1536, 138.0),
    (60, 10240, 80, 32, 1024, 1792, 140.0),
    (80, 12288, 96, 64, 1536, 2304, 148.0),
    (96, 16384, 128, 128, 1920, 2160, 155.0),
)


MegatronRow = tuple[int, int, int, int, int, int, float]


def _megatron_tflops(row: MegatronRow, gpu: dict[str, float]) -> float:
    """The rate of each GPU that a row comes out with, what is recomputed counted, TFLOP/s."""
    layers, hidden, heads, width, gpus, batch, _published = row
    replicas = gpus // width
    workload = {
        "model": {"layers": layers, "hidden": hidden, "heads": heads, "vocab": 51200, "sequence": 2048},
        "batch": batch // replicas,
        "micro_batches": batch // replicas if width > 8 else min(batch // replicas, 8),
        "tensor_parallel": min(width, 8),
        "pipeline_parallel": max(width // 8, 1),
        "recompute": "full",
        "overlap": False,
    }
    one = described(gpus // 8, 8, workload, gpu, A100)
    assert one.workload is not None
    return batch * one.workload.model.flops * 4.0 / 3.0 / step_s(one) / gpus / 1e12


def _with_memory(rate: float) -> dict[str, float]:
    """An A100 by its rate of matrix products, TFLOP/s, and that of its memory."""
    return {**A100_GPU, "achievable_tflops": rate, "memory_bytes_per_s": A100_BYTES_PER_S}


def megatron_rate(row: MegatronRow = MEGATRON[-1]) -> float:
    """The rate of matrix products at which a row comes out as published, TFLOP/s.

    A step grows linearly with the time of a product, so two steps tell it.
    """
    products = (1.0 / 150.0, 1.0 / 300.0)
    steps = [1.0 / _megatron_tflops(row, _with_memory(1.0 / one)) for one in products]
    slope = (steps[0] - steps[1]) / (products[0] - products[1])
    return 1.0 / (products[1] + (1.0 / row[-1] - steps[1]) / slope)


def megatron(rate: float, rows: Sequence[MegatronRow] = MEGATRON[:-1]) -> list[Row]:
    """Megatron-LM's table of April 2021: GPT models on A100, each GPU's rate with recomputation counted."""
    return [
        Row(
            f"width {row[1]:,}, {row[4]} GPUs, tensor {min(row[3], 8)}, pipeline {max(row[3] // 8, 1)}",
            row[-1],
            _megatron_tflops(row, _with_memory(rate)),
            "TFLOP/s per GPU",
            f"{_megatron_tflops(row, A100_GPU):.0f} with one rate for all kernels",
        )
        for row in rows
    ]


LLAMA_8B = {
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "mlp_hidden": 18432,
    "vocab": 128256,
    "sequence": 8192,
    "positions": 0,
    "tied_embeddings": False,
    "parameters_total": 8.03e9,
}
H100 = {"nic_gbps": 400, "nics_per_node": 8, "intra_node_gbps": 3600}


def _titan(nodes: int, tflops: float, **more: Any) -> Cluster:
    sequence = more.pop("sequence", 8192)
    workload = {
        "model": {**LLAMA_8B, "sequence": sequence},
        "batch": 2,
        "zero_stage": 3,
        "parameter_dtype": "bf16",
        "gradient_dtype": "fp32",
        "activation_dtype": "bf16",
        "recompute": "selective",
        **more,
    }
    return described(nodes, 8, workload, {"peak_tflops": 5000, "achievable_tflops": tflops}, H100)


def _rate(published: float, tokens: int, **more: Any) -> float:
    """The rate of kernels at which one node processes ``published`` tokens per second and GPU, TFLOP/s."""
    low, high = 10.0, 5000.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        found = tokens / step_s(_titan(1, middle, **more))
        low, high = (middle, high) if found < published else (low, middle)
    return low


def torchtitan() -> list[Row]:
    """torchtitan, December 2024: kernels' rate from its row of 8 GPUs, then 128 GPUs and longer sequences."""
    rows = []
    tokens = 2 * 8192
    for name, eight, many in (("FSDP", 5762, 5605), ("compiled", 6667, 6514), ("compiled, float8", 8532, 8380)):
        rate = _rate(eight, tokens)
        rows.append(
            Row(
                f"8 B, {name}, 128 GPUs",
                many,
                tokens / step_s(_titan(16, rate)),
                "tokens/s per GPU",
                f"{rate:.0f} TFLOP/s",
            )
        )
    long = {"batch": 1, "recompute": "full"}
    rate = _rate(3890, 32768, sequence=32768, **long)
    for c, published in ((2, 2540), (4, 1071), (8, 548)):
        one = _titan(1, rate, sequence=32768 * c, context_parallel=c, **long)
        remark = "" if c == 2 else "likely: attention in pieces has slower kernels"
        rows.append(
            Row(
                f"8 B, 8 GPUs, {32768 * c} tokens, context {c}",
                published,
                32768 / step_s(one),
                "tokens/s per GPU",
                remark,
            )
        )
    return rows


def _sharded(**more: Any) -> Cluster:
    """Six encoder and six decoder layers of width 8192 on 32 A100, of which only transfers count."""
    width, inner = 8192, 2048
    encoder, decoder = 4 * width**2 + 2 * width * inner, 8 * width**2 + 2 * width * inner
    node_gbps = encoder * 2 * 31 / 32 / 23e-3 * 8 / 1e9  # 23 ms for an encoder layer
    workload = {
        "model": {"kind": "generic", "layers": 12, "parameters": 6.0 * (encoder + decoder), "flops": 1e9},
        "batch": 1,
        "zero_stage": 3,
        "parameter_dtype": "bf16",
        "gradient_dtype": "bf16",
        **more,
    }
    fabric = {"nic_gbps": node_gbps / 4, "nics_per_node": 4, "intra_node_gbps": 2240}
    return described(4, 8, workload, A100_GPU, fabric)


def hybrid() -> list[Row]:
    """pytorch PR #106080: the fully sharded job that hybrid sharding is compared with."""
    return [Row("FSDP, 32 GPUs", 1160, step_s(_sharded()) * 1e3, "ms", "its batch is not published; transfers only")]


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


def read_log(path: Path) -> Log:
    """Read a log of the Jean Zay runs."""
    text = path.read_text(encoding="utf-8", errors="replace")

    def argument(name: str) -> int:
        found = re.search(rf"^\s*{name} \.+ (\d+)\s*$", text, re.MULTILINE)
        assert found is not None, name
        return int(found.group(1))

    def median(name: str, timer: str = r"\| ") -> float:
        values = [float(v) for v in re.findall(rf"{timer}{name}: ([\d.]+)", text)]
        return float(np.median(values[2:]))

    step_ms = float(np.median([float(v) for v in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", text)][2:]))
    return Log(
        argument("num_layers"),
        argument("hidden_size"),
        argument("pipeline_model_parallel_size"),
        step_ms,
        median("forward-compute") + median("backward-compute"),
        median("optimizer") + median("backward-params-all-reduce"),
    )


def jean_zay(folder: Path) -> list[Row]:
    """Pipelines on V100: the first stage's compute is the log's, the step follows from the schedule and the network."""
    rows = []
    for path in sorted(folder.glob("meg_*.out"), key=lambda one: read_log(one).stages):
        log = read_log(path)
        rows.append(
            Row(f"{log.stages} nodes, {log.layers} layers of {log.hidden}", log.step_ms, _pipeline_ms(log), "ms")
        )
    return rows


def _pipeline_ms(log: Log) -> float:
    """The step of a log, from its first stage's compute and its time after the passes."""
    workload = {
        "model": {"layers": log.layers, "hidden": log.hidden, "heads": 32, "vocab": 50688, "sequence": 1024},
        "batch": 4,
        "micro_batches": 4,
        "tensor_parallel": 4,
        "pipeline_parallel": log.stages,
        "recompute": "full",
        "overlap": False,
    }
    fabric = {"nic_gbps": 84.7, "intra_node_gbps": 991}

    def made(rate: float) -> Cluster:
        return described(log.stages, 4, workload, {"peak_tflops": 125, "achievable_tflops": rate}, fabric)

    def first_ms(rate: float) -> float:
        plan = made(rate).plan()
        return 1e3 * sum(one.seconds for one in plan.roles[0] if isinstance(one, Compute))

    kernels = (first_ms(50) - first_ms(100)) * 100.0
    rest_ms = first_ms(100) - kernels / 100.0
    return step_s(made(kernels / (log.compute_ms - rest_ms))) * 1e3 + log.after_ms


class Priority(NamedTuple):
    """What the order of transfers gives to a job with experts, ratios of throughput without an order."""

    experts: int
    tokens: int
    slowest: float
    """The slowest exchange of the backward pass over the same one alone."""
    held: float
    """With the best window of defer."""
    first: float
    """With exchanges strictly first on every link."""


def priority(count: int, sequences: int) -> Priority:
    """One of :func:`priorities`."""
    workload = {
        "model": {"layers": 12, "hidden": 1024, "heads": 16, "vocab": 50257, "sequence": 1024},
        "batch": sequences,
        "experts": count,
        "expert_parallel": count,
        "top_k": 2,
    }
    one = described(4, 4, workload, A100_GPU, {"nic_gbps": 100, "intra_node_gbps": 2240})
    keys = episode_keys([0])
    batch = derive(one, keys)
    job = Simulator(batch, keys)
    free = job.record(job.off(), 2)
    program = batch.program
    is_exchange = ~program.can_wait_O
    took = (free.through_ETO - free.start_ETO)[0, -1]
    alone = program.alone_O + program.latency_O
    tried = [setting for setting in candidates(can_defer=True) if setting[pacing.DEFER, pacing.WINDOW] > 0.0]
    held_s = min(float(Simulator(batch, keys).run(setting[None, None], 12)[0, -1]) for setting in tried)
    ahead = Simulator(replace(batch, program=program._replace(weight_O=np.where(is_exchange, 1e6, 1.0))), keys)
    first_s = float(ahead.run(ahead.off(), 2)[0, -1])
    free_s = float(free.step_ET[0, -1])
    slowest = float((took[is_exchange] / alone[is_exchange]).max())
    return Priority(count, sequences * 1024, slowest, free_s / held_s, free_s / first_s)
