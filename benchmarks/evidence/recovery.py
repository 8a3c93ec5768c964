"""Does `paceenv calibrate` give back what a trace was made with? Random simulated clusters of every mechanism.

`python -m benchmarks.evidence.recovery --write` makes the table of docs/evidence/validation.md. Each
cluster is simulated, calibrated from its trace alone (an operator's base has latencies and racks, nothing of what is
to be found), and every parameter that the trace tells is held against the value the trace was made with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer
from scipy import stats

from benchmarks._common import put, recorded
from paceenv.calibration.fit_trace import JobFit, fit_trace
from paceenv.calibration.parameters import NORMAL_95, Parameter
from paceenv.core.trace import Trace
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.ui import output
from paceenv.ui.output import markdown_table

LEVELS = (0.90, 0.95)
SIGMA = math.erf(math.sqrt(0.5))
"""The level of one standard error."""
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
ALWAYS = {"noise.persistent_cv": _between(0.005, 0.05)}
"""No two workers are quite alike, whatever else goes on."""
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
            "noise.fail_slow_share": _between(0.02, 0.15),
            "noise.fail_slow_mean_iterations": _between(20, 100),
            "noise.fail_slow_factor": _between(1.3, 2.0),
        },
    ),
    "shared uplink": ("equal-slack", GROUPS),
    "post-collective work": (
        "unequal-slack",
        GROUPS | {"post_collective_work.groups": lambda rng: "1", "post_collective_work.work_s": _between(0.05, 0.2)},
    ),
    "post-collective episodes": (
        "equal-slack",
        GROUPS
        | {
            "post_collective_work.share": _between(0.05, 0.25),
            "post_collective_work.mean_iterations": _between(20, 80),
            "post_collective_work.episode_s": _between(0.05, 0.2),
            "post_collective_work.episode_spread": _between(0.1, 0.9),
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
"""Clusters by mechanism: a packaged one, and how the keys that differ are drawn."""
UNKNOWN = (
    *("fabric.nic_gbps=50", "fabric.uplink_gbps=50", "fabric.barrier_us=0", "fabric.buffer_kb=null"),
    *("fabric.timeout_ms=200", "post_collective_work={}", "noise={}", "tenants=[]"),
)
"""What the operator's base has of it."""


SWITCHES = {
    "noise.imbalance": "noise.imbalance_cv",
    "noise.fail_slow": "noise.fail_slow_share",
    "noise.slow_": "noise.slow_ranks",
    "post_collective_work.work_s": "post_collective_work.groups",
    "post_collective_work.groups": "post_collective_work.groups",
    "post_collective_work.share": "post_collective_work.share",
    "post_collective_work.episode_s": "post_collective_work.share",
    "post_collective_work.mean_iterations": "post_collective_work.share",
}
"""By the beginning of their keys, what parameters are only there for if a switch is on."""
TENANTS_IN = 4
"""A tenant takes long to fit: one in so many as of the other mechanisms."""


@dataclass(frozen=True)
class Recovered:
    """One parameter of one calibration; ``inside``: whether its interval holds the true value, by level of LEVELS.

    ``z`` is the error over what the interval gives for a standard error on the side of the true value; NaN if not
    identified.
    """

    key: str
    z: float
    inside: tuple[bool, ...]
    is_identified: bool


def with_bytes(trace: Trace, cluster: Cluster) -> Trace:
    """The trace with the payload's bytes, which the simulator's rows lack, so that rates can be compared."""
    payload = trace.isin("op", cluster.job.collective)
    size = pa.array(np.where(payload, float(str(cluster.job.gradient_bytes)), 0.0).astype(np.int64))
    table = trace.table
    return Trace(
        table.set_column(table.schema.get_field_index("bytes"), table.schema.field("bytes"), size), trace.metadata
    )


@dataclass(frozen=True)
class Case:
    """One calibration: its parameters, what it saw of what is there or not (by switch), and the mean step's error."""

    parameters: tuple[Recovered, ...]
    there: tuple[str, ...]
    seen: tuple[str, ...]
    mean_error: float


def recover(mechanism: str, seed: int) -> Case:
    """Make a cluster, simulate and calibrate it."""
    rng = np.random.default_rng([seed, list(MECHANISMS).index(mechanism)])
    name, drawn = MECHANISMS[mechanism]
    cluster = load_cluster(name).changed([f"{key}={draw(rng)}" for key, draw in (ALWAYS | drawn).items()])
    iterations = round(float(_between(*LENGTHS)(rng)))
    trace = with_bytes(recorded(cluster, int(rng.integers(1 << 31)), iterations), cluster)
    fit = fit_trace(trace, base=cluster.changed(list(UNKNOWN)), program=False)
    switches = [*dict.fromkeys(SWITCHES.values()), "tenants.0.comm_share"]
    there, seen = ([s for s in switches if truth(one, s)] for one in (cluster, fit.cluster))
    return Case(tuple(compare(fit, cluster)), tuple(there), tuple(seen), fit.mean_error)


def compare(fit: JobFit, cluster: Cluster) -> list[Recovered]:
    """The parameters of a fit beside those of the cluster that made its trace."""
    found = []
    for p in fit.parameters:
        true = truth(cluster, p.key)
        if any(p.key.startswith(kind) and not truth(cluster, switch) for kind, switch in SWITCHES.items()):
            true = None  # what is not there has no true value: see ``Case.seen``
        if not true or p.value is None or p.se == 0.0 or (p.se or math.inf) < ROUNDING * abs(true):
            continue
        edges = [_interval(p, level) for level in LEVELS] if p.is_identified else []
        inside = tuple(low <= true <= high for low, high in edges)
        found.append(Recovered(p.key, _away(p, true), inside, p.is_identified))
    return found


def _interval(parameter: Parameter, level: float) -> tuple[float, float]:
    """An interval of another level than 95 %, by the normal's quantiles on either side of the value."""
    value, low, high = parameter.value, parameter.lo, parameter.hi
    assert value is not None
    assert low is not None
    assert high is not None
    shrink = float(stats.norm.ppf(0.5 + 0.5 * level)) / NORMAL_95
    return value + shrink * (low - value), value + shrink * (high - value)


def _away(parameter: Parameter, true: float) -> float:
    """The error in standard errors of a normal with the interval's edge on that side; NaN if not identified."""
    if not parameter.is_identified or parameter.value is None:
        return math.nan
    error = parameter.value - true
    edge = _interval(parameter, SIGMA)[0 if error > 0.0 else 1]
    return error / max(abs(parameter.value - edge), ROUNDING * abs(true))


def truth(cluster: Cluster, key: str) -> float | None:
    """The number that a cluster has for a key; None where it has none."""
    value: Any = cluster.model_dump()
    for part in key.split("."):
        if isinstance(value, list):
            value = value[int(part)] if int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else None


def main(
    count: Annotated[int, typer.Option(min=TENANTS_IN, help="Clusters of every mechanism.")] = 100,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    write: Annotated[bool, typer.Option("--write", help="Rebuild docs/evidence/validation.md from this run.")] = False,
) -> None:
    """Calibrate traces of random clusters, and print how often their parameters are inside the stated intervals."""
    wanted = [
        (mechanism, seed * 1_000_000 + i)
        for mechanism in MECHANISMS
        for i in range(count // TENANTS_IN if mechanism == "tenant" else count)
    ]
    cases = []
    with ProcessPoolExecutor() as pool, output.progress("calibrate", len(wanted)) as done:
        for case in pool.map(recover, *zip(*wanted, strict=True), chunksize=4):
            cases.append(case)
            done(len(cases))
    found = rows(cases)
    output.print_table(f"{len(cases)} clusters", COLUMNS, found)
    if write:
        off = [row for row in found if row[-1] or row[0] == "all"]  # by more than chance
        put("validation.md", "python -m benchmarks.evidence.recovery --write", markdown_table(COLUMNS, off))


def coverage(found: Sequence[Recovered], level: int = 0) -> float:
    """The share of identified parameters inside their interval of a level of LEVELS."""
    return float(np.mean([one.inside[level] for one in found if one.is_identified]))


COLUMNS = ("parameter", "identified", "inside 90 %", "inside 95 %", "z, root mean square", "largest", "")


def rows(cases: Sequence[Case]) -> list[tuple[str, ...]]:
    """By parameter, then all of them."""
    everything = [one for case in cases for one in case.parameters]
    keys = sorted({one.key for one in everything if one.is_identified})
    return [*(_row(key, [one for one in everything if one.key == key]) for key in keys), _row("all", everything)]


def _row(key: str, found: Sequence[Recovered]) -> tuple[str, ...]:
    identified = [one for one in found if one.is_identified]
    z = np.array([one.z for one in identified])
    inside, n = sum(one.inside[0] for one in identified), len(identified)
    # a count that chance alone may make of a share within what was asked for is not called off
    low, high = stats.binom.ppf(0.025, n, ASKED[0]), stats.binom.ppf(0.975, n, ASKED[1])
    off = "" if low <= inside <= high else "too narrow" if inside < low else "too wide"
    shares = (f"{coverage(identified, level):.1%}" for level in range(len(LEVELS)))
    return (key, f"{n} of {len(found)}", *shares, f"{np.sqrt(np.mean(z**2)):.2f}", f"{np.abs(z).max():.1f}", off)


if __name__ == "__main__":
    typer.run(main)
