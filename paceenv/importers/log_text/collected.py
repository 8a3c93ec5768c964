"""What was read from the lines of a log, before it is step times: numbers in columns, one series per writer."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

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
_THOUSANDS: Final = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?")

Array = NDArray[np.float64]


class Number(NamedTuple):
    """A field's kind, its value in seconds (or per second), and the unit of its last digit.

    A comma parts thousands or decimals. ``decimal``: it can only be the latter. ``other``: the value if it were the
    latter, where it may be either, as in 1,234; else None.
    """

    kind: Kind
    value: float
    digit: float
    decimal: bool = False
    other: float | None = None


@dataclass
class Column:
    """Numbers of one format and one writer: ``step`` and ``clock_s`` are not-a-number where a line has none.

    ``digit`` is the unit of the last digit of ``value``, and ``clock_digit_s`` that of the time stamps, seconds.
    ``other`` are the values at ``other_at`` if the comma in them is a decimal one; ``decimal`` says that it is.
    """

    kind: Kind
    averages: str
    step: array[float] = field(default_factory=lambda: array("d"))
    value: array[float] = field(default_factory=lambda: array("d"))
    clock_s: array[float] = field(default_factory=lambda: array("d"))
    digit: float = math.inf
    clock_digit_s: float = 0.0
    other: array[float] = field(default_factory=lambda: array("d"))
    other_at: array[int] = field(default_factory=lambda: array("q"))
    decimal: bool = False

    def add(self, step: float, value: float, stamp: Stamp | None, digit: float, other: float | None = None) -> None:
        """Keep one line's numbers.

        Args:
            step: number of the step.
            value: what the line says, seconds or per second.
            stamp: the line's time; None without one.
            digit: unit of the value's last digit.
            other: what the line says if its comma is a decimal one; None if it says the same.
        """
        if len(self.value) >= MAX_VALUES:
            return
        if other is not None:
            self.other.append(other)
            self.other_at.append(len(self.value))
        self.step.append(step)
        self.value.append(value)
        self.clock_s.append(math.nan if stamp is None else stamp.clock_s)
        self.digit = min(self.digit, digit)
        if stamp is not None:
            self.clock_digit_s = max(self.clock_digit_s, stamp.resolution_s)

    def arrays(self) -> tuple[Array, Array, Array]:
        """Steps, values and clock times, ``(V,)`` each."""
        step, value, clock_s = (np.array(column, np.float64) for column in (self.step, self.value, self.clock_s))
        if self.decimal:
            value[np.array(self.other_at)] = self.other
        return step, value, clock_s


def number(field_name: str, text: str) -> Number | None:
    """The number in a field; None if it is none.

    Args:
        field_name: as the log writes it.
        text: the value as the log writes it, perhaps with commas.
    """
    if field_name == "elapsed":
        seconds = 0
        for part in text.split(":"):
            if not part.isdecimal() or len(part) > 9:
                return None
            seconds = 60 * seconds + int(part)
        return Number("elapsed", float(seconds), 1.0)
    text = text.strip(" ,")
    may_be_decimal = text.count(",") == 1 and "." not in text
    decimal = _in_unit(field_name, text.replace(",", ".")) if may_be_decimal else None
    if "," in text and not _THOUSANDS.fullmatch(text):
        return None if decimal is None else decimal._replace(decimal=True)
    whole = _in_unit(field_name, text.replace(",", ""))
    return whole if whole is None or decimal is None else whole._replace(other=decimal.value)


def _in_unit(field_name: str, text: str) -> Number | None:
    try:
        value = float(text)
    except ValueError:
        return None
    if not (math.isfinite(value) and 0.0 <= value < 1e12):
        return None
    if field_name == "steps_per_s":
        return Number("step time", 1.0 / value, _digit(text) / value**2) if value > 1e-9 else None
    kind, unit = _UNITS[field_name]
    return Number(kind, unit * value, unit * _digit(text))


def _digit(text: str) -> float:
    mantissa, _, exponent = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return float(10.0 ** (int(exponent or 0) - decimals))
