"""Honest comparison: policies on a suite, paired on common random numbers, with bootstrap intervals.

Every rank runs its own copy of a policy on its own view. A row's unit is a seed: one cluster drawn, one noise drawn,
the same for every policy.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceenv import metrics
from paceenv.cluster import Cluster, load_cluster
from policies.rollout import Rollout, run, start
from policies.rules import Static, passive
from policies.select import select_policy
from trainers.config import Suite, SuiteCase

STATIC_GRID = {
    "slack": ((0.0, 0.02, 0.05, 0.1), (0.05, 0.1, 0.3)),
    "slide": ((0.05, 0.1, 0.15, 0.2, 0.3, 0.5), (0.02, 0.05, 0.1, 0.3)),
    "stagger": ((0.0, 0.25, 0.5), (0.1, 0.2, 0.3, 0.4, 0.5)),
}
"""Thresholds and windows that the search for the best single static setting tries, by mechanism."""
NULL_LIMIT = 0.005
"""The most mean step time that a policy may cost where pacing must not matter."""


@dataclass(frozen=True)
class Score:
    """A policy on a suite or on one of its clusters; gains are of throughput over passive, with 95 % intervals."""

    policy: str
    cluster: str
    gain: float
    gain_ci95: tuple[float, float]
    cv: float
    mean_delay_share: float
    null_case: bool = False


@dataclass
class Comparison:
    """All policies on all cases of a suite; step times ``(seeds, T)`` by (policy, cluster)."""

    suite: Suite
    policies: list[str]
    rollouts: dict[tuple[str, str], Rollout] = field(default_factory=dict)

    def outside(self) -> list[str]:
        """One line for each policy that was passive somewhere because it saw what it was not calibrated for."""
        lines = []
        for policy in self.policies:
            met = [(found, c.cluster) for c in self.suite.cases if (found := self.rollouts[policy, c.cluster].outside)]
            if met:
                worst, cluster = max(met, key=lambda one: one[0].share)
                where = f"on {len(met)} of {len(self.suite.cases)} clusters, most on {cluster}"
                lines.append(f"policy {policy}: {where}: {worst}")
        return lines

    def step_s_E(self, policy: str, case: SuiteCase) -> NDArray[np.float64]:
        """Mean step time of a policy on a cluster by seed, ``(E,)``, seconds."""
        return np.asarray(self.rollouts[policy, case.cluster].step_ET.mean(axis=1))

    def score(self, policy: str, case: SuiteCase) -> Score:
        """One policy on one cluster."""
        rollout = self.rollouts[policy, case.cluster]
        gain, *interval = metrics.paired_gain(self.step_s_E(policy, case), self.step_s_E("passive", case))
        cv = float((rollout.step_ET.std(axis=1) / rollout.step_ET.mean(axis=1)).mean())
        delay = float((rollout.mean_delay_E / rollout.ideal_step_E).mean())
        return Score(policy, case.cluster, gain, (interval[0], interval[1]), cv, delay, case.null_case)

    def total(self, policy: str, against: str = "passive") -> Score:
        """One policy on the whole suite: the weighted mean of its gains, seeds resampled in every cluster at once."""
        cases = self.suite.cases
        weights = np.array([case.weight for case in cases])
        weights = weights / weights.sum()
        gain_EC = np.stack([self.step_s_E(against, c) / self.step_s_E(policy, c) - 1.0 for c in cases], axis=1)
        gain, low, high = metrics.bootstrap_interval(gain_EC @ weights)
        scores = [self.score(policy, case) for case in cases]
        cv = float(np.dot(weights, [s.cv for s in scores]))
        delay = float(np.dot(weights, [s.mean_delay_share for s in scores]))
        return Score(policy, self.suite.name, gain, (low, high), cv, delay)


def evaluate(
    policies: Sequence[str],
    suite: Suite,
    clusters: Mapping[str, Cluster] | None = None,
    on_done: Callable[[float], None] = lambda done: None,
) -> Comparison:
    """Run every policy, and passive, on every case of a suite; ``clusters`` replaces configs by name."""
    names = list(dict.fromkeys(["passive", *policies]))
    result, done = Comparison(suite, names), 0
    for case in suite.cases:
        cluster = (clusters or {}).get(case.cluster) or load_cluster(case.cluster)
        for name in names:
            simulator = start(cluster, _seeds(suite), threads=os.cpu_count() or 1)
            result.rollouts[name, case.cluster] = run(select_policy(name, cluster), simulator, suite.iterations)
            done += 1
            on_done(done)
    return result


def _seeds(suite: Suite) -> NDArray[np.int64]:
    return np.arange(suite.first_seed, suite.first_seed + suite.seeds)


def search_size(suite: Suite) -> int:
    """How many runs :func:`best_static` makes, for progress bars."""
    return len(suite.cases) * sum(len(STATIC_GRID[m][0]) * len(STATIC_GRID[m][1]) for m in suite.mechanisms)


def best_static(
    suite: Suite,
    clusters: Mapping[str, Cluster] | None = None,
    on_done: Callable[[float], None] = lambda done: None,
) -> str:
    """The single static setting with the highest mean gain on a suite, as a policy's name.

    Searched on other seeds than the suite's own, so that its score there is not its own selection.
    """
    search = suite.model_copy(update={"first_seed": suite.first_seed + 10 * suite.seeds})
    loaded = {c.cluster: (clusters or {}).get(c.cluster) or load_cluster(c.cluster) for c in suite.cases}
    settings = [(m, t, w) for m in suite.mechanisms for t, w in itertools.product(*STATIC_GRID[m])]
    weights = np.array([case.weight for case in suite.cases])
    gains = np.zeros((len(settings), len(suite.cases)))
    for c, case in enumerate(suite.cases):
        first = start(loaded[case.cluster], _seeds(search), threads=os.cpu_count() or 1)
        passive_E = run(passive(), first, suite.iterations).step_ET.mean(axis=1)
        for s, (mechanism, threshold, window) in enumerate(settings):
            again = start(loaded[case.cluster], _seeds(search), threads=os.cpu_count() or 1)
            step_E = run(Static({mechanism: (threshold, window)}), again, suite.iterations).step_ET.mean(axis=1)
            gains[s, c] = (passive_E / step_E).mean() - 1.0
            on_done(c * len(settings) + s + 1)
    mechanism, threshold, window = settings[int((gains @ weights).argmax())]
    return f"static:mechanism={mechanism},threshold={threshold},window={window}"
