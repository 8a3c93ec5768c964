"""A published scaling table: its baseline by value, its paced column by what pacing changes, beside a null predictor.

Pacing changes a throughput by a few per cent, so a paced throughput within a few per cent of the published one shows
nothing: without any pacing in the model most of them would be. What is held to the table is therefore the gain of
throughput and the change of the CV, each within a share of the published change. The null predictor, "coordination =
baseline", is off by all of it in every row and cannot pass. A published change of 0 is not scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from paceenv.calibration.fits.scaling_table import Published, Rule, ScalingTarget, simulate_column
from paceenv.sim.cluster import Cluster
from paceenv.validation.checks import Check, Expected, Kind

THROUGHPUT_TOLERANCE, CV_TOLERANCE = 0.03, 0.03
"""Of the baseline: relative, and in the CV's own unit."""
CHANGE_TOLERANCE = 0.25
"""Of a published change, as a share of it; below 1, so that the null predictor is always outside."""
OWN_RULE, NULL = "slack rule", "null: coordination = baseline"
Column = dict[int, tuple[float, float]]
"""Throughput in samples/s and CV by number of nodes."""


@dataclass(frozen=True)
class Table:
    """A table of text beside the checks of a target."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Columns:
    """The simulated columns of a table: without pacing, and by the name of each rule."""

    baseline: Column
    paced: dict[str, Column]


def simulate(target: ScalingTarget, cluster: Cluster, *, seeds: int, iterations: int) -> Columns:
    """Simulate every column; the null predictor is the baseline once more.

    Args:
        target: the published table.
        cluster: the cluster, at the table's numbers of nodes.
        seeds: runs of every number, the same for all columns.
        iterations: length of each run.
    """
    sizes = [row.nodes for row in target.rows]

    def column(rule: Rule | None) -> Column:
        return {n: simulate_column(cluster.with_nodes(n), rule, seeds=seeds, iterations=iterations) for n in sizes}

    rules = {OWN_RULE: Rule.of(cluster), **target.rules}
    baseline = column(None)
    return Columns(baseline, {name: column(rule) for name, rule in rules.items()} | {NULL: baseline})


def checks(target: ScalingTarget, columns: Columns) -> Iterator[Check]:
    """Published numbers beside simulated ones: the baseline, then what every rule but the null predictor changes.

    Args:
        target: the published table.
        columns: simulated numbers, a column a rule.
    """
    for row in target.rows:
        throughput, cv = columns.baseline[row.nodes]
        name, how = f"{row.nodes} nodes", kind(row.baseline)
        expected = Expected(value=row.baseline.throughput, tolerance=THROUGHPUT_TOLERANCE)
        yield Check(target.name, name, "baseline throughput", expected, throughput, how)
        expected = Expected(value=row.baseline.cv, tolerance=CV_TOLERANCE, absolute=True)
        yield Check(target.name, name, "baseline cv", expected, cv, how)
    for rule in columns.paced:
        if rule != NULL:
            yield from changes(target, columns, rule)


def changes(target: ScalingTarget, columns: Columns, rule: str) -> Iterator[Check]:
    """The change of throughput and CV under one rule (or the null predictor) beside the published change.

    Args:
        target: the published table.
        columns: simulated numbers, a column a rule.
        rule: whose change.
    """
    for row in target.rows:
        before, after = columns.baseline[row.nodes], columns.paced[rule][row.nodes]
        how: Kind = kind(row.coordination) if rule == OWN_RULE else "predicted"
        for i, quantity in enumerate(("throughput", "cv")):
            published = getattr(row.coordination, quantity) / getattr(row.baseline, quantity) - 1.0
            if published != 0.0:
                expected = Expected(value=published, tolerance=CHANGE_TOLERANCE)
                found = after[i] / before[i] - 1.0
                yield Check(target.name, f"{row.nodes} nodes, {rule}", f"change of {quantity}", expected, found, how)


def kind(published: Published) -> Kind:
    """How a number was used when the model was made."""
    return "fitted" if published.fit else "looked at" if published.looked_at else "predicted"


def predictors(target: ScalingTarget, columns: Columns) -> Table:
    """Gains of throughput: published, by rule, and of the null predictor, with how many changes each has right.

    *Skill* is 1 less the sum of squared errors of the gains over that of the null predictor, which thus has 0.

    Args:
        target: the published table.
        columns: simulated numbers, a column a rule.
    """
    published_N = np.array([r.coordination.throughput / r.baseline.throughput - 1.0 for r in target.rows])
    header = ("predictor", *(f"{row.nodes} nodes" for row in target.rows), "changes within tolerance", "skill")
    rows = [("published", *_percent(published_N), "", "")]
    for rule, column in columns.paced.items():
        gain_N = np.array([column[n][0] / columns.baseline[n][0] - 1.0 for n in column])
        skill = 1.0 - float(np.sum((gain_N - published_N) ** 2) / np.sum(published_N**2))
        scored = list(changes(target, columns, rule))
        right = f"{sum(check.within for check in scored)} of {len(scored)}"
        rows.append((rule, *_percent(gain_N), right, f"{skill:.2f}"))
    return Table("gain of throughput by predictor", header, rows)


def structure(target: ScalingTarget, cluster: Cluster, *, seeds: int, iterations: int) -> Table | None:
    """The gain of every rule where the cluster is built otherwise; None where the target names no such variants.

    Args:
        target: the published table.
        cluster: the cluster.
        seeds: runs of every number.
        iterations: length of each run.
    """
    if target.structure is None:
        return None
    nodes, rows = target.structure.nodes, []
    rules: Mapping[str, Rule] = {OWN_RULE: Rule.of(cluster), **target.rules}
    for variant in target.structure.variants:
        at = cluster.with_nodes(nodes).changed(variant.change, variant.row)
        before, _ = simulate_column(at, None, seeds=seeds, iterations=iterations)
        after = [simulate_column(at, rule, seeds=seeds, iterations=iterations)[0] for rule in rules.values()]
        rows.append((variant.row, f"{before:.0f}", *_percent(np.array(after) / before - 1.0)))
    header = ("structure", "baseline, samples/s", *(f"gain, {rule}" for rule in rules))
    return Table(f"gain of throughput at {nodes} nodes by structure", header, rows)


def _percent(gain_N: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[str, ...]:
    return tuple(f"{gain:+.2%}" for gain in gain_N)
