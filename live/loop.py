"""The loop of one rank: at each tick the sources' observations go into a ring, and where the mode decides, to the
estimator, policy, guard and actuator.

Everything else happens in batches on the housekeeping thread. An error ends the loop and not the job.
``paceenv.live.reporting`` listens and handles files, metrics and summary.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceenv.live.decide.control import Control, Tally
from paceenv.live.decide.deferral import Deferral
from paceenv.live.decide.live_policy import NamedPolicy
from paceenv.live.identity import Identity
from paceenv.live.log_once import Messages, described, raised_by_a_signal_handler
from paceenv.live.observe.backward import Backward
from paceenv.live.observe.collective_calls import Collectives, FunctionalCollectives, StreamWaits
from paceenv.live.observe.hooks import Hooks
from paceenv.live.observe.log import Log, tried
from paceenv.live.observe.optimizer_steps import Checkpoints, OptimizerTick
from paceenv.live.observe.stamps import Clock, HostStamps, cuda_stamps
from paceenv.live.observe.steps import Steps
from paceenv.live.options import Options
from paceenv.live.record.history import History

HOPELESS_ITERATIONS = 200
"""If none of this many iterations could be measured, the agent logs the reason."""
MAX_SILENCE_S = 10.0
"""If a check for a wish to stop is overdue for longer, nothing is delayed until it succeeds."""
MAX_PENDING = 8
"""Iterations whose GPU events have not passed yet; older ones are given up."""
Change = tuple[str, NamedPolicy, int]
"""A new mode, its policy, and its first iteration."""


class Loop:
    """Watches one rank and, where its mode allows, paces it.

    Args:
        in_a_group_only: whether to wait for a process group, whatever the environment says about the job's size.
    """

    def __init__(
        self,
        options: Options,
        policy: NamedPolicy,
        *,
        optimizer: Any = None,
        in_a_group_only: bool = False,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.options, self.policy, self.messages, self._clock = options, policy, Messages(), clock
        self.rank, self.world_size, self.backend, self.device = 0, 1, "", "cpu"
        self.identity = Identity()
        """Of this start of the job. Before it is complete, and where it never is, nothing is delayed."""
        self.lively: dict[str, float] = {}
        """The checks for a wish to stop, and when the next of each is due, by ``time.monotonic``."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called when the rank is known, with the process group, and at the first tick."""
        self.store: Any = None  # of the job
        self.begun = False
        self._change: Change | None = None
        self._changing = threading.RLock()  # a signal's handler may ask for a change in the midst of one
        self._off_reason, self._were_off = "", 0
        self.hooks = Hooks(self.fail)
        self.log = Log(HostStamps(clock))
        self.log.overflow, self.log.on_watch = self.catch_up, self.hooks.watch
        self._tally = Tally()
        self.control = self._new_control()
        self.deferral = Deferral(options.defer, self.log, self.hooks, self.messages.log_once)
        """Holds back transfers for rule ``defer``."""
        self._optimizer = OptimizerTick(self._begin, self.hooks, optimizer)
        self._checkpoints = Checkpoints(self.log, self.hooks)
        self._backward = Backward(self.log, self.hooks)
        self._in_a_group_only = in_a_group_only
        self.tick = self.hooks.guarded(lambda: self._optimizer.tick())
        """The end of an iteration; called by the optimizer's hook, or by hand in a loop that has none. Never raises."""
        self.steps = Steps(self.log, lambda *delay: self.control.settle(*delay), traced=options.out is not None)
        self.history = History(self.log.kinds)
        self.taking = threading.RLock()
        self._takes_here = self.control.decides
        """Whether the training thread takes iterations in; otherwise the housekeeping thread does."""

    @property
    def state(self) -> str:
        return "off" if self._off_reason else self.control.mode

    @property
    def reason(self) -> str:
        """Why it is not the requested mode."""
        return self._off_reason or self.control.reason

    def install(self) -> None:
        if self.options.mode == "off":
            return
        self.hooks.active = True
        log, hooks = self.log, self.hooks
        try:
            calls = Collectives(log, hooks), FunctionalCollectives(log, hooks), self._backward, StreamWaits(log, hooks)
            for source in (self._optimizer, *calls, self._checkpoints, self.deferral):
                source.install()
            from torch import distributed

            hooks.around(distributed, "init_process_group", lambda *_: None if self.begun else True, self._meet)
            self._meet()
        except Exception as error:  # a PyTorch without one of the watched functions
            self.fail(error)

    def _new_control(self, begins_at: int = 0) -> Control:
        control = Control(
            self.options,
            self.policy,
            self.messages.log_once,
            self._clock,
            self.log.stamps,
            self._tally,
            device=self.device,
            place=(self.rank, self.world_size),
            begins_at=begins_at,
        )
        if self.policy.fault and self.options.mode != "probe":  # probes need no policy
            control.downgrade(self.policy.fault)
        return control

    def detach(self, reason: str) -> None:
        """Detach from the job, at any moment: no more measurements and delays; earlier measurements stay."""
        if not self._off_reason:
            self._off_reason = reason
            self.hooks.active = False
            self.deferral.stop()

    def at_next_tick(self, run: Callable[..., None], *arguments: Any) -> None:
        """Call ``run`` once at the end of the next iteration, on the thread that ends it; from any thread."""
        if (run, arguments) not in self.log.chores:
            self.log.chores.append((run, arguments))

    def stop(self, reason: str) -> None:
        """Detach, where delays are possible at the next tick; may be called from any thread."""
        self.messages.log_once(reason)
        self.deferral.stop()
        self.log.hurry = True
        if self.control.decides and self.control.mode != "shadow":
            self.at_next_tick(self.detach, reason)
        else:
            self.detach(reason)

    def downgrade(self, reason: str) -> None:
        """Only observe from the next tick on; may be called from any thread."""
        self.at_next_tick(lambda: self.control.downgrade(reason))

    def change(self, mode: str, policy: NamedPolicy, from_iteration: int) -> None:
        """Change over to another mode and policy, after the first tick; may be called from any thread.

        Args:
            from_iteration: the first iteration of the new mode, the same on every rank; 0 is at once. An agent that
                is past it only observes, because the other ranks may have changed over without it.
        """
        with self._changing:
            self._change, self.log.hurry = (mode, policy, from_iteration), True
        self._optimizer.tick = self._tick  # which knows the number of the iteration

    @property
    def changing(self) -> bool:
        """Whether a :meth:`change` is still to come."""
        return self._change is not None

    def _change_over(self, change: Change) -> None:
        (mode, policy, from_iteration), begins_at = change, self.log.count
        self._read()
        self.control.chosen.final()
        self._were_off = self.off_iterations
        self.policy, self.options = policy, replace(self.options, mode=mode)
        self.messages.log_once(f"mode {mode} from iteration {begins_at} on, by paceenv live set", level=20)
        self.control = self._new_control(begins_at)
        if begins_at > from_iteration > 0:
            self.control.downgrade(f"iteration {from_iteration} of the change to mode {mode} was over already")
        self._takes_here = self.control.decides or self.log.on_device
        with self._changing:
            if self._change is change:  # else another one has come meanwhile
                self._change, self.log.hurry = None, False

    def _tick(self) -> None:
        """The end of an iteration, where the training thread itself takes it in."""
        log, control = self.log, self.control
        if log.skips():
            return
        if log.on_device and log.stamps.capturing():  # a step as a CUDA graph: not even a query is allowed
            return
        control.held_s = self.deferral.tick()
        tick = log.tick()
        if self._off_reason:  # since this tick
            return
        if tick is not None and (tick[2] or log.marked):
            self.control.guard.quiet(tick[0])
        change = self._change
        if not self._takes_here and change is not None and self.taking.acquire(blocking=False):
            self._takes_here = True
            self.taking.release()
        if not self._takes_here:  # the housekeeping thread does, or is at it
            return
        if change is not None and log.count >= change[2]:
            self._change_over(change)
        self._read()
        if self.control.decides and not self.steps.inside and self._may_delay():
            acting = self.control.acting(log.count)
            if acting is not None:
                if self.options.defer:
                    self.deferral.hold_s = self.control.hold_s(log.count, acting)
                log.delay = self.control.apply_delay(log.count, acting)

    def _may_delay(self) -> bool:
        """Whether every rank is known to have an agent, and a wish to stop would be heard; shadow needs neither."""
        if self.control.mode == "shadow" or not self.identity.complete:
            return self.control.mode == "shadow"
        now_s = time.monotonic()
        for name, due_s in self.lively.items():
            if now_s - due_s > MAX_SILENCE_S:
                self.messages.log_once(f"{name} is overdue; nothing is delayed until it succeeds")
                return False
        return True

    def fail(self, error: BaseException) -> None:
        """End the loop because of ``error``, log it, and let the job go on.

        An exception that a signal handler of the script raised while our code ran belongs to the script: it is raised
        again.
        """
        if raised_by_a_signal_handler(error):
            raise error
        if self._off_reason:
            return
        reason = f"switched off by an error of its own: {described(error)}"
        self.detach(reason)
        self.messages.log_once(f"{reason}; the job goes on without it")

    def finish(self) -> None:
        """Detach at the end of the job: a comparison under way gets its last evaluation, PyTorch is as before."""
        try:
            if self.hooks.active:
                self._takes_here = True
                self.catch_up()
                self.control.chosen.final()
        except Exception as error:  # a failed device, for example
            self.fail(error)
        finally:
            self.hooks.active = False
            self._backward.forget()
            try:
                self.deferral.stop(here=True)
            except Exception as error:
                self.messages.log_once(f"could not be removed completely: {error}")
            self.hooks.restore()

    @property
    def iterations(self) -> int:
        """Iterations since the first tick, watched or not."""
        return self.log.count

    @property
    def off_iterations(self) -> int:
        return self._were_off + (self.log.count - self.control.begins_at if self.control.mode == "off" else 0)

    def why_nothing_is_measured(self) -> str:
        """The reason, after many iterations of which none could be measured; otherwise ""."""
        if self.log.count - len(self.log.over) < HOPELESS_ITERATIONS or self.history.count:
            return ""
        if self.log.stamps.dropped:
            return f"{self.log.stamps.dropped} CUDA events could not be recorded"
        if not self.steps.shape.known and not self.history.waiting:
            return "no collective was seen in them"
        return "none of them could be read"

    def catch_up(self) -> None:
        """Take in the iterations that can be read by now; on the housekeeping thread, or where that is not served."""
        with self.taking:
            if not self._takes_here or threading.get_ident() == self.log.thread:
                self._read()
            self.hooks.visit(self.log, self.steps.watched)
            if self.control.mode == "off":
                self.history.waiting.clear()
                return
            self.history.settle()
            if (why := self.why_nothing_is_measured()) != "":
                self.messages.log_once(f"{HOPELESS_ITERATIONS} iterations, and none could be measured: {why}")
            self._checkpoints.install()

    def _meet(self, *_: Any, alone: bool = False) -> None:
        """Know the rank, as soon as there is a process group, or a job ``alone``. No device may be touched yet."""
        from torch import distributed

        up = distributed.is_available() and distributed.is_initialized()
        if up:
            self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
            named = str(distributed.get_backend_config()).split(",")  # get_backend may say "undefined"
            self.backend = "/".join(sorted({device_backend.split(":")[-1] for device_backend in named}))
            self.store = tried(distributed.distributed_c10d._get_default_store, None)
        elif not alone:
            self.messages.rank = None  # the group has gone
            return
        self.messages.rank = self.rank
        self.control = self._new_control()  # a trainer may set the job's environment after the agent came
        self.log.count_from_here(tried(lambda: list(distributed.distributed_c10d._world.pg_map), []))
        self.on_begin()

    def _begin(self) -> None:
        """The first tick: only now is the device known. Its iteration is not counted."""
        import torch

        self.log.forget()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        self._meet(alone=not self._in_a_group_only and int(os.environ.get("WORLD_SIZE") or 1) <= 1)
        if self.messages.rank is None:
            return  # a step before the job's processes found each other
        device = self._optimizer.device
        if "nccl" in self.backend and torch.cuda.is_available() and (device is None or device.type == "cuda"):
            index = device.index if device is not None else torch.cuda.current_device()
            self.device = f"cuda:{index}"
            self.log.stamps = cuda_stamps(index)
            self.log.on_device = True
            self._takes_here = True  # events are read where a capture of a graph cannot be disturbed
            self.control = self._new_control()
        self.steps.alone = self.world_size == 1
        self._optimizer.tick = self._tick if self._takes_here else self.log.tick
        self.log.thread, self.begun = threading.get_ident(), True
        self.on_begin()

    def _read(self) -> None:
        """Take iterations in, as far as their stamps have passed, and decide where the mode does."""
        log, steps, control = self.log, self.steps, self.control
        ring = log.over
        log.every = 1 if control.decides else steps.every
        while ring and steps.readable(ring[0]):
            step = steps.add(ring.popleft())
            if step is None:
                if not steps.inside:
                    control.skip()
                continue
            self.history.add(step)
            if not step.regular:
                control.skip()
            elif control.decides:
                group = log.groups.get(steps.shape.payload_group)
                control.observe(step, steps.shape, *((group.member, group.size) if group is not None else (0, 1)))
        while log.on_device and len(ring) > MAX_PENDING:
            steps.release(ring.popleft())
            control.skip()
