"""A cluster while it is calibrated: its data, its parameters with their evidence, and correlated errors.

Each fit adds its part of a job here, under the keys of a cluster config. :mod:`paceenv.calibration.job_fit` makes the
config from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.job_stamps import JobStamps
from paceenv.calibration.parameters import Parameter, exact, not_identifiable
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import Simulator, episode_keys
from paceenv.ui import config_files

AMPLE: Final = 10.0
"""A link that shows no limit is assumed to be this many times as fast as the one that limits."""
MIN_UNPACED: Final = 16
"""Steps without pacing from which on only those count as what the job does by itself."""
GOOD_MEAN, GOOD_CV = 0.05, 0.03
"""How far a good fit may be off: of the mean step relative to it, of its coefficient of variation."""
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


class ClusterBuilder:
    """The cluster so far. Links are fitted to the stamps ``probed``; ``base`` is what the operator knows.

    ``measured`` describes the trace's steps without pacing, or all steps where too few are without.
    """

    def __init__(self, stamps: JobStamps, probed: JobStamps, base: Cluster | None, name: str) -> None:
        self.stamps, self.probed, self.base = stamps, probed, base
        step_T = stamps.step_T[stamps.unpaced_T]
        self.measured = of_trace(step_T if len(step_T) >= MIN_UNPACED else stamps.step_T)
        self.parameters: list[Parameter] = []
        self.correlations: dict[str, dict[str, float]] = {}
        self.data: dict[str, Any] = {"fabric": {"nodes_per_leaf": 1, "nic_gbps": 1.0, "uplink_gbps": 1.0}, "job": {}}
        if base is not None:
            self.data = base.model_dump()
            self.data["fabric"] |= {"oversubscription": None, "ecmp_paths": None}
            for section in ("noise", "post_collective_work", "tenants"):
                del self.data[section]
        self.data |= {"name": name, "description": f"Fitted to a trace of {stamps.name} ({stamps.source})."}

    @property
    def steady_T(self) -> NDArray[np.bool_]:
        """Iterations that show the job by itself: those without pacing, or all where too few are without."""
        unpaced_T = self.stamps.unpaced_T
        return unpaced_T if unpaced_T.sum() >= MIN_UNPACED else np.ones_like(unpaced_T)

    def add(self, *parameters: Parameter) -> None:
        self.parameters += parameters

    def add_exact(self, key: str, value: float, evidence: str) -> None:
        """Add a parameter that has no error."""
        self.add(exact(key, float(value), evidence))

    def add_correlation(self, one: str, other: str, correlation: float) -> None:
        """Record that the errors of two parameters are correlated; 0 is not recorded."""
        if correlation:
            self.correlations.setdefault(one, {})[other] = float(f"{correlation:.4g}")

    def known(self, section: str, key: str) -> float | None:
        """A plain number that ``base`` gives."""
        value = getattr(getattr(self.base, section), key) if self.base is not None else None
        return float(value) if isinstance(value, int | float) else None

    def source(self, section: str, key: str) -> str:
        """Where a number that limits nothing comes from."""
        return "assumed not to limit" if self.known(section, key) is None else "from base"

    def cluster(self, **fabric: float) -> Cluster:
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
            self.data["fabric"][key] = self.known("fabric", key) or AMPLE
            self.add(not_identifiable(f"fabric.{key}", self.data["fabric"][key], why, self.source("fabric", key)))
