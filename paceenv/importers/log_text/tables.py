"""Metrics in a table: CSV of Lightning and others, JSON lines, and ``trainer_state.json``; columns known by name."""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from paceenv.importers.log_text.conversion import MAX_WRITERS, Column, Kind
from paceenv.importers.log_text.log_lines import Stamp

_STEPS: Final = ("global_step", "step", "_step", "iteration", "iter", "iter_num", "steps", "batches")
_RANKS: Final = ("rank", "global_rank")
_STAMPS: Final = ("_timestamp", "timestamp")
_TIMES: Final[Mapping[str, tuple[Kind, float]]] = {
    "step_time": ("step time", 1.0),
    "step_time_s": ("step time", 1.0),
    "step_time_sec": ("step time", 1.0),
    "step_time_ms": ("step time", 1e-3),
    "train_step_time": ("step time", 1.0),
    "train_step_timing in s": ("step time", 1.0),
    "iter_time": ("step time", 1.0),
    "iter_time_s": ("step time", 1.0),
    "iter_time_ms": ("step time", 1e-3),
    "iteration_time": ("step time", 1.0),
    "iteration-time": ("step time", 1.0),
    "iteration_time_ms": ("step time", 1e-3),
    "time_per_step": ("step time", 1.0),
    "time_per_iteration": ("step time", 1.0),
    "elapsed time per iteration (ms)": ("step time", 1e-3),
    "elapsed_time_per_iteration": ("step time", 1.0),
    "batch_time": ("step time", 1.0),
    "train_speed(iter/s)": ("mean speed", 1.0),
    "_runtime": ("elapsed", 1.0),
    "elapsed_s": ("elapsed", 1.0),
    "wall_time": ("elapsed", 1.0),
    "_timestamp": ("elapsed", 1.0),
    "timestamp": ("elapsed", 1.0),
    "created_at": ("elapsed", 1.0),
    "time": ("elapsed or step time", 1.0),  # of Lightning's throughput monitor: since the start
}
"""Names without what precedes the last ``/`` or ``|``, in lower case; earlier ones are preferred."""
MAX_COLUMNS: Final = 2000
_MOST: Final = 1e15
_MOST_CLOCK: Final = 1e19
"""Above the nanoseconds since 1970."""


def _plain_name(name: str) -> str:
    return name.replace("|", "/").rsplit("/", 1)[-1].strip().lower() if "iter/s" not in name else name.strip()


class Table:
    """Collects rows with named columns, by rank; the best known time column is found at the end."""

    def __init__(self) -> None:
        self._columns: dict[int | None, dict[str, Column]] = {}

    def add(self, row: Mapping[Any, Any], rank: int | None = None) -> None:
        """One row; anything but numbers is left out."""
        if len(row) > MAX_COLUMNS:
            return
        known = {_plain_name(k): v for k, v in row.items() if isinstance(k, str) and len(k) < 200}
        step, own = (_first(known, names) for names in (_STEPS, _RANKS))
        rank = rank if own is None or own < 0.0 or not own.is_integer() else int(own)
        if rank not in self._columns and len(self._columns) >= MAX_WRITERS:
            return
        columns = self._columns.setdefault(rank, {})
        if step is None and isinstance(known.get("max_steps"), str):  # ms-swift: 'global_step/max_steps': '5/94'
            step = _number(known["max_steps"].partition("/")[0])
        clock = _first(known, _STAMPS, _MOST_CLOCK)
        stamp = None if clock is None else Stamp(clock * _clock_unit_s(clock), 1e-3)
        for name, (kind, unit) in _TIMES.items():
            value = _number(known.get(name), _MOST_CLOCK)
            if value is None or value < 0.0 or (kind != "step time" and step is None):
                continue
            unit_s = unit * _clock_unit_s(value)
            column = columns.setdefault(name, Column(kind, "unknown" if kind == "step time" else "interval"))
            column.add(math.nan if step is None else step, unit_s * value, stamp, unit_s * _digit(known[name]))

    def best(self, least: int) -> tuple[str, dict[int | None, Column]]:
        """Name of the best time column, and its numbers of every rank with at least so many; "" and none without."""
        for name in _TIMES:
            known = {rank: columns[name] for rank, columns in self._columns.items() if name in columns}
            if found := {rank: column for rank, column in known.items() if len(column.value) >= least}:
                return name, found
        return "", {}


def csv_rows(lines: Iterable[str]) -> Iterable[Mapping[Any, Any]]:
    """Rows of a CSV with a header line; nothing if it is none."""
    reader = csv.reader(lines)
    try:
        header = next(reader)
        if not 2 <= len(header) <= MAX_COLUMNS:
            return
        for cells in reader:
            if len(cells) == len(header):
                yield dict(zip(header, cells, strict=True))
    except (StopIteration, csv.Error):
        return


def is_csv(head: str) -> bool:
    """Whether a first line is the header of a CSV with a known time column."""
    names = {_plain_name(cell) for cell in head.split(",")}
    return "," in head and bool(names & set(_TIMES)) and bool(names & set(_STEPS))


def json_row(text: str) -> Mapping[Any, Any] | None:
    """A line's JSON object, with its inner objects' entries beside its own, or None."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    flat = dict(row)
    for inner in row.values():
        if isinstance(inner, dict) and len(inner) <= MAX_COLUMNS:
            flat |= inner
    return flat


def _first(known: Mapping[str, Any], names: Sequence[str], most: float = _MOST) -> float | None:
    """The number of the first of these columns that has one."""
    return next((x for name in names if (x := _number(known.get(name), most)) is not None), None)


def _number(value: Any, most: float = _MOST) -> float | None:
    if isinstance(value, str) and len(value) <= 40:
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < most and math.isfinite(value) else None


def _clock_unit_s(value: float) -> float:
    """Seconds of a clock's unit, by its size: since 1970 there are 1.7e9 s, 1.7e12 ms, 1.7e15 us or 1.7e18 ns."""
    return next((unit_s for above, unit_s in ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3)) if value > above), 1.0)


def _digit(value: Any) -> float:
    text = str(value).lower()
    if "e" in text or "." not in text:
        return 1.0 if "e" not in text else 1e-9
    return float(10.0 ** -len(text.partition(".")[2]))


MLPERF: Final = "MLPerf"
MLPERF_MARK: Final = ":::MLLOG"
_STATS: Final = ("train_step_time", "step_time", "train_step_timing")
_AT: Final = ("step", "step_num", "samples_count", "epoch_num")


class Mllog:
    """Collects the events of one writer. ``batch`` is the global batch size, samples a step, or 0."""

    def __init__(self) -> None:
        self.batch = 0.0
        self.timed = Column("step time", "unknown")  # of a single step or a few, with a step number
        self.summary = Column("step time", "interval")  # of a whole block
        self.speed = Column("speed", "interval")
        self.blocks = Column("step time", "interval")
        self._began_s, self._samples = math.nan, 0.0

    def add(self, text: str) -> None:
        """One line; anything but an event with numbers is left out."""
        try:
            event = json.loads(text[text.index(MLPERF_MARK) + len(MLPERF_MARK) :])
        except (ValueError, RecursionError):
            return
        if not isinstance(event, dict):
            return
        key, value, about = event.get("key"), event.get("value"), event.get("metadata")
        about = about if isinstance(about, dict) else {}
        clock_ms = _sane(event.get("time_ms"))
        stamp = None if clock_ms is None else Stamp(clock_ms / 1e3, 1e-3)
        if key == "global_batch_size":
            self.batch = _sane(value) or 0.0
        elif key == "tracked_stats" and isinstance(value, dict):
            self._stats(value, about, stamp)
        elif key == "block_start" and stamp is not None:
            self._began_s = stamp.clock_s  # evaluations lie between blocks
        elif key == "block_stop" and stamp is not None:
            self._block(about, stamp)

    def _block(self, about: dict[str, Any], stamp: Stamp) -> None:
        """A block of steps ended: its mean step from the two time stamps."""
        at = next((x for x in (_sane(about.get(name)) for name in _AT[2:]) if x is not None), None)
        if at is None:
            return
        steps, took_s = (at - self._samples) / max(self.batch, 1.0), stamp.clock_s - self._began_s
        if self.batch and steps >= 1.0 and took_s > 0.0:
            self.blocks.add(at, took_s / steps, stamp, stamp.resolution_s / steps)
        self._samples = at

    def _stats(self, value: dict[str, Any], about: dict[str, Any], stamp: Stamp | None) -> None:
        step = next((x for x in (_sane(about.get(name)) for name in _AT) if x is not None), math.nan)
        for name in _STATS:
            if (time_s := _sane(value.get(name))) is not None and time_s > 0.0:
                column = self.timed if "step" in about else self.summary
                column.add(step, time_s, stamp, 1e-9)
                return
        if (speed := _sane(value.get("throughput"))) is not None and speed > 0.0:
            self.speed.add(step, speed, stamp, 1e-9 * speed)

    def in_steps(self, column: Column) -> Column:
        """A column of step times whose step numbers count steps, where the batch size is known.

        Some submissions count samples, under the same name. The clock tells: a step takes as long as its value says.
        """
        step_V, value_V, clock_s_V = column.arrays()
        if len(step_V) > 1 and (np.diff(step_V) <= 0.0).mean() > 0.3:
            step_V = np.cumsum(step_V)  # every block says how long it was, not where it ends
            column.step = array("d", step_V.tolist())
        if self.batch <= 0.0:
            return column
        if column.kind == "speed":
            column.kind, value_V = "step time", self.batch / value_V
            column.value, column.digit = array("d", value_V.tolist()), 1e-9
        gap_V, between_V = np.diff(step_V), np.diff(clock_s_V)
        good = (gap_V > 0.0) & (between_V > 0.0)
        if good.any():
            per_count_s = float(np.median(between_V[good] / gap_V[good]))
            samples = per_count_s < float(np.median(value_V)) / math.sqrt(self.batch)
        else:
            samples = bool((step_V % self.batch == 0).all()) and bool((gap_V >= self.batch).all())
        if samples:
            column.step = array("d", (step_V / self.batch).round().tolist())
        return column


def _sane(value: Any) -> float | None:
    """A JSON number as a float; None for anything else, and for numbers that are no sane size."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e15 and math.isfinite(value) else None
