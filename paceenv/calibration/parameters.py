"""A calibrated parameter: value, 95 % interval and evidence, or why the trace does not identify it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from paceenv.core.intervals import Interval

_NOT_IDENTIFIED: Final = "cannot be identified from this trace: "
"""How evidence begins where the trace does not identify a parameter."""
FROM_BASE: Final = "from base"
NOT_LIMITING: Final = "assumed not to limit"
NORMAL_95: Final = 1.96
ROUND_US: Final = (2.0, 1000.0)
"""Where 95 % of rounds of messages lie: between what a switched RDMA network and what loaded sockets take."""


@dataclass(frozen=True)
class Parameter:
    """One key of a cluster config, for example ``fabric.uplink_gbps``.

    ``value`` is what the fitted cluster has, ``lo`` and ``hi`` its 95 % interval. Where the trace does not identify the
    parameter, ``se`` is None, ``lo`` or ``hi`` is given if the trace bounds it on that side, and ``evidence`` says why
    and where the value comes from, its ``source`` (empty if identified). ``top``, where given, is from where on a
    higher value makes no difference.
    """

    key: str
    value: float | None
    se: float | None
    lo: float | None
    hi: float | None
    evidence: str
    top: float | None = None
    source: str = ""

    @property
    def is_identified(self) -> bool:
        return not self.source

    @property
    def is_guess(self) -> bool:
        """Whether nobody knows it: neither the trace nor the given cluster."""
        return not self.is_identified and FROM_BASE not in self.source

    @property
    def limits_nothing(self) -> bool:
        """Whether the trace shows no limit there, so that a value was taken that is none."""
        return self.source.startswith(NOT_LIMITING)

    @property
    def reason(self) -> str:
        """The evidence, without its beginning where the trace does not identify the parameter."""
        return self.evidence.removeprefix(_NOT_IDENTIFIED)

    def to_record(self) -> dict[str, Any]:
        """As plain data, to four digits."""
        numbers = {"value": self.value, "se": self.se, "lo": self.lo, "hi": self.hi}
        numbers |= {"top": self.top} if self.top is not None else {}
        rounded = {k: float(f"{v:.4g}") if v is not None and math.isfinite(v) else None for k, v in numbers.items()}
        return rounded | {"evidence": self.evidence} | ({"source": self.source} if self.source else {})


def exact(key: str, value: float, evidence: str) -> Parameter:
    return Parameter(key, value, 0.0, value, value, evidence)


def identified(key: str, value: float, se: float, evidence: str) -> Parameter:
    """A parameter with a normal 95 % interval, cut off at 0."""
    return Parameter(key, value, se, max(value - NORMAL_95 * se, 0.0), value + NORMAL_95 * se, evidence)


def bounded(key: str, interval: Interval, evidence: str) -> Parameter:
    """A parameter with an interval of its own; its standard error is that of a normal interval of this width."""
    value, low, high = interval
    return Parameter(key, value, (high - low) / (2.0 * NORMAL_95), low, high, evidence)


def not_identifiable(
    key: str, value: float | None, why: str, source: str, *, lo: float | None = None, hi: float | None = None
) -> Parameter:
    return Parameter(key, value, None, lo, hi, f"{_NOT_IDENTIFIED}{why}; {source}", source=source)
