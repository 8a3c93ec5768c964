"""The cluster to which the stages of a fit add their keys, and the steps of a job, measured and simulated.

Axes: T steps, R ranks, E simulated runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from paceenv.calibration.link_replay import PayloadFit
from paceenv.calibration.parameters import FROM_BASE, NOT_LIMITING, Parameter, not_identifiable
from paceenv.calibration.step_stamps import StepStamps
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import derive, start
from paceenv.sim.engine.simulator import episode_keys
from paceenv.ui import config_files

AMPLE: Final = 10.0
"""A link that shows no limit is assumed to be this many times as fast as the one that limits."""
GOOD_MEAN, GOOD_CV = 0.05, 0.03
"""How far a good fit may be off: of the mean step relative to it, of its coefficient of variation."""
MATCHED, MATCHED_T = 5e-4, 100
"""Relative precision of a rate that gives the measured step, and the steps that are simulated for it."""
_EPISODES = 32
_BLOCKS = 8
"""Blocks of consecutive steps, whose means give the error of the mean."""

Array = NDArray[np.float64]


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


def simulate(cluster: Cluster, iterations: int) -> Steps:
    simulator = start(cluster, np.arange(_EPISODES))
    step_ET = simulator.run(simulator.off(), iterations)
    mean_E = step_ET.mean(axis=1)
    cv_E = step_ET.std(axis=1, ddof=1) / mean_E
    return Steps(float(mean_E.mean()), float(cv_E.mean()), float(mean_E.std()), float(cv_E.std()))


@dataclass(frozen=True)
class RankCompute:
    """What each rank computes in a step, ``(T, R)``: seconds, or in a program over the mean of its phases.

    ``by_rank``: phases say how ranks differ lastingly, so that noise does not. ``relative_R`` is, of a program, what
    each rank computes in its phases over their mean, ``(T, J)``.
    """

    value_TR: Array
    by_rank: bool = False
    relative_R: Sequence[Array] = ()


class Matched(NamedTuple):
    """Rates by key, and the standard error of their common factor, relative to it."""

    gbps: dict[str, float]
    relative_se: float


Stamps = TypeVar("Stamps", bound=StepStamps)


class ClusterBuilder(Generic[Stamps]):
    """The cluster so far; ``base`` is what the operator knows.

    ``measured`` describes the trace's steps without pacing, or all steps where too few are without. ``unseen`` are
    rates that nobody knows, ``slow`` names ranks that are lastingly slow.
    """

    compute: RankCompute
    payload: PayloadFit | None = None
    unseen: Sequence[str] = ()
    slow: Sequence[int] = ()

    def __init__(self, stamps: Stamps, base: Cluster | None, name: str, probed: Stamps | None = None) -> None:
        self.stamps, self.base, self.probed = stamps, base, stamps if probed is None else probed
        self.data: dict[str, Any] = {"name": name}
        self.measured = of_trace(stamps.step_T[stamps.steady_T])
        self.parameters: list[Parameter] = []
        self._simulated: tuple[dict[str, Any], Steps] | None = None

    def add(self, *parameters: Parameter) -> None:
        """Add evidence alone, of what the config does not have or has already."""
        self.parameters += parameters

    def put(self, *parameters: Parameter) -> None:
        """Add parameters with their evidence, and their values to the config."""
        self.parameters += parameters
        for one in parameters:
            section, _, key = one.key.partition(".")
            self.data.setdefault(section, {})[key] = one.value

    def drop(self, keys: Iterable[str]) -> None:
        """Take back the evidence of some keys, which a later stage knows better."""
        self.parameters = [one for one in self.parameters if one.key not in set(keys)]

    def known(self, section: str, key: str) -> float | None:
        """A plain number that ``base`` gives."""
        value = getattr(getattr(self.base, section), key) if self.base is not None else None
        return float(value) if isinstance(value, int | float) else None

    def source(self, section: str, key: str) -> str:
        """Where a number that limits nothing comes from."""
        return NOT_LIMITING if self.known(section, key) is None else FROM_BASE

    def cluster(self, **fabric: Any) -> Cluster:
        return self.parse(self.data | {"fabric": self.data["fabric"] | fabric})

    def parse(self, data: dict[str, Any]) -> Cluster:
        return config_files.parse(Cluster, data, f"calibration of {self.stamps.name}")

    def simulated(self) -> Steps:
        """Steps of the cluster as it is now, as many as the trace has."""
        if self._simulated is None or self._simulated[0] != self.data:
            steps = simulate(self.cluster(), max(len(self.stamps.step_T), 2))
            self._simulated = deepcopy(self.data), steps
        return self._simulated[1]

    @property
    def mean_error(self) -> float:
        """Of the simulated mean step, relative."""
        return self.simulated().mean_s / self.measured.mean_s - 1.0

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
