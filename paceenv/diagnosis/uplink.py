"""Whether groups contend with each other on an uplink: the engine's fluid uplink under the trace's own arrivals.

The same physics that calibration fits (``paceenv.calibration.links``), asked for less: whether, and how much. Axes: K
groups, T steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from paceenv.calibration.replay import share_uplink

LEAST_EXPLAINED: Final = 0.03
"""Share of the variance of durations that the shared uplink must explain."""
LEAST_CAP: Final = 1.05
"""How much longer than alone groups side by side must take, at least."""
_MOST_STEPS: Final = 400
_MADS: Final = 6.0

Array = NDArray[np.float64]


@dataclass(frozen=True)
class UplinkFit:
    """``contended`` is None where the trace cannot tell; the seconds are those of ``LinkFit``."""

    contended: bool | None
    alone_s: float
    work_s: float

    def contention_KT(self, arrival_KT: Array) -> Array:
        """How many times longer than alone each group takes when they start like this."""
        return contention(arrival_KT, self.alone_s, self.work_s)


def contention(arrival_KT: Array, alone_s: float, work_s: float) -> Array:
    """How many times longer than alone each group takes when they start at ``arrival_KT``, seconds."""
    start_TK = np.ascontiguousarray((arrival_KT - arrival_KT.min(axis=0)).T)
    return np.asarray(np.maximum((share_uplink(start_TK, alone_s, work_s) - start_TK).T / alone_s, 1.0))


def fit_uplink(arrival_KT: Array, lasts_KT: Array, use_T: NDArray[np.bool_]) -> UplinkFit:
    """Fit what a group takes alone and of the uplink to durations; only steps ``use_T`` count, and no outliers."""
    groups, typical_s = len(lasts_KT), float(np.median(lasts_KT))
    away_T = np.abs(lasts_KT - np.median(lasts_KT, axis=1, keepdims=True)).max(axis=0)
    at = np.flatnonzero(use_T & (away_T <= _MADS * max(float(np.median(away_T)), 1e-9)))[:_MOST_STEPS]
    unknown = UplinkFit(None, typical_s, typical_s / groups)
    if len(at) < 8 or typical_s <= 0.0:
        return unknown
    start_TK = np.ascontiguousarray((arrival_KT[:, at] - arrival_KT[:, at].min(axis=0)).T)
    level_K = np.median(lasts_KT[:, at], axis=1)
    scaled_TK = lasts_KT[:, at].T / (level_K / np.median(level_K))  # a group may always be slower than the others
    constant = 0.5 * float((((scaled_TK - scaled_TK.mean()) / typical_s) ** 2).sum())
    if constant / scaled_TK.size < 1e-8:
        return unknown  # starts and durations never vary: nothing shows what the groups cost each other

    def misfit(theta: Array) -> Array:
        work_s = float(np.exp(theta[0])) / groups
        lasts_TK = share_uplink(start_TK, work_s / float(theta[1]), work_s) - start_TK
        return np.asarray((lasts_TK - scaled_TK).ravel() / typical_s)

    least = 1.0 / groups
    fits = [
        optimize.least_squares(
            misfit,
            [np.log(typical_s), cap],
            bounds=([-np.inf, least], [np.inf, 1.0]),
            diff_step=1e-3,
            x_scale=0.1,
            max_nfev=60,
        )
        for cap in (1.2 * least, 0.5 * (1.0 + least), 0.95)
    ]
    best = min(fits, key=lambda fit: float(fit.cost))
    work_s, cap = float(np.exp(best.x[0])) / groups, float(best.x[1])
    if cap < LEAST_CAP * least:
        return UplinkFit(False, work_s / cap, work_s)
    if 1.0 - float(best.cost) / constant < LEAST_EXPLAINED:
        return unknown
    return UplinkFit(True, work_s / cap, work_s)
