"""A calibrated parameter: value, error bars, and the evidence for it, or why the trace cannot tell."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from scipy import stats

from paceenv.calibration.fits.noise_fit import Estimate
from paceenv.core.errors import InputError

CANNOT_TELL: Final = "cannot tell from this trace: "
NORMAL_95: Final = 1.96
ROUND_US: Final = (2.0, 1000.0)
"""Where 95 % of rounds of messages lie: between what a switched RDMA network and what loaded sockets take."""


@dataclass(frozen=True)
class Parameter:
    """One key of a cluster config, for example ``fabric.uplink_gbps``.

    ``lo`` and ``hi`` are a 95 % interval. ``value`` is what the fitted cluster has. Where the trace cannot tell, ``se``
    is None, ``lo`` and ``hi`` are given if it bounds the value at least on one side, and ``evidence`` says why and
    where the value comes from.
    """

    key: str
    value: float | None
    se: float | None
    lo: float | None
    hi: float | None
    evidence: str

    @property
    def told(self) -> bool:
        """Whether the trace tells it."""
        return not self.evidence.startswith(CANNOT_TELL)

    def interval(self, level: float) -> tuple[float, float]:
        """An interval of another level than 95 %, by the normal's quantiles on either side of the value.

        Raises InputError where the trace does not tell the parameter.
        """
        if not self.told or self.value is None or self.lo is None or self.hi is None:
            raise InputError(f"{self.key}: has no interval; allowed: a parameter that the trace tells")
        shrink = float(stats.norm.ppf(0.5 + 0.5 * level)) / NORMAL_95
        return self.value + shrink * (self.lo - self.value), self.value + shrink * (self.hi - self.value)

    def to_record(self) -> dict[str, Any]:
        """As plain data, to four digits."""
        numbers = {"value": self.value, "se": self.se, "lo": self.lo, "hi": self.hi}
        rounded = {k: float(f"{v:.4g}") if v is not None and math.isfinite(v) else None for k, v in numbers.items()}
        return rounded | {"evidence": self.evidence}


def told(key: str, value: float, se: float, evidence: str) -> Parameter:
    """A parameter with a normal interval, kept above 0."""
    return Parameter(key, value, se, max(value - NORMAL_95 * se, 0.0), value + NORMAL_95 * se, evidence)


def bounded(key: str, value: float, interval: tuple[float, float], evidence: str) -> Parameter:
    """A parameter with an interval of its own; the standard error is what a normal one of that width has."""
    low, high = interval
    return Parameter(key, value, (high - low) / (2.0 * NORMAL_95), low, high, evidence)


def estimated(key: str, estimate: Estimate, evidence: str) -> Parameter:
    """A parameter from a fit of noise."""
    return Parameter(key, estimate.value, estimate.se, estimate.lo, estimate.hi, evidence)


def untold(
    key: str, value: float | None, why: str, source: str, *, lo: float | None = None, hi: float | None = None
) -> Parameter:
    """A parameter that the trace does not tell; ``source`` says where ``value`` comes from."""
    return Parameter(key, value, None, lo, hi, f"{CANNOT_TELL}{why}; {source}")
