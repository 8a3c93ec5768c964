"""What pacing can win on the random clusters, by form: how many of them have anything to gain at all.

The best of a grid of constant settings is chosen on some episodes and measured on others, so that a gain is not the
luck of the choice. A constant is the least that a policy can be, so clusters with a gain only for a policy that changes
its settings count as having none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from paceenv.core.limits import LIMITS, Limits
from paceenv.policies.rollout import start
from paceenv.policies.situations import roll_ahead
from paceenv.sim.cluster import Cluster
from paceenv.trainers.evaluation.random_clusters import RandomClusters
from paceenv.trainers.training.algorithms.teacher import coarse_grid, settings_of
from paceenv.ui import output
from paceenv.ui.config_files import write_text
from paceenv.ui.output import markdown_table

MECHANISMS = ("slack", "phase_shift", "stagger")
EPISODES, WARM_UP_ITERATIONS, ITERATIONS = 8, 60, 240
"""Episodes of choosing and of measuring each, the iterations without pacing before, and those with."""
SETTLING_ITERATIONS = 40
WORTH = 1.0
"""Gain in % from which on a cluster has something to gain."""
FIRST_SEED = 6_000_000
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "suites.md"
BEGIN, END = "<!-- begin: python -m benchmarks.evidence.random_worth --write -->", "<!-- end -->"


@dataclass(frozen=True)
class Worth:
    """What the best constant gains on a cluster, in % of the step without pacing, with its standard error."""

    cluster: Cluster
    null: bool
    gain: float
    error: float

    @property
    def kind(self) -> str:
        """The form of the cluster and what could help there."""
        form, cluster = self.cluster.description.partition(",")[0], self.cluster
        if self.null:
            return f"{form}: null"
        periodic = any(not tenant.bursty for tenant in cluster.tenants)
        work = cluster.post_collective_work
        reasons = []
        if cluster.fabric.buffer_kb is not None:
            reasons.append("small buffer")
        if work.groups:
            reasons.append("groups with more work")
        elif work.share != 0.0:
            reasons.append("episodes of more work")
        if periodic:
            reasons.append("tenant" if len(cluster.tenants) == 1 else "tenants")
        return f"{form}: {', '.join(reasons)}"


def worth(cluster: Cluster, null: bool, limits: Limits = LIMITS) -> Worth:
    """Choose the best constant on some episodes of a cluster and measure it on others.

    Args:
        cluster: the job.
        null: whether it was drawn as one on which pacing must not matter.
        limits: of every delay.
    """
    settings = settings_of(coarse_grid(MECHANISMS))

    def steps(first_seed: int, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        simulator = start(cluster, np.arange(first_seed, first_seed + EPISODES), limits=limits)
        simulator.run(simulator.off(), WARM_UP_ITERATIONS)
        return roll_ahead(simulator, np.arange(EPISODES), rows, ITERATIONS)

    best = int(steps(FIRST_SEED, settings).mean(axis=0).argmin())
    step_E2 = steps(FIRST_SEED + EPISODES, settings[[0, best]])
    ratio_E = step_E2[:, 0] / step_E2[:, 1]
    return Worth(cluster, null, 100.0 * (ratio_E.mean() - 1.0), 100.0 * ratio_E.std(ddof=1) / EPISODES**0.5)


def table(found: Sequence[Worth]) -> tuple[list[str], list[list[str]]]:
    """Clusters, and what share of them has something to gain, by kind."""
    kinds = sorted({one.kind for one in found}, key=lambda kind: (kind.endswith("null"), kind))
    rows = [_row(kind, [one for one in found if one.kind == kind]) for kind in kinds]
    rows.append(_row("**all that are no nulls**", [one for one in found if not one.null]))
    rows.append(_row("**all nulls**", [one for one in found if one.null]))
    head = [
        "form: what could help",
        "clusters",
        "gain over 1 %",
        "1 to 3 %",
        "3 to 10 %",
        "over 10 %",
        "median gain, %",
    ]
    return [*head, "largest, %"], rows


def _row(kind: str, found: Sequence[Worth]) -> list[str]:
    gain_C = np.array([one.gain for one in found])
    shares = [np.mean((gain_C > low) & (gain_C <= high)) for low, high in ((1, np.inf), (1, 3), (3, 10), (10, np.inf))]
    return [
        kind,
        str(len(found)),
        *(f"{100.0 * share:.0f} %" for share in shares),
        f"{np.median(gain_C):.2f}",
        f"{gain_C.max():.2f}",
    ]


def main(
    seeds: Annotated[str, typer.Option(help="Seeds of the clusters, with commas.")] = "1,2",
    clusters: Annotated[int, typer.Option(min=1, help="Clusters of each seed.")] = 96,
    max_ranks: Annotated[int, typer.Option(help="Of the largest job.")] = 512,
    limit: Annotated[list[str] | None, typer.Option(help="Another limit of delays, such as cap_share=0.1.")] = None,
    write: Annotated[bool, typer.Option(help="Write the table into docs/reference/suites.md.")] = False,
) -> None:
    """What share of the random clusters has anything to gain from pacing, by form."""
    drawn: Iterable[tuple[Cluster, bool]] = (
        one
        for seed in seeds.split(",")
        for one in RandomClusters(seed=int(seed), clusters=clusters, max_ranks=max_ranks).draw()
    )
    columns, rows = table([worth(cluster, null, LIMITS.changed(limit or [])) for cluster, null in drawn])
    output.print_table("What there is to gain on random clusters", columns, rows)
    if write:
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        lines = "\n".join(markdown_table(columns, rows))
        write_text(DOCUMENT, f"{before}{BEGIN}\n\n{lines}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    typer.run(main)
