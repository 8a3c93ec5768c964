"""The collectives of a profile: which operation each is, of which process group, and how large.

A kernel says so itself since PyTorch 2.3 or so, and only where its launch was recorded. Otherwise its name tells the
operation. A group that nothing names is numbered by its stream, as PyTorch has one stream per group.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, Final

import numpy as np

from paceenv.importers.collective_names import ITEM_BYTES, POINT_TO_POINT, SEND_RECV, op_name
from paceenv.importers.profiler.device_steps import Device
from paceenv.importers.profiler.event_columns import COLLECTIVE, EventTable
from paceenv.importers.timelines import UNNAMED_GROUP, Collective

_MARKS: Final = ("gloo:", "mpi:", "ucc:", "xccl:", "hccl:")
MARKED: Final = re.compile(rf"(?:{'|'.join(_MARKS)})(\w+)\Z")
"""What backends without kernels mark on the host."""
_Said = dict[str, Any]
"""What is said of a collective, by PyTorch's names."""


def device_collectives(table: EventTable, device: Device) -> list[Collective]:
    """The device's collectives in the order of its operations; times in s on the profile's clock."""
    places = np.flatnonzero(device.is_collective_D)
    events, outside = device.event_D[places].tolist(), (device.step_D[places] < 0).tolist()
    said = [_said(table, event) for event in events]
    threads = table.thread_E[events].tolist()
    groups_of: dict[int, set[str]] = defaultdict(set)
    for thread, (op, about) in zip(threads, said, strict=True):
        groups_of[thread] |= {group} if (group := _group(about)) and op not in POINT_TO_POINT else set()
    streams: dict[str, dict[int, int]] = defaultdict(dict)
    for k in sorted(range(len(said)), key=outside.__getitem__):  # as other ranks count them, by operation
        of_op = streams[said[k][0]]
        of_op.setdefault(threads[k], len(of_op))
    collectives = []
    for event, thread, (op, about) in zip(events, threads, said, strict=True):
        known = groups_of[thread]
        group = next(iter(known)) if len(known) == 1 else f"{UNNAMED_GROUP}{streams[op][thread]}"
        group = _group(about) or group
        collectives.append(_collective(table, event, op, "" if op in ("send", "recv") else group, about))
    return collectives


def host_collectives(table: EventTable) -> list[Collective]:
    """What a backend without kernels marks on the host (gloo, MPI), in the order of time; times in s."""
    events = np.flatnonzero(table.named(lambda name: MARKED.match(name) is not None))
    collectives = []
    for event in events[np.lexsort((table.end_us_E[events], table.start_us_E[events]))].tolist():
        about = table.arguments.get(event, {})
        op = op_name(about.get(COLLECTIVE) or table.names[table.name_E[event]].partition(":")[2])
        group = "" if op in POINT_TO_POINT else _group(about) or "/default"
        collectives.append(_collective(table, event, op, group, about))
    return collectives


def _collective(table: EventTable, event: int, op: str, group: str, about: _Said) -> Collective:
    start_s = float(table.start_us_E[event]) * 1e-6
    count = about.get("Out msg nelems" if op == "all_gather" else "In msg nelems", -1)
    size = int((count if 0 <= count < 1 << 56 else 0) * ITEM_BYTES.get(about.get("dtype", ""), 0))
    peer = about.get({"send": "Dst Rank", "recv": "Src Rank"}.get(op, ""), -1)
    peer = peer if 0 <= peer < 1 << 31 else -1
    return Collective(op, group, start_s, start_s + float(table.dur_us_E[event]) * 1e-6, size, peer)


def _group(about: _Said) -> str:
    """What names the process group, "" if nothing does."""
    ranks, name = str(about.get("Process Group Ranks") or ""), about.get("Process Group Name", "")
    return f"{ranks}/{name}" if ranks or name != "" else ""


def _said(table: EventTable, event: int) -> tuple[str, _Said]:
    """The operation, and what the kernel says of it."""
    kernel, about = op_name(table.names[table.name_E[event]]), table.arguments.get(event, {})
    op = op_name(about.get(COLLECTIVE, ""))
    return (kernel if op in ("collective", SEND_RECV) else op), about
