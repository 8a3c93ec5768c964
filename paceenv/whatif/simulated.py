"""Predictions by simulating a cluster and the changed one on the same noise, over clusters that may be the real one.

Every drawn cluster and every seed is one run of the job as it is and one of each change; a difference is taken run by
run. Axes: D drawn clusters, S seeds of each, E episodes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from paceenv.calibration.posterior import drawn_clusters
from paceenv.core.errors import InputError
from paceenv.core.intervals import Interval
from paceenv.policies.ranges import Outside
from paceenv.policies.rollout import run
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import start
from paceenv.whatif.baseline import Baseline
from paceenv.whatif.change import Change, apply
from paceenv.whatif.predictions import LEVEL, Array, Ends, Numbers, Prediction, Row, of_runs, widened

SEEDS = 32
"""Runs of each row; two or more of each drawn cluster."""
MIN_SEEDS = 2
"""Of each drawn cluster, to separate differences between runs from differences between clusters."""
MEASURED_RUNS = 16
"""Simulated runs as long as the trace, for the differences between such runs."""
MAX_MEASURED = 20_000_000
"""Largest number of rank-iterations in all those runs; for a longer trace the runs are shorter."""
MAX_SPREAD = 0.5
"""Half the interval of one run's mean step, a share of it: from there on nothing is predicted."""
END_SEEDS = 4
"""Runs at either end of an open quantity; few are enough, as all share the same noise."""
MIN_TO_SHARE = 1 << 13
"""Total number of ranks from which threads gain more than they cost."""


@dataclass
class Runs:
    """Results of the runs of one case, ``(D, S)`` each once all are done."""

    step_s: list[Array] = field(default_factory=list)
    cv: list[Array] = field(default_factory=list)
    throughput: list[Array] = field(default_factory=list)
    energy_j: list[Array] = field(default_factory=list)
    delay_share: list[Array] = field(default_factory=list)
    outside: Outside | None = None

    def add(self, cluster: Cluster, policy: str, seeds_S: NDArray[np.int64], iterations: int) -> None:
        threads = len(os.sched_getaffinity(0)) if len(seeds_S) * cluster.ranks >= MIN_TO_SHARE else 1
        rollout = run(select_policy(policy, cluster), start(cluster, seeds_S, threads), iterations)
        mean_S, sd_S, outcome = rollout.step_ET.mean(axis=1), rollout.step_ET.std(axis=1), rollout.outcome
        samples_S = cluster.samples_per_step * np.maximum(outcome.useful_iterations, 1.0)
        self.step_s.append(mean_S)
        self.cv.append(sd_S / mean_S)
        self.delay_share.append(rollout.mean_delay_E / mean_S)
        self.throughput.append(samples_S / outcome.time_s)
        if cluster.power.compute_w != 0.0:
            self.energy_j.append(outcome.energy_j / samples_S)
        if rollout.outside is not None and (self.outside is None or rollout.outside.share > self.outside.share):
            self.outside = rollout.outside


_Runs = dict[Change, Runs]


def predict(
    baseline: Baseline,
    changes: Sequence[Change],
    *,
    seeds: int = SEEDS,
    iterations: int,
    on_done: Callable[[float], None] = lambda done: None,
) -> Prediction:
    check(baseline, changes)
    known = drawn(baseline)
    per_draw = max(math.ceil(seeds / len(known)), MIN_SEEDS)
    seeds_DS = np.arange(len(known) * per_draw).reshape(len(known), per_draw)
    rows = [Change(), *changes]
    runs = simulate(baseline, known, rows, seeds_DS, iterations, on_done)
    for change in rows:
        off = abs(baseline.unexplained_s) / float(np.mean(runs[change].step_s))
        if off > MAX_SPREAD:
            raise InputError(
                f"{change.label or 'today'}: the fitted cluster misses the measured step by {off:.0%} of what it "
                f"predicts; allowed: at most {MAX_SPREAD:.0%}. What a late rank costs, paceenv diagnose says"
            )
    few_DS = np.arange(END_SEEDS)[None]
    ends = [simulate(baseline, [cluster], rows, few_DS, iterations) for cluster in baseline.at_ends]
    clusters = f"{len(known)} clusters drawn from the calibration's errors x " if len(known) > 1 else ""
    return Prediction(
        source=baseline.source,
        method=f"simulated: {clusters}{per_draw} seeds x {iterations} iterations, the same noise for all rows",
        unit="batches of a rank" if baseline.counts_batches else "samples",
        today=_row(Change(), baseline, runs, ends),
        changed=[_row(change, baseline, runs, ends) for change in changes],
        assumes=baseline.assumes(changes),
        cannot_tell=baseline.cannot_tell,
        left_open=baseline.left_open,
        measured_step_s=baseline.measured_step_s,
        measured_cv=baseline.measured_cv,
    )


def simulate(
    baseline: Baseline,
    clusters: Sequence[Cluster],
    changes: Sequence[Change],
    seeds_DS: NDArray[np.int64],
    iterations: int,
    on_done: Callable[[float], None] = lambda done: None,
) -> _Runs:
    """Run every change on every cluster, all on the same noise."""
    runs = {change: Runs() for change in changes}
    for d, cluster in enumerate(clusters):
        for i, (change, of_change) in enumerate(runs.items()):
            after = apply(change, cluster, baseline.slow)
            of_change.add(after, change.pacing, seeds_DS[d], iterations)
            on_done((d + (i + 1) / len(runs)) / len(clusters))
    return runs


def check(baseline: Baseline, changes: Sequence[Change]) -> None:
    """Raise InputError for a change that depends on a guess or is impossible."""
    baseline.check(changes)
    for change in changes:
        apply(change, baseline.cluster, baseline.slow)
        select_policy(change.pacing, baseline.cluster)


def _row(change: Change, baseline: Baseline, runs: _Runs, ends: Sequence[_Runs]) -> Row:
    is_today, cluster = change == Change(), apply(change, baseline.cluster, baseline.slow)
    moved = {} if is_today else _moved(ends, change, runs, baseline.unexplained_s)
    return Row(
        change,
        cluster.job.nodes,
        cluster.ranks,
        job=_numbers(runs[change], None, moved),
        against_today=None if is_today else _numbers(runs[change], runs[Change()], moved),
        outside=runs[change].outside,
    )


def _moved(ends: Sequence[_Runs], change: Change, runs: _Runs, left_s: float) -> dict[str, Ends]:
    """How far what is open moves the difference from today's job, in logarithms except for the CV."""
    moved = dict[str, Ends]()
    if ends:
        low, high, usual = (_difference(of_end[Change()], of_end[change]) for of_end in ends)
        moved = {name: (low[name] - value, high[name] - value) for name, value in usual.items()}
    if left_s:  # may stay, or go with the rest of the step
        now, later = (math.log1p(left_s / float(np.mean(runs[of].step_s))) for of in (Change(), change))
        for name, by in (("step_s", later - now), ("throughput", now - later)):
            at_ends = moved.get(name, (0.0, 0.0))
            moved[name] = min(0.0, *at_ends) + min(0.0, by), max(0.0, *at_ends) + max(0.0, by)
    return moved


def _difference(before: Runs, after: Runs) -> dict[str, float]:
    log_ratios = {
        name: float(np.log(np.mean(getattr(after, name)) / np.mean(getattr(before, name))))
        for name in ("step_s", "throughput", "energy_j")
        if getattr(before, name) and getattr(after, name)
    }
    return log_ratios | {"cv": float(np.mean(after.cv) - np.mean(before.cv))}


def drawn(baseline: Baseline) -> list[Cluster]:
    """Clusters that may be the real one, or the one that is known. Raises InputError where runs are no prediction.

    A run draws the persistent differences between its ranks, and all its steps share them. So the trace gives the
    mean step of the cluster no better than one run gives that of another.
    """
    step_s = baseline.measured_step_s
    if not baseline.parameters or step_s is None:
        return [baseline.cluster]
    simulator = start(baseline.cluster, np.arange(MEASURED_RUNS))
    steps = min(baseline.steps, max(MAX_MEASURED // (MEASURED_RUNS * baseline.cluster.ranks), 1))
    run_s_E = simulator.run(simulator.off(), steps).mean(axis=1)
    half_s = float(stats.norm.ppf(0.5 + 0.5 * LEVEL)) * float(run_s_E.std(ddof=1))
    if half_s > MAX_SPREAD * step_s.value:
        raise InputError(
            f"{baseline.source}: runs of the fitted cluster differ by +-{half_s / step_s.value:.0%} of a step, so it "
            f"predicts nothing; allowed: at most {MAX_SPREAD:.0%}"
        )
    if math.isfinite(step_s.low):
        half_s = max(half_s, 0.5 * (step_s.high - step_s.low))
    known = Interval(step_s.value, step_s.value - half_s, step_s.value + half_s)
    clusters = drawn_clusters(baseline.cluster, baseline.parameters, known)
    return clusters if any(one is not baseline.cluster for one in clusters) else [baseline.cluster]


def _numbers(runs: Runs, before: Runs | None, moved: Mapping[str, Ends]) -> Numbers:
    """Those of a job, or of its difference from another one, with the unknowns in their intervals."""

    def one(name: str) -> Interval:
        value_DS = np.array(getattr(runs, name))
        if before is not None:
            before_DS = np.array(getattr(before, name))
            value_DS = value_DS - before_DS if name == "cv" else value_DS / before_DS
        interval = widened(of_runs(value_DS), moved.get(name, (0.0, 0.0)), by_factors=name != "cv")
        if name == "cv":
            return interval if before is not None else interval._replace(low=max(interval.low, 0.0))
        return interval if before is None else Interval(*(end - 1.0 for end in interval))

    has_energy = runs.energy_j and (before is None or before.energy_j)
    return Numbers(one("step_s"), one("throughput"), one("cv"), one("energy_j") if has_energy else None)
