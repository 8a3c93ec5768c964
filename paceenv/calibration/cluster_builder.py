"""A cluster while it is calibrated: its data, its parameters with their evidence, and correlated errors.

Each fit adds its part of a job here, under the keys of a cluster config. :mod:`paceenv.calibration.job_fit` makes the
config from it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.parameters import Parameter
from paceenv.calibration.step_statistics import of_trace
from paceenv.calibration.structure import JobStamps
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import episode_keys
from paceenv.ui import config_files

MIN_UNPACED: Final = 16
"""Steps without pacing from which on only those count as what the job does by itself."""


class ClusterBuilder:
    """The cluster so far. Links are fitted to the stamps ``probed``; ``base`` is what the operator knows.

    ``measured`` describes the trace's steps without pacing, or all steps where too few are without.

    Args:
        stamps: of the trace.
        probed: stamps that links are fitted to.
        base: what the operator knows; None for nothing.
        name: of the cluster.
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
        """Add a parameter that has no error.

        Args:
            key: key of a cluster config.
            value: its exact value.
            evidence: what it comes from.
        """
        self.add(Parameter(key, float(value), 0.0, float(value), float(value), evidence))

    def add_correlation(self, one: str, other: str, correlation: float) -> None:
        """Record that the errors of two parameters are correlated; 0 is not recorded.

        Args:
            one: key of the first parameter.
            other: key of the second.
            correlation: of their errors, -1 to 1.
        """
        if correlation:
            self.correlations.setdefault(one, {})[other] = float(f"{correlation:.4g}")

    def known(self, section: str, key: str) -> float | None:
        """A plain number that ``base`` gives.

        Args:
            section: of the config, such as ``fabric``.
            key: in that section.
        """
        value = getattr(getattr(self.base, section), key) if self.base is not None else None
        return float(value) if isinstance(value, int | float) else None

    def source(self, section: str, key: str) -> str:
        """Where a number that limits nothing comes from.

        Args:
            section: of the config, such as ``fabric``.
            key: in that section.
        """
        return "assumed not to limit" if self.known(section, key) is None else "from base"

    def cluster(self, **fabric: float) -> Cluster:
        """The cluster as it is now, with other keys of its fabric if given."""
        return self.parse(self.data | {"fabric": self.data["fabric"] | fabric})

    def parse(self, data: dict[str, Any]) -> Cluster:
        return config_files.parse(Cluster, data, f"calibration of {self.stamps.name}")

    def seconds(self, key: str, **fabric: float) -> float:
        """A time of the engine's record of the cluster as it is now, with other keys of its fabric if given."""
        return float(derive(self.cluster(**fabric), episode_keys([0])).jobs[key][0])
