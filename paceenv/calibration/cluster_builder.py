"""What every fit has: the steps of a job, measured and simulated, and a cluster to which stages add their keys.

Each stage of a fit adds its part of a job here, under the keys of a cluster config; :meth:`ClusterBuilder.fit` compares
the cluster with the trace and writes the record. Axes: T steps, R ranks, E simulated runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from paceenv.calibration.distances import HeldOutCheck
from paceenv.calibration.parameters import Parameter, not_identifiable
from paceenv.sim.cluster import STAND_INS, Cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import Simulator, episode_keys
from paceenv.ui import config_files

AMPLE: Final = 10.0
"""A link that shows no limit is assumed to be this many times as fast as the one that limits."""
NOT_ASKED: Final = "not asked for"

MIN_UNPACED: Final = 16
"""Steps without pacing from which on only those count as what the job does by itself."""
GOOD_MEAN, GOOD_CV = 0.05, 0.03
"""How far a good fit may be off: of the mean step relative to it, of its coefficient of variation."""
MATCHED, MATCHED_T = 5e-4, 100
"""Relative precision of a rate that gives the measured step, and the steps that are simulated for it."""
_EPISODES = 32
_BLOCKS = 8
"""Blocks of consecutive steps, whose means give the error of the mean."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class StepStamps:
    """What the stamps of a job have, however its step is described.

    ``names`` are the trace's numbers of the ranks, in the order of axis R. ``begin_T`` is when an iteration began on
    the trace's clock, seconds, ``iteration_T`` its number, ``step_T`` how long it took. ``dropped`` counts the
    iterations left out: incomplete, unlike the usual ones, or with a checkpoint.
    """

    name: str
    source: str
    names: tuple[int, ...]
    iteration_T: NDArray[np.int64]
    begin_T: Array
    step_T: Array
    dropped: int

    @property
    def ranks(self) -> int:
        return len(self.names)

    @property
    def unpaced_T(self) -> NDArray[np.bool_]:
        """Iterations without any delay."""
        return np.ones(len(self.step_T), np.bool_)

    @property
    def steady_T(self) -> NDArray[np.bool_]:
        """Iterations that show the job by itself: those without pacing, or all where too few are without."""
        unpaced_T = self.unpaced_T
        return unpaced_T if unpaced_T.sum() >= MIN_UNPACED else np.ones_like(unpaced_T)

    @property
    def described(self) -> str:
        """The job and its trace, in words."""
        return f"{self.name} ({self.source})"

    def part(self, use_T: NDArray[np.bool_]) -> Self:
        """The stamps of some iterations: of every field whose first axis is T."""
        names = [one.name for one in fields(self) if one.name.rpartition("_")[2].startswith("T")]
        parts: dict[str, Any] = {name: getattr(self, name)[use_T] for name in names}
        return replace(self, **parts)


@dataclass(frozen=True)
class Steps:
    """Mean step of a job in seconds, and its coefficient of variation.

    For simulated runs, as long as the trace, these are means over runs, and ``_sd`` is the standard deviation between
    runs: a job that locks into a tenant's phase differs from run to run. For a trace ``mean_sd`` comes from blocks.
    """

    mean_s: float
    cv: float
    mean_sd: float = 0.0
    cv_sd: float = 0.0


def of_trace(step_T: Array) -> Steps:
    """Statistics of a trace's steps ``(T,)``, seconds; blocks give the error of the mean, as near steps are alike."""
    blocks = np.array([block.mean() for block in np.array_split(step_T, min(_BLOCKS, len(step_T)))])
    mean_s = float(step_T.mean())
    se = float(blocks.std(ddof=1)) / math.sqrt(len(blocks))
    return Steps(mean_s, float(step_T.std(ddof=1)) / mean_s, se)


def simulator_of(cluster: Cluster, runs: int = 1, first: int = 0) -> Simulator:
    """Runs of a cluster with seeds from ``first`` on."""
    keys_E = episode_keys(list(range(first, first + runs)))
    return Simulator(derive(cluster, keys_E), keys_E)


def simulate(cluster: Cluster, iterations: int) -> Steps:
    """Statistics of runs of a cluster without pacing, each ``iterations`` long."""
    simulator = simulator_of(cluster, _EPISODES)
    step_ET = simulator.run(simulator.off(), iterations)
    mean_E = step_ET.mean(axis=1)
    cv_E = step_ET.std(axis=1, ddof=1) / mean_E
    return Steps(float(mean_E.mean()), float(cv_E.mean()), float(mean_E.std()), float(cv_E.std()))


class Matched(NamedTuple):
    """Rates by key, and the standard error of their common factor, relative to it."""

    gbps: dict[str, float]
    relative_se: float


Stamps = TypeVar("Stamps", bound=StepStamps)


@dataclass(frozen=True)
class JobFit:
    """A calibrated cluster, its parameters with evidence, and how well it does what the job did.

    ``measured`` are the trace's steps without pacing (all, where too few), ``simulated`` those of the cluster.
    ``check`` is the one on unseen steps, or why there is none; ``notes`` say which description was taken and what was
    left out. ``step_T`` are the steps that it was fitted to, seconds; ``ranks`` the trace's numbers of the ranks.
    """

    cluster: Cluster
    parameters: tuple[Parameter, ...]
    measured: Steps
    simulated: Steps
    step_T: Array = field(default_factory=lambda: np.empty(0))
    ranks: tuple[int, ...] = ()
    check: HeldOutCheck | str = NOT_ASKED
    notes: tuple[str, ...] = ()

    @property
    def mean_error(self) -> float:
        """Of the mean step, relative."""
        return self.simulated.mean_s / self.measured.mean_s - 1.0


class ClusterBuilder(Generic[Stamps]):
    """The cluster so far; ``base`` is what the operator knows.

    ``measured`` describes the trace's steps without pacing, or all steps where too few are without. ``stand_ins`` are
    keys that nobody measured.
    """

    def __init__(self, stamps: Stamps, base: Cluster | None, data: dict[str, Any]) -> None:
        self.stamps, self.base, self.data = stamps, base, data
        self.measured = of_trace(stamps.step_T[stamps.steady_T])
        self.parameters: list[Parameter] = []
        self.stand_ins: dict[str, float] = {}

    def copy(self) -> ClusterBuilder[Stamps]:
        """Another builder that has come as far, to try a change on."""
        builder = ClusterBuilder(self.stamps, self.base, deepcopy(self.data))
        builder.parameters, builder.stand_ins = list(self.parameters), dict(self.stand_ins)
        return builder

    def add(self, *parameters: Parameter) -> None:
        """Add evidence alone, of what the config does not have or has already."""
        self.parameters += parameters

    def put(self, *parameters: Parameter) -> None:
        """Add parameters with their evidence, and their values to the config."""
        self.parameters += parameters
        for one in parameters:
            section, _, key = one.key.partition(".")
            self.data.setdefault(section, {})[key] = one.value

    def stand_in(self, key: str, value: float, why: str, source: str) -> None:
        """Put a value that the trace does not identify and that nobody else knows either."""
        self.put(not_identifiable(key, value, why, source))
        self.stand_ins[key] = value

    def drop(self, keys: Iterable[str]) -> None:
        """Take back the evidence of some keys, which a later stage knows better."""
        self.parameters = [one for one in self.parameters if one.key not in set(keys)]

    def known(self, section: str, key: str) -> float | None:
        """A plain number that ``base`` gives."""
        value = getattr(getattr(self.base, section), key) if self.base is not None else None
        return float(value) if isinstance(value, int | float) else None

    def source(self, section: str, key: str) -> str:
        """Where a number that limits nothing comes from."""
        return "assumed not to limit" if self.known(section, key) is None else "from base"

    def cluster(self, **fabric: Any) -> Cluster:
        """The cluster as it is now, with other keys of its fabric if given."""
        return self.parse(self.data | {"fabric": self.data["fabric"] | fabric})

    def parse(self, data: dict[str, Any]) -> Cluster:
        return config_files.parse(Cluster, data, f"calibration of {self.stamps.name}")

    def seconds(self, key: str, **fabric: float) -> float:
        """A time of the engine's record of the cluster as it is now, with other keys of its fabric if given."""
        return float(derive(self.cluster(**fabric), episode_keys([0])).jobs[key][0])

    def ample(self) -> None:
        """Rates that limit nothing, where payloads take no time to speak of."""
        why = "its payload takes no longer than a round of messages"
        for key in ("nic_gbps", "uplink_gbps"):
            value = self.known("fabric", key) or AMPLE
            self.put(not_identifiable(f"fabric.{key}", value, why, self.source("fabric", key)))

    def match_step(self, keys: Sequence[str], low: float, high: float) -> Matched | str:
        """The rates, all changed alike, with which the simulated step is as long as the measured one; or why none are.

        Rates from ``low`` to ``high`` times those known before are tried.
        """
        known = {key: float(self.data["fabric"][key.partition(".")[2]]) for key in keys}
        mean_s, se_s = self.measured.mean_s, self.measured.mean_sd

        def rates(factor: float) -> dict[str, float]:
            return {key: float(f"{factor * gbps:.6g}") for key, gbps in known.items()}

        def step_s(factor: float) -> float:
            fabric = {key.partition(".")[2]: gbps for key, gbps in rates(factor).items()}
            return simulate(self.cluster(**fabric), MATCHED_T).mean_s

        slow_s, fast_s = step_s(low), step_s(high)
        if slow_s - fast_s < 0.01 * mean_s:
            return "the step does not depend on it"
        if not fast_s < mean_s < slow_s:
            at_any = f"the simulated step is {fast_s:.4g} to {slow_s:.4g} s at any rate near it"
            return f"{at_any}, the measured one {mean_s:.4g}"
        log_factor = optimize.brentq(
            lambda x: step_s(float(np.exp(x))) - mean_s, np.log(low), np.log(high), xtol=MATCHED
        )
        factor = float(np.exp(log_factor))
        slope = abs(step_s(1.1 * factor) - step_s(factor)) / 0.1
        return Matched(rates(factor), max(min(se_s / max(slope, 1e-12), 0.5), 0.01))

    def fit(self) -> JobFit:
        """The cluster, compared with the trace, and where each of its numbers comes from."""
        stamps, cluster = self.stamps, self.cluster()
        simulated = simulate(cluster, max(len(stamps.step_T), 2))
        record: dict[str, Any] = {
            "source": f"{stamps.described}, {len(stamps.step_T)} iterations",
            "fitted": {p.key: p.to_record() for p in self.parameters if p.is_identified},
            "cannot_tell": {p.key: p.to_record() for p in self.parameters if not p.is_identified},
            "measured": {
                "step_mean_s": self.measured.mean_s,
                "step_mean_se_s": self.measured.mean_sd,
                "step_cv": self.measured.cv,
            },
            "simulated": {"step_mean_s": simulated.mean_s, "step_cv": simulated.cv},
        }
        ranks = tuple(sorted(stamps.names))
        if cluster.program is not None:
            record[STAND_INS] = self.stand_ins
        if ranks != tuple(range(len(ranks))):
            record["ranks"] = list(ranks)
        cluster = cluster.model_copy(update={"calibration": record})
        step_T = stamps.step_T[stamps.unpaced_T] if stamps.unpaced_T.any() else stamps.step_T
        return JobFit(cluster, tuple(self.parameters), self.measured, simulated, step_T, ranks)
