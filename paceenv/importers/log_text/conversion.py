"""Numbers of one format and one writer as they stand in a log, and how step times are made from them."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.core.wording import duration
from paceenv.importers.log_text.log_lines import Number

Kind = Literal["step time", "steps a second", "speed", "elapsed", "elapsed or step time", "mean speed"]
MAX_VALUES: Final = 5_000_000
"""Values of one log; what follows is left out."""
GROUPS: Final[Mapping[str, tuple[Kind, float]]] = {
    "s": ("step time", 1.0),
    "ms": ("step time", 1e-3),
    "us": ("step time", 1e-6),
    "steps_per_s": ("steps a second", 1.0),
    "elapsed_s": ("elapsed", 1.0),
}
"""Named groups of a user's own pattern."""
_NO_TIME: Final = re.compile(r"\s*(?:-\.?\d|[+-]?(?:nan|inf)\b)", re.IGNORECASE)
_THOUSANDS: Final = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?")
MIN_VALUES: Final = 4
"""Step times that a log must hold at least."""
LONGEST_S: Final = 86400.0
"""No step takes a day: what takes longer is a pause of the job, or was no time."""
COARSE: Final = (10.0, 100.0)
"""Where times are rounded, a value spans so many units at least; the more where that leaves enough values."""
_ENOUGH: Final = 20
_CLOCK: Final = "milliseconds, a step time in each line, or some hundred seconds"

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass
class Column:
    """Numbers of one format and one writer, a row each: step, value, clock, epoch, line.

    Step and clock are not-a-number where a line has none. ``total`` is the number of steps that lines give behind a
    slash, or 0; ``of`` names what a speed counts; ``refused`` counts values that are no time.
    """

    kind: Kind
    averages: str = "unknown"
    unit_said: bool = True
    of: str = ""
    rows: array[float] = field(default_factory=lambda: array("d"))
    total: float = 0.0
    digit: float = math.inf
    refused: int = 0

    def __len__(self) -> int:
        return len(self.rows) // 5

    def add(self, step: float, number: Number, stamp: Number | None, *, line: int = 0, epoch: float = 0.0) -> None:
        if math.isnan(number.value):
            self.refused += 1
        elif len(self) < MAX_VALUES:
            clock_s = math.nan if stamp is None else stamp.value
            self.rows.extend((step, number.value, clock_s, epoch, line))
            self.digit = min(self.digit, number.digit)

    def arrays(self) -> tuple[Array, Array, Array, Integers]:
        """Steps, values, clock times and lines, ``(V,)`` each."""
        step, value, clock_s, epoch, line = np.array(self.rows, np.float64).reshape(-1, 5).T
        back = np.diff(step) < 0.0
        if back.any() and (np.diff(epoch)[back] > 0.0).mean() > 0.5:  # steps are counted anew in every epoch
            step = step + (epoch - epoch[0]) * max(self.total, float(np.nanmax(step)) + 1.0)
        return step, value, clock_s, line.astype(np.int64)


def number(text: str, unit: float = 1.0) -> Number | None:
    """The number in a field times its unit; None if it is none. A clock such as 1:02:03 is one."""
    if ":" in text:
        parts = text.split(":")
        if not all(part.isdecimal() and len(part) < 10 for part in parts):
            return None
        seconds = sum(60.0**k * int(part) for k, part in enumerate(reversed(parts)))
        return Number(seconds, 1.0)
    text = text.strip(" ,")
    if "," in text and _THOUSANDS.fullmatch(text) is None:
        return None
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    if not (math.isfinite(value) and 0.0 <= value < 1e19):
        return None
    mantissa, _, exponent = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return Number(unit * value, unit * 10.0 ** (int(exponent or 0) - decimals))


def time_or_speed(text: str, unit: float = 1.0) -> Number | None:
    """As :func:`number`; not-a-number for one that is negative or not finite."""
    return Number(math.nan, math.inf) if _NO_TIME.match(text) else number(text, unit)


@dataclass(frozen=True)
class StepLog:
    """Step times as a log has them. All arrays are ``(V,)``."""

    name: str  # of the file
    source: str  # the format
    step_V: Integers  # number of the step at which a value was logged; counted from 0 where the log has no numbers
    step_s_V: Array  # step time, seconds: the mean over ``steps_V`` steps that end at ``step_V``
    steps_V: Integers  # how many steps a value averages over, at least 1; 0 where the log does not tell
    run_V: Integers  # number of the run: a restart, or another file, begins a new one
    rounding_s: float = 0.0  # how coarse the times are, seconds: the unit of the last digit over the steps of a value
    rank: int | None = None  # the rank whose lines these are, where lines are tagged
    others: tuple[StepLog, ...] = ()  # the same of other ranks
    notes: tuple[str, ...] = ()  # what was left out or had to be assumed, a line each
    phases: Mapping[str, Array] = field(default_factory=dict)  # seconds of named parts of each value's step, (V,)
    of: str = "step"  # what a time is of: a token, say, where all that a log has is a speed

    def said(self, time_s: float) -> str:
        """A time in words, and the speed that the log has where it is none of a step."""
        if self.of == "step":
            return duration(time_s)
        return f"{1.0 / time_s:,.0f} {self.of}s/s" if time_s < 0.01 else f"{1.0 / time_s:.3g} {self.of}s/s"


def convert(column: Column, path: Path, source: str, batch: float = 0.0) -> tuple[StepLog, Integers]:
    """One writer's numbers as step times, and the line of each.

    Args:
        batch: samples of a step; 0 if unknown.

    Raises InputError: too few step times, or no times at all.
    """
    notes, where = list[str](), f"{path}: lines of {source}"
    step_V, value_V, clock_s_V, line_V = column.arrays()
    if len(value_V) >= MAX_VALUES:
        notes.append(f"only the first {MAX_VALUES} values are used")
    if column.refused:
        lines = f"{column.refused} line{'s' if column.refused > 1 else ''}"
        notes.append(f"{lines} left out: the step time is negative or not finite")
    known_V = np.isfinite(step_V)
    numbered = len(step_V) > 0 and float(known_V.mean()) > 0.5 and float(np.nanmax(step_V)) > float(np.nanmin(step_V))
    change_V = np.diff(value_V)
    if column.kind == "step time" and len(value_V) > 2 and (change_V > 0.0).all() and (change_V == change_V[0]).all():
        raise InputError(f"{where} count something; allowed: times of steps")
    step_V = step_V if numbered else np.arange(len(value_V), dtype=np.float64)
    row_V = np.flatnonzero(known_V | (not numbered))
    order_V, run_V, mixed = _runs(step_V[row_V])
    row_V = row_V[order_V]
    if mixed:
        notes.append("lines of several writers are mixed; of each step the first one counts")
    step_V, value_V, clock_s_V = step_V[row_V], value_V[row_V], clock_s_V[row_V]
    rounding, kind, averages, of = column.digit, column.kind, column.averages, "step"
    if kind == "elapsed or step time":
        kind = "elapsed" if _is_clock(value_V) else "step time"
        if kind == "step time":
            averages = "unknown" if averages == "interval" else averages
            notes.append("the times are read as step times, not as times since the start: they do not grow")
    if kind == "steps a second":
        rounding /= max(float(np.median(value_V)) ** 2, 1e-18) if len(value_V) else 1.0
        value_V = np.where(value_V > 1e-9, 1.0 / np.maximum(value_V, 1e-9), 0.0)
    if kind in {"elapsed", "mean speed"}:
        elapsed_V, rounding_V = value_V, np.full(len(value_V), rounding)
        if kind == "mean speed":
            safe_V = np.maximum(value_V, 1e-9)
            elapsed_V, rounding_V = step_V / safe_V, step_V * rounding / safe_V**2
        at_V, value_V, gap_V, run_V, rounding = _differences(step_V, elapsed_V, run_V, rounding_V, notes)
        step_V, row_V, averages = step_V[at_V], row_V[at_V], "interval"
    else:
        stamped_s_V = _seconds_a_step(step_V, clock_s_V, run_V)
        if kind == "speed":
            value_V, rounding, of = _seconds(value_V, batch, stamped_s_V, column, notes)
        elif not column.unit_said and column.kind != "steps a second":
            unit = _unit_by_clock(value_V, stamped_s_V)
            value_V, rounding = unit * value_V, unit * rounding
            told = "their time stamps tell" if unit < 1.0 else "read as seconds"
            notes.append(f"no unit is named: {'milliseconds, as ' if unit < 1.0 else ''}{told}")
        gap_V = _gaps(step_V, run_V, numbered)
    good = (value_V > 0.0) & (value_V <= LONGEST_S)
    if int((~good).sum()):
        notes.append(f"{int((~good).sum())} values that are no time, or more than a day a step, are left out")
    if int(good.sum()) < MIN_VALUES:
        if kind == "elapsed" and len(row_V) < MIN_VALUES:
            raise InputError(f"{where}: a clock with too few digits for so short a run; allowed: {_CLOCK}")
        raise InputError(f"{where}: {int(good.sum())} step times of at most a day; allowed: at least {MIN_VALUES}")
    single = averages == "one step" or (averages == "unknown" and not (numbered and float(np.median(gap_V)) > 1.0))
    # Whether other values are means over the steps since the last one is unknown.
    steps_V = gap_V if averages == "interval" else np.full(len(step_V), float(single))
    run_V = np.unique(run_V[good], return_inverse=True)[1].astype(np.int64)
    arrays = step_V[good].astype(np.int64), value_V[good], steps_V[good].astype(np.int64), run_V
    log = StepLog(path.name, source, *arrays, float(rounding), notes=tuple(notes), of=of)
    return log, line_V[row_V][good]


def _seconds_a_step(step_V: Array, clock_s_V: Array, run_V: Integers) -> Array:
    """By the lines' time stamps since the value before, ``(V,)``; not-a-number where they do not tell."""
    passed_s, steps = (np.diff(x, prepend=np.nan) for x in (clock_s_V, step_V))
    told = (np.diff(run_V, prepend=-1) == 0) & (passed_s > 0.0) & (steps > 0.0)
    return np.where(told, passed_s / np.where(told, steps, 1.0), np.nan)


def _unit_by_clock(value_V: Array, stamped_s_V: Array) -> float:
    """The unit of times that nothing names, s: milliseconds where the lines' time stamps say so, else seconds."""
    good = np.isfinite(stamped_s_V) & (value_V > 0.0)
    if good.sum() < MIN_VALUES:
        return 1.0
    return 1e-3 if 5e-4 < float(np.median(stamped_s_V[good])) / float(np.median(value_V[good])) < 5e-3 else 1.0


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


def _is_clock(value_V: Array) -> bool:
    """Whether values are readings of a clock, which nearly always grow; step times fall as often as they rise."""
    change_V = np.diff(value_V)
    return bool((change_V < 0.0).sum() < 0.1 * (change_V != 0.0).sum())


def _gaps(step_V: Array, run_V: Integers, numbered: bool) -> Array:
    """Steps since the value before, ``(V,)``; at the beginning of a run the usual number."""
    if not numbered or len(step_V) < 2:
        return np.ones(len(step_V))
    gap_V, first_V = np.diff(step_V, prepend=0.0), np.diff(run_V, prepend=-1) != 0
    return np.where(first_V, float(np.median(gap_V[~first_V])) if (~first_V).any() else 1.0, gap_V)


def _differences(
    step_V: Array, elapsed_V: Array, run_V: Integers, rounding_V: Array, notes: list[str]
) -> tuple[Integers, Array, Array, Integers, float]:
    """Mean step times between values of a running clock; where it is coarse, over so many that they are exact."""
    began_V = np.diff(elapsed_V, prepend=elapsed_V[:1]) < -np.maximum(rounding_V, 1e-9)
    run_V = run_V + np.cumsum(began_V)  # a clock that goes back begins anew
    _, first, count = np.unique(run_V, return_index=True, return_counts=True)
    passed_s = sum(float(elapsed_V[f + n - 1] - elapsed_V[f]) for f, n in zip(first, count, strict=True))
    rounding, usual_s = float(np.median(rounding_V)) if len(rounding_V) else 0.0, passed_s / max((count - 1).sum(), 1)
    units = min(max(passed_s / _ENOUGH / rounding, COARSE[0]), COARSE[1]) if rounding > 0.0 else 0.0
    stride = max(math.ceil(units * rounding / max(usual_s, 1e-9)), 1)
    pieces = [
        f + np.linspace(0, n - 1, (n - 1) // stride + 1).round().astype(np.int64)
        for f, n in zip(first, count, strict=True)
        if n > stride
    ]
    none = [np.zeros(0, np.int64)]
    at, before = (np.concatenate([piece[part] for piece in pieces] or none) for part in (slice(1, None), slice(-1)))
    gap_V = step_V[at] - step_V[before]
    steps = float(np.median(gap_V)) if len(at) else 1.0
    if stride > 1:
        notes.append(
            f"the clock of this log is coarse ({rounding:.3g} s): each value is the mean over about {steps:.0f} steps"
        )
    return at, (elapsed_V[at] - elapsed_V[before]) / gap_V, gap_V, run_V[at], rounding / steps


def _seconds(
    speed_V: Array, batch: float, stamped_s_V: Array, column: Column, notes: list[str]
) -> tuple[Array, float, str]:
    """Step times from speeds: of the batch, else of what the time stamps say, else those of one sample or token."""
    safe_V = np.where(speed_V > 0.0, speed_V, np.nan)
    stamped_V = stamped_s_V * safe_V
    per_step, of = 1.0, "step"
    if batch > 0.0 and column.of in {"sample", "throughput"}:
        per_step = batch
    elif np.isfinite(stamped_V).sum() >= MIN_VALUES:
        per_step = float(np.nanmedian(stamped_V))
        notes.append("seconds are speeds times a constant that comes from the lines' time stamps")
    else:
        of = column.of if column.of and column.of != "throughput" else "unit"
        notes.append("a speed, and no time stamps: how long a step takes cannot be told, only how the speed changes")
    value_V = per_step / safe_V
    return value_V, float(np.nanmedian(value_V)) * column.digit / float(np.nanmedian(safe_V)), of


def bars_of_steps(bars: Mapping[str, Column]) -> dict[str, Column]:
    """The bars that may count training steps, the one that ran for the longest time first.

    A bar that waits for a whole run of another one at each of its steps counts epochs, and is left out.

    Args:
        bars: the lines of all bars of one length, by that length: time since the start, seconds; a line or more each.
    """
    names, about = list(bars), []
    for column in bars.values():
        step_V, elapsed_V, _, _ = column.arrays()
        steps_V, passed_V = np.diff(step_V), np.diff(elapsed_V)
        about.append((steps_V[steps_V > 0].sum(), passed_V[passed_V > 0].sum(), 1 + (steps_V < 0).sum()))
    steps_B, time_s_B, runs_B = np.array(about, np.float64).reshape(-1, 3).T
    step_bars = {}
    for b in np.argsort(-time_s_B, kind="stable"):
        inner_B = (runs_B >= 0.8 * steps_B[b]) & (time_s_B >= 0.25 * time_s_B[b]) & (runs_B > max(runs_B[b], 2))
        if not inner_B.any():
            step_bars[names[b]] = bars[names[b]]
    return step_bars
