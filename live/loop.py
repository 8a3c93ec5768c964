"""The loop of one rank: at each tick the sources' observations go to estimator, policy, guard and actuator.

Everything in the training thread runs from :meth:`Loop.tick`. An error there ends the loop and not the job.
``paceenv.live.reporting`` listens and handles files, metrics and summary.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceenv.live.decide.actuator import Delay
from paceenv.live.decide.control import Control
from paceenv.live.decide.live_policy import NamedPolicy
from paceenv.live.log_once import Messages
from paceenv.live.observe.backward import Backward
from paceenv.live.observe.checkpoints import Checkpoints
from paceenv.live.observe.collective_calls import Collectives
from paceenv.live.observe.iteration import Iteration, Operation, Shape
from paceenv.live.observe.optimizer_steps import OptimizerTick
from paceenv.live.observe.stamps import Clock, HostStamps, Stamps, cuda_stamps
from paceenv.live.observe.timing_source import Log, Observed, Source
from paceenv.live.options import Options
from paceenv.live.record.history import History

BATCH_ITERATIONS, BATCH_OPERATIONS = 32, 256
"""In modes without decisions, iterations are taken in by the batch, at a fraction of the cost: from the second one on
the code is in the processor's caches."""
HOPELESS_ITERATIONS = 200
"""If none of this many iterations could be measured, the agent logs the reason."""
MAX_PENDING = 8
"""Iterations whose GPU events have not passed yet; older ones are given up."""


@dataclass(slots=True)
class _Raw:
    """An iteration whose stamps may not be readable yet."""

    iteration: int
    operations: list[Observed]
    mark: str
    delay: Delay | None


class Loop:
    """Watches one rank and, where its mode allows, paces it.

    Args:
        options: settings, the same on every rank.
        policy: decides in modes shadow, canary and active.
        optimizer: its step ends an iteration; None takes the first optimizer that steps.
        clock: monotonic seconds of the host.
    """

    def __init__(
        self, options: Options, policy: NamedPolicy, *, optimizer: Any = None, clock: Clock = time.perf_counter
    ) -> None:
        self.options, self.policy, self.messages, self._clock = options, policy, Messages(), clock
        self.rank, self.world_size, self.attempt = 0, 1, 0
        self.backend, self.device = "", "cpu"
        self.history, self.iterations, self.irregular = History(), 0, 0
        self.control = Control(options, policy, self.messages.log_once, clock)
        self.listeners: list[Callable[[Iteration], None]] = []
        """Called with every iteration, on the training thread."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called at the first tick, when the rank is known."""
        self._off_reason = "" if options.mode != "off" else "by mode"
        self._stop_reason = self._downgrade_reason = ""
        self._begun = self._ended = False
        self._stamps: Stamps = HostStamps(clock)
        self._log = Log(self._stamps, self.fail, self.messages.log_once)
        self._optimizer = OptimizerTick(self.tick, optimizer)
        self._sources: tuple[Source, ...] = (
            self._optimizer,
            Collectives(self._log),
            Backward(self._log),
            Checkpoints(self._log),
        )
        self._marks: list[str] = []
        self._pending, self._operations = deque[_Raw](), 0
        self._last_exit_s: float | None = None
        self._delay: Delay | None = None
        self._shape = Shape(self._log.members)

    @property
    def state(self) -> str:
        """The mode in force."""
        return "off" if self._off_reason else self.control.mode

    @property
    def reason(self) -> str:
        """Why it is not the requested mode."""
        return self.control.reason if not self._off_reason else self._off_reason * (self.options.mode != "off")

    def install(self) -> None:
        """Start to watch."""
        if self._off_reason:
            return
        try:
            for source in self._sources:
                source.install()
        except Exception as error:  # a PyTorch without one of the watched functions
            self.fail(error)
        if self.policy.fault and self.options.mode != "probe":  # probes need no policy
            self.control.downgrade(self.policy.fault)

    def detach(self, reason: str) -> None:
        """Detach from the job, at any moment: no more measurements and delays; earlier measurements stay."""
        if not self._off_reason:
            self._off_reason = reason
            for source in self._sources:
                source.stop()

    @contextmanager
    def mark(self, kind: str = "checkpoint") -> Iterator[None]:
        """Mark a checkpoint or an evaluation: no measurement and no delay meanwhile."""
        self._marks.append(kind)
        self._log.mark(kind)
        self.control.guard.mark()
        try:
            yield
        finally:
            self._marks.pop()
            self.control.guard.unmark()
            self._log.mark(kind)

    def stop(self, reason: str) -> None:
        """Detach at the next tick; may be called from any thread."""
        self._stop_reason = reason

    def downgrade(self, reason: str) -> None:
        """Only observe from the next tick on; may be called from any thread."""
        self._downgrade_reason = reason

    def tick(self) -> None:
        """The end of an iteration; called by the optimizer's hook, or by hand in a loop that has none. Never raises."""
        if self._off_reason or self._ended:
            return
        begin_s, slept_s, begun = self._clock(), 0.0, self._begun
        try:
            if self._stop_reason:
                self.detach(self._stop_reason)
                self.messages.log_once(self._off_reason)
                return
            if self._downgrade_reason:
                self.control.downgrade(self._downgrade_reason)
            if self._stamps.capturing():  # a whole step as a CUDA graph: even querying an event is not allowed
                return
            self._advance()
            begun_delay_s = self._clock()
            self._delay = self.control.apply_delay(self.iterations) if self._begun else None
            slept_s = self._clock() - begun_delay_s if self._delay is not None else 0.0
        except Exception as error:
            self.fail(error)
        if begun:  # the first tick imports, opens files and starts the thread
            self.history.add_overhead(self._clock() - begin_s - slept_s)

    def fail(self, error: BaseException) -> None:
        """End the loop because of ``error``, log it, and let the job go on.

        An exception that a signal handler of the script raised while our code ran belongs to the script: it is raised
        again.
        """
        if raised_by_a_signal_handler(error):
            raise error
        if self._off_reason:
            return
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        at = f" ({os.path.basename(where.tb_frame.f_code.co_filename)}:{where.tb_lineno})" if where else ""
        reason = f"switched off by an error of its own: {type(error).__name__}: {error}{at}"
        self.detach(reason)
        self.messages.log_once(f"{reason}; the job goes on without it")

    def finish(self) -> None:
        """Detach at the end of the job: a comparison under way gets its last evaluation, PyTorch is as before."""
        try:
            if not self._ended and not self._off_reason:
                self.catch_up()
                self.control.finish()
        except Exception as error:  # a failed device, for example
            self.fail(error)
        finally:
            self._ended = True
            for source in self._sources:
                try:
                    source.remove()
                except Exception as error:
                    self.messages.log_once(f"could not be removed completely: {error}")

    @property
    def dropped_stamps(self) -> int:
        """Stamps that could not be recorded."""
        return self._stamps.dropped

    def group(self) -> dict[str, int]:
        """Number and size of the process group whose ranks wait for each other at the end of the step."""
        return {"number": self._shape.waiting_group, "members": self.members}

    @property
    def members(self) -> int:
        """Number of ranks that wait for each other at the end of the step; 1 while it is not known."""
        return self._log.members.get(self._shape.waiting_group, (0, 1))[1]

    def _advance(self) -> None:
        operations, mark = self._log.take()
        mark = self._marks[-1] if self._marks else mark
        if not self._begun:
            self._log.release(*(stamp for o in operations for stamp in (o.entry, o.exit)))
            self._begin()
            return
        if mark or self._log.marked:
            self.control.guard.quiet(self.iterations)
        self._pending.append(_Raw(self.iterations, operations, mark, self._delay))
        self._delay = None
        self.iterations += 1
        self._operations += len(operations)
        if self.iterations == HOPELESS_ITERATIONS and not self.history.count:
            self._say_why_nothing_is_measured()
        if self.control.decides or self.iterations % BATCH_ITERATIONS == 0 or self._operations > BATCH_OPERATIONS:
            self.catch_up()

    def catch_up(self) -> None:
        """Take in the iterations that can be read by now."""
        self._operations = 0
        while self._pending and self._readable(self._pending[0]):
            self._take_in(self._pending.popleft())
        while len(self._pending) > MAX_PENDING:
            self._give_up(self._pending.popleft())

    def _begin(self) -> None:
        """The first tick: only now are rank, backend and device known. Its iteration is not counted."""
        import torch
        from torch import distributed

        up = distributed.is_available() and distributed.is_initialized()
        if not up and int(os.environ.get("WORLD_SIZE") or 1) > 1:
            return  # a step before the job's processes found each other
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        self._begun = True
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        if up:
            self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
            named = str(distributed.get_backend_config()).split(",")  # get_backend may say "undefined"
            self.backend = "/".join(sorted({device_backend.split(":")[-1] for device_backend in named}))
            if "nccl" in self.backend and torch.cuda.is_available() and self._optimizer.on_device is not False:
                self.device = f"cuda:{torch.cuda.current_device()}"
                self._stamps = self._log.stamps = cuda_stamps()
        self.messages.rank = self.rank
        self.control.begin(self._stamps, self.device, self.rank, self.world_size)
        self.on_begin()

    def _readable(self, raw: _Raw) -> bool:
        """Whether every stamp has passed, or can never be read."""
        ready = self._stamps.ready
        for operation in raw.operations:
            if operation.exit is not None and not ready(operation.exit):
                return False
        return raw.delay is None or raw.delay.after is None or ready(raw.delay.after)

    def _take_in(self, raw: _Raw) -> None:
        seconds, operations, last, end_s = self._stamps.seconds, list[Operation](), None, -math.inf
        for op, group, size_bytes, entry, exit_ in raw.operations:
            if entry is None or exit_ is None:
                self._give_up(raw)
                return
            operations.append(Operation(op, group, size_bytes, seconds(entry), seconds(exit_)))
            if operations[-1].end_s > end_s:
                last, end_s = exit_, operations[-1].end_s
        if last is None:
            self._give_up(raw)
            return
        operations.sort(key=_entry)
        start_s, self._last_exit_s = self._last_exit_s, end_s
        delay_s = self.control.settle(raw.delay)
        paced_s = seconds(raw.delay.before) if delay_s and raw.delay is not None else start_s or 0.0
        self._stamps.rebase(last)
        self._stamps.release(_stamps_of(raw))
        if start_s is not None and end_s > start_s and all([o.end_s >= o.start_s for o in operations]):
            self._observe(raw, start_s, end_s, tuple(operations), (paced_s, paced_s + delay_s))
        else:
            self.irregular += 1

    def _observe(
        self,
        raw: _Raw,
        start_s: float,
        end_s: float,
        operations: tuple[Operation, ...],
        paced: tuple[float, float],
    ) -> None:
        shape = self._shape
        regular = not raw.mark and shape.observe(operations, end_s - start_s)
        comm_s, barrier_s = shape.comm_s(operations), shape.barrier_s(operations)
        iteration = Iteration(raw.iteration, start_s, end_s, *paced, operations, comm_s, barrier_s, regular, raw.mark)
        if regular:
            self.control.observe(iteration, shape, *self._log.members.get(shape.payload_group, (0, 1)))
            wait_s = self.control.pacer.wait_s if self.control.pacer is not None else 0.0
            self.history.add(iteration.step_s, comm_s, barrier_s, iteration.delay_s, wait_s)
        else:
            self.irregular += 1
            self.control.skip()
        for listener in self.listeners:
            listener(iteration)

    def _say_why_nothing_is_measured(self) -> None:
        if self._stamps.dropped:
            why = f"{self._stamps.dropped} CUDA events could not be recorded"
        elif self._last_exit_s is None and not self._shape.known:
            why = "no collective was seen in them, or not in every one"
        else:
            why = "no two of them in a row are alike"
        self.messages.log_once(f"{HOPELESS_ITERATIONS} iterations, and none could be measured: {why}")

    def _give_up(self, raw: _Raw) -> None:
        """Drop an iteration that cannot be read or has no collective: the next one has no start."""
        self._last_exit_s = None
        self.irregular += 1
        self.control.skip()
        self._stamps.release(_stamps_of(raw))


def raised_by_a_signal_handler(error: BaseException) -> bool:
    """Whether ``error`` came from a handler that the script has set for a signal."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    functions = [getattr(h, "func", h) for h in handlers if callable(h)]  # the function inside a partial
    codes = {getattr(f, "__code__", None) or getattr(type(f).__call__, "__code__", None) for f in functions}
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False


def _entry(operation: Operation) -> float:
    return operation.start_s


def _stamps_of(raw: _Raw) -> list[Any]:
    stamps = [stamp for o in raw.operations for stamp in (o.entry, o.exit)]
    if raw.delay is not None:
        stamps += [raw.delay.before, raw.delay.after]
    return [stamp for stamp in stamps if stamp is not None]
