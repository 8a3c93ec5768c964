"""The noise of what ranks compute in a step, as keys of a cluster.

Axes: T steps, R ranks. ``compute_s_TR`` is the sum of a rank's compute operations in a step. With y = compute time /
mean over steps and healthy ranks, a two-way random-effects analysis of variance (Searle, Casella and McCulloch,
*Variance Components*, 1992, section 4.5) splits y into persistent (per rank), common-mode (per step) and idiosyncratic
variance, each unbiased and therefore sometimes negative.

The model, per rank r and iteration t (the engine's, without its rare events):

    compute_s = mean_s * persistent_r * (1 + common_t) * (1 + jitter_rt + imbalance_rt)

persistent_r = 1 + persistent_cv * N(0, 1), times ``slow_factor`` on ``slow_ranks`` ranks; common and jitter are
normal; imbalance is a shifted gamma with mean 0, which three moments fix (shape 4 / skewness^2) and whose tail, unlike
a lognormal's, gives the right maximum. A residual whose skewness is significant is imbalance, any other is jitter: the
sum of both has one parameter more than three moments can tell apart.

Errors are jackknife errors over blocks of steps: a bootstrap repeats steps, and repeated steps look like persistent
differences between ranks.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from paceenv.calibration.parameters import Parameter, exact
from paceenv.core.errors import InputError
from paceenv.core.operation_matrix import read_matrix
from paceenv.core.trace import Trace

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

Array = NDArray[np.float64]


class Moments(NamedTuple):
    """Moments of one set of steps; variances and skewness are of compute time relative to its mean.

    ``slow_factor`` is slow over healthy mean compute time, 1 without slow workers.
    """

    mean_s: float
    persistent_var: float
    common_var: float
    idiosyncratic_var: float
    idiosyncratic_skewness: float
    slow_factor: float


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


def stage_times(trace: Trace) -> dict[int, Array]:
    """Compute times ``(T, R)``, seconds, of the workers of every stage, in the steps that all completed."""
    matrix = read_matrix(trace)
    total_s_RT = matrix.seconds_RT(matrix.is_compute_N)
    works_R, stage_R = total_s_RT.any(axis=1), matrix.stage_R
    of_stages = {number: total_s_RT[works_R & (stage_R == number)].T for number in np.unique(stage_R).tolist()}
    return {number: total_s_TR[(total_s_TR > 0.0).all(axis=1)] for number, total_s_TR in of_stages.items()}


def fit_noise(compute_s_TR: Array) -> tuple[list[Parameter], list[int]]:
    """The noise of some ranks as keys of a cluster, and which of the ranks are slow, by their places.

    Of jitter and imbalance there is the one that the fit did not fix at zero.
    """
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
    # jackknife errors over steps; never 0, so that nothing is known for certain
    count, variances = len(parts), (float(np.var(values, ddof=1)) for values in zip(*parts, strict=True))
    se = Moments(*(max(math.sqrt((count - 1.0) ** 2 / count * variance), 1e-12) for variance in variances))
    t = float(stats.t.ppf(0.975, count - 1))
    # with what is usual as so many more workers: an error must not vanish because three happen to be alike
    freedom = healthy - 1 + PRIOR_WORKERS
    usual_var = PRIOR_WORKERS * USUAL_PERSISTENT_CV**2
    workers_var = ((healthy - 1) * max(whole.persistent_var, 0.0) + usual_var) / freedom

    def around(key: str, value: float, se: float, t: float) -> Parameter:
        return Parameter(key, value, se, max(value - t * se, 0.0), value + t * se, COMPONENTS)

    def over_workers(key: str, value: float, steps_se: float, share: float) -> Parameter:
        """With the error of having seen few workers, which leaving out steps cannot show: every worker is in all.

        Student's t has the degrees of freedom of both, workers and steps (Welch and Satterthwaite).
        """
        steps_var, few_var = steps_se**2, workers_var * share * value**2
        total = steps_var + few_var
        t_both = stats.t.ppf(0.975, total**2 / (few_var**2 / freedom + steps_var**2 / (count - 1)))
        return around(key, value, math.sqrt(total), float(t_both))

    def deviation(key: str, variance: float, se: float) -> Parameter:
        return _from_variances(key, variance, variance - t * se, variance + t * se, t)

    skewness = whole.idiosyncratic_skewness
    is_skewed = skewness > SIGNIFICANT * se.idiosyncratic_skewness
    kind = "noise.imbalance_cv" if is_skewed else "noise.jitter_cv"
    fitted = [
        over_workers("job.compute_s", whole.mean_s, se.mean_s, 1.0 / healthy),
        deviation(kind, whole.idiosyncratic_var, se.idiosyncratic_var),
        deviation("noise.common_cv", whole.common_var, se.common_var),
        _persistent(whole, steps, healthy),
    ]
    if is_skewed:
        fitted.append(around("noise.imbalance_skew", skewness, se.idiosyncratic_skewness, t))
    if slow:
        fitted.append(exact("noise.slow_ranks", slow, COMPONENTS))
        share = 1.0 / slow + 1.0 / healthy
        fitted.append(over_workers("noise.slow_factor", whole.slow_factor, se.slow_factor, share))
    return fitted, np.flatnonzero(slow_R).tolist()


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


def _from_variances(key: str, value: float, lo: float, hi: float, t: float) -> Parameter:
    """Roots of a variance and its interval; the error is the interval's half width / t, as derivatives fail near 0."""
    value, lo, hi = (math.sqrt(max(variance, 0.0)) for variance in (value, lo, hi))
    return Parameter(key, value, (hi - lo) / (2.0 * t), lo, hi, COMPONENTS)
