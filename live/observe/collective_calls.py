"""Watches every collective that Python code starts, by its entry into the process group and the return of its wait.

It wraps the methods of ``ProcessGroup`` and ``Work``, not the functions of ``torch.distributed``. So code that imported
those by name, or compares them by identity (``P2POp``, torch.compile), keeps working, and one place sees all calls. A
blocking collective lasts from entry to return, an asynchronous one from the start of ``wait()``: the time in which this
rank can do nothing else. ``paceenv.live.observe.backward`` handles what DistributedDataParallel starts in C++.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any
from weakref import ref

from paceenv.live.observe.batch import STANDSTILL
from paceenv.live.observe.hooks import Hooks
from paceenv.live.observe.log import UNKNOWN_WAIT, Group, Log
from paceenv.live.observe.stamps import DeviceStamps

_METHODS_OF = {
    "all_reduce": "allreduce allreduce_coalesced",
    "all_gather": "allgather _allgather_base all_gather_single allgather_coalesced allgather_into_tensor_coalesced "
    "all_gather_single_coalesced",
    "reduce_scatter": "reduce_scatter _reduce_scatter_base reduce_scatter_single reduce_scatter_tensor_coalesced "
    "reduce_scatter_single_coalesced",
    "all_to_all": "alltoall alltoall_base all_to_all_single",
    "recv": "recv recv_anysource",
} | {name: name for name in ("broadcast", "reduce", "gather", "scatter", "barrier", "send")}
_FUNCTIONS_OF = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather_single all_gather_single_autograd all_gather_tensor all_gather_tensor_autograd",
    "reduce_scatter": "reduce_scatter_single reduce_scatter_single_autograd reduce_scatter_tensor "
    "reduce_scatter_tensor_autograd",
    "all_to_all": "all_to_all_single all_to_all_single_autograd",
    "broadcast": "broadcast",
}
METHODS, FUNCTIONS = ({name: op for op in of for name in of[op].split()} for of in (_METHODS_OF, _FUNCTIONS_OF))
"""Methods of a process group, and functions of the module of functional collectives, with their names in the trace;
those that this PyTorch does not have are skipped."""
SINGLE = ("all_reduce", "broadcast", "reduce", "barrier", "send", "recv")
"""Kinds whose first argument is a list of one tensor, nearly always."""
MAX_PENDING = 1024
MAX_CALLS = 4096


class Collectives:
    """Wraps process group and work; ``log`` gets one row per blocking interval.

    A call of ``ProcessGroup`` starts a collective and a call of ``Work`` waits for it, also where the user asked for a
    blocking one. On a GPU a blocking one runs on the current stream, so there it begins with the start.
    """

    def __init__(self, log: Log, hooks: Hooks) -> None:
        self._log, self._hooks = log, hooks
        self._pending: dict[int, tuple[Callable[[], Any], int, Any]] = {}
        """By identity of the work: a weak reference to it, its kind, and the entry if it has begun."""
        self._coalescing: dict[int, tuple[list[int], Any]] = {}
        """By thread: the kinds started since a group began to coalesce, and the entry on a GPU."""

    def install(self) -> None:
        from torch.distributed import ProcessGroup, Work

        around = self._hooks.around
        for method, op in METHODS.items():
            after = self._started(method, op, op in SINGLE and "coalesced" not in method)
            around(ProcessGroup, method, self._starts, after, self._log.give_up, always=False)
        begins = self._coalesces, self._coalescing_began, self._log.give_up
        around(ProcessGroup, "_start_coalescing", *begins, always=False)
        around(ProcessGroup, "_end_coalescing", lambda args, kwargs: args, self._coalesced, always=False)
        around(Work, "wait", self._waits, self._log.end, self._log.give_up, always=False)
        for method in ("send", "recv", "recv_anysource", "monitored_barrier"):
            around(ProcessGroup, method, self._counts_apart, lambda token, result: None)

    def _counts_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._log.uneven = True

    def _starts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments, and the entry of a call that blocks, the host or a GPU's current stream."""
        log = self._log
        if log.on_device and getattr(kwargs.get("opts", args[-1]), "asyncOp", True) is False:
            return args, log.stamps.record()
        return args, None

    def _started(self, method: str, op: str, single: bool) -> Callable[[Any, Any], None]:
        log, pending, coalescing = self._log, self._pending, self._coalescing
        known: dict[tuple[int, int], tuple[int, Group]] = {}
        """By identity of the group, which forgets its entries when it ends, and bytes: kind and group."""

        def after(token: tuple[tuple[Any, ...], Any], work: Any) -> None:
            args, entry = token
            try:
                size = args[1][0].nbytes if single else _payload(args)
            except (IndexError, AttributeError, TypeError):
                size = 0
            call = known.get((id(args[0]), size))
            if call is None:
                group = log.known(args[0], begun=True)
                call = log.kind(op, group.number, size), group
                if len(known) < MAX_CALLS and log.follows(args[0], known):
                    known[id(args[0]), size] = call
            kind, group = call
            group.started(method)
            if coalescing and get_ident() in coalescing:
                coalescing[get_ident()][0].append(kind)
                log.release(entry)
                return
            if work is None:
                if entry is not None:
                    log.add(kind, entry)
                return
            pending[id(work)] = ref(work), kind, entry
            if len(pending) > MAX_PENDING:
                self._forget()

        return after

    def _coalesces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, self._log.stamps.record() if self._log.on_device else None

    def _coalescing_began(self, token: Any, result: Any) -> None:
        left = self._coalescing.pop(get_ident(), None)  # of one that failed on its way
        self._log.release(left[1] if left is not None else None)
        self._coalescing[get_ident()] = [], token[1]

    def _coalesced(self, args: Any, work: Any) -> None:
        """A group ends to coalesce: its one work stands for everything that was started; None where it blocked."""
        together, entry = self._coalescing.pop(get_ident(), ([], None))
        kinds = [self._log.kinds[kind] for kind in together]
        if not kinds:
            self._log.release(entry)
            return
        kind = self._log.kind(kinds[0].op, kinds[0].group, sum(kind.bytes for kind in kinds))
        if work is None:
            self._log.add(kind, entry)
        else:
            self._log.release(entry)
            self._pending[id(work)] = ref(work), kind, None

    def _forget(self) -> None:
        """Works that nobody waited for; a communication hook that returns its future never waits."""
        pending = self._pending
        for key, (work, _, entry) in list(pending.items()):
            if work() is None or len(pending) > MAX_PENDING // 2:
                pending.pop(key, None)  # a transfer that was held back may be awaited meanwhile
                self._log.release(entry)

    def _waits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pending = self._pending.pop(id(args[0]), None)
        if pending is None or pending[0]() is not args[0]:
            return UNKNOWN_WAIT, self._log.stamps.record()
        return pending[1], self._log.stamps.record() if pending[2] is None else pending[2]


def _payload(args: tuple[Any, ...]) -> int:
    """Bytes of output or input, whichever is larger: the whole payload of a gather as of a scatter."""
    return max(map(_bytes, args[1:3]))


def _bytes(argument: Any) -> int:
    if isinstance(argument, (list, tuple)):
        return sum(map(_bytes, argument))
    return int(getattr(argument, "nbytes", 0))


class FunctionalCollectives:
    """Wraps functional collectives, as DTensor and tensor parallelism use them; ``log`` gets one row per wait.

    They are started in C++ and return a tensor that is waited for at its first use, always through ``wait_tensor`` of
    their module. In a graph of ``torch.compile`` there is no such call; the process group's own count then shows that
    collectives were not seen.
    """

    def __init__(self, log: Log, hooks: Hooks) -> None:
        self._log, self._hooks = log, hooks
        self._pending: dict[int, int] = {}
        """By address of the tensor's memory, which views share: the kind."""

    def install(self) -> None:
        from torch.distributed import ProcessGroup, distributed_c10d
        from torch.distributed import _functional_collectives as module

        self._group_type: type = ProcessGroup
        self._group_named: Any = getattr(distributed_c10d, "_resolve_process_group", None)  # private: it may go
        for name, op in FUNCTIONS.items():
            self._hooks.around(module, name, self._starts, self._started(op), traced=True, always=False)
        waits = self._waits, self._log.end, self._log.give_up
        self._hooks.around(module, "wait_tensor", *waits, traced=True, always=False)

    def _starts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for argument in (*args[1:], *kwargs.values()):
            if (group := self._process_group(argument)) is not None:
                return group
        return False

    def _process_group(self, argument: Any) -> Any:
        """The process group in an argument: itself, a mesh, a mesh and its dimension, a name."""
        if isinstance(argument, self._group_type):
            return argument
        if isinstance(argument, str):
            return self._group_named(argument) if argument.isdecimal() else None
        mesh, *dimension = argument if isinstance(argument, tuple) and len(argument) == 2 else (argument,)
        return mesh.get_group(*dimension) if hasattr(mesh, "get_group") and hasattr(mesh, "mesh_dim_names") else None

    def _started(self, op: str) -> Any:
        def after(group: Any, result: Any) -> None:
            tensor = getattr(result, "elem", result)
            number = -1
            if group is not False:
                known = self._log.known(group)
                number, known.opaque = known.number, True  # their backward passes start more of them in C++
            if len(self._pending) >= MAX_PENDING:
                self._pending.clear()
            self._pending[_address(tensor)] = self._log.kind(op, number, int(tensor.nbytes))

        return after

    def _waits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._pending.pop(_address(args[0]), UNKNOWN_WAIT), self._log.stamps.record()


def _address(tensor: Any) -> int:
    return int(getattr(tensor, "elem", tensor).untyped_storage().data_ptr())


class StreamWaits:
    """Wraps a CUDA stream's wait for an event; ``log`` gets one row per wait of the stream that is the current one.

    The collectives of FSDP run beside the compute: what they cost the step is only the time in which the compute stream
    stands still for them.
    """

    def __init__(self, log: Log, hooks: Hooks) -> None:
        self._log, self._hooks = log, hooks

    def install(self) -> None:
        import torch

        waits = self._waits, self._log.end, self._log.give_up
        self._hooks.around(torch.cuda.Stream, "wait_event", *waits, always=False)

    def _waits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stamps = self._log.stamps
        if isinstance(stamps, DeviceStamps) and args[0].cuda_stream == stamps.stream():
            return self._log.kind(STANDSTILL, -1, 0), stamps.record()
        return None  # a stream of the collectives waits for the compute
