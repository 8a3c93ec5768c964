"""Jobs that hang, run to their standstill in a small model of hosts and devices, and their Flight Recorder dumps.

A rank's host enqueues the operations of its program, a few ahead of its device. The device works through them in order;
a collective ends when all members' devices are in it, a send or receive when the other side is. Faults: a host stops, a
device stops (and its record with it), a rank leaves no dump. So the truth is known.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Op:
    """One operation of a rank's program: ``peer`` is a global rank, or None; ``waits``: its end is waited for."""

    group: str
    name: str
    peer: int | None = None
    waits: bool = False
    sizes: tuple[int, ...] = (1024,)
    dtype: str = "BFloat16"


@dataclass
class Job:
    """Groups and a program for each rank, and what goes wrong."""

    groups: dict[str, tuple[str, tuple[int, ...]]]  # description and ranks by name
    programs: dict[int, list[Op]]
    ahead: int = 12  # operations that a host is ahead of its device at most
    host_stops: dict[int, int] = field(default_factory=dict)  # the operation that a rank's host never enqueues
    device_stops: dict[int, int] = field(default_factory=dict)  # the operation that a rank's device never begins
    lag: int = 0  # ends before that point that such a rank's record misses
    enqueued: dict[int, int] = field(default_factory=dict)
    done: dict[int, set[int]] = field(default_factory=dict)
    started: dict[int, set[int]] = field(default_factory=dict)

    def run(self) -> Job:
        """Until nothing moves any more."""
        self.enqueued = dict.fromkeys(self.programs, 0)
        self.done, self.started = {r: set() for r in self.programs}, {r: set() for r in self.programs}
        moved = True
        while moved:
            moved = False
            for rank, program in self.programs.items():
                while self._host_goes_on(rank, program):
                    self.enqueued[rank] += 1
                    moved = True
            moved |= self._devices()
        return self

    def _host_goes_on(self, rank: int, program: list[Op]) -> bool:
        at = self.enqueued[rank]
        if at >= min(len(program), self.host_stops.get(rank, len(program))) or at - len(self.done[rank]) >= self.ahead:
            return False
        return at == 0 or not program[at - 1].waits or at - 1 in self.done[rank]

    def _devices(self) -> bool:
        """Begin what devices have come to, and end what all sides have begun."""
        sides: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
        for rank, program in self.programs.items():
            nth: Counter[Any] = Counter()
            blocked = False
            for i in range(min(self.enqueued[rank], self.device_stops.get(rank, 1 << 30))):
                op = program[i]
                if op.peer is None:
                    meeting: tuple[Any, ...] = (op.group, nth[op.group])
                    nth[op.group] += 1
                else:
                    way = (rank, op.peer) if op.name == "send" else (op.peer, rank)
                    meeting = (op.group, way, nth[op.name, op.group, op.peer])
                    nth[op.name, op.group, op.peer] += 1
                if i in self.done[rank]:
                    continue
                if not blocked:
                    sides[meeting].append((rank, i))
                    self.started[rank].add(i)
                blocked |= op.name != "send"  # the device waits for everything but its sends
        moved = False
        for meeting, here in sides.items():
            needed = 2 if isinstance(meeting[1], tuple) else len(self.groups[meeting[0]][1])
            if len(here) == needed:
                for rank, i in here:
                    self.done[rank].add(i)
                moved = True
        return moved

    @property
    def stopped(self) -> set[int]:
        """Ranks whose host came to the point where it stops."""
        return {rank for rank, at in self.host_stops.items() if self.enqueued[rank] == at}

    def dump(
        self, rank: int, *, only_active: bool = False, timing: bool = False, status: bool = True
    ) -> dict[str, Any]:
        """A rank's dump, as PyTorch writes it."""
        seen = set(self.done[rank])
        if rank in self.device_stops:
            seen -= set(sorted(seen)[len(seen) - self.lag :]) if self.lag else set()
        mine = [name for name, (_, ranks) in self.groups.items() if rank in ranks]
        ids = {name: i for i, name in enumerate(mine)}
        collective: Counter[str] = Counter()
        p2p: Counter[str] = Counter()
        last: dict[str, list[int]] = {name: [-1, -1] for name in mine}
        entries = []
        for i, op in enumerate(self.programs[rank][: self.enqueued[rank]]):
            ranks = self.groups[op.group][1]
            said = op.name
            if op.peer is None:
                collective[op.group] += 1
            else:
                p2p[op.group] += 1
                said += f" {ranks.index(rank)}{'->' if op.name == 'send' else '<-'}{ranks.index(op.peer)}"
            done, begun = i in seen, timing and i in self.started[rank]
            seq = (collective if op.peer is None else p2p)[op.group]
            last[op.group] = [seq, seq if done else last[op.group][1]]
            if only_active and done:
                continue
            created = int((1000.0 + 0.01 * i + 1e-4 * rank) * 1e9)
            entries.append({
                "record_id": i, "pg_id": ids[op.group], "process_group": (op.group, self.groups[op.group][0]),
                "collective_seq_id": collective[op.group], "p2p_seq_id": p2p[op.group], "op_id": i,
                "profiling_name": f"nccl:{said}", "time_created_ns": created, "input_sizes": [list(op.sizes)],
                "input_dtypes": [op.dtype], "output_sizes": [list(op.sizes)], "output_dtypes": [op.dtype],
                "state": "completed" if done else "started" if begun else "scheduled",
                "time_discovered_started_ns": created + 1000 if begun else None,
                "time_discovered_completed_ns": created + 2000 if done else None,
                "retired": done, "timeout_ms": 600000, "is_p2p": op.peer is not None,
                "frames": [{"name": f"step_{op.name}", "filename": "/job/train.py", "line": 10 + i}],
            })  # fmt: skip
        config = {
            name: {"name": name, "desc": self.groups[name][0], "ranks": str(list(self.groups[name][1]))}
            for name in mine
        }
        about: dict[str, Any] = {"version": "2.10", "pg_config": config}
        if status:
            about["pg_status"] = {
                str(ids[name]): {
                    "last_enqueued_collective": seq, "last_started_collective": -1, "last_completed_collective": done
                } for name, (seq, done) in last.items()
            }  # fmt: skip
        return about | {"entries": entries}

    def write(self, folder: Path, *, without: tuple[int, ...] = (), as_json: bool = False, **how: bool) -> Path:
        """Dumps of all ranks in a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank in set(self.programs) - set(without):
            dump = self.dump(rank, **how)
            path = folder / f"nccl_trace_rank_{rank}{'.json' if as_json else ''}"
            path.write_bytes(json.dumps(dump).encode() if as_json else pickle.dumps(dump, 2))
        return folder


def data_parallel(ranks: int = 4, steps: int = 3, **faults: Any) -> Job:
    """All ranks in one group: two collectives a step."""
    program = [Op("0", name) for _ in range(steps) for name in ("_all_gather_base", "all_reduce")]
    return Job({"0": ("default_pg", tuple(range(ranks)))}, {rank: list(program) for rank in range(ranks)}, **faults)


def parallel(tensor: int = 2, pipeline: int = 2, data: int = 2, steps: int = 2, batches: int = 2, **faults: Any) -> Job:
    """Tensor, pipeline and data parallelism: all forward passes of a step, all backward ones, gradients, a norm."""
    grid = {(t, p, d): t + tensor * (d + data * p) for t in range(tensor) for p in range(pipeline) for d in range(data)}
    size = len(grid)
    groups: dict[str, tuple[str, tuple[int, ...]]] = {"0": ("default_pg", tuple(range(size)))}
    names: dict[tuple[str, int], str] = {}
    for kind, axis in (("TENSOR", 0), ("PIPELINE", 1), ("DATA", 2)):
        lines = defaultdict(list)
        for place, rank in grid.items():
            lines[place[:axis] + place[axis + 1 :]].append(rank)
        for line in lines.values():
            if len(line) > 1:
                name = str(len(groups))
                groups[name] = (f"{kind}_PARALLEL", tuple(sorted(line)))
                names |= {(kind, rank): name for rank in line}
    programs = {}
    for (t, p, d), rank in grid.items():
        before, after = grid.get((t, p - 1, d)), grid.get((t, p + 1, d))
        program: list[Op] = []

        def pass_on(source: int | None, sink: int | None, rank: int = rank, program: list[Op] = program) -> None:
            pipe, tensors = names.get(("PIPELINE", rank), ""), names.get(("TENSOR", rank), "")
            program += [Op(pipe, "recv", source)] if source is not None else []
            program += [Op(tensors, "_all_gather_base"), Op(tensors, "_reduce_scatter_base")] if tensors else []
            program += [Op(pipe, "send", sink)] if sink is not None else []

        for _ in range(steps):
            for _ in range(batches):
                pass_on(before, after)
            for _ in range(batches):
                pass_on(after, before)
            program += [Op(names["DATA", rank], "all_reduce")] if ("DATA", rank) in names else []
            program += [Op("0", "all_reduce", waits=True)]
        programs[rank] = program
    return Job(groups, programs, **faults)
