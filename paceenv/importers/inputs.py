"""The one way in: whatever files, folders and patterns a user names, read by their content, the rest named and skipped.

Everything that others recorded comes through :func:`read_inputs`; one reader per format lies beside this file.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow.compute as pc

from paceenv.core.errors import InputError
from paceenv.core.trace import Trace, open_parquet, read_trace
from paceenv.core.wording import duration
from paceenv.importers.flight_recorder import Dump, read_dump
from paceenv.importers.formats import ALLOWED, Format, find_format, list_files
from paceenv.importers.hang_text import HangText
from paceenv.importers.log_text.conversion import StepLog
from paceenv.importers.merge_ranks import merge_ranks
from paceenv.importers.nccl_info import describe_network
from paceenv.importers.nccl_tests import Table, read_tables
from paceenv.importers.profiler.kineto import import_kineto
from paceenv.importers.step_log import compile_pattern, read_step_log
from paceenv.importers.straggler import import_straggler
from paceenv.importers.timelines import RankActivity, Timeline
from paceenv.ui import output

_NAMED: Final = 3
"""Files named in a note; of more that share a reason only their number is given."""
_BAR_BYTES: Final = 8 << 20
"""What takes about a second to read: from there on a progress bar is shown."""


@dataclass
class Inputs:
    trace: Trace | None = None  # operations of ranks; None where no file has any
    notes: tuple[str, ...] = ()  # what is damaged, skipped or left out, one line each
    activity: tuple[RankActivity, ...] = ()  # where each rank's time went by step, of profiles
    dumps: tuple[Dump, ...] = ()  # Flight Recorder dumps as they are
    steps: tuple[StepLog, ...] = ()  # step times alone, of text logs, one per job
    tables: tuple[Table, ...] = ()  # bandwidth tables, one per program run
    apart: bool = False  # whether these are recordings of several runs, of which one is looked at
    several_traces: tuple[Path, ...] = ()  # traces of whole jobs, where there are several
    run: Path | None = None  # the folder that was read, where there are several with a run each
    ended: tuple[str, ...] = ()  # what texts say of how the job died or stands still, a sentence each
    why_no_trace: str = ""  # why files that could have held a trace do not; "" without any

    def one_log(self) -> StepLog | None:
        """The only log, None without any. Raises InputError if there are logs of several jobs."""
        if len(self.steps) > 1:
            named = ", ".join(log.name for log in self.steps[:3]) + (", ..." if len(self.steps) > 3 else "")
            raise InputError(f"logs of {len(self.steps)} jobs ({named}); allowed: those of one")
        return self.steps[0] if self.steps else None

    def say_several(self) -> str:
        return f"{len(self.several_traces)} whole traces ({_first_of(self.several_traces)}); allowed: one of them"

    def require_trace(self) -> Trace:
        """The only trace. Raises InputError that says what there is instead."""
        if self.several_traces:
            raise InputError(f"{self.say_several()}, such as {self.several_traces[0]}")
        if self.trace is not None:
            return self.trace
        if self.why_no_trace:
            raise InputError(self.why_no_trace)
        if self.dumps:
            raise InputError(f"dumps have no steps; paceenv diagnose {self.dumps[0].path.parent} reads them")
        if self.tables:
            source = self.tables[0].source
            raise InputError(f"{source}: a bandwidth table, no trace; allowed: paceenv calibrate {source}")
        raise InputError("step times are no trace of ranks; paceenv diagnose says what they tell")


def read_inputs(paths: Sequence[str | Path], *, pattern: str | None = None, max_rows: int | None = None) -> Inputs:
    """Read all that is usable in files, folders and patterns.

    Raises InputError: nothing usable is there, with the reason.
    """
    files = list_files(paths)
    if pattern is not None:
        compile_pattern(pattern)
    collector = _Found(max_rows, pattern)
    sizes = {path: path.stat().st_size for path in files}
    with output.progress("read", sum(sizes.values()) / 1e6, shown=sum(sizes.values()) > _BAR_BYTES) as done:
        read_bytes = 0
        for path in files:
            try:
                collector.take(path)
            except InputError as error:
                collector.refused[path] = str(error)
            read_bytes += sizes[path]
            done(read_bytes / 1e6)
    return collector.inputs()


class _Found:
    """What has been read so far, and why the rest could not be."""

    def __init__(self, max_rows: int | None, pattern: str | None) -> None:
        self._max_rows, self._pattern = max_rows, pattern
        self._found, self._hang = Inputs(), HangText()
        self._wholes: dict[Path, Format] = {}
        self._profiles: list[Timeline] = []
        self._notes: list[str] = []
        self.refused: dict[Path, str] = {}

    def take(self, path: Path) -> None:
        """Read a file. Raises InputError if it cannot be used."""
        kind, found = find_format(path), self._found
        if kind in ("paceenv trace", "straggler trace"):
            self._wholes[path] = kind  # read once it is known to be the only one
        elif kind == "flight recorder":
            dump = read_dump(path)
            found.dumps += (dump,)
            self._notes += dump.notes
        elif kind == "profile" and self._pattern is None:  # with a pattern the user knows that it is text
            self._profiles.append(import_kineto(path))
        else:
            says_end = self._hang.read(path)
            tables = read_tables(path)
            found.tables += tuple(tables)
            self._notes += [note for table in tables for note in table.notes]
            if tables:
                return
            try:
                found.steps += (read_step_log(path, pattern=self._pattern),)
            except InputError:
                if not says_end:
                    raise

    def inputs(self) -> Inputs:
        """All of it. Raises InputError if nothing is usable."""
        found = self._found
        why: list[str] = []
        for files, read in ((self._wholes, self._whole_trace), (self._profiles, self._merged)):
            try:
                found.trace = read() if files and found.trace is None else found.trace
            except InputError as error:
                why.append(str(error))
        network = describe_network(self._hang.info)
        self._notes += [network] * bool(network)
        if found.tables and (found.trace is not None or found.dumps or found.steps):
            named = dict.fromkeys(table.source.partition(", table ")[0] for table in found.tables)
            self._notes += [f"{name}: a bandwidth table, for paceenv calibrate" for name in named]
        found.dumps, found.ended = found.dumps or self._hang.dumps, self._hang.said
        if found.trace is not None:
            self._notes += [f"{_without_advice(reason)}; skipped" for reason in why]
        elif not (found.dumps or found.ended or network or found.tables or found.steps):
            refused = sorted(self.refused.values(), key=lambda said: ": unknown format; " in said)  # texts last
            more = 0 if why else len(refused) - 1
            also = f" ({more} more {'file' if more == 1 else 'files'} cannot be used either)" if more > 0 else ""
            nothing = f"no file says how long steps take or how the job ended; {ALLOWED}"
            raise InputError((why or [*refused, nothing])[0] + also)
        else:
            found.why_no_trace = why[0] if why else ""
        unusable = _by_reason((path, f"{_without_advice(text)}; skipped") for path, text in self.refused.items())
        found.notes = (*self._notes, *unusable)
        found.apart |= found.several_traces != ()
        return found

    def _whole_trace(self) -> Trace:
        if len(self._wholes) > 1:
            self._found.several_traces = tuple(self._wholes)
        path, kind = [*self._wholes.items()][-1]
        if kind == "straggler trace":
            return import_straggler(path)
        trace, note = read_capped(path, self._max_rows)
        self._notes += [note] * bool(note)
        return trace

    def _merged(self) -> Trace:
        timelines = self._profiles
        if len(timelines) > 1 and (unknown := next((t for t in timelines if not t.is_rank_known), None)) is not None:
            said = "neither distributedInfo nor its name says which rank it is; allowed: rank3.json"
            raise InputError(f"{unknown.path}: {said}")
        runs = split_runs(timelines)
        chosen_run = max(runs, key=lambda run: (len({t.rank for t in run}), _span(*run)[1]))
        if len(runs) > 1:
            self._notes.append(f"{_different_runs(runs)}; {_run_name(chosen_run)} is looked at")
        timelines = _joined(chosen_run)
        recordings = split_recordings([(t.path, t.rank) for t in timelines])
        chosen = max(recordings, key=len)
        for other in recordings:
            if other is not chosen:
                self._notes.append(f"{timelines[other[0]].path.parent}: another recording of the same ranks; skipped")
        latest = {t.rank: t for t in sorted((timelines[i] for i in chosen), key=_span)}
        kept = [timelines[i] for i in chosen if latest[timelines[i].rank] is timelines[i]]
        self._found.apart |= len(runs) > 1 or len(kept) < len(chosen) or len(recordings) > 1
        self._found.run = kept[0].path.parent if len(recordings) > 1 else None
        if len(kept) < len(chosen):
            left = [timelines[i] for i in chosen if latest[timelines[i].rank] is not timelines[i]]
            names, others = (_first_of([Path(one.path.name) for one in some]) for some in (kept, left))
            said = f"several recordings of the same ranks; the latest of each is looked at ({names}), not {others}"
            self._notes.append(f"{kept[0].path.parent}: {said}")
        self._notes += _by_reason((t.path, note) for t in kept for note in t.notes)
        merged = merge_ranks(kept, kept[0].path.parent.resolve().name or "job")
        self._notes += merged.notes
        self._found.activity = merged.activity
        return merged.trace


_HOURS_APART_S: Final = 3600.0
_EPOCH_S: Final = 1e9
"""Clocks that count from 1970 are above; others begin with the machine and tell nothing across hosts."""


def _span(*timelines: Timeline) -> tuple[float, float]:
    steps = [step for t in timelines for step in t.steps]
    return min(s.start_s for s in steps), max(s.end_s for s in steps)


def split_runs(timelines: Sequence[Timeline]) -> list[list[Timeline]]:
    """Recordings of different runs apart: of other world sizes, or hours from each other on clocks from 1970."""
    runs: list[list[Timeline]] = []
    for timeline in sorted(timelines, key=_span):
        size, (start_s, _) = timeline.about.get("world_size"), _span(timeline)
        for run in runs:
            sizes, end_s = {t.about.get("world_size") for t in run} - {None, 0}, _span(*run)[1]
            apart = start_s > _EPOCH_S and start_s - end_s > _HOURS_APART_S
            if not apart and (not size or not sizes or size in sizes):
                run.append(timeline)
                break
        else:
            runs.append([timeline])
    place = {id(timeline): i for i, timeline in enumerate(timelines)}
    return [sorted(run, key=lambda one: place[id(one)]) for run in runs]


def _different_runs(runs: Sequence[Sequence[Timeline]]) -> str:
    said = []
    for run in runs:
        size = max((int(t.about.get("world_size", 0)) for t in run), default=0)
        steps = [step.end_s - step.start_s for t in run for step in t.steps]
        of = f" of {size} ranks" if size else ""
        said.append(f"{_run_name(run)}{of}: {duration(float(np.median(steps)))} a step")
    apart_s = _span(*runs[-1])[0] - _span(*runs[0])[1]
    when = f", {duration(apart_s)} apart" if apart_s > _HOURS_APART_S else ""
    return f"{len(runs)} different runs{when}, not one job ({'; '.join(said)})"


def _run_name(run: Sequence[Timeline]) -> str:
    more = f" and {len(run) - 1} more" if len(run) > 1 else ""
    return f"{run[0].path.name}{more}"


def _joined(timelines: Sequence[Timeline]) -> list[Timeline]:
    """Windows of a rank whose steps follow each other as one recording; all files as they are where some do not."""
    windows: dict[int, list[Timeline]] = defaultdict(list)
    for timeline in sorted(timelines, key=_span):
        windows[timeline.rank].append(timeline)
    pairs = [pair for of_rank in windows.values() for pair in pairwise(of_rank)]
    if not pairs or not all(a.steps[-1].iteration < b.steps[0].iteration for a, b in pairs):
        return list(timelines)
    joined = []
    for first, *others in windows.values():
        steps = [step for one in (first, *others) for step in one.steps]
        said = f"the first of {1 + len(others)} windows, which are read as one recording"
        later = [f"{one.path.name}: {note}" for one in others for note in one.notes if note not in first.notes]
        notes = (*first.notes, *later, said) if others else first.notes
        joined.append(replace(first, steps=tuple(steps), notes=notes))
    return joined


def split_recordings(files: Sequence[tuple[Path, int]]) -> list[list[int]]:
    """Files of one recording each, as indices: a folder is split into those within while a rank stands in it twice."""
    return list(_split(list(range(len(files))), [path.resolve().parent for path, _ in files], [r for _, r in files]))


def _split(chosen: list[int], folders: list[Path], ranks: list[int]) -> Iterator[list[int]]:
    within: dict[tuple[str, ...], list[int]] = defaultdict(list)
    if len({ranks[i] for i in chosen}) < len(chosen):
        common = len(Path(os.path.commonpath([folders[i] for i in chosen])).parts)
        for i in chosen:
            within[folders[i].parts[common : common + 1]].append(i)
    if len(within) < 2:  # all different, or twice in the same folder
        yield chosen
        return
    for part in within.values():
        yield from _split(part, folders, ranks)


def _by_reason(said: Iterable[tuple[Path, str]]) -> list[str]:
    """A line for each reason, with the first files that it holds for."""
    files: dict[str, list[Path]] = defaultdict(list)
    for path, text in said:
        files[text.removeprefix(f"{path}: ")].append(path)
    lines = []
    for reason, paths in files.items():
        lines.append(f"{_first_of(paths)}: {reason}")
    return lines


def _first_of(paths: Sequence[Path]) -> str:
    more = len(paths) - _NAMED
    return ", ".join(map(str, paths[:_NAMED])) + (f" and {more} more" if more > 0 else "")


def _without_advice(text: str) -> str:
    return text.partition("; allowed:")[0]


BLOCKS: Final = 4
"""Blocks of consecutive steps kept of a longer trace, so that correlation between steps stays visible."""


def read_capped(path: Path, max_rows: int | None) -> tuple[Trace, str]:
    """A trace, and a note on what was left out, or "": of more rows, blocks of steps at even distances.

    Raises InputError: the file is damaged or no such trace.
    """
    with open_parquet(path) as file:
        rows = file.metadata.num_rows
        if max_rows is None or rows <= max_rows:
            return read_trace(path), ""
        low, high = pc.min_max(file.read(["iteration"])["iteration"]).as_py().values()
    kept = max(int((high - low + 1) * max_rows / rows / BLOCKS), 2)  # steps a block
    starts = np.linspace(low, max(high + 1 - kept, low), BLOCKS).astype(np.int64).tolist()
    trace = read_trace(path, [range(start, start + kept) for start in starts])
    return trace, f"{path}: {rows} rows; looked at {BLOCKS} blocks of {kept} steps each, {trace.table.num_rows} rows"
