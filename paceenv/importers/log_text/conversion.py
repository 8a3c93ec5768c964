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

from paceenv.core.errors import InputError
from paceenv.importers.log_text.log_lines import Stamp

Kind = Literal[
    "step time", "steps a second", "speed", "elapsed", "elapsed or step time", "mean speed", "mean time", "stamp"
]
MAX_VALUES: Final = 5_000_000
"""Values of one log; what follows is left out."""
MAX_WRITERS: Final = 4096
"""Ranks, and progress bars, that are kept apart."""
GROUPS: Final[Mapping[str, tuple[Kind, float]]] = {
    "s": ("step time", 1.0),
    "ms": ("step time", 1e-3),
    "us": ("step time", 1e-6),
    "steps_per_s": ("steps a second", 1.0),
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

    ``epoch`` is 0 where a line names none, ``total`` the number of steps that a line gives behind a slash, or 0.
    ``unit_said`` tells whether a unit stands anywhere. ``digit`` is the unit of the last digit of ``value``, and
    ``clock_digit_s`` that of the time stamps, seconds.
    ``other`` are the values at ``other_at`` if the comma in them is a decimal one; ``decimal`` says that it is.
    """

    kind: Kind
    averages: str
    step: array[float] = field(default_factory=lambda: array("d"))
    value: array[float] = field(default_factory=lambda: array("d"))
    clock_s: array[float] = field(default_factory=lambda: array("d"))
    epoch: array[float] = field(default_factory=lambda: array("d"))
    line: array[int] = field(default_factory=lambda: array("q"))
    total: float = 0.0
    unit_said: bool = True
    digit: float = math.inf
    clock_digit_s: float = 0.0
    other: array[float] = field(default_factory=lambda: array("d"))
    other_at: array[int] = field(default_factory=lambda: array("q"))
    decimal: bool = False

    def add(self, step: float, number: Number, stamp: Stamp | None, *, line: int = 0, epoch: float = 0.0) -> None:
        """Keep one line's numbers."""
        if len(self.value) >= MAX_VALUES:
            return
        if number.other is not None:
            self.other.append(number.other)
            self.other_at.append(len(self.value))
        self.decimal |= number.decimal
        self.step.append(step)
        self.value.append(number.value)
        self.epoch.append(epoch)
        self.line.append(line)
        self.clock_s.append(math.nan if stamp is None else stamp.clock_s)
        self.digit = min(self.digit, number.digit)
        if stamp is not None:
            self.clock_digit_s = max(self.clock_digit_s, stamp.resolution_s)

    def arrays(self) -> tuple[Array, Array, Array]:
        """Steps, values and clock times, ``(V,)`` each."""
        step, value, clock_s = (np.array(column, np.float64) for column in (self.step, self.value, self.clock_s))
        if self.decimal:
            value[np.array(self.other_at)] = self.other
        epoch = np.array(self.epoch, np.float64)
        back = np.diff(step) < 0.0
        if back.any() and (np.diff(epoch)[back] > 0.0).mean() > 0.5:  # steps are counted anew in every epoch
            step = step + (epoch - epoch[0]) * max(self.total, float(np.nanmax(step)) + 1.0)
        return step, value, clock_s


def number(text: str, kind: Kind = "step time", unit: float = 1.0) -> Number | None:
    """The number in a field, in seconds; None if it is none. A clock such as 1:02:03 is one, too."""
    if ":" in text:
        seconds = 0.0
        for part in text.split(":"):
            if not part.isdecimal() or len(part) > 9:
                return None
            seconds = 60.0 * seconds + int(part)
        return Number(kind, seconds, 1.0)
    text = text.strip(" ,")
    may_be_decimal = text.count(",") == 1 and "." not in text
    decimal = _in_unit(kind, unit, text.replace(",", ".")) if may_be_decimal else None
    if "," in text and not _THOUSANDS.fullmatch(text):
        return None if decimal is None else decimal._replace(decimal=True)
    whole = _in_unit(kind, unit, text.replace(",", ""))
    return whole if whole is None or decimal is None else whole._replace(other=decimal.value)


def _in_unit(kind: Kind, unit: float, text: str) -> Number | None:
    try:
        value = float(text)
    except ValueError:
        return None
    if not (math.isfinite(value) and 0.0 <= value < 1e19):
        return None
    if kind == "steps a second":
        return Number("step time", 1.0 / value, _digit(text) / value**2) if value > 1e-9 else None
    return Number(kind, unit * value, unit * _digit(text))


def _digit(text: str) -> float:
    mantissa, _, exponent = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return float(10.0 ** (int(exponent or 0) - decimals))


MIN_VALUES: Final = 4
"""Step times that a log must hold at least."""
LONGEST_S: Final = 86400.0
"""No step takes a day: what takes longer is a pause of the job, or was no time."""
MOST_STEPS: Final = 5000.0
"""Between two lines; numbers further apart rather count samples or tokens."""
COARSE: Final = 100.0
"""Where times are rounded, a value spans at least so many units of rounding."""

Integers = NDArray[np.int64]


class Steps(NamedTuple):
    """The arrays of a :class:`~paceenv.importers.step_log.StepLog`, ``(V,)`` each, its rounding, notes and lines."""

    step_V: Integers
    step_s_V: Array
    steps_V: Integers
    clock_s_V: Array
    run_V: Integers
    rounding_s: float
    notes: tuple[str, ...]
    line_V: Integers


def convert(column: Column, where: str, batch: float = 0.0) -> Steps:
    """One writer's numbers as step times.

    Args:
        batch: samples of a step, where ``column`` counts samples per second; 0 if unknown.

    Raises InputError: too few step times, or their unit cannot be determined.
    """
    step_V, value_V, clock_s_V = column.arrays()
    line_V = np.array(column.line, np.int64)
    notes: list[str] = []
    if len(value_V) >= MAX_VALUES:
        notes.append(f"only the first {MAX_VALUES} values are used")
    if column.other and not column.decimal and column.kind != "speed":
        notes.append(
            "numbers such as 1,234 are read as thousands; if their comma is a decimal one, use --pattern with a group "
            "of a unit 1000 times smaller, such as ms for s"
        )
    known_V = np.isfinite(step_V)
    numbered = len(step_V) > 0 and float(known_V.mean()) > 0.5 and float(np.nanmax(step_V)) > float(np.nanmin(step_V))
    if column.kind == "step time" and len(value_V) > 2 and _is_counter(value_V):
        raise InputError(f"{where} count something; allowed: times of steps")
    step_V = step_V if numbered else np.arange(len(value_V), dtype=np.float64)
    row_V = np.flatnonzero(known_V | (not numbered))
    order_V, run_V, mixed = _runs(step_V[row_V])
    row_V = row_V[order_V]
    if mixed:
        notes.append("lines of several writers are mixed; of each step the first one counts")
    step_V, value_V = step_V[row_V], value_V[row_V]
    rounding, kind, averages = column.digit, column.kind, column.averages
    if kind == "elapsed or step time":
        kind = "elapsed" if _is_clock(value_V) else "step time"
        if kind == "step time":
            averages = "unknown"
            notes.append("the column does not grow as a clock does: its values are read as step times")
    if kind in {"elapsed", "mean speed", "mean time", "stamp"}:
        elapsed_V, rounding_V = _elapsed(kind, step_V, value_V, rounding)
        at_V, value_V, gap_V, run_V, rounding = _differences(step_V, elapsed_V, run_V, rounding_V, notes)
        step_V, row_V, averages = step_V[at_V], row_V[at_V], "interval"
    else:
        gap_V = _gaps(step_V, run_V, numbered)
        if kind == "speed":
            about = step_V, clock_s_V[row_V], run_V, column
            value_V, rounding = _seconds(where, value_V, batch, about, notes)
        elif not column.unit_said:
            unit = _unit_by_clock(value_V, step_V, clock_s_V[row_V], run_V, gap_V)
            value_V, rounding = unit * value_V, unit * rounding
            told = "their time stamps tell" if unit < 1.0 else "read as seconds"
            notes.append(f"no unit is named: {'milliseconds, as ' if unit < 1.0 else ''}{told}")
    clock_s_V = clock_s_V[row_V]
    good = (value_V > 0.0) & (value_V <= LONGEST_S)
    if int((~good).sum()):
        notes.append(f"{int((~good).sum())} values that are no time, or more than a day a step, are left out")
    if int(good.sum()) < MIN_VALUES:
        raise InputError(f"{where}: {int(good.sum())} step times of at most a day; allowed: at least {MIN_VALUES}")
    steps_V = _averaged(averages, step_V, value_V, clock_s_V, run_V, gap_V, numbered)
    run_V = np.unique(run_V[good], return_inverse=True)[1].astype(np.int64)
    found = step_V[good].astype(np.int64), value_V[good], steps_V[good].astype(np.int64), clock_s_V[good], run_V
    return Steps(*found, float(rounding), tuple(notes), line_V[row_V][good])


def _unit_by_clock(value_V: Array, step_V: Array, clock_s_V: Array, run_V: Integers, gap_V: Array) -> float:
    """The unit of times that nothing names, s: milliseconds where the lines' time stamps say so, else seconds."""
    between_V, gap_V = np.diff(clock_s_V), np.diff(step_V)
    good = (np.diff(run_V) == 0) & (between_V > 0.0) & (gap_V > 0.0) & (value_V[1:] > 0.0)
    if good.sum() < MIN_VALUES:
        return 1.0
    ratio = float(np.median(between_V[good] / gap_V[good])) / float(np.median(value_V[1:][good]))
    return 1e-3 if 5e-4 < ratio < 5e-3 else 1.0


def _runs(step_V: Array) -> tuple[Integers, Integers, bool]:
    """Which values to keep in which order, the run of each, and whether several writers' lines were mixed.

    A step that is repeated at once is the same step (a redrawn bar, a second writer); a step back is a restart.
    """
    fresh = np.concatenate([[True], np.diff(step_V) != 0]) if len(step_V) else np.zeros(0, bool)
    order_V = np.flatnonzero(fresh)
    back_V = np.diff(step_V[order_V]) < 0
    if back_V.sum() > 0.1 * len(order_V):
        # No job restarts so often: ranks without tags write in turn.
        _, first = np.unique(step_V, return_index=True)
        return first.astype(np.int64), np.zeros(len(first), np.int64), True
    run_V = np.concatenate([[0], np.cumsum(back_V)]).astype(np.int64) if len(order_V) else order_V
    return order_V, run_V, False


def _is_counter(value_V: Array) -> bool:
    """Whether values are whole numbers that grow by the same each time."""
    change_V = np.diff(value_V)
    return bool((change_V > 0.0).all() and (change_V == change_V[0]).all())


def _is_clock(value_V: Array) -> bool:
    """Whether values are readings of a clock, which nearly always grow; step times fall as often as they rise."""
    change_V = np.diff(value_V)
    return bool((change_V < 0.0).sum() < 0.1 * (change_V != 0.0).sum())


def _gaps(step_V: Array, run_V: Integers, numbered: bool) -> Array:
    """Steps since the value before, ``(V,)``; at the beginning of a run the usual number."""
    if not numbered or len(step_V) < 2:
        return np.ones(len(step_V))
    gap_V = np.concatenate([[0.0], np.diff(step_V)])
    first_V = np.concatenate([[True], np.diff(run_V) != 0])
    usual = float(np.median(gap_V[~first_V])) if (~first_V).any() else 1.0
    return np.where(first_V, usual, gap_V)


def _elapsed(kind: str, step_V: Array, value_V: Array, digit: float) -> tuple[Array, Array]:
    """Time since the start of a run, and how coarse it is, seconds, ``(V,)`` each."""
    if kind == "mean speed":
        safe_V = np.maximum(value_V, 1e-9)
        return step_V / safe_V, step_V * digit / safe_V**2
    if kind == "mean time":
        return step_V * value_V, step_V * digit
    return value_V, np.full(len(value_V), digit)


def _differences(
    step_V: Array, elapsed_V: Array, run_V: Integers, rounding_V: Array, notes: list[str]
) -> tuple[Integers, Array, Array, Integers, float]:
    """Mean step times between values of a running clock; neighbours are merged where the clock is coarse."""
    restart_V = np.concatenate([[False], np.diff(elapsed_V) < -np.maximum(rounding_V[1:], 1e-9)])
    run_V = run_V + np.cumsum(restart_V)  # a clock that goes back begins anew
    at, before = _pairs(step_V, elapsed_V, run_V, rounding_V, 1e-9)
    if len(at) < 0.7 * max(int((np.diff(run_V) == 0).sum()), 1):
        usual = float(np.median(step_V[at] - step_V[before])) if len(at) else 0.0
        # A slow step by itself would weigh as much as the means over many steps beside it.
        at, before = _pairs(step_V, elapsed_V, run_V, rounding_V, usual)
        notes.append(
            f"the clock of this log is coarse ({float(np.median(rounding_V)):.3g} s): each value is the mean over "
            f"about {usual:.0f} steps"
        )
    gap_V = step_V[at] - step_V[before]
    value_V = (elapsed_V[at] - elapsed_V[before]) / np.maximum(gap_V, 1.0)
    rounding = float(np.median(rounding_V[at] / np.maximum(gap_V, 1.0))) if len(at) else 0.0
    return at, value_V, gap_V, run_V[at], rounding


def _pairs(
    step_V: Array, elapsed_V: Array, run_V: Integers, rounding_V: Array, least: float
) -> tuple[Integers, Integers]:
    """End and beginning of every value: neighbours of one run, at least ``least`` steps and units of rounding apart."""
    kept: list[int] = []
    last = -1
    for v in range(len(step_V)):
        if last >= 0 and run_V[v] == run_V[last]:
            span_s = elapsed_V[v] - elapsed_V[last]
            if span_s < COARSE * max(rounding_V[v], rounding_V[last]) or step_V[v] - step_V[last] < least:
                continue
        kept.append(v)
        last = v
    at = np.array(kept, np.int64)
    same = np.diff(run_V[at]) == 0
    return at[1:][same], at[:-1][same]


def _seconds(
    where: str, speed_V: Array, batch: float, about: tuple[Array, Array, Integers, Column], notes: list[str]
) -> tuple[Array, float]:
    """Step times from speeds in an unknown unit: its size comes from the batch, or from the lines' time stamps."""
    step_V, clock_s_V, run_V, column = about
    positive = speed_V > 0.0
    safe_V = np.where(positive, speed_V, np.nan)
    if batch > 0.0:
        per_step = batch
    else:
        between_V, gap_V = np.diff(clock_s_V), np.diff(step_V)
        good = (np.diff(run_V) == 0) & (between_V > 0.0) & (gap_V > 0.0) & positive[1:]
        if good.sum() < MIN_VALUES:
            raise InputError(
                f"{where} give a speed, and the lines have no time stamps, so that seconds cannot be "
                "determined; allowed: a log with time stamps, or --pattern with (?P<s>..)"
            )
        per_step = float(np.median(between_V[good] / gap_V[good] * safe_V[1:][good]))
        notes.append("seconds are speeds times a constant that comes from the lines' time stamps")
    value_V = per_step / safe_V
    return value_V, float(np.nanmedian(value_V)) * column.digit / float(np.nanmedian(safe_V))


def _averaged(
    averages: str, step_V: Array, value_V: Array, clock_s_V: Array, run_V: Integers, gap_V: Array, numbered: bool
) -> Array:
    """How many steps a value averages over; where the format leaves it open, time stamps may tell; else 0."""
    if averages == "interval":
        return gap_V
    if averages == "one step" or not numbered or float(np.median(gap_V)) <= 1.0:
        return np.ones(len(step_V))
    if float(np.median(gap_V)) > MOST_STEPS:
        return np.zeros(len(step_V))
    between_V = np.diff(clock_s_V) / np.maximum(np.diff(step_V), 1.0)
    good = (np.diff(run_V) == 0) & np.isfinite(between_V) & (between_V > 0.0)
    if good.sum() < 10:
        return np.zeros(len(step_V))
    of_mean, of_value = _spread(value_V[1:][good] - between_V[good]), _spread(value_V[1:][good])
    # A mean over the interval follows the clock; a single step is as far from it as from any other mean.
    return gap_V if of_mean < 0.5 * of_value else np.ones(len(step_V))


def _spread(values: Array) -> float:
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low)


def bars_of_steps(bars: Mapping[str, Column]) -> dict[str, Column]:
    """The bars that may count training steps, the one that ran for the longest time first.

    A bar that waits for a whole run of another one at each of its steps counts epochs, and is left out.

    Args:
        bars: the lines of all bars of one length, by that length: time since the start, seconds; a line or more each.
    """
    names, about = list(bars), []
    for column in bars.values():
        step_V, elapsed_V, _ = column.arrays()
        steps_V, passed_V = np.diff(step_V), np.diff(elapsed_V)
        about.append((steps_V[steps_V > 0].sum(), passed_V[passed_V > 0].sum(), 1 + (steps_V < 0).sum()))
    steps_B, time_s_B, runs_B = np.array(about, np.float64).reshape(-1, 3).T
    found = {}
    for b in np.argsort(-time_s_B, kind="stable"):
        inner_B = (runs_B >= 0.8 * steps_B[b]) & (time_s_B >= 0.25 * time_s_B[b]) & (runs_B > max(runs_B[b], 2))
        if not inner_B.any():
            found[names[b]] = bars[names[b]]
    return found
