"""Honest comparison: policies on a suite, paired on common random numbers, with Student's intervals over seeds.

Every rank runs its own copy of a policy on its own view. A row's unit is a seed: one cluster drawn, one noise drawn,
the same for every policy.

Gap closed is a policy's gain as a share of the *best known* one: the best mean gain of all policies and settings that
ran on the cluster, where one of them looked ahead. No policy is a bound: one that looks ahead tries few settings and
gives all ranks the same one, so others exceed it now and then. On one cluster its interval is the jackknife's over
seeds: the best is found anew without each of them. On several it is Student's over clusters.

Axes: P policies, E seeds, C clusters, K co-tenants.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from paceenv.core import metrics
from paceenv.core.intervals import Interval
from paceenv.policies.names import AHEAD
from paceenv.policies.ranges import Outside
from paceenv.policies.rollout import run
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import start
from paceenv.trainers.evaluation.suites import Case, Suite
from paceenv.ui import output

NULL_LIMIT = 0.005
"""The largest share of mean step time that a policy may cost where pacing cannot help."""
TUNED = "static-tuned"
"""The static setting that is best for each cluster by itself."""
TOTAL = "weighted mean"
"""Stands for the cluster in rows over all clusters of a suite."""


@dataclass(frozen=True)
class Outcome:
    """A policy on a cluster, one entry a seed: step in seconds, CV, mean delay as a share of the ideal step.

    The step is the time for each iteration that counts: the mean step, more where failures undid iterations.
    """

    step_s_E: NDArray[np.float64]
    cv_E: NDArray[np.float64]
    delay_share_E: NDArray[np.float64]
    tenant_rate_EK: NDArray[np.float64]
    """Iterations a second of each co-tenant, ``(E, K)``; not-a-number where it is absent."""
    ideal_step_s_E: NDArray[np.float64]
    """The step without noise and other jobs; the job's own groups share its links."""
    outside: Outside | None = None
    """Whether the policy was passive because it was outside its calibrated range."""


@dataclass(frozen=True)
class Score:
    """A policy on a suite or on one of its clusters; gains are relative ones of throughput over passive.

    ``gap_closed`` is the gain as a share of the best known one, None where that is unknown or nothing.
    """

    policy: str
    cluster: str
    gain: float
    gain_ci95: tuple[float, float]
    cv: float
    mean_delay_share: float
    null_case: bool = False
    gap_closed: Interval | None = None
    tenants_gain: float | None = None


@dataclass
class SuiteResult:
    """All policies on all cases of a suite; outcomes by (policy, name of the case)."""

    suite: Suite
    policies: list[str]
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)

    def outside(self) -> list[str]:
        """One line for each policy that was passive somewhere because it was outside its calibrated range."""
        lines = []
        for policy in self.policies:
            of_case = [(self.outcomes[policy, case.name].outside, case.name) for case in self.suite.cases]
            if met := [(outside, name) for outside, name in of_case if outside]:
                worst, cluster = max(met, key=lambda one: one[0].share)
                where = f"on {len(met)} of {len(of_case)} clusters, most on {cluster}"
                lines.append(f"policy {policy}: {where}: {worst}")
        return lines

    def gain_E(self, policy: str, case: Case, against: str = "passive") -> NDArray[np.float64]:
        """Throughput gains of a policy on a cluster by seed, ``(E,)``."""
        return self.outcomes[against, case.name].step_s_E / self.outcomes[policy, case.name].step_s_E - 1.0

    def tenants_gain(self, policy: str, case: Case) -> float | None:
        """Mean relative gain of the co-tenants' throughput over passive; None where there is none."""
        rate_EK, before_EK = (self.outcomes[name, case.name].tenant_rate_EK for name in (policy, "passive"))
        known_EK = before_EK > 0.0  # not-a-number is not
        return float((rate_EK[known_EK] / before_EK[known_EK]).mean() - 1.0) if known_EK.any() else None

    def best_known(self, case: Case) -> float | None:
        """The best mean gain of any policy on a cluster; None for a null or where no policy has looked ahead."""
        if case.null_case or (AHEAD, case.name) not in self.outcomes:
            return None
        return max(float(self.gain_E(policy, case).mean()) for policy in self.policies)

    def bound(self, case: Case) -> float:
        """The gain over passive if every step were the ideal one."""
        passive = self.outcomes["passive", case.name]
        return float((passive.step_s_E / passive.ideal_step_s_E - 1.0).mean())

    def _share_of_best(self, policy: str, case: Case) -> Interval | None:
        """As :func:`share_of_best`; None where there is nothing to win, as far as anybody knows."""
        best = self.best_known(case)
        if best is None or best <= NULL_LIMIT:
            return None
        gain_PE = np.stack([self.gain_E(one, case) for one in self.policies])
        return share_of_best(gain_PE, self.policies.index(policy))

    def score(self, policy: str, case: Case) -> Score:
        """One policy on one cluster."""
        found, tenants = self.total(policy, cases=[case]), self.tenants_gain(policy, case)
        return replace(found, cluster=case.name, null_case=case.null_case, tenants_gain=tenants)

    def total(self, policy: str, against: str = "passive", cases: Sequence[Case] | None = None) -> Score:
        """One policy on the whole suite: the weighted mean of its gains.

        Its interval is over seeds, each in all clusters. ``gap_closed`` is the mean over clusters where there is
        anything to gain, with an interval over these clusters.

        Args:
            cases: only these clusters; None: all.
        """
        cases = self.suite.cases if cases is None else cases
        weights = np.array([case.weight for case in cases])
        weights = weights / weights.sum()
        gain_EC = np.stack([self.gain_E(policy, c, against) for c in cases], axis=1)
        gain, low, high = metrics.mean_interval(gain_EC @ weights)
        found = [self.outcomes[policy, case.name] for case in cases]
        cv = float(np.dot(weights, [one.cv_E.mean() for one in found]))
        delay = float(np.dot(weights, [one.delay_share_E.mean() for one in found]))
        shares = [share for case in cases if (share := self._share_of_best(policy, case)) is not None]
        return Score(policy, TOTAL, gain, (low, high), cv, delay, gap_closed=mean_share(shares) if shares else None)


def evaluate(
    policies: Sequence[str], suite: Suite, title: str = "", tuned: Mapping[str, str] | None = None
) -> SuiteResult:
    """Run every policy, and passive, on every case of a suite. Raises InputError for a policy that cannot be made.

    Args:
        title: of the progress that is shown; without one there is none.
        tuned: the best static setting of every case.
    """
    names = list(dict.fromkeys(["passive", *policies, *([TUNED] if tuned else [])]))
    result = SuiteResult(suite, names)
    with output.progress(title, len(suite.cases) * len(names), shown=bool(title)) as done:
        for case in suite.cases:
            cluster = case.load()
            for name in names:
                meant = tuned[case.name] if tuned and name == TUNED else name
                result.outcomes[name, case.name] = outcome(meant, cluster, suite)
                done(len(result.outcomes))
    return result


def outcome(policy: str, cluster: Cluster, suite: Suite) -> Outcome:
    """One policy on one cluster, on the suite's seeds."""
    seeds = np.arange(suite.first_seed, suite.first_seed + suite.seeds)
    simulator = start(cluster, seeds, len(os.sched_getaffinity(0)), suite.limits)
    made = select_policy(policy, cluster)
    rollout = run(made, simulator, suite.iterations)
    mean_E, sd_E = rollout.useful_step_E, rollout.step_ET.std(axis=1)
    rate_EK = rollout.outcome.tenant_cycles_EK / rollout.outcome.time_s[:, None]
    delay_E = rollout.mean_delay_E / rollout.ideal_step_E
    cv_E = sd_E / rollout.step_ET.mean(axis=1)
    return Outcome(mean_E, cv_E, delay_E, rate_EK, rollout.ideal_step_E, rollout.outside)


def share_of_best(gain_PE: NDArray[np.float64], policy: int) -> Interval:
    """The gain of one policy as a share of the best one on a cluster, with the jackknife's interval over seeds.

    Source: Efron and Stein, "The Jackknife Estimate of Variance", The Annals of Statistics 9 (1981), 586-596.

    Args:
        gain_PE: gains of all policies of the table, a relative gain of throughput each.
    """
    seeds, mean_P = gain_PE.shape[1], gain_PE.mean(axis=1)
    without_PE = (mean_P[:, None] * seeds - gain_PE) / (seeds - 1)
    share_E = without_PE[policy] / np.maximum(without_PE.max(axis=0), NULL_LIMIT)  # where it is less, nothing to win
    value, jackknife = float(mean_P[policy] / mean_P.max()), metrics.mean_interval((1 - seeds) * share_E)
    half = jackknife.high - jackknife.value
    return Interval(value, value - half, min(value + half, 1.0))


def mean_share(shares: Sequence[Interval]) -> Interval:
    """The mean over clusters of what :func:`share_of_best` gives for each, with an interval over clusters."""
    if len(shares) == 1:
        return shares[0]
    value, low, high = metrics.mean_interval(np.array([share.value for share in shares]))
    return Interval(value, low, min(high, 1.0))
