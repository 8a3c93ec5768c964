"""The noise of what ranks compute in a step, as keys of a cluster.

Axes: T steps, R ranks. ``compute_s_TR`` is the sum of a rank's compute operations in a step. With y = compute time /
mean over steps and healthy ranks, a two-way random-effects analysis of variance (Searle, Casella and McCulloch,
*Variance Components*, 1992, section 4.5) splits y into persistent (per rank), common-mode (per step) and idiosyncratic
variance, each unbiased and therefore sometimes negative. E[max]/mean at width n is the exact expectation of the maximum
over a random subset of n ranks without replacement, from order statistics, divided by the mean over all.

The model, per rank r and iteration t (the engine's, without its rare events):

    compute_s = mean_s * persistent_r * (1 + common_t) * (1 + jitter_rt + imbalance_rt)

persistent_r = 1 + persistent_cv * N(0, 1), times ``slow_factor`` on ``slow_ranks`` ranks; common and jitter are
normal; imbalance is a shifted gamma with mean 0, which three moments fix (shape 4 / skewness^2) and whose tail, unlike
a lognormal's, gives the right maximum. A residual whose skewness is significant is imbalance, any other is jitter: the
sum of both has one parameter more than moments and maxima can tell apart.

Errors are jackknife errors over blocks of steps: a bootstrap repeats steps, and repeated steps look like persistent
differences between ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from paceenv.calibration.parameters import Parameter, exact
from paceenv.core.errors import InputError
from paceenv.core.trace import COMPUTE_OPS, Trace

WIDTHS: Final = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
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
SIGNIFICANT: Final = 3.0
"""A positive skewness counts if it is at least so many standard errors."""
USUAL_PERSISTENT_CV: Final = 0.015
"""Usual persistent difference of healthy workers: between the 0.2 to 0.4 % of the packaged production jobs and the 8 %
of GPUs of one kind (Sinha et al., "Not all GPUs are created equal", SC 2022)."""
PRIOR_WORKERS: Final = 2
"""The usual difference counts as so many more workers in errors: three workers may be alike by chance."""
COMPONENTS: Final = "variance components of a rank's compute in a step, jackknife over steps"
_TAIL = 1e-12
_GRID = 1001
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(21)
_WEIGHTS /= _WEIGHTS.sum()

Array = NDArray[np.float64]


class Moments(NamedTuple):
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


def widths(workers: int) -> tuple[int, ...]:
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


def imbalance_cdf(x: Array, persistent_cv: float, cv: float, skew: float) -> Array:
    """Distribution function at ``x`` of a healthy worker's compute over the mean, without the common mode.

    The imbalance's own, averaged over the nodes of the persistent part.
    """
    shape = 4.0 / skew**2
    nodes, weights = (_NODES, _WEIGHTS) if persistent_cv else (np.zeros(1), np.ones(1))
    factors = np.maximum(1.0 + persistent_cv * nodes, _TAIL)
    z = (x[..., None] / factors - 1.0) / max(cv, _TAIL)
    chance: Array = special.gammainc(shape, np.maximum(shape + z * math.sqrt(shape), 0.0)) @ weights
    return chance


def expected_max(persistent_cv: float, cv: float, skew: float, tested: tuple[int, ...]) -> Array:
    """E[max]/mean of n independent workers for every n of ``tested``: b minus the integral of F^n up to b."""
    shape, sd = 4.0 / skew**2, -special.ndtri(_TAIL)
    scale = cv / math.sqrt(shape)
    low, high = (1.0 + scale * (end(shape, _TAIL) - shape) for end in (special.gammaincinv, special.gammainccinv))
    x = np.linspace(min(low, low * (1.0 - sd * persistent_cv)), high * (1.0 + sd * persistent_cv), _GRID)
    chance = imbalance_cdf(x, persistent_cv, cv, skew)
    expected: Array = x[-1] - np.array([np.trapezoid(chance**width, x) for width in tested])
    return expected


@dataclass(frozen=True)
class NoiseFit:
    """The noise of some ranks as keys of a cluster, and which of the ranks are slow, by their places.

    Of jitter and imbalance it has the one that the fit did not fix at zero.
    """

    parameters: tuple[Parameter, ...]
    slow: tuple[int, ...]


def fit_noise(compute_s_TR: Array) -> NoiseFit:
    steps, ranks = compute_s_TR.shape
    if steps < MIN_STEPS or ranks < 2:
        raise InputError(
            f"noise of compute: {steps} complete steps, ranks: {ranks}; needed: {MIN_STEPS} steps, 2 ranks"
        )
    if not (np.isfinite(compute_s_TR).all() and (compute_s_TR > 0).all()):
        raise InputError(
            f"noise of compute: compute time of a step is {compute_s_TR.min()} s; allowed: positive, finite"
        )
    slow_R = slow_workers(compute_s_TR)
    slow, healthy = int(slow_R.sum()), ranks - int(slow_R.sum())
    whole = moments(compute_s_TR, slow_R)
    blocks = np.array_split(np.arange(steps), min(steps, REPLICATES))
    parts = [moments(np.delete(compute_s_TR, block, axis=0), slow_R) for block in blocks]
    target_se = _jackknife_se(np.array([_targets(part) for part in parts]))
    skewed = whole.idiosyncratic_skewness > SIGNIFICANT * target_se[1]
    t = float(stats.t.ppf(0.975, len(parts) - 1))
    # with what is usual as so many more workers: an error must not vanish because three happen to be alike
    freedom = healthy - 1 + PRIOR_WORKERS
    usual_var = PRIOR_WORKERS * USUAL_PERSISTENT_CV**2
    workers_var = ((healthy - 1) * max(whole.persistent_var, 0.0) + usual_var) / freedom

    def jackknife(key: str, value: float, replicates: list[float]) -> Parameter:
        se = float(_jackknife_se(np.array(replicates)))
        return Parameter(key, value, se, max(value - t * se, 0.0), value + t * se, COMPONENTS)

    def over_workers(key: str, name: str, share: float) -> Parameter:
        over_steps = jackknife(key, getattr(whole, name), [getattr(part, name) for part in parts])
        return _with_workers(over_steps, workers_var * share, (freedom, len(parts) - 1))

    def deviation(key: str, name: str) -> Parameter:
        value, se = getattr(whole, name), float(_jackknife_se(np.array([getattr(part, name) for part in parts])))
        return _from_variances(key, value, value - t * se, value + t * se, t)

    fitted = [over_workers("job.compute_s", "mean_s", 1.0 / healthy)]
    if not skewed:
        fitted.append(deviation("noise.jitter_cv", "idiosyncratic_var"))
    fitted += [deviation("noise.common_cv", "common_var"), _persistent(whole, steps, healthy)]
    if skewed:
        cv_skew, *parts_cv_skew = (_fit_imbalance(one, target_se) for one in (whole, *parts))
        for i, key in enumerate(("noise.imbalance_cv", "noise.imbalance_skew")):
            fitted.append(jackknife(key, cv_skew[i], [one[i] for one in parts_cv_skew]))
    if slow:
        fitted.append(exact("noise.slow_ranks", slow, COMPONENTS))
        fitted.append(over_workers("noise.slow_factor", "slow_factor", 1.0 / slow + 1.0 / healthy))
    return NoiseFit(tuple(fitted), tuple(np.flatnonzero(slow_R).tolist()))


def _targets(moments: Moments) -> Array:
    """The targets of the fit of the idiosyncratic part: its CV, its skewness, and E[max]/mean by width."""
    return np.array([math.sqrt(moments.idiosyncratic_var), moments.idiosyncratic_skewness, *moments.max_over_mean])


def _fit_imbalance(moments: Moments, target_se: Array) -> tuple[float, float]:
    """CV and skewness of the imbalance, by least squares on moments and maxima together."""
    persistent_cv, targets = math.sqrt(max(moments.persistent_var, 0.0)), _targets(moments)
    fitted_widths = WIDTHS[: len(moments.max_over_mean)]

    def misfit(parameters: Array) -> Array:
        predicted_max = expected_max(persistent_cv, parameters[0], parameters[1], fitted_widths)
        predicted = np.concatenate([parameters, predicted_max])
        weighted: Array = (predicted - targets) / target_se
        return weighted

    start = np.clip(targets[:2], [1e-9, 0.05], [np.inf, 10.0])
    best = optimize.least_squares(misfit, start, bounds=([1e-9, 0.02], [np.inf, 20.0]), x_scale=start).x
    return float(best[0]), float(best[1])


def _persistent(moments: Moments, steps: int, healthy: int) -> Parameter:
    """The persistent part, with a chi-square interval: few workers limit it, which leaving out steps cannot show.

    The variance of the workers' means is persistent plus idiosyncratic / T, the latter well known (and memoryless).
    """
    freedom = max(healthy - 1, 1)
    from_steps = moments.idiosyncratic_var / steps
    between = max(moments.persistent_var, 0.0) + from_steps
    lo, hi = (between * freedom / float(stats.chi2.ppf(level, freedom)) for level in (0.975, 0.025))
    normal = float(stats.norm.ppf(0.975))
    return _from_variances("noise.persistent_cv", moments.persistent_var, lo - from_steps, hi - from_steps, normal)


def _with_workers(over_steps: Parameter, relative_var: float, freedom: tuple[int, int]) -> Parameter:
    """A parameter with the error of having seen few workers, ``relative_var``, beside that over steps.

    Leaving out steps cannot show it, as every worker is in all of them. Student's t with the degrees of ``freedom`` of
    both, workers and steps (Welch and Satterthwaite).
    """
    value, se = over_steps.value, over_steps.se
    assert value is not None
    assert se is not None
    steps_var, workers_var = se**2, relative_var * value**2
    total = steps_var + workers_var
    t = stats.t.ppf(0.975, total**2 / (workers_var**2 / freedom[0] + steps_var**2 / freedom[1]))
    half = float(t) * math.sqrt(total)
    return replace(over_steps, se=math.sqrt(total), lo=max(value - half, 0.0), hi=value + half)


def _jackknife_se(replicates: Array) -> Array:
    """Standard error over the first axis of leave-one-block-out values; never 0, so that it can be a weight."""
    blocks = len(replicates)
    se: Array = np.sqrt((blocks - 1.0) ** 2 / blocks * replicates.var(axis=0, ddof=1))
    return np.maximum(se, 1e-12)


def _from_variances(key: str, value: float, lo: float, hi: float, t: float) -> Parameter:
    """Roots of a variance and its interval; the error is the interval's half width / t, as derivatives fail near 0."""
    value, lo, hi = (math.sqrt(max(variance, 0.0)) for variance in (value, lo, hi))
    return Parameter(key, value, (hi - lo) / (2.0 * t), lo, hi, COMPONENTS)
