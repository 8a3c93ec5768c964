"""Predictions by simulating a cluster and the changed one on the same noise, over clusters that may be the real one.

Every drawn cluster and every seed is one run of the job as it is and one of each change; a difference is taken run by
run. Axes: D drawn clusters, S seeds of each, E episodes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from paceenv.calibration.posterior import DRAWS, drawn_clusters
from paceenv.cluster import Cluster
from policies.ranges import Outside
from policies.rollout import run, start
from policies.select import select_policy
from policies.whatif.answer import Answer, Case, Differences, Row
from policies.whatif.basis import Basis
from policies.whatif.change import Change, apply
from policies.whatif.estimate import LEVEL, Array, Estimate, of_runs, spread

LEAST_SEEDS = 2
"""Of each drawn cluster, so that runs of one can be told from runs of another."""
MEASURED_RUNS = 16
"""Simulated runs as long as the trace, which tell how far one lies from another."""
LEAST_TO_SHARE = 1 << 13
"""Ranks of all runs together from which on threads gain more than they cost."""


@dataclass
class _Runs:
    """What the runs of one case came to, ``(D, S)`` each once all are done."""

    step_s: list[Array] = field(default_factory=list)
    cv: list[Array] = field(default_factory=list)
    throughput: list[Array] = field(default_factory=list)
    energy_j: list[Array] = field(default_factory=list)
    outside: Outside | None = None

    def add(self, cluster: Cluster, policy: str, seeds_S: NDArray[np.int64], iterations: int) -> None:
        threads = (os.cpu_count() or 1) if len(seeds_S) * cluster.ranks >= LEAST_TO_SHARE else 1
        simulator = start(cluster, seeds_S, threads)
        found = run(select_policy(policy, cluster), simulator, iterations)
        mean_S, sd_S, outcome = found.step_ET.mean(axis=1), found.step_ET.std(axis=1), found.outcome
        can_fail = bool((simulator.batch.jobs["failure_rate"] > 0.0).any())
        useful_S = outcome.useful_iterations if can_fail else np.full(len(mean_S), float(iterations))
        samples_S = cluster.samples_per_step * np.maximum(useful_S, 1.0)
        self.step_s.append(mean_S)
        self.cv.append(sd_S / mean_S)
        self.throughput.append(samples_S / outcome.time_s)
        if cluster.power.compute_w != 0.0:
            self.energy_j.append(outcome.energy_j / samples_S)
        if found.outside is not None and (self.outside is None or found.outside.share > self.outside.share):
            self.outside = found.outside


def predict(
    basis: Basis,
    changes: Sequence[Change],
    *,
    seeds: int,
    first_seed: int,
    iterations: int,
    on_done: Callable[[float], None] = lambda done: None,
) -> Answer:
    """The job as it is, and every change. Raises InputError for what cannot be, before anything is simulated."""
    basis.check(changes)
    for change in changes:
        apply(change, basis.cluster, basis.slow)
        select_policy(change.pacing, basis.cluster)
    drawn = _drawn(basis, first_seed)
    per_draw = max(math.ceil(seeds / len(drawn)), LEAST_SEEDS)
    unpaced = [replace(change, pacing="passive") for change in changes if change.pacing != "passive"]
    runs = {change: _Runs() for change in [Change(), *changes, *unpaced]}
    for d, cluster in enumerate(drawn):
        seeds_S = np.arange(per_draw) + first_seed + d * per_draw
        for i, (change, found) in enumerate(runs.items()):
            found.add(apply(change, cluster, basis.slow), change.pacing, seeds_S, iterations)
            on_done((d + (i + 1) / len(runs)) / len(drawn))
    text = (
        f"simulated: {len(drawn)} clusters drawn from the calibration's errors x " if len(drawn) > 1 else "simulated: "
    )
    measured = basis.measured
    return Answer(
        source=basis.source,
        basis="simulator",
        method=f"{text}{per_draw} seeds x {iterations} iterations, the same noise for all rows",
        unit="batches of a rank" if basis.is_trace and basis.cluster.job.samples_per_node == 1 else "samples",
        today=_case(basis.cluster, runs[Change()], "passive"),
        changed=[_row(change, apply(change, basis.cluster, basis.slow), runs) for change in changes],
        assumes=basis.assumes(changes),
        cannot_tell=basis.cannot_tell(),
        measured_step_s=None if measured is None else measured.step_s,
        measured_cv=None if measured is None else measured.cv,
    )


def _row(change: Change, cluster: Cluster, runs: Mapping[Change, _Runs]) -> Row:
    found, unpaced = runs[change], None
    if change.pacing != "passive":
        unpaced = _differences(runs[replace(change, pacing="passive")], found)
    return Row(
        change,
        _case(cluster, found, change.pacing),
        _differences(runs[Change()], found),
        unpaced,
        spread(np.array(found.step_s)),
        found.outside,
    )


def _drawn(basis: Basis, seed: int) -> list[Cluster]:
    """Clusters that may be the real one, or the one that is known.

    The mean step of the trace tells that of the cluster no better than one run tells another: which persistent
    differences between ranks a run has is drawn, and all its steps share it.
    """
    if not basis.parameters or basis.measured is None:
        return [basis.cluster]
    step_s, steps = basis.measured.step_s, basis.measured.steps
    simulator = start(basis.cluster, np.arange(MEASURED_RUNS) + seed)
    run_s_E = simulator.run(simulator.off(), steps).mean(axis=1)
    half_s = float(stats.norm.ppf(0.5 + 0.5 * LEVEL)) * float(run_s_E.std(ddof=1))
    if math.isfinite(step_s.low):
        half_s = max(half_s, 0.5 * (step_s.high - step_s.low))
    known = {"mean_s": step_s.value, "low_s": step_s.value - half_s, "high_s": step_s.value + half_s}
    found = drawn_clusters(basis.cluster, basis.parameters, known, seed, DRAWS)
    return found if any(one is not basis.cluster for one in found) else [basis.cluster]


def _case(cluster: Cluster, runs: _Runs, policy: str) -> Case:
    return Case(
        nodes=cluster.job.nodes,
        ranks=cluster.ranks,
        policy=policy,
        step_s=of_runs(np.array(runs.step_s)),
        throughput=of_runs(np.array(runs.throughput)),
        cv=of_runs(np.array(runs.cv)),
        energy_j=of_runs(np.array(runs.energy_j)) if runs.energy_j else None,
    )


def _differences(before: _Runs, after: _Runs) -> Differences:
    def ratio(one: Sequence[Array], other: Sequence[Array]) -> Estimate:
        return of_runs(np.array(other) / np.array(one)).less_one()

    return Differences(
        step=ratio(before.step_s, after.step_s),
        throughput=ratio(before.throughput, after.throughput),
        cv=of_runs(np.array(after.cv) - np.array(before.cv)),
        energy=ratio(before.energy_j, after.energy_j) if before.energy_j and after.energy_j else None,
    )
