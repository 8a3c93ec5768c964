"""Whether groups contend with each other on an uplink: the engine's fluid uplink under the trace's own arrivals.

The model that calibration fits (``paceenv.calibration.link_replay``), here only to find whether and how much.
Axes: K groups, T steps.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.link_replay import UplinkModel, share_uplink
from paceenv.core.operation_matrix import Array

MIN_EXPLAINED: Final = 0.05
"""Smallest share of the variance of durations that the shared uplink explains where there is contention."""
MIN_CAP: Final = 1.05
"""Smallest factor by which groups side by side take longer than alone where there is contention."""
_MAX_STEPS: Final = 400
_MADS: Final = 6.0


class UplinkFit(NamedTuple):
    """``contended`` is None where the trace does not identify it; the seconds are those of ``LinkFit``."""

    contended: bool | None
    alone_s: float
    work_s: float


def contention(arrival_KT: Array, alone_s: float, work_s: float) -> Array:
    """How many times longer than alone each group takes, ``(K, T)``, at least 1."""
    start_TK = np.ascontiguousarray((arrival_KT - arrival_KT.min(axis=0)).T)
    return np.asarray(np.maximum((share_uplink(start_TK, alone_s, work_s) - start_TK).T / alone_s, 1.0))


def fit_uplink(arrival_KT: Array, lasts_KT: Array, use_T: NDArray[np.bool_]) -> UplinkFit:
    """Fit the time that a group takes alone and its share of the uplink to durations; outliers do not count.

    A group may always take longer because its link is slower, or because it meets the others more often. Both models
    are fitted; the second parameter set must be worth its number (Schwarz 1978).
    """
    groups, typical_s = len(lasts_KT), float(np.median(lasts_KT))
    away_T = np.abs(lasts_KT - np.median(lasts_KT, axis=1, keepdims=True)).max(axis=0)
    at = np.flatnonzero(use_T & (away_T <= _MADS * max(float(np.median(away_T)), 1e-9)))[:_MAX_STEPS]
    unknown = UplinkFit(None, typical_s, typical_s / groups)
    if len(at) < 8 or typical_s <= 0.0:
        return unknown
    start_TK = np.ascontiguousarray((arrival_KT[:, at] - arrival_KT[:, at].min(axis=0)).T) / typical_s
    level_K = np.median(lasts_KT[:, at], axis=1)
    fits = list[tuple[float, ...]]()
    for scale_K, fitted in ((np.ones(groups), 2), (level_K / np.median(level_K), 1 + groups)):
        lasts_TK = lasts_KT[:, at].T / scale_K / typical_s
        if (unexplained := float(lasts_TK.var())) < 1e-8:
            return unknown  # starts and durations never vary: nothing shows what the groups cost each other
        model = UplinkModel(start_TK, start_TK + lasts_TK, np.zeros_like(start_TK))
        theta = model.least_squares()
        cost = float((model.residual(theta) ** 2).mean())
        criterion = lasts_TK.size * float(np.log(max(cost, 1e-12))) + fitted * float(np.log(lasts_TK.size))
        fits.append((criterion, 1.0 - cost / unexplained, *model.seconds(theta)))
    _, explained, *seconds = min(fits)
    alone_s, work_s = (typical_s * x for x in seconds)
    if work_s / alone_s * groups < MIN_CAP:
        return UplinkFit(False, alone_s, work_s)
    if explained < MIN_EXPLAINED:
        return unknown
    return UplinkFit(True, alone_s, work_s)
