"""Metrics in a table: rows of CSV and JSON lines, and the events of MLPerf's logger."""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from paceenv.importers.log_text.conversion import MIN_VALUES, Column, Number
from paceenv.importers.log_text.log_lines import Stamp
from paceenv.importers.log_text.named_numbers import role_of

MAX_COLUMNS: Final = 2000


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
    """Whether a first line is the header of a CSV with a column of times and one of steps or ranks."""
    roles = [role_of(cell.strip("'\" \r\n")) for cell in head.split(",")] if "," in head and ":" not in head else []
    told = {role.meaning for role in roles if role is not None}
    return bool(told & {"value", "stamp"}) and bool(told & {"step", "rank"}) and not any(c.isdigit() for c in head[:1])


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
            self.blocks.add(at, Number("step time", took_s / steps, stamp.resolution_s / steps), stamp)
        self._samples = at

    def _stats(self, value: dict[str, Any], about: dict[str, Any], stamp: Stamp | None) -> None:
        step = next((x for x in (_sane(about.get(name)) for name in _AT) if x is not None), math.nan)
        for name in _STATS:
            if (time_s := _sane(value.get(name))) is not None and time_s > 0.0:
                column = self.timed if "step" in about else self.summary
                column.add(step, Number("step time", time_s, 1e-9), stamp)
                return
        if (speed := _sane(value.get("throughput"))) is not None and speed > 0.0:
            self.speed.add(step, Number("speed", speed, 1e-9 * speed), stamp)

    def best(self) -> Column | None:
        """The most exact of its columns that has enough values."""
        for column in (self.timed, self.summary, self.speed, self.blocks):
            if len(column.value) >= MIN_VALUES:
                return self.in_steps(column)
        return None

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
