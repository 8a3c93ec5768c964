"""Importer of PyTorch profiler traces (Kineto's JSON, ``export_chrome_trace``): one file per rank, gzipped or not.

Steps are the profiler's own (``ProfilerStep#n``, so the job calls ``prof.step()``), on the device's timeline where it
has one. Collectives are NCCL's kernels, or on the CPU what a backend marks (``gloo:all_reduce``). Everything else that
runs on device or CPU is compute.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path
from typing import Any, Final, TypeGuard

import msgspec
import numpy as np

from paceenv.core.errors import InputError
from paceenv.importers.json_events import EventFile
from paceenv.importers.timelines import Collective, Step, Timeline, united

SOURCE: Final = "PyTorch profiler"
MAX_STEPS: Final = 100_000
_STEP: Final = re.compile(r"ProfilerStep#(\d{1,9})\Z")
_MARKS: Final = ("gloo:", "mpi:", "ucc:", "xccl:", "hccl:")
_MARKED: Final = re.compile(rf"(?:{'|'.join(_MARKS)})(\w+)\Z")
_NO_WORK: Final = ("c10d::", "record_param_comms")
"""Operations of the CPU that begin like this are a collective's own."""
_TELLING: Final = ("ProfilerStep#", *_MARKS, *_NO_WORK)
"""Whose names begin like this are not, or not always, what their category says."""
_MAX_US: Final = 1e19
_RANK_IN_NAME: Final = re.compile(r"(?:rank|worker|r)[_\-]?(\d{1,6})", re.IGNORECASE)
_DEVICE: Final = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
ITEM_BYTES: Final = {
    **dict.fromkeys(("Float", "Int", "UInt32"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Double", "Long"), 8),
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
}
_OPS: Final = (
    ("allreduce", "all_reduce"), ("reducescatter", "reduce_scatter"), ("allgather", "all_gather"),
    ("alltoall", "all_to_all"), ("barrier", "barrier"), ("broadcast", "broadcast"), ("gather", "gather"),
    ("scatter", "scatter"), ("sendrecv", "send"), ("send", "send"), ("recv", "recv"), ("reduce", "reduce"),
)  # fmt: skip
_POINT_TO_POINT: Final = ("send", "recv")


def op_name(said: str) -> str:
    """The trace's name of a collective that PyTorch or NCCL calls ``said``; "collective" if unknown."""
    plain = re.sub(r"[^a-z0-9]", "", said.lower())
    return next((op for known, op in _OPS if known in plain), "collective")


class Event(msgspec.Struct, gc=False):
    """What matters of an event, as it is written nearly always; see :meth:`of` for all others."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = math.nan
    dur: float = math.nan
    pid: int | str | None = None
    tid: int | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")

    @classmethod
    def of(cls, event: dict[str, Any]) -> Event:
        """An event that may have anything anywhere: what has not its type is left at its default."""
        found = cls(pid=str(event.get("pid")), tid=str(event.get("tid")))
        for key in ("ph", "cat", "name"):
            if isinstance(value := event.get(key), str):
                setattr(found, key, value)
        for key in ("ts", "dur"):
            if is_number(value := event.get(key)):
                setattr(found, key, float(value))
        if isinstance(arguments := event.get("args"), dict):
            found.args = msgspec.Raw(json.dumps(arguments).encode())
        return found

    @property
    def arguments(self) -> dict[str, Any]:
        """``args`` as Python reads them; empty if they are no object."""
        try:
            found = json.loads(bytes(self.args).decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


_EVENTS: Final = msgspec.json.Decoder(list[Event])


def import_kineto(path: str | Path) -> tuple[Timeline, str]:
    """One rank's timeline, and a note on damage, or "". Raises InputError if the file is no profile with steps."""
    with EventFile(path) as file:
        reader = _Reader(file)
        for events in file.batches(_EVENTS):
            reader.take([event if isinstance(event, Event) else Event.of(event) for event in events])
        return reader.timeline(), f"{path}: {file.damage}" if file.damage else ""


class _Reader:
    def __init__(self, file: EventFile) -> None:
        self._file, self._path = file, file.path
        self._steps: dict[str, dict[int, tuple[float, float]]] = {"cpu": {}, "device": {}}
        self._collectives: dict[str, list[Collective]] = {"cpu": [], "device": []}
        self._busy: dict[str, dict[tuple[Any, Any], list[tuple[float, float]]]] = {
            "cpu": defaultdict(list), "device": defaultdict(list)
        }  # fmt: skip

    def take(self, events: list[Event]) -> None:
        """Keep what matters. Nearly all is plain work or nothing, so this loop is all that the others go through."""
        on_cpu, on_device = self._busy["cpu"], self._busy["device"]
        for event in events:
            if event.ph != "X":
                continue
            name, category = event.name, event.cat
            if name.startswith(_TELLING):
                self._tell(event)
            elif category == "cpu_op":
                _work(on_cpu[event.pid, event.tid], event.ts, event.dur)
            elif category in _DEVICE:
                if "ccl" in name.lower():
                    self._tell(event)
                else:
                    _work(on_device[event.pid, event.tid], event.ts, event.dur)

    def _tell(self, event: Event) -> None:
        """Keep what matters of an event whose name says more than its category."""
        start_us, dur_us, name, category = event.ts, event.dur, event.name, event.cat
        if not -_MAX_US < start_us < _MAX_US or not 0.0 <= dur_us < _MAX_US:
            return
        start_s, end_s = start_us * 1e-6, (start_us + dur_us) * 1e-6
        if (step := _STEP.match(name)) is not None:
            steps = self._steps["device" if category == "gpu_user_annotation" else "cpu"]
            if len(steps) < MAX_STEPS:
                steps[int(step[1])] = (start_s, end_s)
        elif category in _DEVICE:
            if "nccl" in name.lower() or "rccl" in name.lower():
                self._collectives["device"].append(_collective(name, event.arguments, start_s, end_s))
            else:
                _work(self._busy["device"][event.pid, event.tid], start_us, dur_us)
        elif (marked := _MARKED.match(name)) is not None:
            self._collectives["cpu"].append(_collective(marked[1], event.arguments, start_s, end_s))
        elif category == "cpu_op" and not name.startswith(_NO_WORK):
            _work(self._busy["cpu"][event.pid, event.tid], start_us, dur_us)

    def timeline(self) -> Timeline:
        """What was read."""
        has_device = bool(self._collectives["device"] or self._busy["device"])
        where = "device" if has_device else "cpu"
        steps = self._steps["device"] if has_device and self._steps["device"] else self._steps["cpu"]
        if not steps:
            raise InputError(
                f"{self._path}: no ProfilerStep# in {self._file.events} events; allowed: a profile of a job that calls "
                "prof.step() at the end of every step"
            )
        collectives = sorted(self._collectives[where], key=lambda c: c.start_s)
        busy = united([span for spans in self._busy[where].values() for span in spans])
        about = {"host": host} if isinstance(host := self._file.value("host_name"), str) else {}
        base_ns = self._file.value("baseTimeNanoseconds")
        base_s = base_ns * 1e-9 if is_number(base_ns) else 0.0
        return Timeline(self._rank(), self._path, tuple(_steps(steps, collectives, busy, base_s)), about)

    def _rank(self) -> int:
        about = self._file.value("distributedInfo")
        rank = about.get("rank") if isinstance(about, dict) else None
        if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 1 << 31:
            return rank
        named = _RANK_IN_NAME.search(self._path.name)
        if named is None:
            raise InputError(
                f"{self._path}: neither distributedInfo nor its name says which rank it is; allowed: rank3.json"
            )
        return int(named[1])


def _work(busy: list[tuple[float, float]], start_us: float, dur_us: float) -> None:
    """Add to when a thread is busy, s; what an operation calls lies within it, so the list stays short."""
    if not -_MAX_US < start_us < _MAX_US or not 0.0 <= dur_us < _MAX_US:
        return
    start_s, end_s = start_us * 1e-6, (start_us + dur_us) * 1e-6
    if busy and busy[-1][0] <= start_s <= busy[-1][1]:
        if end_s > busy[-1][1]:
            busy[-1] = (busy[-1][0], end_s)
    else:
        busy.append((start_s, end_s))


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a JSON value is a finite number of a size that times have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e19 and math.isfinite(value)


def _collective(name: str, arguments: dict[str, Any], start_s: float, end_s: float) -> Collective:
    said = arguments.get("Collective name")
    op = op_name(said if isinstance(said, str) and said else name)
    count, kind = arguments.get("In msg nelems"), arguments.get("dtype")
    size = (
        int(count * ITEM_BYTES.get(kind, 0))
        if is_number(count) and isinstance(kind, str) and 0 <= count < 1 << 56
        else 0
    )
    if op in _POINT_TO_POINT:
        return Collective(op, "", start_s, end_s, size)
    members, group = arguments.get("Process Group Ranks"), arguments.get("Process Group Name")
    return Collective(
        op, f"{members if members else ''}/{group if group is not None else 'default'}", start_s, end_s, size
    )


def _steps(
    spans: dict[int, tuple[float, float]], collectives: list[Collective], busy: list[tuple[float, float]], base_s: float
) -> list[Step]:
    """Steps with what began in them; a step runs until the next one begins."""
    numbers = sorted(spans, key=lambda number: spans[number][0])
    starts = [spans[number][0] for number in numbers]
    ends = [*starts[1:], max(spans[numbers[-1]][1], starts[-1])]
    inside: list[list[Collective]] = [[] for _ in numbers]
    for c in collectives:
        i = bisect_right(starts, c.start_s) - 1
        if i >= 0 and c.start_s < ends[i]:
            inside[i].append(c)
    busy_T = [([], []) for _ in numbers]  # type: list[tuple[list[float], list[float]]]
    for start_s, end_s in busy:
        for i in range(max(bisect_right(starts, start_s) - 1, 0), len(numbers)):
            if starts[i] >= end_s:
                break
            busy_T[i][0].append(start_s)
            busy_T[i][1].append(end_s)
    return [
        Step(number, starts[i] + base_s, ends[i] + base_s,
             tuple(Collective(c.op, c.group, c.start_s + base_s, c.end_s + base_s, c.bytes) for c in inside[i]),
             np.array(busy_T[i][0]) + base_s, np.array(busy_T[i][1]) + base_s)
        for i, number in enumerate(numbers)
    ]  # fmt: skip
