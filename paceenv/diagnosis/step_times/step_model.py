"""A model of a job's step times from a log alone, and how well it predicts step times that it has not seen.

Step times alone tell their distribution and memory. They do not tell which ranks wait for each other, so no cluster can
be fitted to them. The distribution is that of the values (33 percentiles, no formula), outliers apart. Axes: V values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import special

from paceenv.calibration.distances import Distance
from paceenv.core import metrics
from paceenv.core.errors import InputError
from paceenv.core.intervals import Interval
from paceenv.diagnosis.step_times.ordinary import split
from paceenv.importers.step_log import StepLog

PROBABILITIES: Final = np.concatenate([[0.0, 0.003], np.linspace(0.01, 0.99, 29), [0.997, 1.0]])
MIN_VALUES: Final = 20
"""Ordinary values that a model needs."""
MIN_RUN: Final = 20
"""Values of a run that counts as one where runs are held out."""
WHY_NO_CLUSTER: Final = (
    "step times alone do not say which ranks wait for each other, for what, or for how long; a cluster config needs a "
    "trace (paceenv live, or profiles of every rank)"
)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class StepModel:
    """Step times of a job: ordinary ones from percentiles, with memory; outliers beside them."""

    level_s: Interval  # mean of ordinary values, seconds, with its 95 % interval
    cv: Interval  # of ordinary values, with its 95 % interval
    relative_K: Array  # percentiles of ordinary values over their mean, at :data:`PROBABILITIES`
    memory: float  # autocorrelation from one value to the next, 0 to 1
    outlier_share: float  # of values; ``outlier_factor`` is their mean over the level
    outlier_factor: float
    averaged: float  # steps that a value averages over; 0 if unknown

    def sample(self, values: int, seed: int = 0) -> Array:
        """So many step times in order, seconds."""
        random = np.random.default_rng(seed)
        noise = random.normal(size=values + 200)
        state = np.zeros(values + 200)
        for i in range(1, values + 200):
            state[i] = self.memory * state[i - 1] + math.sqrt(1.0 - self.memory**2) * noise[i]
        chance = special.ndtr(state[200:])
        step_s = self.level_s.value * np.interp(chance, PROBABILITIES, self.relative_K)
        return np.where(random.random(values) < self.outlier_share, self.level_s.value * self.outlier_factor, step_s)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        names = ("value", "low", "high")
        return {
            "level_s": dict(zip(names, self.level_s, strict=True)),
            "cv": dict(zip(names, self.cv, strict=True)),
            "relative_percentiles": dict(zip(map("{:.4g}".format, 100 * PROBABILITIES), self.relative_K, strict=True)),
            "memory": self.memory,
            "outlier_share": self.outlier_share,
            "outlier_factor": self.outlier_factor,
            "steps_per_value": self.averaged or None,
        }


def fit_model(log: StepLog) -> StepModel:
    """Fit the model to a log. Raises InputError for fewer than :data:`MIN_VALUES` ordinary values."""
    ordinary = split(log)
    steady_s, plain_s = log.step_s_V[ordinary.steady_V], log.step_s_V[ordinary.plain_V]
    n = len(plain_s)
    if n < MIN_VALUES:
        raise InputError(f"{log.name}: {n} ordinary step times; allowed: at least {MIN_VALUES} for a model of them")
    mean_s, sd_s = float(plain_s.mean()), float(plain_s.std(ddof=1))
    independent = max(n / metrics.correlation_length(plain_s), 2.0)
    level_error, cv = 1.96 * sd_s / math.sqrt(independent), sd_s / mean_s
    cv_error = 1.96 / math.sqrt(2.0 * (independent - 1.0))
    centred = plain_s - mean_s
    memory = float((centred[1:] * centred[:-1]).mean() / max(float((centred**2).mean()), 1e-300))
    outliers = log.step_s_V[ordinary.outlier_V]
    return StepModel(
        Interval(mean_s, mean_s - level_error, mean_s + level_error),
        Interval(cv, cv * math.exp(-cv_error), cv * math.exp(cv_error)),
        np.quantile(plain_s, PROBABILITIES) / mean_s,
        min(max(memory, 0.0), 0.99),
        len(outliers) / len(steady_s),
        float(outliers.mean()) / mean_s if len(outliers) else 1.0,
        float(np.median(log.steps_V)) if (log.steps_V > 0).all() else 0.0,
    )


@dataclass(frozen=True)
class ModelCheck:
    """Distances of a model to step times that it has not seen: its own, and that of a normal with the same moments."""

    held_out: str
    model: Distance
    normal: Distance


def check_model(log: StepLog) -> ModelCheck | str:
    """Fit the model to the first half and compare it with the second, or say in words why not.

    Halves are runs where a log has at least four; else the halves of its steps, in time, so that drift is not known.
    """
    runs = [r for r in range(int(log.run_V.max()) + 1) if int((log.run_V == r).sum()) >= MIN_RUN]
    if len(runs) >= 4:
        cut = len(runs) // 2
        first, second = np.isin(log.run_V, runs[:cut]), np.isin(log.run_V, runs[cut:])
        said = f"{len(runs) - cut} runs, fitted to the {cut} before"
    else:
        at = np.arange(len(log.step_V))
        first, second = at < len(at) // 2, at >= len(at) // 2
        said = "the second half of the log, fitted to the first"
    try:
        model = fit_model(_part(log, first))
    except InputError as error:
        return f"half of the log has too few step times: {error}"
    rest = log.step_s_V[second & split(log).steady_V]
    if len(rest) < MIN_VALUES:
        return f"the half that is held out has {len(rest)} step times after its warm-up; needed: {MIN_VALUES}"
    normal = np.asarray(special.ndtri((np.arange(20_000) + 0.5) / 20_000))
    normal_s = model.level_s.value * (1.0 + model.cv.value * normal)
    return ModelCheck(
        said,
        Distance.between("step times", rest, [model.sample(20_000)]),
        Distance.between("step times, were they normal", rest, [normal_s]),
    )


def _part(log: StepLog, which: NDArray[np.bool_]) -> StepLog:
    run_V = np.unique(log.run_V[which], return_inverse=True)[1].astype(np.int64)
    step_V, step_s_V, steps_V = log.step_V[which], log.step_s_V[which], log.steps_V[which]
    return StepLog(log.name, log.source, step_V, step_s_V, steps_V, log.clock_s_V[which], run_V)
