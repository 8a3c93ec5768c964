"""What of the variation recurs: autocorrelation, what the past predicts, and the period of outliers and of patterns.

Axes: V values in order, K lags.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from paceenv.core.intervals import Interval
from paceenv.core.student_t import student_t_quantile

MAX_LAG: Final = 20
ORDERS: Final = (1, 2, 5, 10)
"""Lengths of the autoregressions that are tried."""
MIN_PREDICTED: Final = 60
"""Values below which prediction cannot be tested on unseen ones."""
MAX_PERIOD: Final = 128
MAX_VALUES: Final = 20_000
"""Values of which a pattern's period is looked for."""
_ALPHA = 1e-4

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Period:
    """Something that happens every ``steps`` steps; ``share`` of its occurrences keep to it.

    For a pattern of ordinary steps ``share`` is the share of their variance that it explains.
    """

    steps: int
    share: float


def autocorrelation(values: Array, run_V: Integers) -> Array:
    """At lags from 1, ``(K,)``; pairs do not reach from one run into another. Empty for values that do not vary."""
    lags = min(MAX_LAG, len(values) // 4)
    centred = values - values.mean()
    variance = float((centred**2).mean())
    if lags < 1 or not variance > 1e-18 * float(values.mean()) ** 2:
        return np.zeros(0)
    found = []
    for lag in range(1, lags + 1):
        same = run_V[lag:] == run_V[:-lag]
        pairs = (centred[lag:] * centred[:-lag])[same]
        found.append(float(pairs.mean()) / variance if len(pairs) else 0.0)
    return np.array(found)


def predictable(values: Array) -> Interval | None:
    """Share of the variance that the past predicts, 0 to 1, on values that the prediction has not seen.

    Autoregressions are fitted to the first half and then to the first three quarters, and tested on the quarter that
    follows. None for fewer than :data:`MIN_PREDICTED` values, or values that do not vary.
    """
    n = len(values)
    if n < MIN_PREDICTED or not float(values.std()) > 1e-9 * float(values.mean()):
        return None
    error2, spread2 = [], []
    for cut, end in ((n // 2, 3 * n // 4), (3 * n // 4, n)):
        predicted = _predict(values, cut, end)
        error2.append((values[cut:end] - predicted) ** 2)
        spread2.append((values[cut:end] - values[cut:end].mean()) ** 2)
    error2_v, spread2_v = np.concatenate(error2), np.concatenate(spread2)
    if not spread2_v.sum() > 0.0:
        return None
    share = 1.0 - float(error2_v.sum() / spread2_v.sum())
    blocks = np.array_split(np.arange(len(error2_v)), 20)
    sums = np.array([(error2_v[b].sum(), spread2_v[b].sum()) for b in blocks])
    picks = np.random.default_rng(0).integers(0, len(sums), (400, len(sums)))
    drawn = 1.0 - sums[picks, 0].sum(axis=1) / np.maximum(sums[picks, 1].sum(axis=1), 1e-300)
    low, high = np.clip(np.quantile(drawn, [0.025, 0.975]), 0.0, 1.0).tolist()
    return Interval(min(max(share, 0.0), 1.0), low, high)


def _predict(values: Array, cut: int, end: int) -> Array:
    """One-step predictions of ``values[cut:end]`` by the autoregression that fits those before ``cut`` best (AIC)."""
    mean = float(values[:cut].mean())
    centred = values - mean
    best, chosen = math.inf, np.full(end - cut, mean)
    for order in ORDERS:
        if cut < 6 * order:
            continue
        past = np.stack([centred[order - k - 1 : end - k - 1] for k in range(order)], axis=1)
        fit, new = past[: cut - order], past[cut - order :]
        gram = fit.T @ fit
        weights = np.linalg.solve(gram + 1e-6 * np.trace(gram) / order * np.eye(order), fit.T @ centred[order:cut])
        left = float(((centred[order:cut] - fit @ weights) ** 2).mean())
        score = (cut - order) * math.log(max(left, 1e-300)) + 2.0 * order
        if score < best:
            best, chosen = score, mean + new @ weights
    return chosen


def outlier_period(step_V: Integers, outlier_V: NDArray[np.bool_]) -> Period | None:
    """How many steps lie between outliers, if most keep to one period and most of its places have one."""
    at = step_V[outlier_V]
    if len(at) < 4:
        return None
    gap = max(int(np.median(np.diff(step_V))) if len(step_V) > 1 else 1, 1)
    gaps = np.diff(at)
    found: list[Period] = []
    for steps in np.unique(gaps[gaps > 0])[:200].tolist():
        if steps < 2 * gap:
            continue
        phase = at % steps
        # A logged value covers the steps since the last one, so phases within a logging interval are one.
        nearest = np.minimum(np.abs(phase[:, None] - phase[None, :]), steps - np.abs(phase[:, None] - phase[None, :]))
        members = int((nearest < gap).sum(axis=1).max()) if len(at) <= 2000 else 0
        places = (at[-1] - at[0]) / steps + 1.0
        chance = min(2.0 * gap / steps, 1.0)
        unlikely = float(stats.binom.sf(members - 2, len(at) - 1, chance)) < 1e-2 / len(gaps)
        if members >= 0.7 * len(at) and members >= 0.7 * places and unlikely:
            found.append(Period(int(steps), members / len(at)))
    return max(found, key=lambda period: (period.share, period.steps), default=None)


def pattern_period(values: Array, gap: int) -> Period | None:
    """The period of ordinary steps that take turns, as every k-th one being longer; None if there is none."""
    values = values[:MAX_VALUES]
    n, total = len(values), float(((values - values.mean()) ** 2).sum())
    if n < 16 or not total > 1e-18 * n * float(values.mean()) ** 2:
        return None
    best: Period | None = None
    periods = range(2, min(MAX_PERIOD, n // 4) + 1)
    for period in periods:
        phase = np.arange(n) % period
        means = np.bincount(phase, values, period) / np.bincount(phase, minlength=period)
        between = float((np.bincount(phase, minlength=period) * (means - values.mean()) ** 2).sum())
        ratio = (between / (period - 1)) / max((total - between) / (n - period), 1e-300)
        adjusted = 1.0 - (total - between) / (n - period) / (total / (n - 1))
        clear = float(stats.f.sf(ratio, period - 1, n - period)) < _ALPHA / len(periods) and adjusted > 0.1
        # A multiple of the period explains as much; it must explain clearly more to be the better answer.
        if clear and (best is None or adjusted > 1.1 * best.share + 0.02):
            best = Period(period * gap, adjusted)
    return best


_BLOCKS = 10
_SMALLEST_DRIFT = 0.002


@dataclass(frozen=True)
class Drift:
    """Change of the level from the beginning to the end, relative, with the half width of its 95 % interval.

    ``ends_s`` are the beginning and the end of the line, seconds.
    """

    change: float
    half_width: float
    ends_s: tuple[float, float]


def drift(values: Array) -> Drift | None:
    """A steady change from the beginning to the end, by a line through the means of ten blocks, or fewer of few values.

    None if it cannot be told from 0, is below 0.2 %, or for fewer than 12 values.
    """
    n = len(values)
    if n < 12:
        return None
    blocks = _BLOCKS if n >= 3 * _BLOCKS else n // 3
    mean_s = float(values.mean())
    means = np.array([block.mean() for block in np.array_split(values, blocks)]) / mean_s
    x = (np.arange(blocks) - (blocks - 1) / 2.0) / blocks
    slope = float(x @ means / (x @ x))
    left = means - means.mean() - slope * x
    # Neighbouring blocks of a slow variation are alike, so that a line fits them by chance more often.
    memory = max(float(left[1:] @ left[:-1]) / max(float(left @ left), 1e-300), 0.0)
    error = math.sqrt(float(left @ left) / (blocks - 2) / float(x @ x)) * math.sqrt((1.0 + memory) / (1.0 - memory))
    half_width = error * student_t_quantile(0.025, blocks - 2)
    if abs(slope) < max(1.5 * half_width, _SMALLEST_DRIFT):
        return None
    half_s = 0.5 * (n - 1) * float(np.polyfit(np.arange(n), values, 1)[0])
    return Drift(slope, half_width, (max(mean_s - half_s, 0.0), max(mean_s + half_s, 0.0)))
