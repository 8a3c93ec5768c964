"""Is what-if right? Clusters whose truth is known: predicted from a trace of today's job, held against the changed one.

`python -m benchmarks.evidence.whatif_accuracy --write` makes the tables of docs/evidence/whatif-accuracy.md. A
prediction sees only the trace of a run at 16 nodes; the truth is the true cluster with the same change, simulated. An
interval should hold 95 % of single runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks._common import recorded
from paceenv.core.errors import InputError, out_of_range
from paceenv.core.intervals import Interval
from paceenv.policies.rollout import run, start
from paceenv.policies.select import select_policy
from paceenv.policies.whatif.answer import Row
from paceenv.policies.whatif.baseline import of_trace
from paceenv.policies.whatif.change import SLOW, Change, apply
from paceenv.policies.whatif.estimate import as_json
from paceenv.policies.whatif.simulated import predict
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.ui import config_files, output
from paceenv.ui.output import markdown_table

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "whatif-accuracy.md"
MARK = "## Results: random clusters"
"""Heading of what this script writes; what stands above it in the document is written by hand."""
NODES = 16
TRACED = 400
"""Iterations of the trace."""
ITERATIONS, SEEDS = 1000, 32
TRUE_SEED = 10_000
"""The truth's noise is not that of the predictions."""
ASSUMED_LATENCY_US = 10
"""Of a round: what a calibration assumes, as a trace of one size does not tell it from the payload's own time."""
Rng = np.random.Generator


@dataclass(frozen=True)
class Found:
    """A prediction and the truth: mean steps of single true runs ``(E,)`` in seconds, with and without the change."""

    kind: str
    question: str
    row: Row
    step_s_E: NDArray[np.float64]
    today_s_E: NDArray[np.float64]
    cv_E: NDArray[np.float64]

    @property
    def error(self) -> float:
        """Of the predicted mean step, relative."""
        return self.row.case.step_s.value / float(self.step_s_E.mean()) - 1.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "question": self.question,
            "predicted": as_json(self.row.case.step_s),
            "true_step_s": float(self.step_s_E.mean()),
            "runs_inside": inside(self.row.case.step_s, self.step_s_E),
        }


def plain(rng: Rng) -> Cluster:
    """One process group on a non-blocking fabric; every second has a slow rank."""
    changes = [*_noise(rng), f"job.nodes={NODES}", f"fabric.nodes_per_leaf={rng.choice([4, 8, 16])}"]
    changes += ["fabric.oversubscription=1", "fabric.uplink_gbps=null", f"fabric.nic_gbps={rng.uniform(80, 400):.4g}"]
    changes += [f"noise.persistent_cv={rng.uniform(0.0, 0.03):.4g}"]
    if rng.uniform() < 0.5:
        changes += ["noise.slow_ranks=1", f"noise.slow_factor={rng.uniform(1.15, 1.8):.4g}"]
    return load_cluster("null-jitter").changed(changes)


def grouped(rng: Rng) -> Cluster:
    """Process groups that share the tier above the leaves, one with work after its collective."""
    alone_s = float(rng.uniform(0.03, 0.1))
    nic_gbps = 8e-3 / alone_s  # of 1 MB in a group of two
    changes = [*_noise(rng), f"job.nodes={NODES}", f"fabric.nic_gbps={nic_gbps!r}"]
    changes += [f"fabric.uplink_gbps={nic_gbps * rng.uniform(4.0, 14.0)!r}", "job.compute_s=0.2"]
    changes += [f"fabric.latency_us={ASSUMED_LATENCY_US}", f"post_collective_work.groups={rng.integers(0, 2)}"]
    changes += [f"post_collective_work.work_s={rng.uniform(0.02, 0.2):.4g}"]
    return load_cluster("unequal-slack").changed(changes)


def slow_rounds(rng: Rng) -> Cluster:
    """Likewise, with rounds of messages that take fifty times as long as a trace's calibration assumes."""
    return grouped(rng).changed([f"fabric.latency_us={50 * ASSUMED_LATENCY_US}"])


def plain_slow_rounds(rng: Rng) -> Cluster:
    """One process group, whose ring has more rounds the more nodes it has."""
    return plain(rng).changed([f"fabric.latency_us={np.exp(rng.uniform(np.log(2.0), np.log(1000.0))):.4g}"])


def growing(rng: Rng) -> Cluster:
    """Process groups whose post-collective work grows with the job, by an exponent between 0 and 1."""
    cluster = grouped(rng).changed(["post_collective_work.groups=1"])
    power = {"value": cluster.post_collective_work.work_s, "at_nodes": float(NODES), "exponent": float(rng.uniform())}
    return cluster.changed([f"post_collective_work.work_s={{power_law: {power}}}"])


def incast(rng: Rng) -> Cluster:
    """A gather into a port whose buffer is shallow or not."""
    changes = [*_noise(rng), f"job.nodes={NODES}", f"fabric.buffer_kb={rng.uniform(35, 180):.4g}"]
    changes += [f"fabric.latency_us={ASSUMED_LATENCY_US}"]
    return load_cluster("incast-shallow").changed(changes)


def _noise(rng: Rng) -> list[str]:
    kind = rng.choice(["jitter_cv", "imbalance_cv"])
    found = [f"noise.{kind}={rng.uniform(0.01, 0.12):.4g}", f"noise.common_cv={rng.uniform(0.0, 0.02):.4g}"]
    return found + ([] if kind == "jitter_cv" else ["noise.jitter_cv=0.0"])


PACED = "static:slack=0.02/0.25"
KINDS: dict[str, tuple[Callable[[Rng], Cluster], dict[str, Change]]] = {
    "one group": (
        plain,
        {
            "64 nodes": Change(nodes=64),
            "without its slow rank": Change(removed=SLOW),
            "64 nodes without its slow rank": Change(nodes=64, removed=SLOW),
        },
    ),
    "groups on one uplink": (
        grouped,
        {
            "64 nodes": Change(nodes=64),
            "oversubscription 1": Change(oversubscription=1.0),
            "64 nodes, paced": Change(nodes=64, pacing=PACED),
        },
    ),
    "groups, slow rounds": (slow_rounds, {"64 nodes": Change(nodes=64)}),
    "one group, any rounds": (plain_slow_rounds, {"64 nodes": Change(nodes=64)}),
    "groups, post-collective work grows": (growing, {"64 nodes": Change(nodes=64)}),
    "gather": (incast, {"64 nodes": Change(nodes=64)}),
}
"""Clusters at random, and what is asked of each."""


def inside(estimate: Interval, value_E: NDArray[np.float64]) -> float:
    """Share of values in the interval."""
    return float(((value_E >= estimate.low) & (value_E <= estimate.high)).mean())


def judge(kind: str, seed: int) -> list[Found]:
    """All questions to one cluster at random. Raises InputError where the trace cannot answer."""
    rng = np.random.default_rng([seed, *kind.encode()])
    make, questions = KINDS[kind]
    truth = make(rng)
    baseline = of_trace(recorded(truth, seed, TRACED), f"{kind} {seed}", None, None)
    asked = {q: c for q, c in questions.items() if c.removed != SLOW or (truth.noise.slow_ranks and baseline.slow)}
    answer = predict(baseline, list(asked.values()), seeds=SEEDS, first_seed=0, iterations=ITERATIONS)
    today_s_E = _runs(truth, "passive")[0]
    found = []
    for (question, change), row in zip(asked.items(), answer.changed, strict=True):
        step_s_E, cv_E = _runs(apply(change, truth, None), change.pacing)
        found.append(Found(kind, question, row, step_s_E, today_s_E, cv_E))
    return found


def _runs(cluster: Cluster, policy: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean step in seconds and its CV of single runs, ``(E,)``."""
    simulator = start(cluster, np.arange(TRUE_SEED, TRUE_SEED + SEEDS), threads=os.cpu_count() or 1)
    step_s_ET = run(select_policy(policy, cluster), simulator, ITERATIONS).step_ET
    return step_s_ET.mean(axis=1), step_s_ET.std(axis=1) / step_s_ET.mean(axis=1)


COLUMNS = (
    "job", "question", "jobs", "runs inside", "mean of runs inside", "change inside", "CV inside",
    "error, median", "worst", "half width, median",
)  # fmt: skip


def table(found: list[Found]) -> list[tuple[str, ...]]:
    """One row for each kind of job and question."""
    rows = []
    for kind, question in dict.fromkeys((f.kind, f.question) for f in found):
        part = [f for f in found if (f.kind, f.question) == (kind, question)]
        errors = np.array([f.error for f in part])
        steps = [f.row.case.step_s for f in part]
        shares = (
            [inside(f.row.case.step_s, f.step_s_E) for f in part],
            [inside(f.row.case.step_s, f.step_s_E.mean(keepdims=True)) for f in part],
            [inside(f.row.against_today.step, f.step_s_E / f.today_s_E - 1.0) for f in part],
            [inside(f.row.case.cv, f.cv_E) for f in part],
        )
        widths = [0.5 * (e.high - e.low) / e.value for e in steps]
        rows.append(
            (
                kind,
                question,
                str(len(part)),
                *(f"{np.mean(share):.0%}" for share in shares),
                f"{np.median(np.abs(errors)):.1%}",
                f"{errors[np.abs(errors).argmax()]:+.1%}",
                f"{np.median(widths):.1%}",
            )
        )
    return rows


def main(
    count: Annotated[int, typer.Option(min=1, help="Clusters of each kind.")] = 40,
    kind: Annotated[list[str] | None, typer.Option(help="Only this kind of job.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    write: Annotated[
        bool, typer.Option("--write", help="Rebuild the tables of docs/evidence/whatif-accuracy.md.")
    ] = False,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Predict changed jobs from traces of random clusters, and count how often the truth is in the interval."""
    found: list[Found] = []
    refused: list[str] = []
    kinds = kind or list(KINDS)
    for one in kinds:
        if one not in KINDS:
            raise out_of_range("--kind", one, f"one of {', '.join(KINDS)}", "benchmarks.evidence.whatif_accuracy")
    with output.progress("predict", len(kinds) * count) as done:
        for n, (one, i) in enumerate([(one, i) for one in kinds for i in range(count)]):
            try:
                found += judge(one, seed + i)
            except InputError as error:
                refused.append(f"{one} {i}: {error}")
            done(n + 1)
    if json_ is not None:
        output.write_json({"found": [f.as_dict() for f in found], "refused": refused}, json_)
    if json_ != "-":
        output.print_table("What-if against the truth", COLUMNS, table(found), f"{len(refused)} jobs refused")
        for line in refused:
            output.say(line)
    if write:
        config_files.write_text(DOCUMENT, document(found, refused, count))


def document(found: list[Found], refused: list[str], count: int) -> str:
    """``docs/evidence/whatif-accuracy.md``: the text above MARK stays, the table below is new.

    Args:
        found: predictions beside the truth.
        refused: jobs without an answer, and why.
        count: clusters of each kind.
    """
    head = DOCUMENT.read_text(encoding="utf-8").partition(MARK)[0] if DOCUMENT.exists() else ""
    text = (
        f"Up to {count} random clusters of each kind are traced for {TRACED} iterations at {NODES} nodes and asked the "
        f"questions below.\n*Runs inside* is the share of {SEEDS} single runs of the changed true cluster, "
        f"{ITERATIONS} iterations each, whose mean step lies in the 95 % interval.\nThe next columns give the same for "
        f"the mean of all runs, the change against today, and the CV.\n{len(refused)} jobs were refused because their "
        "trace does not identify what the answer depends on."
    )
    return "\n".join([head.rstrip(), "", MARK, "", text, "", *markdown_table(COLUMNS, table(found)), ""])


if __name__ == "__main__":
    typer.run(main)
