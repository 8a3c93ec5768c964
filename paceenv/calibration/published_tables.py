"""Calibration from published numbers: the parameters that a target file frees, fitted to the rows that it marks.

A target (``configs/targets``) is a scaling table, throughput and CV by number of nodes, without and with pacing; or the
throughputs of a described cluster under several settings. It says which rows a fit may see and which config keys it may
move, within which bounds. Pacing acts in the simulation only by moving ranks in time; the coordination column is the
slack rule with the threshold and window of the cluster config.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from scipy.optimize import least_squares

from paceenv.calibration.parameters import Estimate
from paceenv.core import metrics, pacing
from paceenv.core.errors import InputError
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import Simulator, episode_keys
from paceenv.ui import config_files
from paceenv.ui.config_files import Config

THROUGHPUT_SCALE, CV_SCALE = 0.01, 0.01
"""Residuals of one: 1 % of throughput, 0.01 of CV."""


class Target(Config):
    """Published numbers of a cluster, and what a fit may move within which bounds."""

    name: str
    cluster: str
    free: dict[str, tuple[float, float]] = {}
    step: ClassVar[float] = 1e-6
    """Of differences, as a share of the bounds."""


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


class Variant(Config):
    """The cluster built otherwise in one respect that the publication leaves open."""

    row: str
    change: list[str] = Field([], description="key=value assignments to the cluster")


class Structure(Config):
    """What the gain of pacing becomes in other structures, at one number of nodes."""

    nodes: int = Field(ge=1)
    variants: list[Variant]


class ScalingTarget(Target):
    """A published scaling table; a residual of one is one standard deviation."""

    rows: list[Row]
    structure: Structure | None = None
    notes: list[str] = []
    step: ClassVar[float] = 0.02  # a smaller one drowns in the noise of the simulated runs

    @property
    def seen(self) -> int:
        """How many numbers the fit may see."""
        return sum(2 * column.fit for row in self.rows for column in (row.baseline, row.coordination))

    def residuals(self, cluster: Cluster) -> list[float]:
        """What a cluster misses these numbers by."""
        scale = {"throughput": THROUGHPUT_SCALE, "cv": CV_SCALE}
        rows = compare(self, cluster, seeds=6, iterations=4000, only_fit=True)
        return [row.error / scale[row.quantity.split()[-1]] for row in rows]

    def variance(self, _: Cluster) -> float:
        """Of residuals."""
        return 1.0


class Setting(Config):
    """One measured throughput, and how the cluster was set for it; what was not published is empty."""

    name: str
    set: dict[str, Any] = {}
    throughput: float = Field(gt=0, description="in the target's unit per second")
    fit: bool = False
    scaling: float | None = None
    net_gbps: float | None = Field(None, description="sent and received by a node while training, Gb/s")
    volume_GB: float | None = Field(None, description="sent and received by a node in a run, GB")


class ThroughputTarget(Target):
    """Published throughputs of one described cluster under several settings; residuals are of logarithms."""

    kind: Literal["throughput"]
    unit: str = Field(description="what throughput counts")
    units_per_sample: float = Field(gt=0)
    run_samples: float = Field(gt=0, description="samples of a run, for volumes")
    single: dict[str, Any] = Field(description="one GPU, the base of the scaling factor")
    rows: Annotated[list[Setting], Field(min_length=1)]

    @model_validator(mode="after")
    def _ordered(self) -> ThroughputTarget:
        if any(not 0 < low < high for low, high in self.free.values()):
            raise ValueError("free: two positive bounds each, lower first")
        return self

    @property
    def seen(self) -> int:
        """How many numbers the fit may see."""
        return sum(row.fit for row in self.rows)

    def residuals(self, cluster: Cluster) -> list[float]:
        """What a cluster misses these numbers by."""
        return [self._residual(row, cluster) for row in self.rows if row.fit]

    def variance(self, cluster: Cluster) -> float:
        """Over all rows, seen or not: with as many parameters as fitted rows the residuals of those say nothing."""
        squares = [self._residual(row, cluster) ** 2 for row in self.rows]
        return sum(squares) / max(len(squares) - len(self.free), 1)

    def _residual(self, row: Setting, cluster: Cluster) -> float:
        one = cluster.changed([f"{key}={value}" for key, value in row.set.items()])
        step_s = float(derive(one, episode_keys([0])).jobs["ideal_step_s"][0])
        return math.log(one.samples_per_step / step_s * self.units_per_sample / row.throughput)


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


def simulate_column(cluster: Cluster, *, paced: bool, seeds: int, iterations: int) -> tuple[float, float]:
    """Throughput in samples/s and CV of a cluster, without pacing or with the static setting of its config."""
    keys = episode_keys(list(range(seeds)))
    simulator = Simulator(derive(cluster, keys), keys, threads=os.cpu_count() or 1)
    own = cluster.pacing
    settings = pacing.one_mechanism(own.mechanism, own.threshold, own.window) if paced else pacing.off()
    step = simulator.run(np.broadcast_to(settings, (seeds, 1, *settings.shape)), iterations)
    statistics = metrics.step_statistics(step)
    return cluster.samples_per_step / statistics["mean"], statistics["cv"]


def compare(
    target: ScalingTarget, cluster: Cluster, *, seeds: int = 16, iterations: int = 10_000, only_fit: bool = False
) -> Iterator[Comparison]:
    """The numbers of a scaling table beside their simulation."""
    for row in target.rows:
        at = cluster.with_nodes(row.nodes)
        for name, published in (("baseline", row.baseline), ("coordination", row.coordination)):
            if only_fit and not published.fit:
                continue
            paced = name == "coordination"
            throughput, cv = simulate_column(at, paced=paced, seeds=seeds, iterations=iterations)
            yield Comparison(row.nodes, f"{name} throughput", published.throughput, throughput, published.fit)
            yield Comparison(row.nodes, f"{name} cv", published.cv, cv, published.fit)


def fit_table(target: ScalingTarget | ThroughputTarget, start: Cluster) -> Cluster:
    """Fit a cluster to the numbers of a target that are marked for it; the record has standard errors.

    Least squares from the present values. Common random numbers make simulated residuals smooth and reproducible.
    """
    keys = list(target.free)
    if not 1 <= len(keys) <= target.seen:
        raise InputError(
            f"{target.name}: free = {len(keys)} keys; allowed: 1 to {target.seen}, as many numbers as "
            "are marked fit: true"
        )
    low, high = np.array(list(target.free.values())).T

    def values(x: NDArray[np.float64]) -> list[float]:
        """From 1 at the lower bound to 2 at the upper, so that a relative step is a share of the bounds."""
        return (low + (x - 1.0) * (high - low)).tolist()  # type: ignore[no-any-return]

    def moved(key_values: list[float]) -> Cluster:
        return start.changed([f"{key}={value!r}" for key, value in zip(keys, key_values, strict=True)])

    present = [float(attrgetter(key)(start)) for key in keys]
    first = 1.0 + (np.clip(present, low, high) - low) / (high - low)
    solution = least_squares(
        lambda x: target.residuals(moved(values(x))),
        first,
        bounds=(1.0, 2.0),
        diff_step=target.step,
        x_scale=0.1,
        xtol=1e-3,
    )
    fitted = moved([float(f"{value:.4g}") for value in values(solution.x)])
    covariance = np.linalg.pinv(solution.jac.T @ solution.jac) * target.variance(fitted)
    se = np.sqrt(np.diag(covariance)) * (high - low)
    record = {
        "source": f"targets/{target.name}",
        "fitted": {
            key: Estimate.normal(value, error).to_record()
            for key, value, error in zip(keys, values(solution.x), se.tolist(), strict=True)
        },
    }
    return config_files.parse(Cluster, fitted.model_dump() | {"calibration": record}, f"fit of {target.name}")
