"""Targets about runs: quantities of simulated clusters, with or without a fixed pacing setting. Talks to the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paceenv.calibration.fits.scaling_table import Rule
from paceenv.core import pacing
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import Outcome, Simulator, episode_keys
from paceenv.ui.config_files import Config
from paceenv.validation.checks import Check, Expected

Quantity = Literal[
    "step_s",
    "cv",
    "throughput",
    "efficiency",
    "slowdown",
    "rerun_share",
    "energy_j_per_sample",
    "energy_w",
]


class Row(Config):
    """One number: a quantity of a cluster, or with ``over`` its ratio to the same quantity of another run."""

    row: str
    cluster: str
    change: list[str] = Field([], description="key=value assignments to the cluster")
    nodes: int | None = Field(None, ge=1)
    pace: Rule | None = None
    quantity: Quantity
    expected: Expected
    fit: bool = False
    remark: str = ""
    over: list[str] | None = Field(
        None, description="the quantity as a ratio to that of the run with these changes instead and without pacing"
    )


class SimulatedTarget(Config):
    """Rows about simulated runs, and where their numbers come from."""

    name: str
    kind: Literal["simulated"]
    source: str
    rows: list[Row]


@dataclass(frozen=True)
class _Ran:
    """A run of a cluster; its properties are the quantities of :data:`Quantity`."""

    cluster: Cluster
    simulator: Simulator
    step_ET: NDArray[np.float64]
    outcome: Outcome

    @property
    def step_s(self) -> float:
        return float(self.step_ET.mean())

    @property
    def cv(self) -> float:
        return float((self.step_ET.std(axis=1) / self.step_ET.mean(axis=1)).mean())

    @property
    def throughput(self) -> float:
        """Samples a second; those of iterations that a failure has undone do not count."""
        return self._samples / float(self.step_ET.sum())

    @property
    def efficiency(self) -> float:
        """Compute time over step time, both means."""
        return float(self.simulator.batch.jobs["compute_s"].mean() / self.step_ET.mean())

    @property
    def slowdown(self) -> float:
        """Step over that in which every rank computes the mean of all ranks' compute times and nothing is shared."""
        job = self.simulator.batch.jobs
        mean_s = float((np.abs(self.simulator.state.noise_ENR[:, 0]).mean(axis=1) * job["compute_s"]).mean())
        rest_s = float((job["ideal_step_s"] - job["compute_s"]).mean())
        return self.step_s / (mean_s + rest_s)

    @property
    def rerun_share(self) -> float:
        return float(self.outcome.rerun_iterations.mean() / self.step_ET.shape[1])

    @property
    def _samples(self) -> float:
        return float(self.outcome.useful_iterations.sum() * self.cluster.samples_per_step)

    @property
    def energy_j_per_sample(self) -> float:
        return float(self.outcome.energy_j.sum() / self._samples)

    @property
    def energy_w(self) -> float:
        return float(self.outcome.energy_j.sum() / self.outcome.time_s.sum())


def checks(target: SimulatedTarget, *, seeds: int, iterations: int) -> Iterator[Check]:
    """Every row of the target beside its simulation; runs that rows share are simulated once.

    Args:
        target: the rows.
        seeds: number of runs.
        iterations: length of each run, shorter for large jobs.
    """
    known: dict[str, _Ran] = {}

    def value(row: Row, change: list[str], pace: Rule | None) -> float:
        key = f"{row.cluster} {row.nodes} {change} {pace}"
        if key not in known:
            known[key] = _run(row, change, pace, seeds, iterations)
        return float(getattr(known[key], row.quantity))

    for row in target.rows:
        found = value(row, row.change, row.pace)
        if row.over is not None:
            found /= value(row, row.over, None)
        quantity = row.quantity + (" ratio" if row.over is not None else "")
        yield Check(
            target.name, row.row, quantity, row.expected, found, "fitted" if row.fit else "predicted", row.remark
        )


def _run(row: Row, change: list[str], pace: Rule | None, seeds: int, iterations: int) -> _Ran:
    cluster = load_cluster(row.cluster).changed(change, row.row)
    if row.nodes is not None:
        cluster = cluster.with_nodes(row.nodes)
    keys = episode_keys(list(range(seeds)))
    # small jobs vary more from run to run, and large ones cost more
    length = max(200, min(iterations, 50_000_000 // (cluster.job.ranks * seeds)))
    simulator = Simulator(derive(cluster, keys), keys, threads=os.cpu_count() or 1)
    settings = pacing.off() if pace is None else pacing.one_mechanism(pace.mechanism, pace.threshold, pace.window)
    step_ET = simulator.run(np.broadcast_to(settings, (seeds, 1, *settings.shape)), length)
    return _Ran(cluster, simulator, step_ET, simulator.outcome())
