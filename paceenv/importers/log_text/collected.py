"""What was read from the lines of a log, before it is step times: numbers in columns, one series per writer."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from paceenv.importers.log_text.log_lines import Stamp

Kind = Literal["step time", "speed", "elapsed", "elapsed or step time", "mean speed", "mean time", "stamp"]
MAX_VALUES: Final = 5_000_000
"""Values of one log; what follows is left out."""
MAX_WRITERS: Final = 4096
"""Ranks, and progress bars, that are kept apart."""
_UNITS: Final[Mapping[str, tuple[Kind, float]]] = {
    "s": ("step time", 1.0),
    "ms": ("step time", 1e-3),
    "us": ("step time", 1e-6),
    "rate": ("speed", 1.0),
    "elapsed": ("elapsed", 1.0),
    "elapsed_s": ("elapsed", 1.0),
    "elapsed_ms": ("elapsed", 1e-3),
    "mean_steps_per_s": ("mean speed", 1.0),
    "mean_s": ("mean time", 1.0),
    "mean_ms": ("mean time", 1e-3),
}

Array = NDArray[np.float64]


@dataclass
class Column:
    """Numbers of one format and one writer: ``step`` and ``clock_s`` are not-a-number where a line has none.

    ``digit`` is the unit of the last digit of ``value``, and ``clock_digit_s`` that of the time stamps, seconds.
    """

    kind: Kind
    averages: str
    step: array[float] = field(default_factory=lambda: array("d"))
    value: array[float] = field(default_factory=lambda: array("d"))
    clock_s: array[float] = field(default_factory=lambda: array("d"))
    digit: float = math.inf
    clock_digit_s: float = 0.0

    def add(self, step: float, value: float, stamp: Stamp | None, digit: float) -> None:
        """Keep one line's numbers.

        Args:
            step: number of the step.
            value: what the line says, seconds or per second.
            stamp: the line's time; None without one.
            digit: unit of the value's last digit.
        """
        if len(self.value) >= MAX_VALUES:
            return
        self.step.append(step)
        self.value.append(value)
        self.clock_s.append(math.nan if stamp is None else stamp.clock_s)
        self.digit = min(self.digit, digit)
        if stamp is not None:
            self.clock_digit_s = max(self.clock_digit_s, stamp.resolution_s)

    def arrays(self) -> tuple[Array, Array, Array]:
        """Steps, values and clock times, ``(V,)`` each."""
        step, value, clock_s = (np.array(column, np.float64) for column in (self.step, self.value, self.clock_s))
        return step, value, clock_s


def number(field_name: str, text: str) -> tuple[Kind, float, float] | None:
    """The kind of a field, its value in seconds (or per second), and the unit of its last digit; None if invalid.

    Args:
        field_name: as the log writes it.
        text: the value as the log writes it, perhaps with a unit.
    """
    if field_name == "elapsed":
        seconds = 0
        for part in text.split(":"):
            if not part.isdecimal() or len(part) > 9:
                return None
            seconds = 60 * seconds + int(part)
        return "elapsed", float(seconds), 1.0
    try:
        plain = text.replace(",", "")
        value = float(plain)
    except ValueError:
        return None
    if not (math.isfinite(value) and 0.0 <= value < 1e12):
        return None
    if field_name == "steps_per_s":
        return ("step time", 1.0 / value, _digit(plain) / value**2) if value > 1e-9 else None
    kind, unit = _UNITS[field_name]
    return kind, unit * value, unit * _digit(plain)


def _digit(text: str) -> float:
    mantissa, _, exponent = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return float(10.0 ** (int(exponent or 0) - decimals))
