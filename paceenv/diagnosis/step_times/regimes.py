"""Changes of the level of step times, and drift. Axes: V values in order.

Levels are found by splitting a series where its mean changes most, again and again (binary segmentation, Scott and
Knott 1974), as long as the change stands out from the series' own slow variation.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.metrics import correlation_length
from paceenv.core.student_t import student_t_quantile

MIN_LENGTH: Final = 10
"""Values of a regime."""
MIN_CHANGE: Final = 0.01
"""Of the level; smaller changes are no regimes."""
MAX_REGIMES: Final = 24
MIN_MEMORIES: Final = 5.0
"""Times the memory of the residual that a regime lasts at least."""
THRESHOLD: Final = 4.5
"""Standard errors, with memory counted, that two levels differ by: one false change in some thousand logs."""
_BLOCKS = 10
_SMALLEST_DRIFT = 0.002

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Regime:
    """Values ``start`` to ``end`` (exclusive) on one level, seconds."""

    start: int
    end: int
    level_s: float


@dataclass(frozen=True)
class Drift:
    """Change of the level from the beginning to the end, relative, with the half width of its 95 % interval."""

    change: float
    half_width: float


def regimes(values: Array) -> tuple[Regime, ...]:
    """The levels of a series without outliers; one where it does not change, or drifts steadily.

    Args:
        values: step times, seconds, tamed.
    """
    cuts = [0, len(values)]
    while len(cuts) <= MAX_REGIMES:
        gain, at = max(_best_cut(values, a, b) for a, b in itertools.pairwise(cuts))
        if gain <= 0.0:
            break
        cuts = sorted([*cuts, at])
    cuts = _merged(values, cuts)
    if len(cuts) > 2 and _is_line(values, cuts):
        cuts = [0, len(values)]
    return tuple(Regime(a, b, float(values[a:b].mean())) for a, b in itertools.pairwise(cuts))


def _best_cut(values: Array, start: int, end: int) -> tuple[float, int]:
    """What the best cut of a part takes off its sum of squares, and where it is; 0 if nothing may be cut."""
    part = values[start:end]
    n = len(part)
    if n < 2 * MIN_LENGTH:
        return 0.0, 0
    at = np.arange(MIN_LENGTH, n - MIN_LENGTH + 1)
    total = np.concatenate([[0.0], np.cumsum(part - part.mean())])
    gain = (total[at] / at - (total[n] - total[at]) / (n - at)) ** 2 * at * (n - at) / n
    best = int(np.argmax(gain))
    return float(gain[best]), start + int(at[best])


def _merged(values: Array, cuts: list[int]) -> list[int]:
    """Cuts without those between levels that do not differ clearly.

    The residual that all cuts leave tells noise and memory. A regime must last many times that memory, or a slow
    variation would be one regime after the other.
    """
    cuts = list(cuts)
    while len(cuts) > 2:
        residual = np.concatenate([values[a:b] - values[a:b].mean() for a, b in itertools.pairwise(cuts)])
        length = correlation_length(residual + float(values.mean()))
        variance = float((residual**2).sum()) / max(len(residual) - len(cuts), 1) * length
        variance += (1e-6 * float(values.mean())) ** 2
        scores = []
        for a, b, c in zip(cuts, cuts[1:], cuts[2:], strict=False):
            left, right = float(values[a:b].mean()), float(values[b:c].mean())
            clear = abs(left - right) >= MIN_CHANGE * min(left, right) and min(b - a, c - b) >= MIN_MEMORIES * length
            error = math.sqrt(variance * (1.0 / (b - a) + 1.0 / (c - b)))
            scores.append(abs(left - right) / error if clear else 0.0)
        worst = int(np.argmin(scores))
        if scores[worst] >= THRESHOLD:
            break
        del cuts[worst + 1]
    return cuts


def _is_line(values: Array, cuts: list[int]) -> bool:
    """Whether a straight line describes a series as well as its levels (Bayesian information criterion)."""
    x = np.arange(len(values)) - (len(values) - 1) / 2.0
    centred = values - values.mean()
    line = centred - x * float(x @ centred) / float(x @ x)
    steps = np.concatenate([values[a:b] - values[a:b].mean() for a, b in itertools.pairwise(cuts)])
    independent = len(values) / correlation_length(line + float(values.mean()))
    saved = (2 * len(cuts) - 3 - 2) * math.log(max(independent, 2.0))
    return independent * math.log(float((line**2).sum()) / max(float((steps**2).sum()), 1e-300)) < saved


def drift(values: Array) -> Drift | None:
    """A steady change of one regime from its beginning to its end, by a line through the means of ten blocks.

    None if it cannot be told from 0, is below 0.2 %, or for fewer than 30 values.
    """
    if len(values) < 3 * _BLOCKS:
        return None
    means = np.array([block.mean() for block in np.array_split(values, _BLOCKS)]) / float(values.mean())
    x = (np.arange(_BLOCKS) - (_BLOCKS - 1) / 2.0) / _BLOCKS
    slope = float(x @ means / (x @ x))
    left = means - means.mean() - slope * x
    # Neighbouring blocks of a slow variation are alike, so that a line fits them by chance more often.
    memory = max(float(left[1:] @ left[:-1]) / max(float(left @ left), 1e-300), 0.0)
    error = math.sqrt(float(left @ left) / (_BLOCKS - 2) / float(x @ x)) * math.sqrt((1.0 + memory) / (1.0 - memory))
    half_width = error * student_t_quantile(0.025, _BLOCKS - 2)
    if abs(slope) < max(1.5 * half_width, _SMALLEST_DRIFT):
        return None
    return Drift(slope, half_width)
