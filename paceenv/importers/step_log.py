"""Text logs of training programs with a step time in them, read into step times.

Formats are told by the lines themselves: Megatron-LM, NeMo, torchtitan, DeepSpeed, nanoGPT and its relatives, MaxText,
MLPerf, Hugging Face Trainer, ms-swift, Lightning, progress bars, CSV and JSON lines; or by the user's own pattern.
Axes: V logged values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.importers.log_text.conversion import (
    MAX_WRITERS,
    MIN_VALUES,
    Column,
    Number,
    bars_of_steps,
    convert,
    number,
)
from paceenv.importers.log_text.line_formats import ANY_STEP, BAR, FORMATS, SAMPLES_PER_STEP, UserPattern
from paceenv.importers.log_text.log_lines import Line, Stamp, read_lines, stamp_in
from paceenv.importers.log_text.tables import MLPERF, MLPERF_MARK, Mllog, Table, csv_rows, is_csv, json_row
from paceenv.importers.packed import content_of, head_of

MIN_STAMPS: Final = 8
"""Lines with a time stamp and a step number that are taken for a log of steps."""
MAX_JSON: Final = 256 << 20
ALLOWED: Final = (
    "Parquet, JSON of the PyTorch profiler, dumps of its Flight Recorder, output of nccl-tests, a log of Megatron-LM, "
    "NeMo, torchtitan, DeepSpeed, nanoGPT, MaxText, MLPerf, ms-swift or Lightning, a progress bar, CSV or JSON lines "
    "with a column such as step_time, lines with a time stamp and a step number, or any other log with --pattern "
    "'step (?P<step>\\d+).*time: (?P<ms>[\\d.]+)'"
)
SETTINGS: Final = (
    "world_size", "data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "micro_batch_size", "global_batch_size", "num_layers", "hidden_size", "seq_length",
)  # fmt: skip
"""Settings as Megatron-LM and DeepSpeed print them, ``name ..... value``, that explain a change of step time."""
_SETTING: Final = re.compile(r"([a-z_]{5,40}) \.{3,80} ([0-9A-Za-z_.+-]{1,40})")
_UNKNOWN = np.nan

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class StepLog:
    """Step times as a log has them. All arrays are ``(V,)``."""

    name: str  # of the file
    source: str  # the format
    step_V: Integers  # number of the step at which a value was logged; counted from 0 where the log has no numbers
    step_s_V: Array  # step time, seconds: the mean over ``steps_V`` steps that end at ``step_V``
    steps_V: Integers  # how many steps a value averages over, at least 1; 0 where the log does not tell
    clock_s_V: Array  # when it was logged, seconds since 1970; not-a-number where the log has no time stamps
    run_V: Integers  # number of the run: a restart, or another file, begins a new one
    rounding_s: float = 0.0  # how coarse the times are, seconds: the unit of the last digit over the steps of a value
    rank: int | None = None  # the rank whose lines these are, where lines are tagged
    others: tuple[StepLog, ...] = ()  # the same of other ranks
    notes: tuple[str, ...] = ()  # what was left out or had to be assumed, a line each
    settings: Mapping[str, str] = field(default_factory=dict)  # those of SETTINGS that the program printed


def read_step_log(
    path: str | Path, *, pattern: str | None = None, on_bytes: Callable[[float], None] = lambda done: None
) -> StepLog:
    """Read a log. Memory is at most 8 times the file's size, and 150 MB for the largest part that is looked at.

    Raises InputError: the file cannot be read or has no step times.
    """
    path = Path(path)
    head = head_of(path)
    if head[:4] in {b"PAR1", b"PK\x03\x04"} or b"\0" in head[:4096].replace(b"\0\n", b""):
        raise InputError(f"{path}: no text; allowed: {ALLOWED}")
    if pattern is None and (table := _whole_table(path, head)) is not None:
        return table
    found = _Lines(None if pattern is None else UserPattern(pattern))
    for line in read_lines(path, on_bytes):
        found.add(line)
    return replace(found.log(path), settings=found.settings)


def jobs_of(logs: Sequence[StepLog], on_note: Callable[[str], None]) -> tuple[StepLog, ...]:
    """Logs put together that go on where another of the same job ended; jobs in the order of their first log.

    A log goes on if its format and settings are the other's and its steps begin later: a job resumed from a checkpoint.
    """
    jobs: list[list[StepLog]] = []
    for log in logs:
        for job in jobs:
            last = job[-1]
            later = log.step_V.min() > last.step_V.min() and log.step_V.max() > last.step_V.max()
            if later and (log.source, log.settings) == (last.source, last.settings):
                job.append(log)
                break
        else:
            jobs.append([log])
    for job in jobs:
        if len(job) > 1:
            on_note(f"{', '.join(log.name for log in job)}: read as one job that was resumed")
    return tuple(map(join_logs, jobs))


def join_logs(logs: Sequence[StepLog]) -> StepLog:
    """Logs of one format that follow each other as one, each a run of its own."""
    first = logs[0]
    if len(logs) == 1:
        return first
    offsets = np.cumsum([0, *(int(log.run_V[-1]) + 1 for log in logs[:-1])])
    names = ("step_V", "step_s_V", "steps_V", "clock_s_V")
    parts: dict[str, Any] = {name: np.concatenate([getattr(log, name) for log in logs]) for name in names}
    run_V = np.concatenate([log.run_V + offset for log, offset in zip(logs, offsets, strict=True)])
    notes = tuple(dict.fromkeys(f"{log.name}: {note}" for log in logs for note in log.notes))
    return replace(first, **parts, run_V=run_V, rounding_s=max(log.rounding_s for log in logs), others=(), notes=notes)


def _whole_table(path: Path, head: bytes) -> StepLog | None:
    """A CSV, or the state of Hugging Face's Trainer; None if the file is neither."""
    text = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    table, source = Table(), ""
    if text.startswith("{") and '"log_history"' in text:
        source = "trainer_state.json"
        content, damage = content_of(path, MAX_JSON)
        state = None if damage else json_row(content.decode("utf-8-sig", "replace"))
        for row in (state or {}).get("log_history") or () if isinstance((state or {}).get("log_history"), list) else ():
            if isinstance(row, dict):
                table.add(row)
    elif is_csv(text.partition("\n")[0]):
        source = "CSV"
        for row in csv_rows(line.text for line in read_lines(path)):
            table.add(row)
    if not source:
        return None
    name, by_rank = table.best(MIN_VALUES)
    if not by_rank:
        raise InputError(
            f"{path}: {source} without times of steps; allowed: {'a column' if source == 'CSV' else 'entries'} such "
            "as step_time, or the program's console log with its progress bar or time stamps"
        )
    return _to_log(path, f"{source}, {name}", {rank: {"": column} for rank, column in by_rank.items()}, [])


class _Lines:
    """Numbers of every format that any line of a log matches, by writer: a rank, or the length of a progress bar."""

    def __init__(self, pattern: UserPattern | None) -> None:
        self._pattern = pattern
        self._columns: dict[str, dict[tuple[int | None, str], Column]] = {}
        self._mllog: dict[int | None, Mllog] = {}
        self._table = Table()
        self.settings: dict[str, str] = {}
        self._batch = 0.0
        self._stamp: Stamp | None = None

    def add(self, line: Line) -> None:
        """One line of the log."""
        text = line.text
        if self._pattern is not None:
            if (fields := self._pattern.match(text)) is not None:
                self._keep(self._pattern.name, fields, line, "unknown")
            return
        if MLPERF_MARK in text:
            if len(self._mllog) < MAX_WRITERS:
                self._mllog.setdefault(line.rank, Mllog())
            if line.rank in self._mllog:
                self._mllog[line.rank].add(text)
            return
        if text[:1] == "{" and '"' in text and (row := json_row(text)) is not None:
            self._table.add(row, line.rank)
            return
        for one in FORMATS:
            if (fields := one.match(text)) is not None and ("step" in fields or one.without_step):
                self._keep(one.name, fields, line, one.averages)
                return
        if " ...." in text and (setting := _SETTING.search(text)) is not None and setting[1] in SETTINGS:
            self.settings[setting[1]] = setting[2]
        if "train_batch_size" in text and (batch := SAMPLES_PER_STEP.search(text)) is not None:
            self._batch = float(batch[1])
        elif (step := ANY_STEP.search(text)) is not None:
            self._keep("time stamps", {"step": step[1]}, line, "interval")

    def _keep(self, name: str, fields: dict[str, str], line: Line, averages: str) -> None:
        stamp = stamp_in(fields.get("time", line.text))
        step, rank = (_whole(fields.get(name)) for name in ("step", "rank"))
        key = (line.rank if rank is None else int(rank), fields.get("total", ""))
        about = {"step", "time", "rank", "total"}
        value = next((number(field, text) for field, text in fields.items() if field not in about), None)
        if value is None and set(fields) <= about and stamp is not None and step is not None:
            value = Number("stamp", stamp.clock_s, stamp.resolution_s)
        if value is None:
            return
        columns = self._columns.setdefault(name, {})
        if key not in columns:
            if len(columns) >= MAX_WRITERS:
                return
            columns[key] = Column(value.kind, averages)
        if columns[key].kind == value.kind:
            columns[key].add(_UNKNOWN if step is None else step, value.value, stamp, value.digit, value.other)
            columns[key].decimal |= value.decimal

    def log(self, path: Path) -> StepLog:
        """The log from the first format, in the order of trust, that has enough values."""
        notes: list[str] = []
        order = ["--pattern", *(one.name for one in FORMATS[:-1]), MLPERF, "JSON lines", FORMATS[-1].name]
        for name in [*order, "time stamps"]:
            columns = self._of(name)
            least = MIN_STAMPS if name == "time stamps" else MIN_VALUES
            by_rank: dict[int | None, dict[str, Column]] = {}
            for (rank, total), column in columns.items():
                if len(column.value) >= least:
                    by_rank.setdefault(rank, {})[total] = column
            if name == BAR:
                by_rank = {rank: steps for rank, bars in by_rank.items() if (steps := bars_of_steps(bars))}
            if not by_rank:
                continue
            try:
                return _to_log(path, name, by_rank, notes, self._batch)
            except InputError as error:
                notes.append(str(error))
        if notes:
            raise InputError(notes[0])
        seen = max((len(c.value) for columns in self._columns.values() for c in columns.values()), default=0)
        few = f" ({seen} found, needed {MIN_VALUES})" if seen else ""
        what = f"too few step times in it{few}" if seen else "unknown format"
        if self._pattern is not None:
            raise InputError(f"{path}: --pattern matches too few lines{few}; allowed: one that matches a line per step")
        raise InputError(f"{path}: {what}; allowed: {ALLOWED}")

    def _of(self, name: str) -> dict[tuple[int | None, str], Column]:
        if name == "JSON lines":
            return {(rank, ""): column for rank, column in self._table.best(MIN_VALUES)[1].items()}
        if name != MLPERF:
            return self._columns.get(name, {})
        found = {}
        for rank, one in self._mllog.items():
            for column in (one.timed, one.summary, one.speed, one.blocks):
                if len(column.value) >= MIN_VALUES:
                    found[rank, ""] = one.in_steps(column)
                    break
        return found


def _whole(text: str | None) -> float | None:
    """A field's number, as of a step or a rank; None where there is none."""
    found = None if text is None else number("s", text)
    return None if found is None else found.value


def _to_log(
    path: Path, source: str, by_rank: dict[int | None, dict[str, Column]], notes: list[str], batch: float = 0.0
) -> StepLog:
    """Step times of every writer; that with the most values is shown, the others stand beside it.

    Of a writer's columns, the lengths of its progress bars, the first one counts that has step times.
    """
    logs, problem = [], ""
    for rank, columns in by_rank.items():
        for total, column in columns.items():
            try:
                steps = convert(column, f"{path}: lines of {source}", batch)
            except InputError as error:
                problem = problem or str(error)
                continue
            said = (f"of progress bars of {', '.join(columns)} steps that of {total} is used",) * (len(columns) > 1)
            logs.append(StepLog(path.name, source, *steps[:-1], rank=rank, notes=(*said, *steps.notes)))
            break
    if not logs:
        raise InputError(problem)
    logs.sort(key=lambda log: (-len(log.step_V), -1 if log.rank is None else log.rank))
    first = logs[0]
    said = tuple(dict.fromkeys([*notes, *first.notes]))
    if len(logs) > 1:
        said = (*said, f"lines of {len(logs)} ranks; those of rank {first.rank} are used")
    return replace(first, others=tuple(logs[1:]), notes=said)
