"""Student's t distribution in plain Python, for intervals of means without SciPy.

The upper tail is half a regularised incomplete beta function. Its continued fraction keeps full relative accuracy far
out in the tail, where one minus a distribution function has only rounding errors.
"""

from __future__ import annotations

import math

from paceenv.core.errors import out_of_range

_TERMS, _PRECISION, _TINY = 10_000, 1e-15, 1e-300


def student_t_tail(t: float, degrees: float) -> float:
    """Probability that Student's t with ``degrees`` degrees of freedom exceeds ``t``.

    Relative error below 1e-8 up to a million degrees, below 1e-10 up to a thousand.

    Source: Abramowitz and Stegun, equation 26.7.1 with 26.5.2; the continued fraction is 26.5.8.
    """
    if not degrees > 0.0:
        raise out_of_range("degrees", degrees, "above 0", "Student's t")
    if t < 0.0:
        return 1.0 - student_t_tail(-t, degrees)
    square = t * t
    if square == math.inf:
        return 0.0
    return 0.5 * _incomplete_beta(0.5 * degrees, 0.5, degrees / (degrees + square), square / (degrees + square))


def student_t_quantile(tail: float, degrees: float) -> float:
    """The ``t`` that Student's t with ``degrees`` degrees of freedom exceeds with probability ``tail``, 0 to 1.

    Newton steps on the logarithm of the tail, inside a shrinking bracket. Raises InputError for a value out of range.
    """
    if not 0.0 < tail < 1.0:
        raise out_of_range("tail", tail, "above 0 and below 1", "Student's t")
    if tail > 0.5:
        return -student_t_quantile(1.0 - tail, degrees)
    low, high = 0.0, 1.0
    while student_t_tail(high, degrees) > tail:
        low, high = high, 2.0 * high
    t, wanted = 0.5 * (low + high), math.log(tail)
    for _ in range(200):
        tail_at_t = student_t_tail(t, degrees)
        low, high = (t, high) if tail_at_t > tail else (low, t)
        step = (math.log(tail_at_t) - wanted) * tail_at_t / _density(t, degrees) if tail_at_t > 0.0 else math.inf
        better = t + step if low < t + step < high else 0.5 * (low + high)
        if abs(better - t) <= 1e-13 * max(t, 1.0):
            return better
        t = better
    return t


def _density(t: float, degrees: float) -> float:
    log_scale = math.lgamma(0.5 * (degrees + 1.0)) - math.lgamma(0.5 * degrees) - 0.5 * math.log(degrees * math.pi)
    return math.exp(log_scale - 0.5 * (degrees + 1.0) * math.log1p(t * t / degrees))


def _incomplete_beta(a: float, b: float, x: float, complement: float) -> float:
    """Regularised incomplete beta function at ``x``; ``complement`` is ``1 - x`` without its rounding error."""
    if x <= 0.0 or complement <= 0.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - _incomplete_beta(b, a, complement, x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(complement)
    return math.exp(log_front) / a / _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    """The denominator's continued fraction, by Lentz's method."""
    value, c, d = 1.0, 1.0, 0.0
    for m in range(1, _TERMS):
        k = m // 2
        numerator = k * (b - k) if m % 2 == 0 else -(a + k) * (a + b + k)
        term = numerator * x / ((a + m - 1.0) * (a + m))
        d = 1.0 / _away_from_zero(1.0 + term * d)
        c = _away_from_zero(1.0 + term / c)
        value *= c * d
        if abs(c * d - 1.0) < _PRECISION:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
