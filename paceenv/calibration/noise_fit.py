"""Compute noise of a job: measured as a few numbers that can be stored where a trace cannot, and fitted to them.

Axes: T steps, R ranks (workers) of one pipeline stage. ``compute_s_TR`` is the sum of a worker's compute operations in
a step. With y = compute time / mean over steps and healthy workers, a two-way random-effects analysis of variance
(Searle, Casella and McCulloch, *Variance Components*, 1992, section 4.5) splits y into persistent (per worker),
common-mode (per step) and idiosyncratic variance, each unbiased and therefore sometimes negative. E[max]/mean at width
n is the exact expectation of the maximum over a random subset of n workers without replacement, from order statistics,
divided by the mean over all.

The model, per worker r and iteration t (the engine's, without its rare events):

    compute_s = mean_s * persistent_r * (1 + common_t) * (1 + jitter_rt + imbalance_rt)

persistent_r = 1 + persistent_cv * N(0, 1), times ``slow_factor`` on ``slow_ranks`` workers; common and jitter are
normal; imbalance is a shifted gamma with mean 0, which three moments fix (shape 4 / skewness^2) and whose tail, unlike
a lognormal's, gives the right maximum. A residual whose skewness is significant is imbalance, any other is jitter: the
sum of both has one parameter more than moments and maxima can tell apart.

Everything is a function of :class:`StageMeasurements`, so that a packaged summary and the trace it came from give the
same fit and the same error bars. Those are jackknife errors over blocks of steps: a bootstrap repeats steps, and
repeated steps look like persistent differences between workers.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from paceenv.calibration.parameters import Estimate
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
"""A worker is slow if its median step is SLOW_FACTOR x its peers' median or more, and SLOW_MADS deviations above it.
Of two, the other one is all peers."""

ROUNDING: Final = 1e-6
"""Of a step, or of what has no unit: stamps that differ by less do not differ."""
_ROUNDING_VAR: Final = 1e-24  # relative variance below which equal times differ by rounding alone
TOLERANCE: Final = 0.02
"""Largest relative error of E[max]/mean on held-out steps for a fit that counts as good."""
SIGNIFICANT: Final = 3.0
"""A positive skewness counts if it is at least so many standard errors."""
USUAL_PERSISTENT_CV: Final = 0.015
"""Usual persistent difference of healthy workers: between the 0.2 to 0.4 % of the packaged production jobs and the 8 %
of GPUs of one kind (Sinha et al., "Not all GPUs are created equal", SC 2022)."""
PRIOR_WORKERS: Final = 2
"""The usual difference counts as so many more workers in errors: three workers may be alike by chance."""
_TAIL = 1e-12
_GRID = 1001
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(21)
_WEIGHTS /= _WEIGHTS.sum()

Array = NDArray[np.float64]


class Moments(Config):
    """Moments of one set of steps; variances and skewness are of compute time relative to its mean.

    ``max_over_mean`` holds E[max]/mean at the widths of :data:`WIDTHS` up to the number of healthy workers.
    ``slow_factor`` is slow over healthy mean compute time, 1 without slow workers.
    """

    mean_s: float
    persistent_var: float
    common_var: float
    idiosyncratic_var: float
    idiosyncratic_skewness: float
    max_over_mean: tuple[float, ...]
    slow_factor: float


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


class NoiseMeasurements(Config):
    """The noise of one job, as a packaged file."""

    source: str
    stages: tuple[StageMeasurements, ...]


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
    healthy_s_TR = _healthy(compute_s_TR, slow_R)
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


def _healthy(compute_s_TR: Array, slow_R: NDArray[np.bool_]) -> Array:
    """The healthy workers' columns. A single one has no peer: both are taken, with its mean and their pooled CV.

    Pooled by seconds, as the slow one's noise is that of the step.
    """
    healthy_s_TR = compute_s_TR[:, ~slow_R]
    if healthy_s_TR.shape[1] > 1:
        return healthy_s_TR
    mean_s_R = compute_s_TR.mean(axis=0)
    relative_TR = (compute_s_TR - mean_s_R) / math.sqrt(float(np.mean(mean_s_R**2)))
    pooled_s_TR: Array = healthy_s_TR.mean() * (1.0 + relative_TR)
    return pooled_s_TR


def slow_workers(compute_s_TR: Array) -> NDArray[np.bool_]:
    """Which workers are persistently slow outliers, ``(R,)``."""
    typical_s_R = np.median(compute_s_TR, axis=0)
    if len(typical_s_R) == 2:
        return np.asarray(typical_s_R > SLOW_FACTOR * typical_s_R.min())
    peers_s = np.median(typical_s_R)
    deviation_s = np.median(np.abs(typical_s_R - peers_s))
    slow: NDArray[np.bool_] = (typical_s_R > SLOW_FACTOR * peers_s) & (typical_s_R > peers_s + SLOW_MADS * deviation_s)
    return slow


def measure_stage(compute_s_TR: Array, *, stage: int = 0) -> StageMeasurements:
    """Measure one pipeline stage."""
    steps, workers = compute_s_TR.shape
    if steps < MIN_STEPS or workers < 2:
        raise InputError(f"stage {stage}: {steps} complete steps, ranks: {workers}; needed: {MIN_STEPS} steps, 2 ranks")
    if not (np.isfinite(compute_s_TR).all() and (compute_s_TR > 0).all()):
        raise InputError(f"stage {stage}: compute time of a step is {compute_s_TR.min()} s; allowed: positive, finite")
    slow_R = slow_workers(compute_s_TR)
    healthy_s_TR = _healthy(compute_s_TR, slow_R)
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


@dataclass(frozen=True)
class WorkerDistribution:
    """Compute time of a healthy worker relative to the mean, without the common mode that all workers share.

    The residual (jitter or imbalance) has mean 0 and is a shifted gamma; with ``skew`` 0, its limit, the normal.
    """

    persistent_cv: float
    residual_cv: float
    skew: float

    def cdf(self, x: Array) -> Array:
        """Distribution function at ``x`` (any shape): the residual's own, averaged over the persistent part's nodes."""
        mixed_cv, kernel = self.persistent_cv, self._residual_cdf
        if not self.skew and self.persistent_cv > self.residual_cv:
            # A product of two normals: to average over the narrower one takes the fewest nodes.
            mixed_cv, kernel = self.residual_cv, lambda y: np.asarray(special.ndtr(y / self.persistent_cv))
        if not mixed_cv:
            return kernel(x - 1.0)
        factors = np.maximum(1.0 + mixed_cv * _NODES, _TAIL)
        chance: Array = kernel(x[..., None] / factors - 1.0) @ _WEIGHTS
        return chance

    def expected_max(self, tested: tuple[int, ...]) -> Array:
        """E[max]/mean of n independent workers for every n of ``tested``: b minus the integral of F^n up to b."""
        if not (self.persistent_cv or self.residual_cv):
            return np.ones(len(tested))
        sd = -special.ndtri(_TAIL)
        low, high = 1.0 - sd * self.residual_cv, 1.0 + sd * self.residual_cv
        if self.skew:
            shape = 4.0 / self.skew**2
            scale = self.residual_cv / math.sqrt(shape)
            low, high = (
                1.0 + scale * (end(shape, _TAIL) - shape) for end in (special.gammaincinv, special.gammainccinv)
            )
        x = np.linspace(min(low, low * (1.0 - sd * self.persistent_cv)), high * (1.0 + sd * self.persistent_cv), _GRID)
        chance = self.cdf(x)
        expected: Array = x[-1] - np.array([np.trapezoid(chance**width, x) for width in tested])
        return expected

    def _residual_cdf(self, y: Array) -> Array:
        z = y / max(self.residual_cv, _TAIL)
        if not self.skew:
            return np.asarray(special.ndtr(z))
        shape = 4.0 / self.skew**2
        return np.asarray(special.gammainc(shape, np.maximum(shape + z * math.sqrt(shape), 0.0)))


@dataclass(frozen=True)
class NoiseFit:
    """The noise of one stage. Parameters that the fit fixed at zero (jitter or imbalance) have no error bars: None.

    ``distance`` is the largest difference between fitted and measured distribution function at the stored quantiles.
    """

    source: str
    stage: int
    workers: int
    slow_workers: tuple[int, ...]
    mean_compute_s: Estimate
    persistent_cv: Estimate
    common_cv: Estimate
    jitter_cv: Estimate | None
    imbalance_cv: Estimate | None
    imbalance_skew: Estimate | None
    slow_factor: Estimate | None
    distance: float

    def to_config(self) -> dict[str, Any]:
        """``mean_compute_s``, the ``noise`` section of a cluster config, and where it comes from in ``calibration``."""
        noise: dict[str, float] = {"jitter_cv": 0.0, "common_cv": 0.0, "persistent_cv": 0.0}
        noise |= {"slow_ranks": len(self.slow_workers), "slow_factor": 1.0, "imbalance_cv": 0.0, "imbalance_skew": 0.0}
        fitted = {"job.compute_s": asdict(self.mean_compute_s)}
        for name in noise:
            estimate = getattr(self, name, None)
            if estimate is not None:
                noise[name] = estimate.value
                fitted[f"noise.{name}"] = asdict(estimate)
        calibration = {"source": f"{self.source}, stage {self.stage}", "fitted": fitted}
        return {"mean_compute_s": self.mean_compute_s.value, "noise": noise, "calibration": calibration}


def fit_noise(m: StageMeasurements, source: str) -> NoiseFit:
    """Fit one stage's noise."""
    target_se = _jackknife_se(np.array([_targets(replicate) for replicate in m.replicates]))
    skewed = m.all.idiosyncratic_skewness > SIGNIFICANT * target_se[1]
    model = _fit_worker(m.all, skewed, target_se)
    models = [_fit_worker(replicate, skewed, target_se) for replicate in m.replicates]
    t = float(stats.t.ppf(0.975, len(m.replicates) - 1))
    slow = len(m.slow_workers)
    healthy, (workers_var, freedom) = m.workers - slow, _between_workers(m)

    def jackknife(value: float, replicates: list[float]) -> Estimate:
        se = float(_jackknife_se(np.array(replicates)))
        return Estimate(value, se, max(value - t * se, 0.0), value + t * se)

    def with_workers(value: float, replicates: list[float], share: float) -> Estimate:
        over_steps = jackknife(value, replicates)
        return _with_workers(over_steps, workers_var * share * value**2, (freedom, len(replicates) - 1))

    def deviation(name: str) -> Estimate:
        value, replicates = getattr(m.all, name), np.array([getattr(replicate, name) for replicate in m.replicates])
        se = float(_jackknife_se(replicates))
        return _from_variances(value, value - t * se, value + t * se, t)

    return NoiseFit(
        source=source,
        stage=m.stage,
        workers=m.workers,
        slow_workers=m.slow_workers,
        mean_compute_s=with_workers(m.all.mean_s, [r.mean_s for r in m.replicates], 1.0 / healthy),
        persistent_cv=_persistent(m),
        common_cv=deviation("common_var"),
        jitter_cv=None if skewed else deviation("idiosyncratic_var"),
        imbalance_cv=jackknife(model.residual_cv, [r.residual_cv for r in models]) if skewed else None,
        imbalance_skew=jackknife(model.skew, [r.skew for r in models]) if skewed else None,
        slow_factor=with_workers(m.all.slow_factor, [r.slow_factor for r in m.replicates], 1.0 / slow + 1.0 / healthy)
        if slow
        else None,
        distance=float(np.max(np.abs(model.cdf(1.0 + np.array(m.quantiles)) - QUANTILES))),
    )


def _targets(moments: Moments) -> Array:
    """The targets of the fit of the idiosyncratic part: its CV, its skewness, and E[max]/mean by width."""
    return np.array([math.sqrt(moments.idiosyncratic_var), moments.idiosyncratic_skewness, *moments.max_over_mean])


def _fit_worker(moments: Moments, skewed: bool, target_se: Array) -> WorkerDistribution:
    """The worker's distribution: by moments, and if skewed then by least squares on moments and maxima together."""
    persistent_cv = math.sqrt(max(moments.persistent_var, 0.0))
    targets = _targets(moments)
    if not skewed:
        return WorkerDistribution(persistent_cv, float(targets[0]), 0.0)
    fitted_widths = WIDTHS[: len(moments.max_over_mean)]

    def misfit(parameters: Array) -> Array:
        predicted_max = WorkerDistribution(persistent_cv, *parameters).expected_max(fitted_widths)
        predicted = np.concatenate([parameters, predicted_max])
        weighted: Array = (predicted - targets) / target_se
        return weighted

    start = np.clip(targets[:2], [1e-9, 0.05], [np.inf, 10.0])
    best = optimize.least_squares(misfit, start, bounds=([1e-9, 0.02], [np.inf, 20.0]), x_scale=start).x
    return WorkerDistribution(persistent_cv, *best.tolist())


def _persistent(m: StageMeasurements) -> Estimate:
    """The persistent part, with a chi-square interval: few workers limit it, which leaving out steps cannot show.

    The variance of the workers' means is persistent plus idiosyncratic / T, the latter well known (and memoryless).
    """
    freedom = max(m.workers - len(m.slow_workers) - 1, 1)
    from_steps = m.all.idiosyncratic_var / m.steps
    between = max(m.all.persistent_var, 0.0) + from_steps
    lo, hi = (between * freedom / float(stats.chi2.ppf(level, freedom)) for level in (0.975, 0.025))
    return _from_variances(m.all.persistent_var, lo - from_steps, hi - from_steps, float(stats.norm.ppf(0.975)))


def _between_workers(m: StageMeasurements) -> tuple[float, int]:
    """Variance of healthy workers' persistent differences as errors count it, and its degrees of freedom.

    With what is usual as PRIOR_WORKERS more: the error of a mean over three that happen to be alike must not vanish
    with their differences.
    """
    seen = m.workers - len(m.slow_workers) - 1
    freedom = seen + PRIOR_WORKERS
    variance = seen * max(m.all.persistent_var, 0.0) + PRIOR_WORKERS * USUAL_PERSISTENT_CV**2
    return variance / freedom, freedom


def _with_workers(over_steps: Estimate, workers_var: float, freedom: tuple[int, int]) -> Estimate:
    """An estimate with the error of having seen few workers, ``workers_var``, beside that over steps.

    Leaving out steps cannot show it, as every worker is in all of them. Student's t with the degrees of ``freedom`` of
    both, workers and steps (Welch and Satterthwaite).
    """
    steps_var = over_steps.se**2
    total = steps_var + workers_var
    t = stats.t.ppf(0.975, total**2 / (workers_var**2 / freedom[0] + steps_var**2 / freedom[1]))
    half = float(t) * math.sqrt(total)
    return Estimate(over_steps.value, math.sqrt(total), max(over_steps.value - half, 0.0), over_steps.value + half)


def _jackknife_se(replicates: Array) -> Array:
    """Standard error over the first axis of leave-one-block-out values; never 0, so that it can be a weight."""
    blocks = len(replicates)
    se: Array = np.sqrt((blocks - 1.0) ** 2 / blocks * replicates.var(axis=0, ddof=1))
    return np.maximum(se, 1e-12)


def _from_variances(value: float, lo: float, hi: float, t: float) -> Estimate:
    """Roots of a variance and its interval; the error is the interval's half width / t, as derivatives fail near 0."""
    value, lo, hi = (math.sqrt(max(variance, 0.0)) for variance in (value, lo, hi))
    return Estimate(value, (hi - lo) / (2.0 * t), lo, hi)
