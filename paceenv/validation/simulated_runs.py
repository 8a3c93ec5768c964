"""Targets about runs: quantities of simulated clusters, with or without a fixed pacing setting. Talks to the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paceenv.core import pacing
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import Outcome, Simulator, episode_keys
from paceenv.ui.config_files import AnyMechanism, Config
from paceenv.validation.checks import Check, Expected

Quantity = Literal[
    "step_s",
    "cv",
    "throughput",
    "efficiency",
    "slowdown",
    "rerun_share",
    "energy_j_per_sample",
    "goodput",
    "energy_w",
]


class Pace(Config):
    """A fixed setting of one rule, as ``pacing.one_mechanism`` takes it."""

    mechanism: AnyMechanism
    threshold: float = Field(0.0, ge=0)
    window: float = Field(ge=0, le=1)


class Row(Config):
    """One number: a quantity of a cluster, or with ``over`` its ratio to the same quantity of another run."""

    row: str
    cluster: str
    change: list[str] = Field([], description="key=value assignments to the cluster")
    nodes: int | None = Field(None, ge=1)
    pace: Pace | None = None
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


def checks(target: SimulatedTarget, *, seeds: int, iterations: int) -> Iterator[Check]:
    """Every row of the target beside its simulation; runs that rows share are simulated once.

    Args:
        target: the rows.
        seeds: number of runs.
        iterations: length of each run, shorter for large jobs.
    """
    known: dict[str, tuple[Cluster, Simulator, NDArray[np.float64], Outcome]] = {}

    def value(row: Row, change: list[str], pace: Pace | None) -> float:
        key = f"{row.cluster} {row.nodes} {change} {pace}"
        if key not in known:
            known[key] = _run(row, change, pace, seeds, iterations)
        return _QUANTITIES[row.quantity](*known[key])

    for row in target.rows:
        found = value(row, row.change, row.pace)
        if row.over is not None:
            found /= value(row, row.over, None)
        quantity = row.quantity + (" ratio" if row.over is not None else "")
        yield Check(
            target.name, row.row, quantity, row.expected, found, "fitted" if row.fit else "predicted", row.remark
        )


def _run(
    row: Row, change: list[str], pace: Pace | None, seeds: int, iterations: int
) -> tuple[Cluster, Simulator, NDArray[np.float64], Outcome]:
    cluster = load_cluster(row.cluster).changed(change, row.row)
    if row.nodes is not None:
        cluster = cluster.with_nodes(row.nodes)
    keys = episode_keys(list(range(seeds)))
    # small jobs vary more from run to run, and large ones cost more
    length = max(200, min(iterations, 50_000_000 // (cluster.job.ranks * seeds)))
    simulator = Simulator(derive(cluster, keys), keys, threads=os.cpu_count() or 1)
    settings = pacing.off() if pace is None else pacing.one_mechanism(pace.mechanism, pace.threshold, pace.window)
    step_ET = simulator.run(np.broadcast_to(settings, (seeds, 1, *settings.shape)), length)
    return cluster, simulator, step_ET, simulator.outcome()


def _step_s(cluster: Cluster, simulator: Simulator, step_ET: NDArray[np.float64], outcome: Outcome) -> float:
    return float(step_ET.mean())


def _cv(cluster: Cluster, simulator: Simulator, step_ET: NDArray[np.float64], outcome: Outcome) -> float:
    return float((step_ET.std(axis=1) / step_ET.mean(axis=1)).mean())


def _throughput(cluster: Cluster, simulator: Simulator, step_ET: NDArray[np.float64], outcome: Outcome) -> float:
    return cluster.samples_per_step / float(step_ET.mean())


def _efficiency(cluster: Cluster, simulator: Simulator, step_ET: NDArray[np.float64], outcome: Outcome) -> float:
    """Compute time over step time, both means."""
    return float(simulator.batch.jobs["compute_s"].mean() / step_ET.mean())


def _slowdown(cluster: Cluster, simulator: Simulator, step_ET: NDArray[np.float64], outcome: Outcome) -> float:
    """Step over that in which every rank computes the mean of all ranks' compute times and nothing is shared."""
    job = simulator.batch.jobs
    mean_s = float((np.abs(simulator.state.noise_ENR[:, 0]).mean(axis=1) * job["compute_s"]).mean())
    rest_s = float((job["ideal_step_s"] - job["compute_s"]).mean())
    return float(step_ET.mean()) / (mean_s + rest_s)


def _rerun_share(cluster: Cluster, simulator: Simulator, step_ET: NDArray[np.float64], outcome: Outcome) -> float:
    return float(outcome.rerun_iterations.mean() / step_ET.shape[1])


def _energy(cluster: Cluster, simulator: Simulator, step_ET: NDArray[np.float64], outcome: Outcome) -> float:
    return float(outcome.energy_j.sum() / (outcome.useful_iterations.sum() * cluster.samples_per_step))


def _goodput(cluster: Cluster, simulator: Simulator, step_ET: NDArray[np.float64], outcome: Outcome) -> float:
    return float(outcome.useful_iterations.sum() * cluster.samples_per_step / outcome.time_s.sum())


def _power_w(cluster: Cluster, simulator: Simulator, step_ET: NDArray[np.float64], outcome: Outcome) -> float:
    return float(outcome.energy_j.sum() / outcome.time_s.sum())


_QUANTITIES: dict[str, Callable[[Cluster, Simulator, NDArray[np.float64], Outcome], float]] = {
    "step_s": _step_s,
    "cv": _cv,
    "throughput": _throughput,
    "efficiency": _efficiency,
    "slowdown": _slowdown,
    "rerun_share": _rerun_share,
    "energy_j_per_sample": _energy,
    "goodput": _goodput,
    "energy_w": _power_w,
}
