"""Is the cause that `paceenv diagnose` names the one that is there? Simulated jobs with known causes, single and mixed.

`python -m benchmarks.evidence.simulated_causes --write` makes docs/evidence/detection.md. A cause's true share is what
its removal saves in the simulator, on the same noise, averaged over all orders of removal (Shapley); the diagnosis sees
only the trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks._common import put, recorded
from benchmarks.evidence._pipeline_jobs import PipelineJob
from paceenv.core.trace import Trace
from paceenv.diagnosis import causes as names
from paceenv.diagnosis.diagnose import diagnose
from paceenv.diagnosis.verdict import Diagnosis
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.cluster.derive import start
from paceenv.ui import output
from paceenv.ui.output import markdown_table

ITERATIONS = 400
WITHIN = 0.1
"""Of lost time: how far a share may be off, and how close two causes may be for either to count as the top one."""
SICK = 0.03
HEALTHY = "(none)"


@dataclass(frozen=True)
class Case:
    """A job with known causes: its trace, and the mean step with only some of them."""

    label: str
    causes: tuple[str, ...]
    trace: Callable[[], Trace]
    step_s: Callable[[Collection[str]], float]


@dataclass(frozen=True)
class Verdict:
    """What was true and what was found, shares of lost time by cause; lost time as a share of the step."""

    case: Case
    true: dict[str, float]
    found: dict[str, float]
    lost: float

    @property
    def truth(self) -> str:
        return max(self.true, key=lambda cause: self.true[cause]) if self.case.causes else HEALTHY

    @property
    def named(self) -> str:
        return next(iter(self.found), HEALTHY)

    @property
    def top_right(self) -> bool:
        """Whether the first cause named is the largest one, or as good as."""
        return self.named == self.truth or self.true.get(self.named, -1.0) >= self.true[self.truth] - WITHIN

    @property
    def error(self) -> float:
        """How far off the share of the true top cause is."""
        return abs(self.found.get(self.truth, 0.0) - self.true[self.truth])


# --- jobs on the engine -------------------------------------------------------------------------------------------
Rng = np.random.Generator
ENGINE: dict[str, tuple[Callable[[Rng], list[str]], list[str]]] = {
    names.AMPLIFICATION: (lambda r: [f"noise.jitter_cv={r.uniform(0.04, 0.12):.4g}"], ["noise.jitter_cv=0.0"]),
    names.SLOW_RANK: (
        lambda r: ["noise.slow_ranks=1", f"noise.slow_factor={r.uniform(1.08, 2.0):.4g}"],
        ["noise.slow_ranks=0"],
    ),
    names.DATA: (lambda r: [f"noise.imbalance_cv={r.uniform(0.05, 0.2):.4g}"], ["noise.imbalance_cv=0"]),
    names.STALLS: (
        lambda r: [f"noise.stall_rate={r.uniform(0.002, 0.015):.4g}", f"noise.stall_mean_s={r.uniform(0.15, 0.6):.4g}"],
        ["noise.stall_rate=0"],
    ),
    names.CHECKPOINT: (
        lambda r: [
            f"reliability.checkpoint_iterations={r.integers(10, 50)}",
            f"reliability.checkpoint_s={r.uniform(0.5, 3.0):.4g}",
        ],
        ["reliability.checkpoint_s=0"],
    ),
    names.DRIFT: (
        lambda r: [f"noise.drift_cv={r.uniform(0.04, 0.12):.4g}", f"noise.drift_iterations={r.uniform(10, 60):.4g}"],
        ["noise.drift_cv=0"],
    ),
    names.CONTENTION: (
        lambda r: [
            f"fabric.uplink_gbps={r.uniform(0.25, 0.5):.4g}",
            f"noise.jitter_cv={r.uniform(0.02, 0.08):.4g}",
            f"noise.transfer_cv={r.uniform(0.0, 0.03):.4g}",
        ],
        ["fabric.uplink_gbps=100"],
    ),
    names.TENANT: (
        lambda r: [
            f"tenants=[{{period_ratio: {r.choice([1.0, 1.05, 1.13, 0.9]):.3g}, "
            f"comm_share: {r.uniform(0.25, 0.5):.3g}, ranks: 8}}]",
            f"job.gradient_bytes={r.uniform(1.5e9, 4.0e9):.4g}",
            "noise.jitter_cv=0.005",
        ],
        ["tenants=[]"],
    ),
    names.INCAST: (
        lambda r: [f"fabric.buffer_kb={r.uniform(28, 60):.4g}", f"noise.jitter_cv={r.uniform(0.02, 0.05):.4g}"],
        ["fabric.buffer_kb=100000"],
    ),
}
"""What switches a cause on, and off again."""
SURROUNDINGS = {names.CONTENTION: "equal-slack", names.TENANT: "one-job", names.INCAST: "incast-shallow"}
"""The clusters of causes that need a fabric of their own; the others are in a plain barrier job."""


def engine_case(rng: Rng, wanted: tuple[str, ...]) -> Case:
    """A job of the engine with these causes."""
    special = next((SURROUNDINGS[c] for c in wanted if c in SURROUNDINGS), None)
    base = load_cluster(special or "null-jitter")
    settings = ["noise.common_cv=0.01"]
    if special is None:
        settings += [f"job.nodes={rng.choice([8, 16, 32, 64])}", "noise.jitter_cv=0.005", "fabric.uplink_gbps=12800"]
        settings += [f"job.compute_s={rng.uniform(0.2, 0.8):.4g}"]
    off: dict[str, list[str]] = {}
    for cause in wanted:
        make, undo = ENGINE[cause]
        settings += make(rng)
        off[cause] = undo
    off[names.AMPLIFICATION] = ["noise.jitter_cv=0.0"]
    cluster = base.changed(settings)
    seed = int(rng.integers(1 << 31))
    return Case(
        "engine", wanted, lambda: recorded(cluster, seed, ITERATIONS), lambda on: _engine_step_s(cluster, off, on, seed)
    )


def _engine_step_s(cluster: Cluster, off: dict[str, list[str]], on: Collection[str], seed: int) -> float:
    undone = [setting for cause, settings in off.items() if cause not in on for setting in settings]
    simulator = start(cluster.changed(undone) if undone else cluster, [seed])
    return float(simulator.run(simulator.off(), ITERATIONS).mean())


# --- jobs operation by operation ----------------------------------------------------------------------------------
PIPELINE: dict[str, tuple[str, tuple[float, float]]] = {
    names.STAGE: ("stage", (1.1, 1.6)),
    names.SLOW_RANK: ("slow", (1.1, 2.0)),
    names.DATA: ("data", (0.08, 0.3)),
    names.DRIFT: ("drift", (0.06, 0.15)),
    names.STALLS: ("stall", (0.15, 0.5)),
    names.CHECKPOINT: ("checkpoint", (1.0, 5.0)),
    names.AMPLIFICATION: ("jitter", (0.15, 0.35)),
    names.LOCALITY: ("link", (1.2, 2.0)),
}
FLAT = (names.SLOW_RANK, names.CHECKPOINT, names.STALLS, names.DRIFT)


def pipeline_case(rng: Rng, wanted: tuple[str, ...], *, flat: bool = False) -> Case:
    """A job with known causes, with pipeline stages or, if ``flat``, of several groups without."""
    strengths = {PIPELINE[c][0]: float(rng.uniform(*PIPELINE[c][1])) for c in wanted}
    job = PipelineJob(
        int(rng.integers(1 << 31)),
        steps=120,
        replicas=int(rng.choice([4, 8])),
        stages=int(rng.choice([2, 4])),
        micro_batches=8,
        causes={"jitter": 0.01} | strengths,
        drift_steps=float(rng.uniform(8, 25)),
    )
    if flat:
        job = replace(
            job, stages=1, micro_batches=1, replicas=16, groups=4, forward_s=0.0, backward_s=0.2, steps=240,
            reduce_s=float(rng.uniform(0.06, 0.3)), stall_rate=0.004, causes={"jitter": 0.005} | strengths,
        )  # fmt: skip
    label = "flat" if flat else "pipeline"
    return Case(label, wanted, job.trace, lambda on: job.step_s({PIPELINE[cause][0] for cause in on}))


# --- truth and verdict --------------------------------------------------------------------------------------------
def judge(case: Case) -> tuple[Verdict, Diagnosis]:
    """Diagnose a case, and hold the result against what removing causes saves in the simulator."""
    parts = tuple(dict.fromkeys((*case.causes, names.AMPLIFICATION)))
    value = {frozenset(on): case.step_s(on) for size in range(len(parts) + 1) for on in combinations(parts, size)}
    n, costs = len(parts), dict.fromkeys(parts, 0.0)
    for cause in parts:
        for on, step_s in value.items():
            if cause not in on:
                weight = math.factorial(len(on)) * math.factorial(n - len(on) - 1) / math.factorial(n)
                costs[cause] += weight * (value[on | {cause}] - step_s)
    lost_s = max(sum(max(c, 0.0) for c in costs.values()), 1e-12)
    diagnosis = diagnose(case.trace())
    true = {cause: cost / lost_s for cause, cost in costs.items()}
    found = {c.cause: c.share for c in diagnosis.causes}
    return Verdict(case, true, found, lost_s / value[frozenset(parts)]), diagnosis


def cases(count: int, seed: int) -> list[Case]:
    """``count`` jobs with causes: about two thirds with one, of every kind as often, the others with two."""
    rng = np.random.default_rng(seed)
    single = [partial(engine_case, rng, (cause,)) for cause in ENGINE]
    single += [partial(pipeline_case, rng, (cause,), flat=cause == names.LOCALITY) for cause in PIPELINE]
    plain = [cause for cause in ENGINE if cause not in (names.AMPLIFICATION, *SURROUNDINGS)]
    mixed = [partial(engine_case, rng, pair) for pair in combinations(plain, 2)]
    mixed += [
        partial(engine_case, rng, (one, other)) for one in SURROUNDINGS for other in (names.SLOW_RANK, names.CHECKPOINT)
    ]
    inside = [cause for cause in PIPELINE if cause not in (names.LOCALITY, names.AMPLIFICATION)]
    mixed += [partial(pipeline_case, rng, pair) for pair in combinations(inside, 2)]
    mixed += [partial(pipeline_case, rng, (names.LOCALITY, other), flat=True) for other in FLAT]
    singles = round(0.65 * count)
    made = [_sick(single[i % len(single)]) for i in range(singles)]
    return made + [_sick(mixed[i % len(mixed)]) for i in range(count - singles)]


def _sick(make: Callable[[], Case]) -> Case:
    """A job that loses at least SICK of its step: what loses less counts as healthy, whatever its causes."""
    while True:
        case = make()
        parts = {*case.causes, names.AMPLIFICATION}
        if 1.0 - case.step_s(()) / case.step_s(parts) >= SICK:
            return case


def healthy(count: int, seed: int) -> list[Case]:
    """Jobs without a cause: what noise is left costs next to nothing."""
    rng = np.random.default_rng(seed)
    return [pipeline_case(rng, (), flat=bool(i % 2)) if i % 3 == 2 else engine_case(rng, ()) for i in range(count)]


def main(
    count: Annotated[int, typer.Option(min=1, help="Jobs with causes.")] = 200,
    sound: Annotated[int, typer.Option(min=1, help="Jobs without.")] = 200,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    write: Annotated[bool, typer.Option("--write", help="Rebuild docs/evidence/detection.md from this run.")] = False,
) -> None:
    """Diagnose jobs with known causes, and print the confusion matrix."""
    sick, well = cases(count, seed), healthy(sound, seed + 1)
    verdicts: list[Verdict] = []
    with output.progress("diagnose", len(sick) + len(well)) as done:
        for case in [*sick, *well]:
            verdicts.append(judge(case)[0])
            done(len(verdicts))
    with_cause, without = verdicts[: len(sick)], verdicts[len(sick) :]
    result = summary(with_cause, without)
    rows = [(key, _spelled(value)) for key, value in result.items()]
    output.print_table("Diagnosis of known causes", ("", ""), rows)
    for v in with_cause:
        if not v.top_right or v.error > WITHIN:
            shares = f"true {_shares(v.true)}, found {_shares(v.found)}"
            output.say(f"{v.case.label} {v.case.causes}: lost {v.lost:.1%}, {shares}")
    if write:
        command = "python -m benchmarks.evidence.simulated_causes --write"
        put("detection.md", command, markdown_table(("simulated jobs", ""), rows))


def summary(with_cause: list[Verdict], without: list[Verdict]) -> dict[str, Any]:
    """The numbers that count."""
    errors = np.array([v.error for v in with_cause])
    return {
        "jobs with causes": len(with_cause),
        "top cause right": float(np.mean([v.top_right for v in with_cause])),
        "share of the top cause within 10 points": float(np.mean(errors <= WITHIN)),
        "mean error of that share": float(errors.mean()),
        "jobs without": len(without),
        "false alarms": float(np.mean([bool(v.found) for v in without])),
    }


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{cause} {share:.0%}" for cause, share in shares.items()) or "nothing"


def _spelled(value: float | int) -> str:
    return f"{value:.1%}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    typer.run(main)
