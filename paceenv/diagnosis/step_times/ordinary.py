"""Levels, warm-up and outliers of a log's step times: cut first, then looked for within what lies between two cuts.

Axes: V values in order.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from paceenv.core.metrics import correlation_length
from paceenv.core.warm_up import unlike_values
from paceenv.diagnosis.outliers import MAX_STALLS, stall_threshold
from paceenv.importers.log_text.conversion import Array, StepLog

WINDOW: Final = 51
"""Values of the running median that an outlier is compared with."""
MAX_WARM_UP: Final = 0.1
"""Share of a run that can be warm-up, beyond its first three values; and at most 100 values."""
_COMPILES: Final = 4.0
"""Times the usual: such a value among the first three ends the warm-up, also where an ordinary one stands before."""
OUTLIER: Final = 8.0
MIN_OUTLIER: Final = 0.03
"""An outlier is so many robust deviations above the usual value, and by at least this share of it."""
_CLIP: Final = 5.0
"""Robust deviations at which values are clipped to find where to cut; levels are medians of raw values."""
_SMOOTH: Final = 5
"""Values of a running median before cutting: single long steps are no levels."""
MIN_LENGTH: Final = 4
"""Values of a level."""
FEW: Final = 20
"""Values that a level lasts at least unless the change is large."""
MIN_CHANGE: Final = 0.01
"""Of the level; smaller changes are no levels."""
LARGE_CHANGE: Final = 0.1
MAX_LEVELS: Final = 24
MIN_MEMORIES: Final = 5.0
"""Times the memory of what is left that a level lasts at least, unless the change is large."""
_OF_MEDIANS: Final = 0.5 * math.pi
"""Variance of a median over that of a mean."""
THRESHOLD: Final = 5.0
"""Standard errors, with memory counted, that two levels differ by: one false change in some thousand logs."""

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Level:
    """Values ``start`` to ``end`` (exclusive), and their median, seconds."""

    start: int
    end: int
    level_s: float


@dataclass(frozen=True)
class Ordinary:
    """The values of a log in classes, ``(V,)`` each: ``warm_up_V``, ``outlier_V``; and the levels of those left."""

    log: StepLog
    warm_up_V: Flags
    outlier_V: Flags
    levels: tuple[Level, ...]  # positions among the steady values

    @property
    def steady_V(self) -> Flags:
        return ~self.warm_up_V

    @property
    def plain_V(self) -> Flags:
        return ~self.warm_up_V & ~self.outlier_V


def split(log: StepLog) -> Ordinary:
    step_s_V, V = log.step_s_V, len(log.step_s_V)
    cuts = find_cuts(step_s_V)
    warm_up_V, outlier_V, usual_s_V = np.zeros(V, bool), np.zeros(V, bool), step_s_V.copy()
    for start, end in itertools.pairwise(cuts):
        usual_s_V[start:end] = running_median(step_s_V[start:end])
    for start, end in itertools.pairwise([0, *(np.flatnonzero(np.diff(log.run_V)) + 1).tolist(), V]):
        inner = [cut - start for cut in cuts if start < cut < end] + [end - start]
        warm_up_V[start : start + _warm_up(step_s_V[start:end], inner)] = True
    if (~warm_up_V).sum() >= 10:
        relative = step_s_V / usual_s_V
        outlier_V = ~warm_up_V & (relative >= _longest_ordinary(relative[~warm_up_V]))
    before_V = np.concatenate([[0], np.cumsum(~warm_up_V)])
    kept = sorted({int(before_V[cut]) for cut in cuts})
    steady_s = step_s_V[~warm_up_V]
    levels = tuple(Level(a, b, float(np.median(steady_s[a:b]))) for a, b in itertools.pairwise(kept))
    return Ordinary(log, warm_up_V, outlier_V, levels)


def _longest_ordinary(relative: Array) -> float:
    """The least outlier among values of which 1 is usual: beyond the tail of the bulk, or many deviations away."""
    deviation = 1.4826 * float(np.median(np.abs(relative - 1.0)))
    far = 1.0 + max(OUTLIER * deviation, MIN_OUTLIER)
    return min(stall_threshold(relative), far if float((relative >= far).mean()) <= MAX_STALLS else math.inf)


def running_median(values: Array, window: int = WINDOW) -> Array:
    """The median of the values around each; of few values that of all."""
    if len(values) < 2 * window:
        return np.full(len(values), float(np.median(values)))
    # Beyond an end the last values' median: the last value itself, repeated, would be the usual one.
    padded = np.pad(values, window // 2, mode="median", stat_length=_SMOOTH)
    return np.asarray(ndimage.median_filter(padded, size=window)[window // 2 : -(window // 2)], np.float64)


def _warm_up(step_s_v: Array, cuts: list[int]) -> int:
    """How many values at the beginning of a run, whose levels end at ``cuts``, are slower than those that follow.

    Or its first one alone is shorter than all others: part of a step.
    """
    most, begins = min(max(3, int(MAX_WARM_UP * len(step_s_v))), 100, len(step_s_v) // 3), 0
    if cuts[0] <= most and float(np.median(step_s_v[: cuts[0]])) > float(np.median(step_s_v[cuts[0] :])):
        begins, cuts = cuts[0], cuts[1:]  # a slow beginning that is short is none of its levels
    within = step_s_v[begins : cuts[0]]
    most = min(most - begins, len(within) // 3)
    if most < 1:
        return begins
    usual_s = float(np.median(within))
    unlike = unlike_values(within, most)[:most]
    slow = unlike & (within[:most] > usual_s)
    slow[0] |= unlike[0] and within[0] < within[1:].min()
    compiled = np.flatnonzero(slow[:3] & (within[:most][:3] > _COMPILES * usual_s)) + 1
    return begins + max(int(np.argmin(slow)) if not slow.all() else most, int(np.max(compiled, initial=0)))


def find_cuts(step_s_V: Array) -> list[int]:
    """Where the level of a series changes, with 0 and its length; only those where it does not change steadily."""
    values = np.log(step_s_V)
    if len(values) >= 2 * _SMOOTH:
        values = running_median(values, _SMOOTH)
    cuts = [0, len(values)]
    while len(cuts) <= MAX_LEVELS:
        gain, at = max(_best_cut(values, a, b) for a, b in itertools.pairwise(cuts))
        if gain <= 0.0:
            break
        cuts = sorted([*cuts, at])
    raw = np.log(step_s_V)
    cuts = _moved(raw, _merged(raw, _moved(raw, cuts)))
    return [0, len(values)] if len(cuts) > 2 and _is_line(values, cuts) else cuts


def _moved(values: Array, cuts: list[int]) -> list[int]:
    """Cuts moved to where raw values change most between the two beside each."""
    for k in range(1, len(cuts) - 1):
        gain, at = _best_cut(values, cuts[k - 1], cuts[k + 1])
        cuts[k] = at if gain > 0.0 else cuts[k]
    return cuts


def clipped(values: Array) -> Array:
    """Values limited to some robust deviations around their median, so that none dominates."""
    middle = float(np.median(values))
    deviation = 1.4826 * float(np.median(np.abs(values - middle)))
    return np.clip(values, middle - _CLIP * deviation, middle + _CLIP * deviation) if deviation > 0.0 else values


def _best_cut(values: Array, start: int, end: int) -> tuple[float, int]:
    """What the best cut of a part takes off its sum of squares, and where it is; 0 if nothing may be cut."""
    part = clipped(values[start:end])
    n = len(part)
    if n < 2 * MIN_LENGTH:
        return 0.0, 0
    at = np.arange(MIN_LENGTH, n - MIN_LENGTH + 1)
    total = np.concatenate([[0.0], np.cumsum(part - part.mean())])
    gain = (total[at] / at - (total[n] - total[at]) / (n - at)) ** 2 * at * (n - at) / n
    best = int(np.argmax(gain))
    return float(gain[best]), start + int(at[best])


def _merged(values: Array, cuts: list[int]) -> list[int]:
    """Cuts of logarithms without those between levels that do not differ clearly.

    What is left between all cuts tells noise and memory. A level must last many times that memory, or a slow variation
    would be one level after the other.
    """
    cuts = list(cuts)
    while len(cuts) > 2:
        left = np.concatenate([clipped(values[a:b] - np.median(values[a:b])) for a, b in itertools.pairwise(cuts)])
        length = correlation_length(left + 1.0)
        variance = _OF_MEDIANS * float((left**2).sum()) / max(len(left) - len(cuts), 1) * length + 1e-12
        scores = []
        for a, b, c in zip(cuts, cuts[1:], cuts[2:], strict=False):
            change, shorter = abs(float(np.median(values[a:b]) - np.median(values[b:c]))), min(b - a, c - b)
            large = change >= LARGE_CHANGE and change**2 > 2.0 * OUTLIER**2 * variance / length
            clear = change >= MIN_CHANGE and (large or shorter >= max(MIN_MEMORIES * length, FEW))
            scores.append(change / math.sqrt(variance * (1.0 / (b - a) + 1.0 / (c - b))) if clear else 0.0)
        worst = int(np.argmin(scores))
        if scores[worst] >= THRESHOLD:
            break
        del cuts[worst + 1]
    return cuts


def _is_line(values: Array, cuts: list[int]) -> bool:
    """Whether a straight line describes a series as well as its levels (Bayesian information criterion)."""
    values = np.exp(values)
    medians = [float(np.median(values[a:b])) for a, b in itertools.pairwise(cuts)]
    x = np.arange(len(values)) - (len(values) - 1) / 2.0
    centred = values - values.mean()
    line = centred - x * float(x @ centred) / float(x @ x)
    steps = np.concatenate([values[a:b] - m for (a, b), m in zip(itertools.pairwise(cuts), medians, strict=True)])
    rising = np.sign(np.diff(medians))
    if len(medians) > 3 and abs(rising.sum()) == len(rising) and (line**2).sum() < 0.1 * (centred**2).sum():
        return True
    independent = len(values) / correlation_length(line + float(values.mean()))
    saved = (2 * len(cuts) - 3 - 2) * math.log(max(independent, 2.0))
    return independent * math.log(float((line**2).sum()) / max(float((steps**2).sum()), 1e-300)) < saved
