"""Compute noise of a trace, reduced to a few numbers that can be stored where the trace cannot.

Reads :mod:`paceenv.core.trace`; :mod:`paceenv.calibration.noise_fit` fits the simulator's noise to the result,
whether it comes from a trace or from a packaged summary. Axes: T steps, R ranks (workers) of one pipeline stage.

``compute_s_TR`` is the sum of a worker's compute operations in a step. With y = compute time / mean over steps and
healthy workers, a two-way random-effects analysis of variance (Searle, Casella and McCulloch, *Variance Components*,
1992, section 4.5) splits y into persistent (per worker), common-mode (per step) and idiosyncratic variance, each
unbiased and therefore sometimes negative. E[max]/mean at width n is the exact expectation of the maximum over a random
subset of n workers without replacement, from order statistics, divided by the mean over all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, model_validator

from paceenv.core.errors import InputError
from paceenv.core.trace import COMPUTE_OPS, Trace
from paceenv.ui.config_files import Config

WIDTHS: Final = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
QUANTILES: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
MIN_STEPS: Final = 8
"""Fewer would leave little of a third moment."""
REPLICATES: Final = 20
SLOW_FACTOR: Final = 1.2
SLOW_MADS: Final = 6.0
"""A worker is slow if its median step is SLOW_FACTOR x its peers' median or more, and SLOW_MADS deviations above it."""

ROUNDING: Final = 1e-6
"""Of a step, or of what has no unit: stamps that differ by less do not differ."""
_ROUNDING_VAR: Final = 1e-24  # relative variance below which equal times differ by rounding alone
_Positive = Annotated[float, Field(gt=0)]

Array = NDArray[np.float64]
Stage = TypeVar("Stage")


class Moments(Config):
    """Moments of one set of steps; variances and skewness are of compute time relative to its mean.

    ``max_over_mean`` holds E[max]/mean at the widths of :data:`WIDTHS` up to the number of healthy workers.
    ``slow_factor`` is slow over healthy mean compute time, 1 without slow workers.
    """

    mean_s: _Positive
    persistent_var: float
    common_var: float
    idiosyncratic_var: Annotated[float, Field(ge=0)]
    idiosyncratic_skewness: float
    max_over_mean: tuple[float, ...]
    slow_factor: _Positive

    model_config = ConfigDict(allow_inf_nan=False)


class StageMeasurements(Config):
    """One pipeline stage. Everything but ``workers`` and ``slow_workers`` describes the healthy workers.

    ``slow_workers`` are positions among the stage's workers in ascending order of rank. ``quantiles`` (at
    :data:`QUANTILES`) are of compute time over its step's mean, minus 1, times sqrt(R / (R - 1)) to undo the centring.
    ``replicates`` leave out one of :data:`REPLICATES` blocks of consecutive steps each: the spread of any function of
    them gives its jackknife error.
    """

    stage: int
    steps: int
    workers: int
    slow_workers: tuple[int, ...]
    quantiles: tuple[float, ...]
    all: Moments
    replicates: tuple[Moments, ...]

    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        expected = len(widths(self.workers - len(self.slow_workers)))
        given = {len(m.max_over_mean) for m in (self.all, *self.replicates)}
        if given != {expected} or len(self.quantiles) != len(QUANTILES) or len(self.replicates) < 2:
            raise ValueError(
                f"stage {self.stage}: needs {expected} max_over_mean each, {len(QUANTILES)} quantiles and 2 replicates "
                f"or more, has {sorted(given)}, {len(self.quantiles)} and {len(self.replicates)}"
            )
        return self


class NoiseMeasurements(Config):
    """The noise of one job: ``step_mean_s`` and ``step_cv`` are of the whole step, first start to last end."""

    paceenv_noise_measurements: Literal[1] = 1
    source: str
    steps: int
    step_mean_s: float
    step_cv: float
    stages: tuple[StageMeasurements, ...]

    model_config = ConfigDict(allow_inf_nan=False)

    def stage(self, number: int) -> StageMeasurements:
        """One stage. Raises InputError if there is none of that number."""
        return chosen({measured.stage: measured for measured in self.stages}, number, self.source)


def chosen(stages: Mapping[int, Stage], number: int, source: str) -> Stage:
    """One of several stages. Raises InputError if there is none of that number."""
    if number not in stages:
        raise InputError(f"{source}: stage = {number!r}; allowed: one of {sorted(stages)}")
    return stages[number]


def widths(workers: int) -> tuple[int, ...]:
    """The widths of :data:`WIDTHS` that fit into ``workers``."""
    return tuple(width for width in WIDTHS if width <= workers)


def subset_max(values_TR: Array, width: int) -> Array:
    """Expected maximum over a random subset of ``width`` of each row's R values, ``(T,)``, exactly.

    The chance that all of the subset is among the i smallest is C(i, width) / C(R, width).
    """
    ranks = values_TR.shape[1]
    below = np.arange(ranks + 1.0)[:, None] - np.arange(width)
    chance = np.prod(np.maximum(below, 0.0) / (ranks - np.arange(width)), axis=1)
    expected_T: Array = np.sort(values_TR, axis=1) @ np.diff(chance)
    return expected_T


def moments(compute_s_TR: Array, slow_R: NDArray[np.bool_]) -> Moments:
    """Moments of compute times ``(T, R)``, seconds, with slow workers marked in ``(R,)`` and left out of the noise."""
    healthy_s_TR = compute_s_TR[:, ~slow_R]
    steps, ranks = healthy_s_TR.shape
    mean_s = float(healthy_s_TR.mean())
    y_TR = healthy_s_TR / mean_s
    residual_TR = y_TR - y_TR.mean(axis=0) - y_TR.mean(axis=1, keepdims=True) + y_TR.mean()
    idiosyncratic = float(np.sum(residual_TR**2)) / ((steps - 1) * (ranks - 1))
    skewness = 0.0
    if ranks > 2 and idiosyncratic > _ROUNDING_VAR:
        # A doubly centred residual keeps (n - 1)(n - 2) / n^2 of the third moment along each axis.
        kept = (steps - 1) * (steps - 2) / steps**2 * (ranks - 1) * (ranks - 2) / ranks**2
        skewness = float(np.mean(residual_TR**3)) / kept / idiosyncratic**1.5
    return Moments(
        mean_s=mean_s,
        persistent_var=float(y_TR.mean(axis=0).var(ddof=1)) - idiosyncratic / steps,
        common_var=float(y_TR.mean(axis=1).var(ddof=1)) - idiosyncratic / ranks,
        idiosyncratic_var=idiosyncratic,
        idiosyncratic_skewness=skewness,
        max_over_mean=tuple(float(subset_max(y_TR, width).mean()) for width in widths(ranks)),
        slow_factor=float(compute_s_TR[:, slow_R].mean()) / mean_s if slow_R.any() else 1.0,
    )


def slow_workers(compute_s_TR: Array) -> NDArray[np.bool_]:
    """Which workers are persistently slow outliers, ``(R,)``. Needs three workers to tell."""
    typical_s_R = np.median(compute_s_TR, axis=0)
    peers_s = np.median(typical_s_R)
    deviation_s = np.median(np.abs(typical_s_R - peers_s))
    slow: NDArray[np.bool_] = (typical_s_R > SLOW_FACTOR * peers_s) & (typical_s_R > peers_s + SLOW_MADS * deviation_s)
    return slow


def measure_stage(compute_s_TR: Array, *, stage: int = 0) -> StageMeasurements:
    """Measure one pipeline stage."""
    steps, workers = compute_s_TR.shape
    if steps < MIN_STEPS or workers < 2:
        raise InputError(f"stage {stage}: {steps} complete steps of {workers} ranks; needed: {MIN_STEPS} and 2")
    if not (np.isfinite(compute_s_TR).all() and (compute_s_TR > 0).all()):
        raise InputError(f"stage {stage}: compute time of a step is {compute_s_TR.min()} s; allowed: positive, finite")
    slow_R = slow_workers(compute_s_TR)
    healthy_s_TR = compute_s_TR[:, ~slow_R]
    x_TR = healthy_s_TR / healthy_s_TR.mean(axis=1, keepdims=True) - 1.0
    ranks = x_TR.shape[1]
    blocks = np.array_split(np.arange(steps), min(steps, REPLICATES))
    return StageMeasurements(
        stage=stage,
        steps=steps,
        workers=workers,
        slow_workers=tuple(int(r) for r in np.flatnonzero(slow_R)),
        quantiles=tuple(float(q) for q in np.quantile(x_TR * np.sqrt(ranks / (ranks - 1)), QUANTILES)),
        all=moments(compute_s_TR, slow_R),
        replicates=tuple(moments(np.delete(compute_s_TR, block, axis=0), slow_R) for block in blocks),
    )


def stage_times(trace: Trace, *, job: str | None = None) -> dict[int, Array]:
    """Compute times ``(T, R)``, seconds, of the workers of every stage of one job, in the steps that all completed."""
    mine = trace.isin("job", trace.job_name(job))
    rank, iteration, start_s, end_s = (trace.column(n)[mine] for n in ("rank", "iteration", "start_s", "end_s"))
    is_compute = trace.isin("op", *COMPUTE_OPS)[mine]
    stage_of = trace.metadata.of_ranks("stage", 0)
    stage = np.array([stage_of.get(int(r), 0) for r in np.unique(rank)])[np.unique(rank, return_inverse=True)[1]]
    by_stage = {}
    for number in np.unique(stage).tolist():
        rows = is_compute & (stage == number)
        by_stage[number] = _compute_matrix(rank[rows], iteration[rows], (end_s - start_s)[rows])
    return by_stage


def _compute_matrix(rank: NDArray[np.int32], iteration: NDArray[np.int32], duration_s: Array) -> Array:
    """Compute time per step and worker ``(T, R)`` of the steps every worker took part in."""
    steps, t = np.unique(iteration, return_inverse=True)
    ranks, r = np.unique(rank, return_inverse=True)
    shape = (len(steps), len(ranks))
    cell = t * len(ranks) + r
    total_s_TR: Array = np.bincount(cell, duration_s, len(steps) * len(ranks)).reshape(shape).astype(np.float64)
    complete_T = np.bincount(cell, minlength=total_s_TR.size).reshape(shape).all(axis=1)
    return total_s_TR[complete_T]
