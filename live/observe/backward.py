"""Times what DistributedDataParallel waits for in C++: the reduction of its gradients, the broadcast of its buffers.

The reducer waits for its buckets in a callback at the end of the backward pass. We queue one callback before it, which
runs when this rank's gradients are done. That one queues another, which runs after the reducer's. A hook on a node
of the graph, where gradients are accumulated, detects a backward pass; where parameters may stay unused, one on the
model's output does, too. Nothing is registered with the reducer or the model. So a user's communication hook stays as
it is, results cannot change, and a model is copied and saved as usual. On a GPU both stamps are events on the compute
stream, which waits for the communication stream between them.

With reentrant checkpointing a backward pass is many, one inside the other, each with callbacks of its own, and the
reducer waits in the one that finishes the last gradient. So each of them is timed, and the last one is the reduction.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from paceenv.live.observe.hooks import Hooks
from paceenv.live.observe.log import Log

_MAX_NODES = 64


class Backward:
    """Follows every existing and future DDP model, and marks iterations in which one is evaluated."""

    def __init__(self, log: Log, hooks: Hooks) -> None:
        self._log, self._hooks = log, hooks
        self._models: list[_Model] = []

    def install(self) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        self._is_grad_enabled = torch.is_grad_enabled
        around = self._hooks.around
        around(DistributedDataParallel, "__init__", lambda args, kwargs: args[0], self._follow)
        forward = self._forward_begins, _Model.watch
        around(DistributedDataParallel, "forward", *forward, traced=True, always=False)
        buffers = self._buffers, self._log.end, self._log.give_up
        around(DistributedDataParallel, "_sync_buffers", *buffers, traced=True, always=False)
        classes = _with_subclasses(DistributedDataParallel)
        for thing in gc.get_referrers(*classes):  # an object refers to its class
            if any(type(thing) is kind for kind in classes):  # isinstance would call code of the thing itself
                self._follow(thing)

    def forget(self) -> None:
        """Keep no part of a graph any longer."""
        self._models.clear()

    def _model(self, ddp: Any) -> _Model | None:
        return next((model for model in self._models if model.ddp() is ddp), None)

    def _follow(self, ddp: Any, result: None = None) -> None:
        if self._model(ddp) is None:
            left = [model for model in self._models if model.ddp() is not None]
            self._models = [*left, _Model(ddp, self._log, self._hooks)]

    def _forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ddp = args[0]
        if self._is_grad_enabled():
            return self._model(ddp) if ddp.find_unused_parameters else None
        if not ddp.training:
            self._log.mark("evaluation")
        return None

    def _buffers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = self._model(args[0])
        return (model.broadcast, self._log.stamps.record()) if model is not None else None


class _Model:
    """The backward passes of one DDP model; constants of the model are read once."""

    def __init__(self, ddp: Any, log: Log, hooks: Hooks) -> None:
        import torch
        from torch.autograd import Variable
        from torch.autograd.graph import get_gradient_edge
        from torch.nn.parallel.distributed import _find_tensors  # as DDP itself does, with unused parameters

        self._log, self.ddp, self._hooks = log, weakref.ref(ddp), hooks
        self._queue = Variable._execution_engine.queue_callback
        self._is_compiling = torch.compiler.is_compiling
        self._find_tensors: Callable[[Any], Iterable[Any]] = _find_tensors
        self._graph_task = getattr(torch._C, "_current_graph_task_id", itertools.count().__next__)
        parameters = [p for p in ddp.parameters() if p.requires_grad]
        known = log.known(ddp.process_group)
        known.opaque = True  # the reducer starts its buckets by itself
        self._kind = log.kind("all_reduce", known.number, _bytes(parameters))
        self.broadcast = log.kind("broadcast", known.number, _bytes(ddp.buffers()))
        self._task = -1
        """The backward pass that got a callback of ours last; each has a number of its own."""
        self._entry: Any = None
        self._own_part = hooks.guarded(self._own_part_ends, always=False)
        self._reduction = hooks.guarded(self._reduction_ends, always=False)
        # the first parameter's gradient is among the last; three where a pass may leave parameters out
        told_by = {0, len(parameters) // 2, len(parameters) - 1} if ddp.static_graph else {0}
        self._nodes = [get_gradient_edge(parameters[i]).node for i in told_by if parameters]  # kept alive with us
        for node in self._nodes:
            hooks.register(node.register_prehook, self._backward_runs, always=False)

    def watch(self, output: Any) -> None:
        """Detect the backward pass of this output, whichever parameters it uses."""
        nodes = (tensor.grad_fn for tensor in self._find_tensors(output) if tensor.grad_fn is not None)
        for node in itertools.islice(nodes, _MAX_NODES):
            self._hooks.register(node.register_prehook, self._backward_runs, kept=False, always=False)

    def _backward_runs(self, gradients: Any) -> None:
        """A gradient of the model is done: queue a callback for the end of this rank's own part."""
        task = self._graph_task()
        if task == self._task or self._is_compiling():
            return
        ddp = self.ddp()
        if ddp is not None and ddp.require_backward_grad_sync:
            self._task = task
            self._queue(self._own_part)

    def _own_part_ends(self) -> None:
        self._log.release(self._entry)  # of a reduction that failed
        self._entry = self._log.stamps.record()
        self._queue(self._reduction)

    def _reduction_ends(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._log.add(self._kind, entry)


def _with_subclasses(kind: type) -> list[type]:
    children: list[type] = type.__subclasses__(kind)
    return [kind, *(sub for child in children for sub in _with_subclasses(child))]


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(int(t.numel() * t.element_size()) for t in tensors)
