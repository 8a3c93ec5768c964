"""The interface of a policy: from observations of ranks to threshold and window of each pacing mechanism."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.core.errors import out_of_range
from paceenv.core.pacing import Candidate
from paceenv.policies.ranges import Outside

INTERVAL_ITERATIONS = 20
"""Control interval of the rules, and of a policy that records no other, iterations."""


class Policy(ABC):
    """Maps observations of ranks to pacing settings; every rank runs its own copy on its own view.

    A batch row is one rank: rows never see each other, so evaluating many rows at once is the same as running many
    copies. Legend: B rows, O signals (``paceenv.core.signals``), M mechanisms (``paceenv.core.pacing.MECHANISMS``).
    """

    name: str
    interval_iterations: int = INTERVAL_ITERATIONS
    """Iterations between two of its decisions: a policy acts as it was made to only at this interval."""
    mechanisms: Sequence[str] = pacing.MECHANISMS
    """The mechanisms that it may turn on."""
    calibrated_range: Mapping[str, tuple[float, float]] = MappingProxyType({})
    """For each signal the interval ``[low, high]`` met in training; others are not compared."""

    def reset(self, rows: int) -> None:  # noqa: B027  (a policy without state has nothing to do)
        """Forget everything and prepare for ``rows`` ranks.

        Args:
            rows: B, the number of ranks that it decides for.
        """

    @abstractmethod
    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        """Settings ``(B, M, 2)`` for the next control interval: threshold and window as ratios.

        Args:
            signals_BO: what each rank observed in the last interval, ``(B, O)``.
        """

    def constant(self) -> NDArray[np.float64] | None:
        """Settings ``(M, 2)`` if they are always the same for every rank, else None; a run then needs no views."""
        return None

    def memory_iterations(self) -> int:
        """Iterations over which its longest average or trial of what it saw runs; 0: it has no memory."""
        return 0

    def outside(self) -> Outside | None:
        """How often since the last reset ranks were passive because they were outside the range; None: never."""
        return None


def checked(candidate: Candidate, where: str, thresholds: Sequence[float], window: float) -> NDArray[np.float64]:
    """A candidate as settings ``(M, 2)``. Raises InputError for an unknown mechanism and for values out of range.

    Args:
        candidate: (threshold, window) by mechanism.
        where: what the error is about.
        thresholds: the largest allowed one of each mechanism.
        window: the largest allowed one.
    """
    for mechanism, pair in candidate.items():
        if mechanism not in pacing.MECHANISMS:
            raise out_of_range("mechanism", mechanism, f"one of {', '.join(pacing.MECHANISMS)}", where)
        limits = thresholds[pacing.MECHANISMS.index(mechanism)], window
        for key, value, most in zip(("threshold", "window"), pair, limits, strict=True):
            if not 0.0 <= value <= most:
                raise out_of_range(f"{key} of {mechanism}", value, f"0 to {most:g}", where)
    return pacing.settings(candidate)


def fault_of(settings: NDArray[Any], rows: int, *, threshold: float, window: float) -> str:
    """What is wrong with a policy's answer, in words; "" for nothing.

    Args:
        settings: the answer, which is to be numbers ``(rows, M, 2)``, at least 0.
        rows: ranks that it was asked for.
        threshold: the largest allowed one.
        window: likewise.
    """
    wanted = (rows, len(pacing.MECHANISMS), 2)
    if settings.shape != wanted or settings.dtype.kind not in "fiu":
        return f"returned {settings.dtype} of shape {settings.shape}; allowed: numbers of shape {wanted}"
    for what, index, most in (("threshold", pacing.THRESHOLD, threshold), ("window", pacing.WINDOW, window)):
        values = settings[..., index]
        wrong = values[~((values >= 0.0) & (values <= most))]
        if wrong.size:
            return f"returned a {what} of {wrong[0]:g}; allowed: 0 to {most:g}"
    return ""
