"""The collectives of a profile: which operation each is, of which process group, and how large.

A kernel says so itself since PyTorch 2.3 or so, and only where its launch was recorded. Otherwise its name tells the
operation. A group that nothing names is numbered by its stream, as PyTorch has one stream per group.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Final

import numpy as np

from paceenv.importers.collective_names import ITEM_BYTES, POINT_TO_POINT, SEND_RECV, op_name
from paceenv.importers.profiler.device_steps import Device
from paceenv.importers.profiler.event_columns import CollectiveArguments, EventTable
from paceenv.importers.timelines import UNNAMED_GROUP, Collective

_MARKS: Final = ("gloo:", "mpi:", "ucc:", "xccl:", "hccl:")
MARKED: Final = re.compile(rf"(?:{'|'.join(_MARKS)})(\w+)\Z")
"""What backends without kernels mark on the host."""
_NOTHING_SAID: Final = CollectiveArguments()


def device_collectives(table: EventTable, device: Device) -> dict[int, Collective]:
    """The device's collectives by their place among its operations; times in s on the profile's clock."""
    places = np.flatnonzero(device.is_collective_D).tolist()
    said = {place: _said(table, int(device.event_D[place])) for place in places}
    threads = table.thread_E[device.event_D]
    groups_of: dict[int, set[str]] = defaultdict(set)
    for place in places:
        if (group := _group(said[place][1])) and said[place][0] not in POINT_TO_POINT:
            groups_of[int(threads[place])].add(group)
    streams: dict[str, dict[int, int]] = defaultdict(dict)
    for place in sorted(places, key=lambda place: device.step_D[place] < 0):  # as other ranks count them, by operation
        of_op = streams[said[place][0]]
        of_op.setdefault(int(threads[place]), len(of_op))
    collectives = {}
    for place in places:
        op, arguments = said[place]
        event, thread = int(device.event_D[place]), int(threads[place])
        known = groups_of[thread]
        group = next(iter(known)) if len(known) == 1 else f"{UNNAMED_GROUP}{streams[op][thread]}"
        group = _group(arguments) or group
        collectives[place] = _collective(table, event, op, "" if op in ("send", "recv") else group, arguments)
    return collectives


def host_collectives(table: EventTable) -> list[Collective]:
    """What a backend without kernels marks on the host (gloo, MPI), in the order of time; times in s."""
    marked = [(mark[1] if (mark := MARKED.match(name)) else "") for name in table.names]
    events = np.flatnonzero(table.named(lambda name: MARKED.match(name) is not None))
    collectives = []
    for event in events[np.argsort(table.start_us_E[events], kind="stable")].tolist():
        arguments = table.arguments.get(event, _NOTHING_SAID)
        op = op_name(arguments.name or marked[table.name_E[event]])
        group = "" if op in POINT_TO_POINT else _group(arguments) or "/default"
        collectives.append(_collective(table, event, op, group, arguments))
    return collectives


def _collective(table: EventTable, event: int, op: str, group: str, said: CollectiveArguments) -> Collective:
    start_s = float(table.start_us_E[event]) * 1e-6
    count = said.outputs if op == "all_gather" else said.elements
    size = int((count if 0 <= count < 1 << 56 else 0) * ITEM_BYTES.get(said.dtype, 0))
    peer = {"send": said.receiver, "recv": said.sender}.get(op, -1)
    peer = peer if 0 <= peer < 1 << 31 else -1
    return Collective(op, group, start_s, start_s + float(table.dur_us_E[event]) * 1e-6, size, peer)


def _group(said: CollectiveArguments) -> str:
    """What names the process group, "" if nothing does."""
    ranks = str(said.group_ranks) if said.group_ranks else ""
    return f"{ranks}/{said.group_name}" if ranks or said.group_name != "" else ""


def _said(table: EventTable, event: int) -> tuple[str, CollectiveArguments]:
    """The operation, and what the kernel says of it."""
    kernel, arguments = op_name(table.names[table.name_E[event]]), table.arguments.get(event, _NOTHING_SAID)
    op = op_name(arguments.name)
    return (kernel if op in ("collective", SEND_RECV) else op), arguments
