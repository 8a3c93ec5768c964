"""Text logs of training programs with a step time in them, read into step times.

One general reader takes named numbers out of every line (``log_text.named_numbers``), of CSV and of JSON lines. Axes: V
logged values.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from paceenv.core.errors import InputError, short_repr
from paceenv.importers.formats import ALLOWED
from paceenv.importers.log_text.conversion import (
    GROUPS,
    MIN_VALUES,
    Array,
    Column,
    Integers,
    StepLog,
    bars_of_steps,
    convert,
    number,
    time_or_speed,
)
from paceenv.importers.log_text.log_lines import Line, Number, read_lines, stamp_in, without_dates
from paceenv.importers.log_text.named_numbers import (
    BAR,
    COUNTED,
    FORMATS,
    TRUST_STAMPS,
    TRUST_SUM,
    Named,
    Role,
    numbers_in,
    numbers_of,
    role_of,
)
from paceenv.importers.packed import content_of, head_of

MIN_STAMPS: Final = 8
"""Lines with a time stamp and a step number that are taken for a log of steps."""
MAX_JSON: Final = 256 << 20
MAX_WRITERS: Final = 4096
"""Ranks, and progress bars, that are kept apart."""
MAX_COLUMNS: Final = 2000
MAX_PHASES: Final = 40
_NO_TRAINING: Final = re.compile(
    r"[Vv]alidat|[Ee]valuat|\b(?:eval|EVAL|Eval|Test|Val)\b\s*:|\((?:val|test)\)|[Ii]nference|Sanity|Testing|Predict|Download|"
    r"Loading|Fetching|Resolving|Map[: ]|Filter|Generating|[Tt]okeniz|dataset|examples/s|ba/s|Processed prompts|"
    r"Watchdog|NCCL INFO|:::MLLOG"
)
"""Lines of anything else: evaluation, files, Hugging Face's datasets (which count examples), vLLM."""
_ALL_MS: Final = "time (ms) |"
"""DeepSpeed and Megatron-LM: what follows are parts of a step."""
_WHOLE: Final = 1.2
"""A part of a step that takes longer than the step by so much shows that it is none."""
_CARRIED: Final = 60
"""Lines below one with a step number whose numbers belong to it, as Composer and OLMo print them."""
_SEEN: Final = 2000
"""Characters of a line that a user's own pattern sees."""


def read_step_log(path: str | Path, *, pattern: str | None = None) -> StepLog:
    """Read a log. Memory is at most 8 times the file's size, and 150 MB for the largest part that is looked at.

    Raises InputError: the file cannot be read or has no step times.
    """
    path = Path(path)
    head = head_of(path)
    if head[:4] in {b"PAR1", b"PK\x03\x04"} or b"\0" in head[:4096].replace(b"\0\n", b""):
        raise InputError(f"{path}: no text; {ALLOWED}")
    compiled = None if pattern is None else compile_pattern(pattern)
    runs, count = defaultdict[str, _Lines](lambda: _Lines(compiled)), Counter[str]()  # by the column run of a table
    source, rows = _rows_of(path, head) if pattern is None else ("", ())
    for row in rows:
        if isinstance(row, dict) and ((name := str(row.get("run", ""))) in runs or len(runs) < MAX_WRITERS):
            runs[name].add_row(row, source)
            count[name] += 1
    for line in read_lines(path) if not source else ():
        runs[""].add(line)
    name = max(count, key=count.__getitem__, default="")
    log = runs[name].log(path, is_table=source != "")
    more = f"{len(runs)} runs, by its column run; of them {short_repr(name)} is looked at, as none has more rows"
    return replace(log, notes=(more, *log.notes)) if len(runs) > 1 else log


def compile_pattern(text: str) -> re.Pattern[str]:
    """A user's own pattern; without a value the time stamps of the lines give a step time.

    Raises InputError: it is no regular expression, or lacks a group that it needs.
    """
    try:
        pattern = re.compile(text)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        raise InputError(
            f"--pattern {short_repr(text)}: no regular expression ({error}); "
            "allowed: for example 'step (?P<step>\\d+).*time: (?P<ms>[\\d.]+)'"
        ) from None
    names = set(pattern.groupindex)
    unknown, values = sorted(names - {"step", "time", "rank", *GROUPS}), sorted(names & set(GROUPS))
    if unknown or len(values) > 1 or not names & {"step", *GROUPS}:
        said = (
            f"group {unknown[0]!r} is unknown" if unknown else f"groups {', '.join(values)}" if values else "no group"
        )
        raise InputError(f"--pattern: {said}; allowed: one of {', '.join(GROUPS)}, beside it step, time, rank")
    if "elapsed_s" in values and "step" not in names:
        raise InputError("--pattern: elapsed_s without (?P<step>..); allowed: both, as it is differenced")
    return pattern


def _rows_of(path: Path, head: bytes) -> tuple[str, Iterable[Any]]:
    """The rows of a CSV, or of the state of Hugging Face's Trainer, and which of them it is; "" if it is neither."""
    text = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    if text.startswith("{") and '"log_history"' in text:
        state = _json_row(content_of(path, MAX_JSON)[0].decode("utf-8-sig", "replace")) or {}
        return "trainer_state.json", history if isinstance(history := state.get("log_history"), list) else ()
    if _is_csv(text.partition("\n")[0]):
        return "CSV", _csv_rows(line.text for line in read_lines(path))
    return "", ()


def _is_csv(head: str) -> bool:
    """Whether a first line is the header of a CSV with a column of times and one of steps or ranks."""
    roles = [role_of(cell.strip("'\" \r\n")) for cell in head.split(",")] if "," in head and ":" not in head else []
    told = {role.meaning for role in roles if role is not None}
    return bool(told & {"value", "stamp"}) and bool(told & {"step", "rank"}) and not head[:1].isdigit()


def _csv_rows(lines: Iterable[str]) -> Iterator[Mapping[Any, Any]]:
    """Rows of a CSV with a header line that have as many cells as it, up to one that cannot be read."""
    with contextlib.suppress(csv.Error):
        yield from (row for row in csv.DictReader(lines) if None not in row and None not in row.values())


def _json_row(text: str) -> Mapping[Any, Any] | None:
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


class _Row(NamedTuple):
    """What one line says besides its values; ``step`` is not-a-number where it has none."""

    step: float
    total: float
    epoch: float
    stamp: Number | None
    rank: int | None
    text: str
    source: str
    parts: dict[str, float]


_COUNT: Final = Role("step", "", trust=5)
"""A number without a name and with a slash behind it."""


class _Lines:
    """What was read so far: columns by trust and name, each by rank and length of a progress bar."""

    def __init__(self, pattern: re.Pattern[str] | None) -> None:
        self._pattern = pattern
        self.settings: dict[str, str] = {}
        self._columns: dict[tuple[int, str], dict[tuple[int | None, str], Column]] = {}
        self._phases: dict[int | None, dict[str, array[float]]] = defaultdict(dict)  # line and seconds, and so on
        self._number, self._step, self._step_line = 0, math.nan, -_CARRIED

    def add(self, line: Line) -> None:
        text = line.text
        if self._pattern is not None:
            self._number += 1
            heads = (one[:_SEEN] for one in (text, line.tagged))
            if (hit := next(filter(None, map(self._pattern.search, heads)), None)) is not None:
                self._add_fields({name: value for name, value in hit.groupdict().items() if value is not None}, line)
        elif text[:1] == "{" and '"' in text and (row := _json_row(text)) is not None:
            self.add_row(row, "JSON lines", line.rank)
        elif any(map(str.isdecimal, text)) and not _NO_TRAINING.search(text):
            self._add_text(text, line.rank)

    def _add_text(self, text: str, rank: int | None) -> None:
        head, _, parts = without_dates(text).partition(_ALL_MS)
        numbers = [(one, role_of(one.name, one.unit)) for one in numbers_in(head)]
        for one in numbers_in(parts):
            name = one.name.rpartition("|")[2].strip(" :").replace("_", " ").replace("-", " ")
            numbers.append((Named(name, one.value), Role("phase", name, unit=1e-3)))
        self._take(numbers, stamp_in(text), rank, text)

    def add_row(self, row: Mapping[Any, Any], source: str, rank: int | None = None) -> None:
        self._take([(one, role_of(one.name, one.unit)) for one in numbers_of(row)], None, rank, "", source)

    def _take(
        self,
        numbers: list[tuple[Named, Role | None]],
        stamp: Number | None,
        rank: int | None,
        text: str,
        source: str = "",
    ) -> None:
        """A line or row: its step, the named parts of the step, and its values."""
        self._number += 1
        by: dict[str, list[tuple[Role, Number, Named]]] = defaultdict(list)
        for one, known in numbers:
            role = known or (_COUNT if one.total and not one.unit else None)
            read = time_or_speed if role is not None and role.meaning == "value" else number
            amount = None if role is None else read(one.value, role.unit or 1.0)
            if role is not None and amount is not None:
                by[role.meaning].append((role, amount, one))
        for role, _, one in by["setting"]:
            self.settings.setdefault(role.name, one.value)
        for _, amount, _ in by["stamp"]:
            stamp = _as_clock(amount)
        rank = next((int(amount.value) for _, amount, _ in by["rank"]), rank)
        epoch = next((amount.value for _, amount, _ in by["epoch"]), 0.0)
        times = ((r.unit or 1.0, amount.value) for r, amount, _ in by["value"] if "step time" in r.kind)
        whole, named = next(times, (1.0, 0.0)), dict[str, float]()
        for role, amount, _ in by["phase"]:
            part_s = amount.value * (1.0 if role.unit else whole[0])
            if role.unit or "time" in role.name or part_s <= whole[1]:  # else a number of anything
                named[role.name] = part_s
        line = _Row(math.nan, 0.0, epoch, stamp, rank, text, source, named)
        if by["step"]:
            _, amount, one = min(by["step"], key=lambda step: step[0].trust)
            self._step, self._step_line = amount.value, self._number
            line = line._replace(step=amount.value, total=float(one.total or 0))
        phases = self._phases[rank]
        for name, part_s in named.items():
            if name in phases or len(phases) < MAX_PHASES:
                phases.setdefault(name, array("d")).extend((self._number, part_s))
        plain = {name: name.replace(" microstep", "") for name in named}
        parts = [n for n in plain if not any(plain[n].startswith(other + " ") for other in plain.values())]
        parts = [n for n in parts if " microstep" in n or plain[n] + " microstep" not in plain]
        if not by["value"] and len(parts) > 1:
            role = Role("value", " + ".join(parts), trust=TRUST_SUM, averages="one step")
            whole_s = sum(named[name] for name in parts)
            by["value"].append((role, Number(whole_s, 1e-5), Named("", "")))
        for value in by["value"]:
            self._add_value(line, *value)
        if by["step"] and stamp is not None:
            self._keep((TRUST_STAMPS, "time stamps"), (rank, ""), Column("elapsed"), line, stamp)

    def _add_value(self, line: _Row, role: Role, amount: Number, one: Named) -> None:
        """A value of a line, unless it may be of anything."""
        known = next((f for f in FORMATS if f.name == role.name and f.needle in line.text), None)
        of = next((COUNTED[w] for w in f"{role.name} {one.unit}".replace("/", " ").split() if w in COUNTED), "")
        if known is not None:
            trust, name, kind, averages = -1, known.program, known.kind, known.averages
        else:
            trust, name, kind, averages = role.trust, role.name or one.unit, role.kind, role.averages
            name = f"{line.source}, {name}" if line.source else name if name == BAR else f"named columns, {name}"
        if math.isnan(line.step):
            near = self._number - self._step_line <= _CARRIED and not line.source
            line = line._replace(step=self._step if near else math.nan)
            is_rate = kind == "steps a second" or (kind == "speed" and of != "")
            alone = trust in {4, 5} or (kind != "step time" and math.isnan(line.step))
            if alone and len(line.parts) < 2 and not is_rate:
                return  # a time without a step in its line may be of anything
        scale = {"k": 1e3, "m": 1e6, "g": 1e9}.get(one.unit, 1.0)
        amount = Number(*(scale * x for x in (_as_clock(amount) if "elapsed" in kind else amount)))
        column = Column(kind, averages, role.unit is not None, of)
        self._keep((trust, name), (line.rank, f"{line.total:.0f}" if name == BAR else ""), column, line, amount)

    def _add_fields(self, fields: dict[str, str], line: Line) -> None:
        stamp = stamp_in(fields.get("time", line.text))
        step, rank = (number(fields.get(name, "")) for name in ("step", "rank"))
        group = next((name for name in fields if name in GROUPS), None)
        kind, unit = GROUPS[group or "elapsed_s"]
        value = None if group is None else time_or_speed(fields[group], unit)
        if group is None and stamp is not None and step is not None:
            value = stamp
        if value is not None:
            at = math.nan if step is None else step.value
            row = _Row(at, 0.0, 0.0, stamp, line.rank if rank is None else int(rank.value), "", "", {})
            self._keep((-9, "--pattern"), (row.rank, ""), Column(kind), row, value)

    def _keep(
        self, name: tuple[int, str], writer: tuple[int | None, str], column: Column, line: _Row, value: Number
    ) -> None:
        """Add a number to the column of its name and writer; ``column`` is a new one for it."""
        columns = self._columns.setdefault(name, {})
        if writer in columns or len(columns) < MAX_WRITERS:
            column = columns.setdefault(writer, column)
            column.total = max(column.total, line.total)
            column.add(line.step, value, line.stamp, line=self._number, epoch=line.epoch)

    def log(self, path: Path, *, is_table: bool) -> StepLog:
        """The log from what is trusted most and has step times; of its writers that with the most values is shown."""
        problems: list[str] = []
        for trust, source in sorted(self._columns):
            least = MIN_STAMPS if trust == TRUST_STAMPS else MIN_VALUES
            by_rank: dict[int | None, dict[str, Column]] = defaultdict(dict)
            for (rank, total), column in self._columns[trust, source].items():
                if len(column) >= least:
                    by_rank[rank][total] = column
            logs = [log for rank in by_rank for log in self._logs(path, source, rank, by_rank[rank], problems)]
            if logs:
                first, *others = sorted(logs, key=lambda log: (-len(log.step_V), -1 if log.rank is None else log.rank))
                more = (f"lines of {len(logs)} ranks; those of rank {first.rank} are shown, all are compared",)
                return replace(first, others=tuple(others), notes=first.notes + more * bool(others))
        if problems:
            raise InputError(problems[0])
        seen = max((len(c) for columns in self._columns.values() for c in columns.values()), default=0)
        refused = max((c.refused for columns in self._columns.values() for c in columns.values()), default=0)
        if refused >= MIN_VALUES:
            said = f"{seen} step times, as {refused} are negative or not finite"
            raise InputError(f"{path}: {said}; allowed: at least {MIN_VALUES}")
        few = f" ({seen} found, needed {MIN_VALUES})" if seen else ""
        if self._pattern is not None:
            raise InputError(f"{path}: --pattern matches too few lines{few}; allowed: one that matches a line per step")
        what = f"too few step times in it{few}" if seen or is_table else "unknown format"
        raise InputError(f"{path}: {what}; {ALLOWED}")

    def _logs(
        self, path: Path, source: str, rank: int | None, columns: Mapping[str, Column], problems: list[str]
    ) -> Iterator[StepLog]:
        """A writer's step times, or nothing: of its columns, the lengths of its bars, those of the first that has some.

        Why the others have none is added to ``problems``.
        """
        columns = bars_of_steps(columns) if source == BAR else columns
        batch = float(self.settings.get("train batch size") or self.settings.get("global batch size") or 0.0)
        for total, column in columns.items():
            try:
                log, line_V = convert(column, path, source, batch)
                parts = _phases_of(line_V, self._phases.get(rank) or {}) if log.of == "step" else {}
                longest_s = max((float(np.nanmedian(part_V)) for part_V in parts.values()), default=0.0)
                if longest_s > _WHOLE * float(np.median(log.step_s_V)) and self._pattern is None:
                    allowed = "allowed: --pattern with the whole step"
                    raise InputError(f"{path}: lines of {source} are of a part of a step; {allowed}")
            except InputError as error:
                problems.append(str(error))
                continue
            said = (f"of progress bars of {', '.join(columns)} steps that of {total} is used",) * (len(columns) > 1)
            yield replace(log, rank=rank, notes=(*said, *log.notes), phases=parts)
            return


def _as_clock(reading: Number) -> Number:
    """A clock's reading in seconds: since 1970 there are 1.7e9 s, 1.7e12 ms, 1.7e15 us or 1.7e18 ns."""
    above = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
    unit_s = next((unit_s for least, unit_s in above if reading.value > least), 1.0)
    return Number(*(unit_s * x for x in reading))


def _phases_of(line_V: Integers, phases: Mapping[str, array[float]]) -> dict[str, Array]:
    """Named parts of a step at each value: those of its own line, or of the lines up to the next value."""
    parts = {}
    order = np.argsort(line_V, kind="stable")
    for name, phase in phases.items():
        line, value = np.array(phase).reshape(-1, 2).T
        at = np.searchsorted(line_V[order], line, side="right") - 1
        part_V = np.full(len(line_V), np.nan)
        part_V[order[at[at >= 0]]] = value[at >= 0]
        if np.isfinite(part_V).mean() > 0.5:
            parts[name] = part_V
    return {n: parts[n] for n in parts if n.replace(" microstep", "") not in parts.keys() - {n}}
