"""Order statistics in closed form: how much the slowest of many ranks lengthens a step. Dimensionless."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
from scipy import integrate


def probability_any(probability: float, ranks: int) -> float:
    """Probability that at least one of ``ranks`` is slow in a step, each with ``probability``: ``1 - (1 - p)**n``."""
    return float(-np.expm1(ranks * np.log1p(-probability))) if probability < 1.0 else 1.0


def exponential_maximum(ranks: int) -> float:
    """Expected maximum of n exponentials over their mean: the harmonic number ``1 + 1/2 + ... + 1/n``."""
    return float(np.sum(1.0 / np.arange(1, ranks + 1)))


def expected_maximum(survival: Callable[[float], float], ranks: int, low: float, high: float) -> float:
    """Expected maximum of n draws, by quadrature of ``1 - F(x)**n``.

    Args:
        survival: ``1 - F``, so that no digits are lost in the tail.
        ranks: n.
        low: lower end of the support.
        high: upper end of the support.
    """

    def above(x: float) -> float:
        tail = survival(x)
        return 1.0 if tail >= 1.0 else -math.expm1(ranks * math.log1p(-tail))

    edges = itertools.pairwise(np.linspace(low, high, 65))
    return float(low + sum(integrate.quad(above, a, b, epsabs=1e-12, epsrel=1e-10)[0] for a, b in edges))
