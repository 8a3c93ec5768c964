"""Calibration from a published scaling table: throughput and CV by number of nodes, without and with pacing.

The target file says which rows a fit may see and which config keys it may move. Pacing acts in the simulation only by
moving ranks in time; the coordination column is the slack rule with the threshold and window of the cluster config.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.optimize import least_squares

from paceenv.calibration.parameters import Estimate
from paceenv.core import metrics, pacing
from paceenv.core.errors import InputError
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import Simulator, episode_keys
from paceenv.ui import config_files
from paceenv.ui.config_files import AnyMechanism, Config

THROUGHPUT_SCALE, CV_SCALE = 0.01, 0.01
"""Residuals of one: 1 % of throughput, 0.01 of CV."""
STEP = 0.02
"""Of differences, as a share of the bounds: a smaller one drowns in the noise of the simulated runs."""


class Published(Config):
    """One column's numbers in one row: samples/s and coefficient of variation of iteration time."""

    throughput: float = Field(gt=0)
    cv: float = Field(gt=0)
    fit: bool
    looked_at: bool = Field(False, description="whether a person chose something of the model with this number in view")


class Row(Config):
    """One number of nodes."""

    nodes: int = Field(ge=1)
    baseline: Published
    coordination: Published


class Rule(Config):
    """A fixed setting of one pacing rule, as ``pacing.one_mechanism`` takes it."""

    mechanism: AnyMechanism
    threshold: float = Field(0.0, ge=0)
    window: float = Field(ge=0, le=1)

    @classmethod
    def of(cls, cluster: Cluster) -> Rule:
        """The static setting of a cluster config."""
        own = cluster.pacing
        return cls(mechanism=own.mechanism, threshold=own.threshold, window=own.window)


class Variant(Config):
    """The cluster built otherwise in one respect that the publication leaves open."""

    row: str
    change: list[str] = Field([], description="key=value assignments to the cluster")


class Structure(Config):
    """What the gain of pacing becomes in other structures, at one number of nodes."""

    nodes: int = Field(ge=1)
    variants: list[Variant]


class ScalingTarget(Config):
    """A published table, the cluster held to it, and what a fit may move within which bounds."""

    name: str
    cluster: str
    rows: list[Row]
    structure: Structure | None = None
    notes: list[str] = []
    free: dict[str, tuple[float, float]] = {}


@dataclass(frozen=True)
class Comparison:
    """One published number beside the simulated one."""

    nodes: int
    quantity: str
    expected: float
    simulated: float
    fit: bool

    @property
    def error(self) -> float:
        """Relative for throughput, absolute for CV."""
        difference = self.simulated - self.expected
        return difference / self.expected if self.quantity.endswith("throughput") else difference


def simulate_column(cluster: Cluster, rule: Rule | None, *, seeds: int, iterations: int) -> tuple[float, float]:
    """Throughput in samples/s and CV of a cluster."""
    keys = episode_keys(list(range(seeds)))
    simulator = Simulator(derive(cluster, keys), keys, threads=os.cpu_count() or 1)
    settings = pacing.off() if rule is None else pacing.one_mechanism(rule.mechanism, rule.threshold, rule.window)
    step = simulator.run(np.broadcast_to(settings, (seeds, 1, *settings.shape)), iterations)
    statistics = metrics.step_statistics(step)
    return cluster.samples_per_step / statistics["mean"], statistics["cv"]


def compare(
    target: ScalingTarget, cluster: Cluster, *, seeds: int = 16, iterations: int = 10_000, only_fit: bool = False
) -> Iterator[Comparison]:
    """The numbers of a table beside their simulation."""
    for row in target.rows:
        at = cluster.with_nodes(row.nodes)
        for name, published in (("baseline", row.baseline), ("coordination", row.coordination)):
            if only_fit and not published.fit:
                continue
            rule = Rule.of(at) if name == "coordination" else None
            throughput, cv = simulate_column(at, rule, seeds=seeds, iterations=iterations)
            yield Comparison(row.nodes, f"{name} throughput", published.throughput, throughput, published.fit)
            yield Comparison(row.nodes, f"{name} cv", published.cv, cv, published.fit)


def residuals(target: ScalingTarget, cluster: Cluster) -> NDArray[np.float64]:
    """Differences of the numbers that a fit may use, in units of their scale."""
    scale = {"throughput": THROUGHPUT_SCALE, "cv": CV_SCALE}
    rows = compare(target, cluster, seeds=6, iterations=4000, only_fit=True)
    return np.array([row.error / scale[row.quantity.split()[-1]] for row in rows])


def fit_scaling(target: ScalingTarget, start: Cluster) -> Cluster:
    """Fit a cluster to the rows of a table that are marked for it; the record has standard errors.

    Least squares from the present values. Common random numbers make the residuals smooth and the result reproducible.
    A residual of one is one standard deviation.
    """
    keys, bounds = list(target.free), list(target.free.values())
    marked = sum(2 * column.fit for row in target.rows for column in (row.baseline, row.coordination))
    if not 1 <= len(keys) <= marked:
        raise InputError(
            f"{target.name}: free = {len(keys)} keys; allowed: 1 to {marked}, as many numbers as are marked fit: true"
        )
    low, high = np.array(bounds).T

    def values(x: NDArray[np.float64]) -> NDArray[np.float64]:
        """From 1 at the lower bound to 2 at the upper, so that a relative step is a share of the bounds."""
        return np.asarray(low + (x - 1.0) * (high - low))

    def moved(x: NDArray[np.float64]) -> Cluster:
        return start.changed([f"{key}={float(f'{value:.4g}')!r}" for key, value in zip(keys, values(x), strict=True)])

    first = 1.0 + (np.clip([_value(start, key) for key in keys], low, high) - low) / (high - low)
    found = least_squares(
        lambda x: residuals(target, moved(x)), first, bounds=(1.0, 2.0), diff_step=STEP, x_scale=0.1, xtol=1e-3
    )
    se = np.sqrt(np.diag(np.linalg.pinv(found.jac.T @ found.jac))) * (high - low)
    record = {
        "source": f"targets/{target.name}",
        "cost": round(2.0 * float(found.cost), 3),
        "fitted": {
            key: Estimate.normal(float(value), float(error)).to_record()
            for key, value, error in zip(keys, values(found.x), se, strict=True)
        },
    }
    data = moved(found.x).model_dump() | {"calibration": record}
    return config_files.parse(Cluster, data, f"fit of {target.name}")


def _value(cluster: Cluster, key: str) -> float:
    node = cluster.model_dump()
    for part in key.split("."):
        node = node[part]
    return float(node)  # type: ignore[arg-type]
