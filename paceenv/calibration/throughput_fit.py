"""Fits named hardware parameters of a described cluster to measured throughputs, and predicts all other rows.

A target (``configs/targets``, ``kind: throughput``) lists rows: what to set in the cluster, the throughput measured,
and whether the fit may see it. Least squares in the logarithms of throughputs and parameters. The standard errors scale
with the root mean square error over *all* rows, seen or not (degrees of freedom: rows less parameters): with as many
parameters as fitted rows the residuals of those say nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from scipy import optimize

from paceenv.calibration.parameters import Estimate
from paceenv.core.errors import InputError
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.step_time import Step
from paceenv.ui import config_files
from paceenv.ui.config_files import Config

MAX_FREE = 4
Set = dict[str, Any]


class Row(Config):
    """One measurement, and how the cluster was set for it; empty: not published."""

    name: str
    set: Set = {}
    throughput: float = Field(gt=0, description="in the target's unit per second")
    fit: bool = False
    scaling: float | None = None
    net_gbps: float | None = Field(None, description="sent and received by a node while training, Gb/s")
    volume_GB: float | None = Field(None, description="sent and received by a node in a run, GB")


class ThroughputTarget(Config):
    """Published throughputs of one cluster under several settings."""

    name: str
    kind: Literal["throughput"]
    cluster: str
    unit: str = Field(description="what throughput counts")
    units_per_sample: float = Field(gt=0)
    run_samples: float = Field(gt=0, description="samples of a run, for volumes")
    single: Set = Field(description="one GPU, the base of the scaling factor")
    free: dict[str, Annotated[list[float], Field(min_length=2, max_length=2)]] = Field(
        max_length=MAX_FREE, description="what the fit may move, within which positive bounds"
    )
    rows: list[Row] = Field(min_length=1)

    @model_validator(mode="after")
    def _determined(self) -> ThroughputTarget:
        seen = sum(row.fit for row in self.rows)
        if seen < len(self.free):
            raise ValueError(f"at least as many rows to fit as free parameters ({seen} and {len(self.free)})")
        if any(not 0 < low < high for low, high in self.free.values()):
            raise ValueError("free: two positive bounds each, lower first")
        return self


@dataclass(frozen=True)
class Prediction:
    """A row beside what the described cluster does."""

    row: Row
    step: Step
    throughput: float
    scaling: float
    net_gbps: float
    """Payload sent and received by the busiest node per second; measurements include packet headers."""
    volume_GB: float

    @property
    def error(self) -> float:
        """Of the throughput, relative to the measured one."""
        return self.throughput / self.row.throughput - 1.0


def step_of(cluster: Cluster, *settings: Set) -> Step:
    """The ideal step of a described cluster with ``key.sub: value`` settings applied."""
    changed = cluster.changed([f"{key}={value}" for setting in settings for key, value in setting.items()])
    step = changed.step()
    if step is None:
        raise InputError(f"{cluster.name}: no workload; allowed: a cluster that describes its workload and GPU")
    return step


def predict(target: ThroughputTarget, cluster: Cluster, values: Set | None = None) -> list[Prediction]:
    """All rows of a table as the cluster would have measured them."""
    values = values or {}
    single = step_of(cluster, target.single, values).samples_per_s
    return [_prediction(target, row, step_of(cluster, row.set, values), single) for row in target.rows]


def _prediction(target: ThroughputTarget, row: Row, step: Step, single: float) -> Prediction:
    both_ways = 2.0 * step.traffic.total
    return Prediction(
        row,
        step,
        throughput=step.samples_per_s * target.units_per_sample,
        scaling=step.samples_per_s / (step.gpus * single),
        net_gbps=both_ways * 8e-9 / step.step_s,
        volume_GB=both_ways * 1e-9 * target.run_samples / step.samples,
    )


def fit(target: ThroughputTarget, cluster: Cluster) -> tuple[dict[str, Estimate], list[Prediction]]:
    """The free parameters from the rows marked for it, starting in the middle of their bounds, and all rows."""
    keys = list(target.free)
    low, high = np.log(np.array(list(target.free.values()))).T
    seen = [row for row in target.rows if row.fit]

    def values(x: NDArray[np.float64]) -> Set:
        return dict(zip(keys, np.exp(x).tolist(), strict=True))

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array(
            [
                math.log(step_of(cluster, row.set, values(x)).samples_per_s * target.units_per_sample / row.throughput)
                for row in seen
            ]
        )

    found = optimize.least_squares(residuals, (low + high) / 2.0, bounds=(low, high), x_scale=0.1)
    if not found.success:
        raise InputError(f"{target.name}: the fit did not converge: {found.message}")
    predictions = predict(target, cluster, values(found.x))
    squares = sum(math.log1p(p.error) ** 2 for p in predictions)
    variance = squares / max(len(predictions) - len(keys), 1)
    relative_se = np.sqrt(np.diag(np.linalg.pinv(found.jac.T @ found.jac)) * variance)
    errors = zip(values(found.x).items(), relative_se.tolist(), strict=True)
    return {key: Estimate.normal(value, value * se) for (key, value), se in errors}, predictions


def fit_throughput(target: ThroughputTarget, cluster: Cluster) -> Cluster:
    """The cluster with the fitted values, to four digits, and with them, their errors and 95 % intervals on record."""
    record = {key: estimate.to_record() for key, estimate in fit(target, cluster)[0].items()}
    moved = cluster.changed([f"{key}={numbers['value']}" for key, numbers in record.items()])
    calibration = {"source": f"targets/{target.name}", "fitted": record}
    return config_files.parse(Cluster, moved.model_dump() | {"calibration": calibration}, f"fit of {target.name}")
