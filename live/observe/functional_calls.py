"""Watches functional collectives, as DTensor and tensor parallelism use them: started in C++, waited for in one place.

They return a tensor that is waited for at its first use, always through ``wait_tensor`` of their module. In a graph of
``torch.compile`` there is no such call; the process group's own count then shows that collectives were not seen.
"""

from __future__ import annotations

from typing import Any

from paceenv.live.observe.hooks import Hooks
from paceenv.live.observe.log import UNKNOWN_WAIT, Log

OPS = {
    "all_reduce": "all_reduce",
    "all_gather_single": "all_gather",
    "all_gather_single_autograd": "all_gather",
    "all_gather_tensor": "all_gather",
    "all_gather_tensor_autograd": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_autograd": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_autograd": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_to_all_single_autograd": "all_to_all",
    "broadcast": "broadcast",
}
"""Functions of the module, and their names in the trace; those that this PyTorch does not have are skipped."""
MAX_PENDING = 1024


class FunctionalCollectives:
    """Wraps ``torch.distributed._functional_collectives``; ``log`` gets one row per wait."""

    def __init__(self, log: Log, hooks: Hooks) -> None:
        self._log, self._hooks = log, hooks
        self._pending: dict[int, int] = {}
        """By address of the tensor's memory, which views share: the kind."""

    def install(self) -> None:
        try:
            from torch.distributed import _functional_collectives as module
        except ImportError:
            return
        for name, op in OPS.items():
            self._hooks.around(module, name, self._starts, self._started(op), traced=True)
        self._hooks.around(module, "wait_tensor", self._waits, self._waited, self._failed, traced=True)

    def remove(self) -> None:
        self._pending.clear()

    def _starts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = (*args[1:], *kwargs.values())
        return next((group for argument in given if (group := _process_group(argument)) is not None), False)

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

    def _waited(self, token: Any, result: Any) -> None:
        self._log.add(*token)

    def _failed(self, token: Any) -> None:
        self._log.release(token[1])


def _address(tensor: Any) -> int:
    return int(getattr(tensor, "elem", tensor).untyped_storage().data_ptr())


def _process_group(argument: Any) -> Any:
    """The process group in an argument of a functional collective: itself, a mesh, a mesh and its dimension, a name."""
    from torch.distributed import ProcessGroup, distributed_c10d

    if isinstance(argument, ProcessGroup):
        return argument
    if isinstance(argument, str) and argument.isdecimal():
        return getattr(distributed_c10d, "_resolve_process_group")(argument)  # noqa: B009 private: it may go
    mesh, *dimension = argument if isinstance(argument, tuple) and len(argument) == 2 else (argument,)
    return mesh.get_group(*dimension) if hasattr(mesh, "get_group") and hasattr(mesh, "mesh_dim_names") else None
