"""Steps that were taken in, on their way to the history and the trace; and what the agent itself costs.

The training thread only adds steps. All else happens in batches, on the housekeeping thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from paceenv.live.observe.batch import ITERATION, OPERATION, Batch
from paceenv.live.observe.hooks import Hooks
from paceenv.live.observe.log import Log
from paceenv.live.observe.step import Step
from paceenv.live.record.history import History

MEASURED_EVERY = 16
"""The agent's own cost is measured from one of so many visits of the housekeeping thread to the next after which an
iteration was watched."""
CHUNK_ITERATIONS = 256
"""Steps that are accounted for at a time."""
MAX_DONE = 200_000
"""Steps and their operations that wait for the accounts; with more, steps are left out of accounts and trace."""
MAX_MARKS = 200
OTHER_MARKS = "other marks"
"""Name of all marks that come after so many different ones."""


class Accounts:
    def __init__(self, log: Log, hooks: Hooks, history: History) -> None:
        self.on_batch: Callable[[Batch], None] = lambda batch: None
        """Called with every batch of steps, on the thread that takes them in."""
        self.left_out = 0
        """Steps that are in neither accounts nor trace, because the thread that takes them there was held up."""
        self.waiting = deque[Step]()
        self._log, self._hooks, self._history = log, hooks, history
        self._marks = [""]
        self._visits = 0
        self._since: tuple[int, float] | None = None
        """While the cost is measured: iterations watched and seconds waited for the device before."""

    def add(self, step: Step) -> None:
        if len(self.waiting) * (1 + len(step.operations)) < MAX_DONE:  # steps are alike
            self.waiting.append(step)
        else:
            self.left_out += 1

    def settle(self) -> None:
        """Bring the steps that wait to the history and to whoever else wants them."""
        done = [self.waiting.popleft() for _ in range(len(self.waiting))]
        for i in range(0, len(done), CHUNK_ITERATIONS):
            batch = self._batch(done[i : i + CHUNK_ITERATIONS])
            self._history.add(batch)
            self.on_batch(batch)

    def measure(self, watched: int) -> None:
        """Measure the agent's own cost from one visit to the next, in some, ``watched`` iterations into the job."""
        self._visits += 1
        stamps = self._log.stamps
        if self._since is None and self._visits % MEASURED_EVERY == 2:
            self._hooks.measure(True)
            stamps.measures, self._since = True, (watched, stamps.waited_s)
        elif self._since is not None and watched > self._since[0]:
            self._hooks.measure(False)
            stamps.measures, (watched_before, waited_before_s) = False, self._since
            waited_s = stamps.waited_s - waited_before_s
            self._history.add_overhead(self._hooks.cost_s(watched - watched_before, self._log.every, waited_s))
            self._since = None

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
        return Batch(np.array(rows, ITERATION), operations_N, tuple(self._log.kinds), tuple(marks))
