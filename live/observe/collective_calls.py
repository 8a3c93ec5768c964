"""Watches every collective that Python code starts, by its entry into the process group and the return of its wait.

It wraps the methods of ``ProcessGroup`` and ``Work``, not the functions of ``torch.distributed``. So code that imported
those by name, or compares them by identity (``P2POp``, torch.compile), keeps working, and one place sees all calls. A
blocking collective lasts from entry to return, an asynchronous one from the start of ``wait()``: the time in which this
rank can do nothing else. ``paceenv.live.observe.backward`` handles collectives that C++ starts by itself (the reducer
of DistributedDataParallel).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from paceenv.live.observe.timing_source import Function, Log, Patches

OPS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}
"""Methods of a process group, and their names in the trace. Methods that this PyTorch does not have are skipped."""
_MAX_PENDING = 1024


class Collectives:
    """Wraps process group and work; ``log`` gets one entry per blocking interval."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._patches = Patches()
        self._pending: dict[int, tuple[str, int, int, Any]] = {}  # by id of the Work: op, group, bytes, entry or None
        self._thread = threading.local()

    def install(self) -> None:
        from torch.distributed import ProcessGroup, Work

        for method, op in OPS.items():
            self._patches.wrap(ProcessGroup, method, self._around(functools.partial(self._start, op)))
        self._patches.wrap(Work, "wait", self._around(self._wait))

    def stop(self) -> None:
        self._patches.stop()

    def remove(self) -> None:
        self._patches.restore()
        self._pending.clear()

    def _around(self, watched: Function) -> Callable[[Function], Function]:
        """A function that replaces a method by one that goes through ``watched``."""

        def make(original: Function) -> Function:
            def wrapped(owner: Any, *args: Any, **kwargs: Any) -> Any:
                # nested: a group that delegates to another is one collective, seen from outside
                if not self._patches.active or getattr(self._thread, "inside", False):
                    return original(owner, *args, **kwargs)
                return watched(original, owner, args, kwargs)

            return wrapped

        return make

    def _call(self, original: Function, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._thread.inside = True
        try:
            return original(owner, *args, **kwargs)
        finally:
            self._thread.inside = False

    def _start(self, op: str, original: Function, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        blocking = _is_blocking(args, kwargs)
        entry = self._record() if blocking else None
        try:
            work = self._call(original, group, args, kwargs)
        except BaseException:
            self._log.release(entry)
            raise
        try:
            number, size_bytes = self._log.group(group), _bytes(args)
            if work is not None:
                self._remember(work, (op, number, size_bytes, entry))
            elif blocking:
                self._add(op, number, size_bytes, entry)
        except Exception as error:
            self._log.fail(error)
        return work

    def _remember(self, work: Any, started: tuple[str, int, int, Any]) -> None:
        """Keep the description of ``work`` until its wait; a hook that returns its future never waits."""
        before = self._pending.pop(id(work), None)
        forgotten = [before] if before is not None else []
        if len(self._pending) >= _MAX_PENDING:
            forgotten += self._pending.values()
            self._pending = {}
        self._log.release(*(entry for *_, entry in forgotten))
        self._pending[id(work)] = started

    def _wait(self, original: Function, work: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op, group, size_bytes, entry = self._pending.pop(id(work), ("recv", -1, 0, None))
        if entry is None:
            entry = self._record()
        result = self._call(original, work, args, kwargs)
        self._add(op, group, size_bytes, entry)
        return result

    def _record(self) -> Any:
        try:
            return self._log.stamps.record()
        except Exception as error:
            self._log.fail(error)
            return None

    def _add(self, op: str, group: int, size_bytes: int, entry: Any) -> None:
        try:
            self._log.add(op, group, size_bytes, entry)
        except Exception as error:
            self._log.fail(error)


def _is_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    options = kwargs.get("opts", args[-1] if args else None)
    return getattr(options, "asyncOp", True) is False


def _bytes(args: tuple[Any, ...]) -> int:
    """Bytes of the largest tensor argument: the whole payload of a gather as of a scatter."""
    return max((_size_bytes(argument) for argument in args), default=0)


def _size_bytes(argument: Any) -> int:
    if isinstance(argument, (list, tuple)):
        return sum(map(_size_bytes, argument))
    return int(getattr(argument, "nbytes", 0))
