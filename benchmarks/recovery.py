"""Does `paceenv calibrate` give back what a trace was made with? Random simulated clusters of every mechanism.

`python -m benchmarks.recovery --write` makes the tables of docs/calibration.md. Each cluster is simulated, calibrated
from its trace alone (an operator's base has latencies and racks, nothing of what is to be found), and every parameter
that the trace tells is held against the value the trace was made with.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer
from scipy import stats

from benchmarks._common import recorded
from paceenv import configs, output
from paceenv.calibration.job import JobFit, calibrate_job
from paceenv.cluster import Cluster, load_cluster
from paceenv.output import markdown_table
from paceenv.trace import Trace

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "calibration.md"
MARK = "## Recovery, measured"
"""Heading of what this script writes; what stands above it in the document is written by hand."""
LEVELS = (0.90, 0.95)
ASKED = (0.85, 0.95)
"""Of 90 % intervals so many are to hold the true value."""
ROUNDING = 1e-6
"""Relative: what a trace without any noise tells exactly, to the digits of its stamps, has no coverage."""
LENGTHS = (200, 800)
"""Iterations of a trace, log-uniformly."""

Rng = np.random.Generator


def _between(low: float, high: float) -> Callable[[Rng], str]:
    return lambda rng: f"{math.exp(rng.uniform(math.log(low), math.log(high))):.6g}"


def _one_of(*values: int) -> Callable[[Rng], str]:
    return lambda rng: str(int(rng.choice(values)))


PLAIN = {
    "job.nodes": _one_of(4, 8, 16, 32, 64),
    "job.compute_s": _between(0.1, 1.0),
    "noise.common_cv": _between(0.005, 0.03),
    "noise.persistent_cv": _between(0.005, 0.05),
    "noise.transfer_cv": _between(0.005, 0.1),
    "fabric.uplink_gbps": lambda rng: "100000",
}
GROUPS = {
    "job.nodes": _one_of(4, 6, 8, 16),
    "job.compute_s": _between(0.05, 0.2),
    "job.gradient_bytes": _between(5e5, 2e6),
    "fabric.nic_gbps": _between(0.12, 0.3),
    "fabric.uplink_gbps": _between(0.25, 0.5),
    "noise.jitter_cv": _between(0.02, 0.15),
    "noise.transfer_cv": _between(0.005, 0.05),
    "noise.common_cv": _between(0.005, 0.03),
}
MECHANISMS: dict[str, tuple[str, dict[str, Callable[[Rng], str]]]] = {
    "jitter": ("null-jitter", PLAIN | {"noise.jitter_cv": _between(0.01, 0.1)}),
    "imbalance": (
        "null-jitter",
        PLAIN
        | {
            "noise.jitter_cv": lambda rng: "0",
            "noise.imbalance_cv": _between(0.05, 0.2),
            "noise.imbalance_skew": _between(0.8, 2.0),
        },
    ),
    "slow rank": (
        "null-jitter",
        PLAIN
        | {
            "noise.jitter_cv": _between(0.01, 0.05),
            "noise.slow_ranks": lambda rng: "1",
            "noise.slow_factor": _between(1.3, 2.5),
        },
    ),
    "fail-slow": (
        "null-jitter",
        PLAIN
        | {
            "noise.jitter_cv": _between(0.01, 0.05),
            "noise.persistent_cv": lambda rng: "0",
            "noise.fail_slow_share": _between(0.02, 0.15),
            "noise.fail_slow_mean_iterations": _between(20, 100),
            "noise.fail_slow_factor": _between(1.3, 2.0),
        },
    ),
    "shared uplink": ("equal-slack", GROUPS),
    "exposed work": (
        "unequal-slack",
        GROUPS | {"exposed.groups": lambda rng: "1", "exposed.work_s": _between(0.05, 0.2)},
    ),
    "exposed episodes": (
        "equal-slack",
        GROUPS
        | {
            "exposed.share": _between(0.05, 0.25),
            "exposed.mean_iterations": _between(20, 80),
            "exposed.episode_s": _between(0.05, 0.2),
            "exposed.episode_spread": lambda rng: "0.3",
        },
    ),
    "incast": (
        "incast-shallow",
        {
            "job.nodes": _one_of(6, 8, 12),
            "job.compute_s": _between(0.05, 0.2),
            "job.gradient_bytes": _between(1.0e5, 2e5),
            "fabric.buffer_kb": _between(28, 60),
            "fabric.nic_gbps": _between(0.15, 0.4),
            "noise.jitter_cv": _between(0.02, 0.08),
        },
    ),
    "tenant": (
        "sockets-two-jobs",
        {
            "tenants.0.period_ratio": _between(0.8, 1.25),
            "tenants.0.comm_share": _between(0.2, 0.4),
        },
    ),
}
"""What a cluster is made of: a packaged one, and how the keys that differ are drawn."""
UNKNOWN = ("fabric.nic_gbps=50", "fabric.uplink_gbps=50", "fabric.barrier_us=0", "fabric.buffer_kb=null")
UNKNOWN += ("fabric.timeout_ms=200", "exposed={}", "noise={}", "tenants=[]")
"""What the operator's base has of it."""


@dataclass(frozen=True)
class Recovered:
    """One parameter of one calibration beside the value the trace was made with; ``inside`` by level of LEVELS."""

    mechanism: str
    key: str
    true: float
    value: float
    se: float
    inside: tuple[bool, ...]
    told: bool

    @property
    def error(self) -> float:
        """Relative."""
        return self.value / self.true - 1.0


def random_cluster(mechanism: str, rng: Rng) -> tuple[Cluster, list[str]]:
    """A cluster of a mechanism, and the keys that were drawn for it."""
    name, drawn = MECHANISMS[mechanism]
    settings = {key: draw(rng) for key, draw in drawn.items()}
    return load_cluster(name).changed([f"{key}={value}" for key, value in settings.items()]), list(settings)


def with_bytes(trace: Trace, cluster: Cluster) -> Trace:
    """The trace with the payload's bytes, which the simulator's rows lack, so that rates can be compared."""
    payload = trace.isin("op", cluster.job.collective)
    size = pa.array(np.where(payload, float(str(cluster.job.gradient_bytes)), 0.0).astype(np.int64))
    table = trace.table
    return Trace(
        table.set_column(table.schema.get_field_index("bytes"), table.schema.field("bytes"), size), trace.metadata
    )


def recover(mechanism: str, rng: Rng) -> list[Recovered]:
    """Make a cluster, simulate and calibrate it; every parameter whose true value is known and not 0."""
    cluster, _ = random_cluster(mechanism, rng)
    iterations = round(float(_between(*LENGTHS)(rng)))
    trace = with_bytes(recorded(cluster, int(rng.integers(1 << 31)), iterations), cluster)
    fit = calibrate_job(trace, base=cluster.changed(list(UNKNOWN)))
    return compare(mechanism, fit, cluster)


def compare(mechanism: str, fit: JobFit, cluster: Cluster) -> list[Recovered]:
    """The parameters of a fit beside those of the cluster that made its trace."""
    found = []
    for p in fit.parameters:
        true = truth(cluster, p.key)
        if p.key == "noise.imbalance_skew" and not truth(cluster, "noise.imbalance_cv"):
            true = None  # jitter taken for imbalance
        if not true or p.value is None or p.se == 0.0 or (p.se or math.inf) < ROUNDING * abs(true):
            continue
        edges = [p.interval(level) for level in LEVELS] if p.told else []
        inside = tuple(low <= true <= high for low, high in edges)
        found.append(Recovered(mechanism, p.key, true, p.value, p.se or math.nan, inside, p.told))
    return found


def truth(cluster: Cluster, key: str) -> float | None:
    """The number that a cluster has for a key; None where it has none."""
    value: Any = cluster.model_dump()
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list) and int(part) < len(value) else value
        value = value.get(part) if isinstance(value, dict) else value
    return float(value) if isinstance(value, int | float) else None
