"""A cluster while it is fitted: its data, its parameters with their evidence, and correlated errors.

Each stage of a fit adds its part of a job here, under the keys of a cluster config; :meth:`ClusterBuilder.fit` compares
the cluster with the trace and writes the record.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.heldout import HeldOutCheck
from paceenv.calibration.job_steps import Steps, StepStamps, of_trace, simulate
from paceenv.calibration.parameters import Parameter, not_identifiable
from paceenv.sim.cluster import STAND_INS, Cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import episode_keys
from paceenv.ui import config_files

AMPLE: Final = 10.0
"""A link that shows no limit is assumed to be this many times as fast as the one that limits."""
NOT_ASKED: Final = "not asked for"

Array = NDArray[np.float64]
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

    def to_json(self) -> dict[str, Any]:
        """Every parameter, and how well the cluster does what the job did, as plain data."""
        return {
            "parameters": [{"key": p.key, "told": p.is_identified} | p.to_record() for p in self.parameters],
            "measured": {"step_mean_s": self.measured.mean_s, "step_cv": self.measured.cv},
            "simulated": {"step_mean_s": self.simulated.mean_s, "step_cv": self.simulated.cv},
        }

    @property
    def mean_error(self) -> float:
        """Of the mean step, relative."""
        return self.simulated.mean_s / self.measured.mean_s - 1.0

    @property
    def cv_error(self) -> float:
        """Of the coefficient of variation."""
        return self.simulated.cv - self.measured.cv


class ClusterBuilder(Generic[Stamps]):
    """The cluster so far; ``base`` is what the operator knows.

    ``measured`` describes the trace's steps without pacing, or all steps where too few are without. ``stand_ins`` are
    keys that nobody measured.
    """

    def __init__(self, stamps: Stamps, base: Cluster | None, data: dict[str, Any]) -> None:
        self.stamps, self.base, self.data = stamps, base, data
        self.measured = of_trace(stamps.step_T[stamps.steady_T])
        self.parameters: list[Parameter] = []
        self.correlations: dict[str, dict[str, float]] = {}
        self.stand_ins: dict[str, float] = {}

    def copy(self) -> ClusterBuilder[Stamps]:
        """Another builder that has come as far, to try a change on."""
        found = ClusterBuilder(self.stamps, self.base, deepcopy(self.data))
        found.parameters, found.correlations = list(self.parameters), deepcopy(self.correlations)
        found.stand_ins = dict(self.stand_ins)
        return found

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

    def fit(self) -> JobFit:
        """The cluster, compared with the trace, and where each of its numbers comes from."""
        stamps, cluster = self.stamps, self.cluster()
        simulated = simulate(cluster, max(len(stamps.step_T), 2))
        record: dict[str, Any] = {
            "source": f"{stamps.described}, {len(stamps.step_T)} iterations",
            "fitted": {p.key: p.to_record() for p in self.parameters if p.is_identified},
            "cannot_tell": {p.key: p.to_record() for p in self.parameters if not p.is_identified},
            "correlations": self.correlations,
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
