"""What one rank knows about its own time: where its steps went, by collective and in blocks of iterations.

Blocks cover the same iterations on every rank, so that ``paceenv.live.record.findings`` can compare the ranks block by
block. One rank alone cannot tell early from late: it only knows how long it worked and how long it was blocked.
Legend: T iterations of a batch, N operations, K kinds of collectives, B blocks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.live.observe.batch import ITERATION, OPERATION, STREAM, THREAD, Batch, Kind
from paceenv.live.observe.log import Group
from paceenv.live.observe.step import Step

CHUNK_ITERATIONS = 256
"""Steps that are taken in at a time."""
MAX_WAITING = 200_000
"""Steps and their operations that wait; with more, steps are left out of history and trace."""
MAX_MARKS, OTHER_MARKS = 200, "other marks"
"""Different marks, and the name of all that come after."""
KEPT_ITERATIONS = 4096
BLOCKS, BLOCK_ITERATIONS = 64, 1
"""Blocks kept, and the iterations of a block at the start; when all are in use, pairs of them become one."""
KEPT_COLLECTIVES = 64
"""Of further ones, the times are summed up as op "other"."""
NEWEST = 64
"""Steps that tell how fast the job is now."""
LOW = 0.01
"""Quantile that stands for the best of a time."""
STOPPED = 20.0
"""A step this many times the median was stopped from outside; in the means it would outweigh all others."""

Array = NDArray[np.float64]
_STEP, _OWN, _COLLECTIVE, _BARRIER, _PACING = range(5)
_STEPS, _STEP_S, _OWN_S, _FIRST_KIND = range(4)
_OTHER = ("other", -1)


class History:
    """Accounts of one rank, all times in seconds. Only :meth:`add` may be called while another thread is in it.

    Args:
        kinds: of the operations; the list may grow.
    """

    def __init__(self, kinds: Sequence[Kind] = ()) -> None:
        self.on_batch: Callable[[Batch], None] = lambda batch: None
        """Called with every batch of steps, on the thread that takes them in."""
        self.waiting = deque[Step]()
        self.left_out = 0
        """Steps that are neither here nor in the trace, because the thread that takes them in was held up."""
        self._kinds, self._marks = kinds, [""]
        self._rows = np.zeros((KEPT_ITERATIONS, 5))
        self.count = 0
        """Steps that were measured."""
        self._stopped, self._stopped_s, self._longest = 0, 0.0, (0.0, 0.0)  # such steps; the longest, and when it ended
        self._stopped_own_s, self._longest_s = 0.0, 0.0  # own work in such steps; the longest of all steps
        self._ticks = 0
        self._keys: dict[tuple[str, int], int] = {_OTHER: 0}
        self._number: list[int] = []
        self._operations = np.zeros(KEPT_COLLECTIVES)
        self._block_iterations = BLOCK_ITERATIONS
        self._blocks = np.zeros((_FIRST_KIND + KEPT_COLLECTIVES, BLOCKS))
        self._side = {"seconds": 0.0, "streams_s": 0.0}
        """Seconds in collectives of other threads, and in those on other CUDA streams."""

    def add(self, step: Step) -> None:
        """A step that is over; it waits for :meth:`settle`."""
        if len(self.waiting) * (1 + len(step.operations)) < MAX_WAITING:  # steps are alike
            self.waiting.append(step)
        else:
            self.left_out += 1

    def settle(self) -> None:
        """Take in the steps that wait, and bring them to whoever else wants them."""
        done = [self.waiting.popleft() for _ in range(len(self.waiting))]
        for i in range(0, len(done), CHUNK_ITERATIONS):
            batch = self._batch(done[i : i + CHUNK_ITERATIONS])
            self.take(batch)
            self.on_batch(batch)

    def _batch(self, done: list[Step]) -> Batch:
        marks = self._marks
        for mark in sorted({step.mark for step in done} - set(marks)):
            if len(marks) < MAX_MARKS:
                marks.append(mark if len(marks) < MAX_MARKS - 1 else OTHER_MARKS)
        numbers = {mark: number for number, mark in enumerate(marks)}
        rows = [
            (*step[:5], step.barrier_s, step.still_s, step.ticks, numbers.get(step.mark, len(marks) - 1), step.regular)
            for step in done
        ]
        columns = np.array([operation for step in done for operation in step.operations], float).reshape(-1, 3)
        operations_N = np.empty(len(columns), OPERATION)
        operations_N["place"] = np.repeat(np.arange(len(done)), [len(step.operations) for step in done])
        for name, column in zip(("kind", "start_s", "end_s"), columns.T, strict=True):
            operations_N[name] = column
        return Batch(np.array(rows, ITERATION), operations_N, tuple(self._kinds), tuple(marks))

    def take(self, batch: Batch) -> None:
        """Take in the steps of a batch; marked and stopped ones are left out of the means."""
        of_T, of_N, place_N = batch.iterations_T, batch.operations_N, batch.operations_N["place"]
        if not len(of_T):
            return
        barrier_s_T, still_s_T = of_T["barrier_s"], of_T["still_s"]
        step_s_T, pacing_s_T = of_T["end_s"] - of_T["start_s"], of_T["pace_end_s"] - of_T["pace_start_s"]
        usual_s = float(np.median(step_s_T[-KEPT_ITERATIONS:]))
        if self.count:
            usual_s = float(np.median(np.append(self._kept()[-64:, _STEP], usual_s)))
        stopped_T = (step_s_T > 0.0) & (step_s_T >= STOPPED * usual_s)  # by a mark, too: other ranks have none
        counts_T = (of_T["mark"] == 0) & (step_s_T > 0.0) & ~stopped_T
        self._longest_s = max(self._longest_s, float(step_s_T.max()))
        self._stopped += int(stopped_T.sum())
        self._stopped_s += float(step_s_T[stopped_T].sum())
        now_s = time.time() - time.perf_counter()
        ends = zip(step_s_T[stopped_T].tolist(), (now_s + of_T["end_s"][stopped_T]).tolist(), strict=True)
        self._longest = max([self._longest, *ends])
        number_N = self._numbers(batch)
        side_N = np.array([kind.side for kind in batch.kinds], np.int64)[of_N["kind"]]
        lasts_s_N = of_N["end_s"] - of_N["start_s"]
        self._side["seconds"] += float(lasts_s_N[side_N == THREAD].sum())
        self._side["streams_s"] += float(lasts_s_N[side_N == STREAM].sum())
        seen_N = side_N != THREAD
        used_N = counts_T[place_N] & seen_N
        blocked_s_N = np.where(seen_N, _blocked(batch, seen_N), 0.0)
        blocked_s_T: Array = np.bincount(place_N, blocked_s_N, len(step_s_T)).astype(np.float64)
        # beside the compute, a collective costs the step only the time in which the compute stands still for it
        alone_s_N = np.where(seen_N, _blocked(batch, side_N == 0), 0.0)
        stood_s_T = still_s_T + np.bincount(place_N, alone_s_N, len(step_s_T))
        stood_s_T = np.where(np.isnan(still_s_T), blocked_s_T, np.minimum(stood_s_T, step_s_T - pacing_s_T))
        own_s_T = np.maximum(step_s_T - stood_s_T - pacing_s_T, 0.0)
        self._stopped_own_s += float(own_s_T[stopped_T].sum())
        np.add.at(self._operations, number_N[used_N], 1.0)
        rows = np.stack([step_s_T, own_s_T, np.maximum(stood_s_T - barrier_s_T, 0.0), barrier_s_T, pacing_s_T], 1)
        for row in rows[counts_T][-KEPT_ITERATIONS:]:
            self._rows[self.count % KEPT_ITERATIONS] = row
            self.count += 1
        self._ticks += int(of_T["ticks"][counts_T].sum())

        while int(of_T["iteration"][-1]) // self._block_iterations >= BLOCKS:  # pairs of blocks become one
            merged = self._blocks[:, 0::2] + self._blocks[:, 1::2]
            self._blocks = np.concatenate([merged, np.zeros_like(merged)], axis=1)
            self._block_iterations *= 2
        block_T = of_T["iteration"] // self._block_iterations
        for row, value_T in ((_STEPS, np.ones(len(of_T))), (_STEP_S, step_s_T), (_OWN_S, own_s_T)):
            np.add.at(self._blocks[row], block_T[counts_T], value_T[counts_T])
        np.add.at(self._blocks, (_FIRST_KIND + number_N[used_N], block_T[place_N][used_N]), blocked_s_N[used_N])

    def _numbers(self, batch: Batch) -> NDArray[np.integer]:
        """The collective of every operation, as a row of the accounts."""
        while len(self._number) < len(batch.kinds):
            kind = batch.kinds[len(self._number)]
            key = (kind.op, kind.group)
            if key not in self._keys and len(self._keys) < KEPT_COLLECTIVES:
                self._keys[key] = len(self._keys)
            self._number.append(self._keys.get(key, self._keys[_OTHER]))
        number_N: NDArray[np.integer] = np.array(self._number, np.int64)[batch.operations_N["kind"]]
        return number_N

    def _kept(self) -> Array:
        """The kept steps, the oldest first."""
        if self.count <= KEPT_ITERATIONS:
            return self._rows[: self.count]
        return np.roll(self._rows, -(self.count % KEPT_ITERATIONS), axis=0)

    def as_dict(self) -> dict[str, Any]:
        """Its entries of a snapshot (``paceenv.live.record.snapshot``)."""
        names = ("compute_s", "collective_s", "barrier_s", "pacing_s")
        entries: dict[str, Any] = {
            "regular": self.count,
            "stopped": {"count": self._stopped, "total_s": self._stopped_s, "own_s": self._stopped_own_s}
            | {"longest_s": self._longest[0], "unix_time_s": self._longest[1]},
            "step_iterations": round(self._ticks / self.count, 3) if self.count else 1.0,
            "step": dict.fromkeys(("mean_s", "cv", "p50_s", "p99_s", "baseline_s", "newest_s", "longest_s")),
            "parts": dict.fromkeys(names),
            "own": {"blocks": None},
            "collectives": self._collectives(),
            "side": {name: number / max(self.count, 1) for name, number in self._side.items()},
            "wait": {"mean_s": None},
        }
        if not self.count:
            return entries
        rows = self._kept()
        step, collective, barrier = (rows[:, column] for column in (_STEP, _COLLECTIVE, _BARRIER))
        low, p50, p99 = np.quantile(step, (LOW, 0.5, 0.99)).tolist()
        mean_s, newest_s = float(step.mean()), float(step[-NEWEST:].mean())
        entries["step"] = {"mean_s": mean_s, "cv": float(step.std() / step.mean()), "p50_s": p50, "p99_s": p99}
        entries["step"] |= {"baseline_s": low, "newest_s": newest_s, "longest_s": self._longest_s}
        entries["parts"] = dict(zip(names, rows[:, _OWN:].mean(axis=0).tolist(), strict=True))
        entries["own"]["blocks"] = {
            "iterations": self._block_iterations,
            "steps": [int(steps) for steps in self._used_blocks()[_STEPS]],
            "own_s": self._means(_OWN_S),
            "step_s": self._means(_STEP_S),
        }
        # a slow network is in it, and a wait that is the same in every step is not: a rank alone cannot tell them
        wait = np.maximum(collective - float(np.quantile(collective, LOW)), 0.0) + barrier
        entries["wait"]["mean_s"] = float(wait.mean())
        return entries

    def _used_blocks(self) -> Array:
        used = np.flatnonzero(self._blocks[_STEPS])
        return self._blocks[:, : used[-1] + 1 if len(used) else 0]

    def _means(self, row: int) -> list[float | None]:
        blocks = self._used_blocks()
        means_s = np.round(blocks[row] / np.maximum(blocks[_STEPS], 1.0), 9).tolist()  # to the nanosecond: short JSON
        return [mean_s if steps else None for mean_s, steps in zip(means_s, blocks[_STEPS], strict=True)]

    def _collectives(self) -> list[dict[str, Any]]:
        """The collectives, those with the most blocked time first: kind, group, and seconds per step, also by block."""
        steps = float(self._blocks[_STEPS].sum())
        blocked_s_K = self._blocks[_FIRST_KIND:].sum(axis=1)
        return [
            {
                "op": op,
                "group": group,
                "per_step": round(float(self._operations[k]) / max(self.count, 1), 3),
                "blocked_s": float(blocked_s_K[k]) / steps,
                "blocks_s": self._means(_FIRST_KIND + k),
            }
            for (op, group), k in sorted(self._keys.items(), key=lambda item: -blocked_s_K[item[1]])
            if steps and self._operations[k]
        ]


def unseen(groups: dict[int, Group], steps: int) -> list[dict[str, Any]]:
    """Collectives per step that the groups themselves have counted and the agent has not seen."""
    per_group = [(group.number, group.unseen() / max(steps, 1)) for group in list(groups.values())]
    return [{"group": number, "per_step": round(n, 3)} for number, n in per_group if n >= 0.5]


def _blocked(batch: Batch, counts_N: NDArray[np.bool_]) -> Array:
    """Seconds that each counting operation added to their time ``(N,)``: what overlaps an earlier one counts once."""
    of_N = batch.operations_N
    if not len(of_N):
        return np.zeros(0)
    end_s_N = np.where(counts_N, of_N["end_s"], -np.inf)
    before_s_N = np.concatenate([[-np.inf], np.maximum.accumulate(end_s_N)[:-1]])
    start_s_N = np.maximum(np.maximum(of_N["start_s"], before_s_N), batch.iterations_T["start_s"][of_N["place"]])
    return np.where(counts_N, np.maximum(of_N["end_s"] - start_s_N, 0.0), 0.0)
