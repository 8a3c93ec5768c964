"""Holds back transfers that can wait: an asynchronous collective starts a little later than its caller asked for it.

The caller gets a ``Work`` at once. A timer thread starts the collective when its hold is over. It starts at once when
anybody asks its work for anything, when anything else is called on the same process group, when a wait for another
transfer has blocked (``paceenv.core.pacing.releases``), at the tick, and when the agent ends. So each process group has
the order of its calls, and nobody waits for what was never started.

On CPU tensors over gloo only. The caller leaves the tensors alone until ``wait()``, as an asynchronous call demands.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from paceenv.core.pacing import releases
from paceenv.live.decide.actuator import DelayLengths
from paceenv.live.observe.collective_calls import FUNCTIONS, METHODS
from paceenv.live.observe.hooks import Hooks
from paceenv.live.observe.log import LISTS, Log
from paceenv.live.record.housekeeping import background, launches

DEFERRABLE = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter")
"""Kinds that can be held back; a reduce-scatter of lists is not, as gloo counts it as one reduction for each rank."""
_ASK_NOTHING = {"rank", "size", "name", "get_group_store", "_id", "_backend_id", "_device_types", "_get_backend_name"}
_ASK_NOTHING |= {"_get_sequence_number_for_group", "_has_hooks", "_get_backend", "unbox", "_pybind11_conduit_v1_"}
"""Methods of a process group that have nothing to do with the order of its collectives."""


class Transfer:
    """A collective that was asked for and may not have started."""

    def __init__(
        self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked_s: float, due_s: float, sequence: int
    ) -> None:
        import torch

        self.args, self.asked_s, self.due_s, self.sequence = tuple(map(_kept, args)), asked_s, due_s, sequence
        self._original, self._kwargs = original, {name: _kept(value) for name, value in kwargs.items()}
        self._gradients = torch.is_grad_enabled()
        self.work: Any = None
        self.begun = False
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start it, unless that has been done. An error is for those who ask for the result."""
        if self.begun:
            return
        import torch

        self.begun = True
        try:
            with torch.set_grad_enabled(self._gradients):
                self.work = self._original(*self.args, **self._kwargs)
        except BaseException as error:
            self.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self.args, self._kwargs = (), {}


class Deferral:
    def __init__(self, chosen: str, log: Log, hooks: Hooks, log_once: Callable[[str], None]) -> None:
        self.hold_s = 0.0
        """How long each transfer is held back from now on, seconds; 0 holds nothing."""
        self.late = DelayLengths()
        """Transfers that were started later than asked for, and by how long."""
        self._chosen = frozenset(filter(None, (part.strip() for part in chosen.split(","))))
        self._log, self._hooks, self._log_once = log, hooks, log_once
        self._off, self._recent_s = not self._chosen, 0.0
        self._held: dict[int, deque[Transfer]] = {}
        """By identity of the process group, which a transfer keeps alive: what is held, in order."""
        self._refused: dict[int, str] = {}
        """By identity of the process group: why nothing is held on it, or "" where it may be."""
        self._fresh()

    def _fresh(self) -> None:
        self._lock, self._wake = threading.RLock(), threading.Event()
        self._timer: threading.Thread | None = None
        self._target_s = math.inf
        """When the timer looks again."""

    def install(self) -> None:
        """Watch the calls; after the sources that observe them, so that they see when a transfer really starts."""
        if self._off:
            return
        from torch.distributed import ProcessGroup, Work
        from torch.distributed import _functional_collectives as functional
        from torch.nn.parallel import DistributedDataParallel

        methods = [name for name, one in vars(ProcessGroup).items() if callable(one) and not isinstance(one, type)]
        for name in methods:
            if name[:2] != "__" and name not in _ASK_NOTHING:
                self._hooks.instead(ProcessGroup, name, functools.partial(self._called, name))
        for name in FUNCTIONS:  # PyTorch's C++ starts these
            self._hooks.instead(functional, name, self._called_elsewhere, traced=True)
        self._hooks.instead(DistributedDataParallel, "__init__", self._called_elsewhere)
        self._hooks.around(Work, "wait", self._waits, self._waited)

    def stop(self, *, here: bool = False) -> None:
        """Start everything that is held, and hold nothing any more; any thread may call it.

        ``here``, on whichever thread: once the hooks are gone, the next call would overtake what is held.
        """
        self._off = True
        try:
            if here or threading.current_thread() is threading.main_thread():
                self.release()
        finally:
            self._wake.set()  # elsewhere it is the timer's work, which the end of the process waits for

    def forget(self) -> None:
        """In a forked child: what is held is the parent's."""
        self._off, held, self._held = True, self._held, {}
        self._fresh()
        for queue in held.values():
            for transfer in queue:
                transfer.begun, transfer.error = True, RuntimeError("a transfer of the process that forked this one")

    def tick(self) -> float:
        """The end of an iteration: start everything; returns the longest real hold since the last tick, seconds."""
        self.hold_s = 0.0
        if self._held:
            self.release()
        recent_s, self._recent_s = self._recent_s, 0.0
        return recent_s

    def counts(self) -> dict[str, float]:
        """What was held back so far, as a snapshot has it: transfers, their sum and the longest, seconds."""
        return {"held": self.late.count, "held_s": self.late.total_s, "held_max_s": self.late.longest_s}

    def release(self, group: int | None = None) -> None:
        """Start everything that is held, of one group or of all, in order."""
        with self._lock:
            for key in (group,) if group is not None else tuple(self._held):
                self._start(key)

    def _start(self, key: int, until_s: float = math.inf) -> None:
        """Start a group's transfers that are due at ``until_s``; the lock is held."""
        queue = self._held.get(key)
        while queue and queue[0].due_s <= until_s:
            transfer = queue.popleft()
            try:
                self._check(transfer)
            finally:
                transfer.start()
                late_s = max(time.monotonic() - transfer.asked_s, 0.0)
                self.late.add(late_s)
                self._recent_s = max(self._recent_s, late_s)
        if not queue:
            self._held.pop(key, None)

    def _check(self, transfer: Transfer) -> None:
        """Between call and start, a process group must not have counted a collective that came by another way."""
        if not self._off and not transfer.begun and _counted(transfer.args[0]) != transfer.sequence:
            self._refuse(transfer.args[0], "PyTorch's C++ starts collectives there, too")
            self._off = True

    def _refuse(self, group: Any, why: str) -> None:
        self._remember(group, why)
        self._log_once(f"transfers of process group {_named(group)[1]} are not held back: {why}")

    def _remember(self, group: Any, why: str) -> None:
        if self._log.follows(group, self._refused):
            self._refused[id(group)] = why

    def _called_elsewhere(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._held:
            self.release()

    def _called(self, name: str, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place of a method of a process group: the work of a transfer that is held, or None to go on."""
        if not self._held and (self._off or not self.hold_s > 0.0):
            return None
        group = args[0]
        try:
            if not self._off and self.hold_s > 0.0 and self._can_wait(name, args, kwargs):
                return self._hold(original, args, kwargs)
        except BaseException:
            self._off = True
            self.release()
            raise
        if name == "_start_coalescing":
            self._remember(group, "it coalesces")
        if id(group) in self._held:
            self.release(id(group))
        return None

    def _waits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        """When a wait begins; None where nothing is held."""
        return time.monotonic() if self._held else None

    def _waited(self, since_s: float, result: Any) -> None:
        """What made room for a transfer that was needed may go once that is through."""
        if self._held and releases(time.monotonic() - since_s, self.hold_s):
            self.release()

    def _can_wait(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        import torch

        kind, group = METHODS.get(name), args[0]
        if kind not in DEFERRABLE or name == LISTS or self._refused.get(id(group)):
            return False
        if getattr(kwargs.get("opts", args[-1]), "asyncOp", False) is not True:
            return False
        if kind not in self._chosen and self._chosen.isdisjoint(_named(group)):
            return False
        stacks = (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack())
        if any(stacks) or torch.is_inference_mode_enabled():  # what watches or changes calls of this thread only
            return False
        if not all(_on_cpu(argument) for argument in (*args[1:], *kwargs.values())):
            return False
        known, why = self._log.known(group), ""
        if id(group) not in self._refused:
            why = _why_not(group)
            self._remember(group, why)
        with self._lock:  # a start by the timer is counted by PyTorch first and then by us
            if known.opaque or known.unseen():
                why = "PyTorch's C++ starts collectives there, too, or lists are scattered"
        if why:
            self._refuse(group, why)
        return not why

    def _hold(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group, now_s = args[0], time.monotonic()
        with self._lock:
            if not self._off and (self._timer is None or not self._timer.is_alive()):  # with the first transfer
                self._timer = background("paceenv-deferral", self._watch, self._log_once)
                if self._timer is None:
                    self._off = True
            if self._off:
                self.release()
                return None
            queue = self._held.get(id(group))
            sequence = queue[-1].sequence + 1 if queue else _counted(group)
            transfer = Transfer(original, args, kwargs, now_s, now_s + self.hold_s, sequence)
            work = _held_work()(functools.partial(self._begin, id(group), transfer))
            self._held.setdefault(id(group), deque()).append(transfer)
            if transfer.due_s < self._target_s:
                self._wake.set()
            return work

    def _begin(self, key: int, transfer: Transfer) -> Any:
        """Somebody asks for a transfer: its real work, or the error of its start."""
        if transfer.work is None and transfer.error is None:
            try:
                self.release(key)  # waits for a start that is under way
            except Exception as error:
                self._off = True
                self._hooks.report(error)
            with self._lock:
                transfer.start()  # unless it has been
        if transfer.error is not None:
            raise transfer.error
        if transfer.work is None:
            raise RuntimeError("the start of this collective was interrupted")
        return transfer.work

    def _watch(self) -> None:
        try:
            while not (self._off and not self._held):
                self._wake.wait(max(self._target_s - time.monotonic(), 0.0) if self._target_s < math.inf else None)
                self._wake.clear()
                with launches, self._lock:
                    now_s = math.inf if self._off else time.monotonic()
                    for key in tuple(self._held):
                        self._start(key, now_s)
                    self._target_s = min((queue[0].due_s for queue in self._held.values()), default=math.inf)
        except Exception as error:
            self._off = True
            with launches:
                self.release()
            self._hooks.report(error)


def _why_not(group: Any) -> str:
    """Why nothing is held on a group, or ""."""
    import torch
    from torch.distributed import ProcessGroup

    if type(group) is not ProcessGroup:
        return f"it is a {type(group).__name__}"
    backend = group._get_backend(torch.device("cpu")).name()
    return "" if backend == "gloo" else f"its backend is {backend}; only gloo's transfers can be held"


def _named(group: Any) -> tuple[str, str]:
    return str(group.group_desc), str(group.group_name)


def _counted(group: Any) -> int:
    return int(group._get_sequence_number_for_group())


@functools.cache
def _held_work() -> type:
    """A ``torch.distributed.Work`` that is made with a function, which it calls for the real one when it is asked."""
    from torch.distributed import Work

    def asks(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._begin(), name)(*args, **kwargs)

        return method

    def begin_with(self: Any, begin: Callable[[], Any]) -> None:
        Work.__init__(self)
        self._begin = begin

    names = {name for name in vars(Work) if name[:2] != "__"} - {"unbox", "_pybind11_conduit_v1_"}
    return type("HeldWork", (Work,), {"__init__": begin_with} | {name: asks(name) for name in names})


def _kept(argument: Any) -> Any:
    """The argument as it is now: PyTorch copies lists when it is called, and leaves tensors and options."""
    return [_kept(part) for part in argument] if isinstance(argument, (list, tuple)) else argument


def _on_cpu(argument: Any) -> bool:
    """Whether all tensors in an argument are plain ones on the CPU."""
    import torch

    if isinstance(argument, (list, tuple)):
        return all(map(_on_cpu, argument))
    if not hasattr(argument, "untyped_storage"):
        return True
    plain = type(argument) in (torch.Tensor, torch.nn.Parameter) and argument.layout is torch.strided
    return plain and argument.device.type == "cpu"
