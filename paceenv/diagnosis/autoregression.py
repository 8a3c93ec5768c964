"""How well the past of a series foretells its next value: an autoregression (Yule and Walker), as long as it pays."""

from __future__ import annotations

from typing import Final

import numpy as np

from paceenv.diagnosis.operation_matrix import Array

MOST_LAGS: Final = 12
_ROUNDING: Final = 1e-12
"""Of a value: what varies by no more is constant."""


def memory(x_T: Array) -> float:
    """Correlation of a series with what its last values foretell, 0 to 1; of first order, its autocorrelation.

    A rotation (a tenant whose period is not ours comes by every few steps) has small autocorrelations at most lags and
    is foretold well by several together. Their number is the one that Schwarz' criterion (1978) prefers, none included,
    by the recursion of Levinson (1947) and Durbin (1960).
    """
    steps, mean = len(x_T), float(x_T.mean())
    x_T = x_T - mean
    most = min(MOST_LAGS, steps // 8)
    covariance_L = np.array([x_T[lag:] @ x_T[: steps - lag] for lag in range(most + 1)]) / max(steps, 1)
    whole = left = kept = float(covariance_L[0])
    if whole <= (_ROUNDING * mean) ** 2:
        return 0.0
    weights, least = np.zeros(0), steps * np.log(whole)
    for order in range(1, most + 1):
        new = (covariance_L[order] - weights @ covariance_L[order - 1 : 0 : -1]) / left
        weights = np.append(weights - new * weights[::-1], new)
        left *= 1.0 - new**2
        if left <= 1e-12 * whole:
            return 1.0
        criterion = steps * np.log(left) + order * np.log(steps)
        if criterion < least:
            least, kept = criterion, left
    return float(np.sqrt(1.0 - kept / whole))
