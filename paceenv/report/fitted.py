"""The cluster behind a trace, and its predictions: the job at other sizes, and under pacing policies.

Both are what-if answers on the same clusters, drawn from the calibration's errors. Other sizes are those of
``paceenv whatif --nodes``. For a policy the mean effect matters, not that of a single run: its interval is the range in
which 95 % of such clusters have it.

Legend: D drawn clusters, E seeds, T steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.fit_trace import JobFit
from paceenv.core.errors import InputError
from paceenv.core.intervals import Interval
from paceenv.core.trace import Trace
from paceenv.diagnosis.causes import TENANT
from paceenv.diagnosis.verdict import NO_DIFFERENCE, word_of
from paceenv.sim.cluster import Cluster
from paceenv.whatif.baseline import Baseline, of_trace
from paceenv.whatif.change import Change
from paceenv.whatif.predictions import Prediction, one_more
from paceenv.whatif.simulated import MIN_SEEDS, check, drawn, predict, simulate

Array = NDArray[np.float64]
SEEDS: Final = 4
SIZES: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""How many times as many nodes as the traced job has."""
MAX_RANKS: Final = 4096
SIZE_ITERATIONS, POLICY_ITERATIONS = 300, 800
MANY_RANKS: Final = 256
"""From here on a run is long enough to do with one seed a cluster."""
GOOD_MEAN: Final = 0.1
"""A fitted cluster whose mean step is further off than this share predicts little."""
HOLDS: Final = ("static:defer=0/0.02", "static:defer=0/0.1")
"""Policies that hold back transfers that can wait, for a fixed share of a step."""
_FIRST_SEED = 5_000_000


@dataclass(frozen=True)
class Fitted:
    """The cluster fitted to a trace, other clusters that may be the real one, and the diagnosed ``causes``."""

    baseline: Baseline
    clusters: Sequence[Cluster]
    causes: frozenset[str] = frozenset()

    @property
    def fit(self) -> JobFit:
        """The calibration."""
        assert self.baseline.fit is not None
        return self.baseline.fit

    @property
    def doubt(self) -> str:
        """Why the fitted clusters may not be the job; "" if nothing shows that."""
        said = []
        if abs(self.fit.mean_error) > GOOD_MEAN:
            said.append(f"the fitted cluster's mean step is {self.fit.mean_error:+z.0%} off")
        if TENANT in self.causes and not self.fit.cluster.tenants:
            said.append("the fitted cluster lacks the other job among the causes")
        return ", and ".join(said)

    def to_json(self) -> dict[str, Any]:
        return {"calibration": self.fit.cluster.calibration, "doubt": self.doubt}


def fit(trace: Trace, source: str, job: str | None, causes: frozenset[str] = frozenset()) -> Fitted | str:
    """The cluster of a trace, or why there is none."""
    try:
        baseline = of_trace(trace, source, None, job)
        return Fitted(baseline, drawn(baseline), causes)
    except InputError as error:
        return str(error)


def sizes(fitted: Fitted, on_done: Callable[[float], None] = lambda done: None) -> Prediction | str:
    """The job at other node counts, as ``paceenv whatif --nodes`` predicts it, or why it cannot be predicted."""
    today, ranks_per_node = fitted.fit.cluster.job.nodes, fitted.fit.cluster.job.ranks_per_node
    changes, refused = [], ""
    for nodes in sorted({max(round(today * factor), 1) for factor in SIZES} - {today}):
        if not 1 < nodes * ranks_per_node <= MAX_RANKS:
            continue
        try:
            check(fitted.baseline, [Change(nodes=nodes)])
        except (
            InputError
        ) as error:  # an answer that depends on a guess, groups that do not divide, more slow ranks than ranks
            refused = str(error)
            continue
        changes.append(Change(nodes=nodes))
    if not changes:
        return refused or f"{today} nodes, and no size to compare with of at most {MAX_RANKS} ranks"
    seeds, clusters = MIN_SEEDS * len(fitted.clusters), fitted.clusters
    return predict(
        fitted.baseline, changes, seeds=seeds, iterations=SIZE_ITERATIONS, clusters=clusters, on_done=on_done
    )


@dataclass(frozen=True)
class Paced:
    """A policy on the fitted clusters: throughput against no pacing, CV with and without, delay as a share of a step.

    ``outside`` says whether it met conditions outside its calibrated range.
    """

    policy: str
    gain: Interval
    cv: float
    cv_passive: float
    delay_share: float
    outside: str = ""
    SHOWN: ClassVar = ("policy", "gain", "cv", "cv_passive", "delay_share", "verdict", "outside")

    @property
    def verdict(self) -> str:
        """The interval in words."""
        word = word_of(self.gain)
        more = {
            "makes no difference": f" (less than {NO_DIFFERENCE:.1%})",
            "is open": "; this trace does not show whether it helps",
        }
        return word + more.get(word, "")


def compare(
    fitted: Fitted, policies: Sequence[str], on_done: Callable[[float], None] = lambda done: None
) -> list[Paced] | str:
    """Policies on the fitted clusters against no pacing on the same noise, or why they cannot be predicted.

    Where transfers can wait, windows of the rule defer are tried too.
    """
    if fitted.fit.cluster.can_defer:
        policies = [*policies, *HOLDS]
    changes = [Change(pacing=policy) for policy in dict.fromkeys(policies)]
    try:
        fitted.baseline.check(changes)
    except InputError as error:
        return str(error)
    seeds_S = _FIRST_SEED + np.arange(SEEDS if fitted.fit.cluster.ranks < MANY_RANKS else 1)
    seeds_DS = np.broadcast_to(seeds_S, (len(fitted.clusters), len(seeds_S)))
    runs = simulate(fitted.baseline, fitted.clusters, [Change(), *changes], seeds_DS, POLICY_ITERATIONS, on_done)
    rows, passive = [], runs[Change()]
    for change in changes:
        paced = runs[change]
        gain_D = (np.array(passive.step_s) / np.array(paced.step_s)).mean(axis=1) - 1.0
        cv, cv_passive, delay = (float(np.mean(x)) for x in (paced.cv, passive.cv, paced.delay_share))
        rows.append(Paced(change.pacing, one_more(gain_D), cv, cv_passive, delay, str(paced.outside or "")))
    return rows
