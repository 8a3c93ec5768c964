"""Text logs of training programs with a step time in them, read into step times.

One general reader takes named numbers out of every line (``log_text.named_numbers``), of CSV and of JSON lines; only
progress bars, MLPerf's events and the user's own pattern are read otherwise. Axes: V logged values.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.importers.log_text.conversion import (
    GROUPS,
    MAX_WRITERS,
    MIN_VALUES,
    Column,
    Number,
    Steps,
    bars_of_steps,
    convert,
    number,
)
from paceenv.importers.log_text.log_lines import Line, Stamp, read_lines, stamp_in, without_dates
from paceenv.importers.log_text.named_numbers import FORMATS, UNITS_S, Named, Role, numbers_in, numbers_of, role_of
from paceenv.importers.log_text.tables import MLPERF, MLPERF_MARK, Mllog, csv_rows, is_csv, json_row
from paceenv.importers.log_text.user_pattern import UserPattern
from paceenv.importers.packed import content_of, head_of

MIN_STAMPS: Final = 8
"""Lines with a time stamp and a step number that are taken for a log of steps."""
MAX_JSON: Final = 256 << 20
ALLOWED: Final = (
    "Parquet, JSON of the PyTorch profiler, dumps of its Flight Recorder, output of nccl-tests, a log whose lines name "
    "a step and its time (as in 'step: 10 time: 0.4 s'), a progress bar, CSV or JSON lines with a column such as "
    "step_time, or any other log with --pattern 'step (?P<step>\\d+).*time: (?P<ms>[\\d.]+)'"
)
SETTINGS: Final = (
    "world_size", "data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "micro_batch_size", "global_batch_size", "num_layers", "hidden_size", "seq_length",
)  # fmt: skip
"""Settings as Megatron-LM and DeepSpeed print them, ``name ..... value``: logs of one job have the same."""
_BAR: Final = "progress bar (tqdm)"
_BAR_LINE: Final = re.compile(r"(?<![0-9.])(?P<step>\d{1,12})/(?P<total>\d{1,12}) \[(?P<s>(?:\d{1,3}:)?\d{1,2}:\d\d)<")
_NO_TRAINING: Final = re.compile(
    r"[Vv]alidat|[Ee]valuat|\b(?:eval|EVAL|Eval|Test|Val)\b\s*:|\((?:val|test)\)|[Ii]nference|Sanity|Testing|Predict|Download|"
    r"Loading|Fetching|Resolving|Map[: ]|Filter|Generating|[Tt]okeniz|dataset|examples/s|ba/s|Processed prompts|"
    r"Watchdog|NCCL INFO"
)
"""Lines of anything else: evaluation, files, Hugging Face's datasets (which count examples), vLLM."""
_TIMER: Final = re.compile(r"^\s*([A-Za-z][\w-]{1,40}) \.{2,}: ?\(([\d.]+), ([\d.]+)\)")
"""Megatron-LM: the least and the most of all ranks, in ms."""
_SAMPLES_PER_STEP: Final = re.compile(r"train_batch_size \.{1,64} (\d{1,12})")
"""DeepSpeed prints its configuration; its samples per second are of the whole batch."""
_ALL_MS: Final = "time (ms) |"
"""DeepSpeed and Megatron-LM: what follows are parts of a step."""
_FASTEST: Final = " of the fastest rank"
MAX_PHASES: Final = 40
_SUM, _BARS, _STAMPS = 20, 90, 99
"""Trust in a sum of named parts, in progress bars, and in time stamps, after what a line says by itself."""
_OF_A_STEP: Final = frozenset(("step time", "steps a second"))
_WHOLE: Final = 1.2
"""A part of a step that takes longer than the step by so much shows that it is none."""
_CARRIED: Final = 60
"""Lines below one with a step number whose numbers belong to it, as Composer and OLMo print them."""
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
    phases: Mapping[str, Array] = field(default_factory=dict)  # seconds of named parts of each value's step, (V,)
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
    common = [name for name in first.phases if all(name in log.phases for log in logs)]
    parts: dict[str, Any] = {name: np.concatenate([getattr(log, name) for log in logs]) for name in names}
    run_V = np.concatenate([log.run_V + offset for log, offset in zip(logs, offsets, strict=True)])
    notes = tuple(dict.fromkeys(f"{log.name}: {note}" for log in logs for note in log.notes))
    return replace(
        first,
        **parts,
        run_V=run_V,
        rounding_s=max(log.rounding_s for log in logs),
        others=(),
        notes=notes,
        phases={name: np.concatenate([log.phases[name] for log in logs]) for name in common},
    )


def _whole_table(path: Path, head: bytes) -> StepLog | None:
    """A CSV, or the state of Hugging Face's Trainer; None if the file is neither."""
    text, source = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n"), ""
    lines = _Lines(None)
    if text.startswith("{") and '"log_history"' in text:
        source = "trainer_state.json"
        content, damage = content_of(path, MAX_JSON)
        state = None if damage else json_row(content.decode("utf-8-sig", "replace"))
        history = (state or {}).get("log_history")
        for row in history if isinstance(history, list) else ():
            if isinstance(row, dict):
                lines.add_row(row, source)
    elif is_csv(text.partition("\n")[0]):
        source = "CSV"
        for found in csv_rows(line.text for line in read_lines(path)):
            lines.add_row(found, source)
    if not source:
        return None
    try:
        return lines.log(path)
    except InputError as error:
        if "--pattern" not in str(error):
            raise
        raise InputError(
            f"{path}: {source} without times of steps; allowed: {'a column' if source == 'CSV' else 'entries'} such "
            "as step_time, or the program's console log with its progress bar or time stamps"
        ) from None


@dataclass
class _Phase:
    """A named part of steps: lines that give it, and seconds."""

    line: array[int] = field(default_factory=lambda: array("q"))
    value: array[float] = field(default_factory=lambda: array("d"))


class _Lines:
    """Numbers of every line of a log, by what they are and by writer: a rank, or the length of a progress bar."""

    def __init__(self, pattern: UserPattern | None) -> None:
        self._pattern = pattern
        self._columns: dict[tuple[int, str], dict[tuple[int | None, str], Column]] = {}
        self._phases: dict[int | None, dict[str, _Phase]] = defaultdict(dict)
        self._mllog: dict[int | None, Mllog] = {}
        self.settings: dict[str, str] = {}
        self._batch = 0.0
        self._number, self._step, self._step_line = 0, np.nan, -_CARRIED - 1
        self._unread: Counter[str] = Counter()
        self._samples: dict[str, str] = {}

    def add(self, line: Line) -> None:
        """One line of the log."""
        text = line.text
        self._number += 1
        if self._pattern is not None:
            if (fields := self._pattern.match(text) or self._pattern.match(line.tagged)) is not None:
                self._add_fields(fields, line)
            return
        if MLPERF_MARK in text:
            if len(self._mllog) < MAX_WRITERS:
                self._mllog.setdefault(line.rank, Mllog())
            if line.rank in self._mllog:
                self._mllog[line.rank].add(text)
            return
        if text[:1] == "{" and '"' in text and (row := json_row(text)) is not None:
            self.add_row(row, "JSON lines", line.rank)
            return
        if _NO_TRAINING.search(text):
            return
        if self._is_special(text, line.rank):
            return
        if any(map(str.isdecimal, text)):
            self._add_numbers(numbers_in(without_dates(text)), stamp_in(text), line.rank, text)

    def _is_special(self, text: str, rank: int | None) -> bool:
        """Read a progress bar, a timer of Megatron-LM, or a setting; whether the line was one."""
        if "<" in text and (bar := _BAR_LINE.search(text)) is not None:
            value = number(bar["s"], "elapsed")
            if value is not None:
                self._keep((_BARS, _BAR), (rank, bar["total"]), float(bar["step"]), value, None, "interval")
            return True
        if " ...." in text:
            if (timer := _TIMER.match(text)) is not None:
                for name, value_ms in ((timer[1], timer[3]), (timer[1] + _FASTEST, timer[2])):
                    self._add_phase(rank, name.replace("-", " "), 1e-3 * float(value_ms))
                return True
            if (setting := _SETTING.search(text)) is not None and setting[1] in SETTINGS:
                self.settings[setting[1]] = setting[2]
        if "train_batch_size" in text and (batch := _SAMPLES_PER_STEP.search(text)) is not None:
            self._batch = float(batch[1])
            return True
        return False

    def add_row(self, row: Mapping[Any, Any], source: str, rank: int | None = None) -> None:
        """A row of a table."""
        self._number += 1
        self._add_numbers(numbers_of(row), None, rank, "", source)

    def _add_numbers(
        self, numbers: list[Named], stamp: Stamp | None, rank: int | None, text: str, source: str = ""
    ) -> None:
        steps: list[tuple[int, float, float]] = []
        epoch, timers, values, phases = 0.0, False, list[tuple[Role, Named]](), list[tuple[str, float]]()
        all_ms = _ALL_MS in text
        for one in numbers:
            timers = timers or (all_ms and _ALL_MS in one.name)
            role = role_of(one.name, "ms" if timers and not one.unit else one.unit)
            if timers:
                name = one.name.rpartition("|")[2].strip(" :").replace("_", " ").replace("-", " ")
                phases.append((name, 1e-3 * float(one.value.replace(",", ""))))
                continue
            if role is None:
                if one.total and not one.unit:
                    steps.append(
                        (5, float(one.value.replace(",", "") if ":" not in one.value else "nan"), float(one.total))
                    )
                continue
            if role.meaning == "stamp" or role.meaning == "value":
                values.append((role, one))
                if role.meaning == "stamp":
                    stamp = _clock(one.value) or stamp
            elif role.meaning == "phase" and (part := number(one.value)) is not None:
                phases.append((role.name, (1.0 if role.unit is None else role.unit) * part.value))
            elif (found := number(one.value)) is not None and role.meaning == "step":
                steps.append((role.trust, found.value, float(one.total or 0)))
            elif found is not None and role.meaning == "epoch":
                epoch = found.value
            elif found is not None and role.meaning == "rank" and found.value.is_integer():
                rank = int(found.value)
        _, step, total = min(steps, key=lambda one: one[0], default=(0, np.nan, 0.0))
        if steps:
            self._step, self._step_line = step, self._number
        elif self._number - self._step_line <= _CARRIED and not source:
            step = self._step
        if all_ms and phases and not steps:
            values.append((Role("value", _whole_step(phases), "step time", 1.0, _SUM, "one step"), Named("", "")))
        self._add_value(values, phases, (step, epoch, total), stamp, rank, text, source, bool(steps))

    def _add_value(
        self,
        values: list[tuple[Role, Named]],
        phases: list[tuple[str, float]],
        at: tuple[float, float, float],
        stamp: Stamp | None,
        rank: int | None,
        text: str,
        source: str,
        has_step: bool,
    ) -> None:
        """The best value of a line, with its step, and the named parts of the step."""
        step, epoch, total = at
        for name, part_s in phases:
            self._add_phase(rank, name, part_s)
        kept = False
        for role, one in (_as_known(role, one, text) for role, one in values):
            unit = 1.0 if role.unit is None else role.unit
            whole = _scaled(number(one.value, role.kind, unit), one.unit)
            if role.trust == _SUM:
                parts = dict(phases)
                whole = Number("step time", sum(parts[name] for name in role.name.split(" + ")), 1e-5)
            elif (not has_step and len(phases) < 2) and (
                role.trust in {4, 5} or (np.isnan(step) and role.kind not in _OF_A_STEP)
            ):
                continue  # a time without a step in its line may be of anything
            if whole is None:
                continue
            if role.kind in {"elapsed", "elapsed or step time"}:
                whole = _as_clock(whole)
            name = f"{source}, {role.name}" if source else role.name
            name = name if source or role.trust < 0 else f"named columns, {role.name or one.unit}"
            said = role.unit is not None
            self._keep((role.trust, name), (rank, ""), step, whole, stamp, role.averages, epoch, total, said=said)
            kept = True
        if has_step and stamp is not None:
            value = Number("stamp", stamp.clock_s, stamp.resolution_s)
            self._keep((_STAMPS, "time stamps"), (rank, ""), step, value, stamp, "interval", epoch, total)
        elif not kept and text and len(self._samples) < 500:
            shape = re.sub(r"\d+", "0", text[:200])
            self._unread[shape] += 1
            self._samples.setdefault(shape, text[:200])

    def _add_phase(self, rank: int | None, name: str, part_s: float) -> None:
        phases = self._phases[rank]
        if name in phases or len(phases) < MAX_PHASES:
            phase = phases.setdefault(name, _Phase())
            phase.line.append(self._number)
            phase.value.append(part_s)

    def _add_fields(self, fields: dict[str, str], line: Line) -> None:
        """What the user's own pattern found."""
        stamp = stamp_in(fields.get("time", line.text))
        step, rank = (number(fields.get(name, "")) for name in ("step", "rank"))
        group = next((name for name in fields if name in GROUPS), None)
        value = None if group is None else number(fields[group], *GROUPS[group])
        if group is None and stamp is not None and step is not None:
            value = Number("stamp", stamp.clock_s, stamp.resolution_s)
        if value is not None:
            writer = line.rank if rank is None else int(rank.value)
            at = np.nan if step is None else step.value
            self._keep((-9, UserPattern.name), (writer, ""), at, value, stamp, "unknown")

    def _keep(
        self,
        name: tuple[int, str],
        writer: tuple[int | None, str],
        step: float,
        value: Number,
        stamp: Stamp | None,
        averages: str,
        epoch: float = 0.0,
        total: float = 0.0,
        *,
        said: bool = True,
    ) -> None:
        columns = self._columns.setdefault(name, {})
        if writer not in columns:
            if len(columns) >= MAX_WRITERS:
                return
            columns[writer] = Column(value.kind, averages, unit_said=said)
        column = columns[writer]
        if column.kind == value.kind:
            column.total = max(column.total, total)
            column.add(step, value, stamp, line=self._number, epoch=epoch)

    def log(self, path: Path) -> StepLog:
        """The log from what is trusted most and has enough values."""
        notes: list[str] = []
        if self._mllog:
            self._columns[1, MLPERF] = {
                (rank, ""): column for rank, one in self._mllog.items() if (column := one.best())
            }
        for trust, name in sorted(self._columns):
            least = MIN_STAMPS if trust == _STAMPS else MIN_VALUES
            by_rank: dict[int | None, dict[str, Column]] = {}
            for (rank, total), column in self._columns[trust, name].items():
                if len(column.value) >= least:
                    by_rank.setdefault(rank, {})[total] = column
            if name == _BAR:
                by_rank = {rank: steps for rank, bars in by_rank.items() if (steps := bars_of_steps(bars))}
            if not by_rank:
                continue
            try:
                return _to_log(path, name, by_rank, notes, self._phases, self._batch)
            except InputError as error:
                notes.append(str(error))
        if notes:
            raise InputError(notes[0])
        seen = max((len(c.value) for columns in self._columns.values() for c in columns.values()), default=0)
        few = f" ({seen} found, needed {MIN_VALUES})" if seen else ""
        if self._pattern is not None:
            raise InputError(f"{path}: --pattern matches too few lines{few}; allowed: one that matches a line per step")
        what = f"too few step times in it{few}" if seen else f"unknown format{self._like()}"
        raise InputError(f"{path}: {what}; allowed: {ALLOWED}")

    def _like(self) -> str:
        """What the lines that nothing could be made of look like, and a pattern that would read them."""
        shape, count = self._unread.most_common(1)[0] if self._unread else ("", 0)
        if count < MIN_VALUES:
            return ""
        sample = self._samples[shape]
        decimal = re.search(r"\d+\.\d+", sample)
        if decimal is None:
            return f" ({count} lines like {sample[:80]!r})"
        before = re.sub(r"\d+", r"\\d+", re.escape(sample[max(decimal.start() - 20, 0) : decimal.start()]))
        return f" ({count} lines like {sample[:80]!r}; if {decimal[0]} is a time: --pattern '{before}(?P<s>[\\d.]+)')"


def _as_known(role: Role, one: Named, text: str) -> tuple[Role, Named]:
    """A value as the small table of formats says it is."""
    for known in FORMATS:
        if (
            known.words == role.name
            and known.needle in text
            and (text or not known.needle)
            and (known.words or one.unit in UNITS_S)
        ):
            return role._replace(name=known.program, kind=known.kind, averages=known.averages, trust=-1), one
    return role, one


def _whole_step(phases: list[tuple[str, float]]) -> str:
    """The named parts that add up to a step: those that are no part of another one."""
    names = [name for name, _ in phases]
    whole = [name for name in names if not any(name != other and name.startswith(other + " ") for other in names)]
    return " + ".join(whole)


def _scaled(found: Number | None, unit: str) -> Number | None:
    """A number with a K, M or G behind it."""
    factor = {"k": 1e3, "m": 1e6, "g": 1e9}.get(unit, 1.0)
    return found and found._replace(value=factor * found.value, digit=factor * found.digit)


def _clock(text: str) -> Stamp | None:
    """A column's time stamp."""
    found = number(text)
    return None if found is None else Stamp((clock := _as_clock(found)).value, clock.digit)


def _as_clock(found: Number) -> Number:
    """A clock's reading in seconds: since 1970 there are 1.7e9 s, 1.7e12 ms, 1.7e15 us or 1.7e18 ns."""
    above = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
    unit_s = next((unit_s for least, unit_s in above if found.value > least), 1.0)
    return found._replace(value=unit_s * found.value, digit=unit_s * found.digit)


def _to_log(
    path: Path,
    source: str,
    by_rank: dict[int | None, dict[str, Column]],
    notes: list[str],
    phases: Mapping[int | None, Mapping[str, _Phase]],
    batch: float = 0.0,
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
            parts = _phases_of(steps, phases.get(rank) or {})
            longest_s = max((float(np.nanmedian(part_V)) for part_V in parts.values()), default=0.0)
            if longest_s > _WHOLE * float(np.median(steps.step_s_V)) and not source.startswith(UserPattern.name):
                problem = f"{path}: lines of {source} are of a part of a step; allowed: --pattern with the whole step"
                continue
            found = steps.step_V, steps.step_s_V, steps.steps_V, steps.clock_s_V, steps.run_V, steps.rounding_s
            logs.append(StepLog(path.name, source, *found, rank, notes=(*said, *steps.notes), phases=parts))
            break
    if not logs:
        raise InputError(problem)
    logs.sort(key=lambda log: (-len(log.step_V), -1 if log.rank is None else log.rank))
    first = logs[0]
    said = tuple(dict.fromkeys([*notes, *first.notes]))
    if len(logs) > 1:
        said = (*said, f"lines of {len(logs)} ranks; those of rank {first.rank} are shown, all are compared")
    return replace(first, others=tuple(logs[1:]), notes=said)


def _phases_of(steps: Steps, phases: Mapping[str, _Phase]) -> dict[str, Array]:
    """Named parts of a step at each value: those of its own line, or of the lines up to the next value."""
    line_V, found = steps.line_V, {}
    order = np.argsort(line_V, kind="stable")
    for name, phase in phases.items():
        line, value = np.array(phase.line), np.array(phase.value)
        at = np.searchsorted(line_V[order], line, side="right") - 1
        part_V = np.full(len(line_V), np.nan)
        part_V[order[at[at >= 0]]] = value[at >= 0]
        if np.isfinite(part_V).mean() > 0.5:
            found[name] = part_V
    return found
