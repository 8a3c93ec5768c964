"""Published steps of real jobs against described programs: what the page says is met stays met."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from described_steps import ideal_s
from traced_jobs import JEAN_ZAY_DIR, needs_jean_zay

from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.program_tables import Compute
from paceenv.ui import config_files


def described(
    nodes: int, per_node: int, workload: dict[str, Any], gpu: dict[str, float], fabric: dict[str, Any]
) -> Cluster:
    """A job as a program."""
    usual = {"nodes_per_leaf": 1024, "oversubscription": 1, "latency_us": 10, "intra_node_latency_us": 3.4}
    data = {"name": "published", "job": {"nodes": nodes, "ranks_per_node": per_node, "algorithm": "auto"}}
    data |= {"workload": workload, "gpu": gpu, "fabric": usual | fabric}
    return config_files.parse(Cluster, data, "published")


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
            return described(self.stages, 4, workload, {"achievable_tflops": rate}, fabric)

        def first_ms(rate: float) -> float:
            return 1e3 * sum(one.seconds for one in made(rate).plan().roles[0] if isinstance(one, Compute))

        kernels = (first_ms(50) - first_ms(100)) * 100.0
        rest_ms = first_ms(100) - kernels / 100.0
        return ideal_s(made(kernels / (self.compute_ms - rest_ms))) * 1e3 + self.after_ms


@needs_jean_zay
def test_pipelines_of_a_university_cluster_follow_from_their_first_stage() -> None:
    logs = sorted(map(Log.read, JEAN_ZAY_DIR.glob("meg_*.out")), key=lambda log: log.stages)
    assert [log.stages for log in logs] == [4, 8, 16]
    for log in logs:
        assert log.predicted_ms() == pytest.approx(log.step_ms, rel=0.15)


LLAMA_8B: dict[str, Any] = {"layers": 32, "hidden": 4096, "heads": 32, "mlp_hidden": 18432, "vocab": 128256}
LLAMA_8B |= {"sequence": 8192, "positions": 0, "tied_embeddings": False}


def tokens_per_s(nodes: int, tflops: float) -> float:
    """Of torchtitan's 8 B model on H100, per GPU."""
    workload = {"model": LLAMA_8B, "batch": 2, "zero_stage": 3, "recompute": "selective"}
    workload |= {"parameter_dtype": "bf16", "gradient_dtype": "fp32", "activation_dtype": "bf16"}
    h100 = {"nic_gbps": 400, "nics_per_node": 8, "intra_node_gbps": 3600}
    return 2 * 8192 / ideal_s(described(nodes, 8, workload, {"achievable_tflops": tflops}, h100))


@pytest.mark.slow
@pytest.mark.parametrize(("eight", "many"), [(5762, 5605), (6667, 6514), (8532, 8380)])
def test_fully_sharded_steps_follow_from_one_node(eight: float, many: float) -> None:
    """torchtitan, December 2024: the rate of kernels from its row of 8 GPUs; plain, compiled, in float8."""
    low, high = 10.0, 5000.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if tokens_per_s(1, middle) < eight else (low, middle)
    assert tokens_per_s(16, low) == pytest.approx(many, rel=0.05)
