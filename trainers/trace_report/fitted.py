"""The cluster behind a trace, and what it foretells: the job at other sizes, and under pacing policies.

Clusters are drawn from the calibration's errors (``paceenv.calibration.posterior``), so that intervals hold what the
trace leaves open: what is given of a quantity is the range in which 95 % of such clusters have it.

Legend: D drawn clusters, E seeds, T steps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.job import JobFit, calibrate_job
from paceenv.calibration.posterior import drawn_clusters
from paceenv.cluster import Cluster
from paceenv.errors import InputError
from paceenv.trace import Trace
from policies.ranges import Outside
from policies.rollout import run, start
from policies.select import select_policy
from trainers.evaluate import NULL_LIMIT
from trainers.predict import one_more

Array = NDArray[np.float64]
Interval = tuple[float, float, float]
"""A value and its 95 % interval."""
DRAWS: Final = 12
SEEDS: Final = 4
SIZES: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""How many times as many nodes as the traced job has."""
MOST_RANKS: Final = 4096
SIZE_ITERATIONS, POLICY_ITERATIONS = 300, 800
MANY_RANKS: Final = 256
"""From here on a run is long enough to do with one seed a cluster."""
GOOD_MEAN: Final = 0.1
"""A fitted cluster whose mean step is further off than this share foretells little."""
_BATCHES = 16
_FIRST_SEED = 5_000_000


@dataclass(frozen=True)
class Fitted:
    """The cluster fitted to a trace, and others that may be the real one as well."""

    fit: JobFit
    clusters: Sequence[Cluster]

    @property
    def knows_tenants(self) -> bool:
        """Whether the trace shows another job on the same links."""
        return any(p.told and p.key.startswith("tenants.") for p in self.fit.parameters)

    @property
    def doubt(self) -> str:
        """What to say where the fit does not do what the job did; empty where it does."""
        if abs(self.fit.mean_error) <= GOOD_MEAN:
            return ""
        return (
            f"The fitted cluster's mean step is {self.fit.mean_error:+.0%} off the measured one: something in this job "
            "is not in the model, so read what follows as a sketch."
        )


def fit(trace: Trace, step_s_T: Array, job: str | None) -> Fitted | str:
    """The cluster of a trace, or why there is none. ``step_s_T`` are the job's step times, seconds."""
    stages = set(trace.metadata.of_ranks("stage", 0).values())
    if len(stages) > 1:
        return f"the job has {len(stages)} pipeline stages, and the simulator only knows jobs without"
    try:
        found = calibrate_job(trace, job=job, name="fitted")
    except InputError as error:
        return str(error)
    half_s = 1.96 * _standard_error(step_s_T)
    mean_s = found.measured.mean_s
    measured = {"mean_s": mean_s, "low_s": mean_s - half_s, "high_s": mean_s + half_s}
    return Fitted(found, drawn_clusters(found.cluster, found.parameters, measured, 0, DRAWS))


def _standard_error(step_s_T: Array) -> float:
    """Of the mean step, from means of batches, because neighbouring steps may hang together."""
    means = np.array([part.mean() for part in np.array_split(step_s_T, min(_BATCHES, len(step_s_T)))])
    return float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else 0.0


@dataclass(frozen=True)
class Size:
    """The job on so many nodes: mean step in seconds, its CV, and throughput as multiples of the traced size's."""

    nodes: int
    ranks: int
    step_s: Interval
    cv: Interval
    throughput: Interval

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        named = {"step_s": self.step_s, "cv": self.cv, "throughput": self.throughput}
        return {"nodes": self.nodes, "ranks": self.ranks} | {key: _record(value) for key, value in named.items()}


def sizes(fitted: Fitted, on_done: Callable[[int], None] = lambda done: None) -> list[Size]:
    """The job at other node counts, the work of a rank, the number of slow ranks, and NICs and uplinks per node as
    they are."""
    today = fitted.fit.cluster.job.nodes
    steps: dict[int, tuple[Array, Array]] = {}
    ranks: dict[int, int] = {}
    for i, nodes in enumerate(sorted({max(round(today * factor), 1) for factor in SIZES})):
        try:
            at_size = [resized(cluster, nodes) for cluster in fitted.clusters]
        except InputError:  # groups that do not divide, more slow ranks than ranks
            continue
        ranks[nodes] = at_size[0].ranks
        if ranks[nodes] <= max(MOST_RANKS, fitted.fit.cluster.ranks) and ranks[nodes] > 1:
            steps[nodes] = _unpaced(at_size)
        on_done(i + 1)
    mean_s_D = steps[today][0]
    return [
        Size(nodes, ranks[nodes], one_more(mean), one_more(cv), one_more(nodes / today * mean_s_D / mean))
        for nodes, (mean, cv) in steps.items()
    ]


def resized(cluster: Cluster, nodes: int) -> Cluster:
    """``cluster`` with the job on other nodes: groups keep their size, one of all nodes remains one of all nodes."""
    changes = [f"job.nodes={nodes}"]
    if cluster.job.groups == 1:
        changes.append(f"job.nodes_per_group={nodes}")
    uplink = cluster.fabric.uplink_gbps
    if isinstance(uplink, float):
        changes.append(f"fabric.uplink_gbps={uplink * nodes / cluster.job.nodes!r}")
    return cluster.changed(changes, f"{cluster.name} at {nodes} nodes")


def _unpaced(clusters: Sequence[Cluster]) -> tuple[Array, Array]:
    """Mean steps in seconds and CVs of clusters without pacing, ``(D,)`` each, on the same noise."""
    found = [_run("passive", cluster, SIZE_ITERATIONS) for cluster in clusters]
    return np.array([one.mean_E.mean() for one in found]), np.array([one.cv_E.mean() for one in found])


@dataclass(frozen=True)
class _Run:
    mean_E: Array
    cv_E: Array
    delay_share: float
    outside: Outside | None


def _run(policy: str, cluster: Cluster, iterations: int) -> _Run:
    seeds = _FIRST_SEED + np.arange(SEEDS if cluster.ranks < MANY_RANKS else 1)
    found = run(select_policy(policy, cluster), start(cluster, seeds, threads=os.cpu_count() or 1), iterations)
    mean_E = found.step_ET.mean(axis=1)
    return _Run(mean_E, found.step_ET.std(axis=1) / mean_E, float((found.mean_delay_E / mean_E).mean()), found.outside)


@dataclass(frozen=True)
class Paced:
    """A policy on the fitted clusters: throughput against no pacing, CV with and without, delay as a share of a step.

    ``outside`` says whether it met what it was not calibrated for.
    """

    policy: str
    gain: Interval
    cv: float
    cv_passive: float
    delay_share: float
    outside: str = field(default="")

    @property
    def verdict(self) -> str:
        """What the interval says."""
        _, low, high = self.gain
        if max(-low, high) < NULL_LIMIT:
            return f"makes no difference (less than {NULL_LIMIT:.1%})"
        return "helps" if low > 0.0 else "costs" if high < 0.0 else "makes no difference that this trace can tell"

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        numbers = {"cv": self.cv, "cv_passive": self.cv_passive, "delay_share": self.delay_share}
        gain = {"throughput_gain": _record(self.gain)}
        return {"policy": self.policy} | gain | numbers | {"verdict": self.verdict, "outside": self.outside or None}


def compare(fitted: Fitted, policies: Sequence[str], on_done: Callable[[int], None] = lambda done: None) -> list[Paced]:
    """Policies on the fitted clusters, against no pacing on the same noise."""
    rows, clusters = [], fitted.clusters
    passive = [_run("passive", cluster, POLICY_ITERATIONS) for cluster in clusters]
    for i, policy in enumerate(policies):
        paced = [_run(policy, cluster, POLICY_ITERATIONS) for cluster in clusters]
        gain_D = np.array([(b.mean_E / a.mean_E).mean() - 1.0 for a, b in zip(paced, passive, strict=True)])
        cv, cv_passive = (float(np.mean([one.cv_E.mean() for one in runs])) for runs in (paced, passive))
        met = [one.outside for one in paced if one.outside is not None]
        outside = str(max(met, key=lambda found: found.share)) if met else ""
        delay = float(np.mean([one.delay_share for one in paced]))
        rows.append(Paced(policy, one_more(gain_D), cv, cv_passive, delay, outside))
        on_done(i + 1)
    return rows


def _record(interval: Interval) -> dict[str, float]:
    return dict(zip(("value", "lo", "hi"), interval, strict=True))
