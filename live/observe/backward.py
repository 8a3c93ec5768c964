"""Times the gradient reduction of DistributedDataParallel: from the end of the rank's own backward pass to its end.

The reducer waits for its buckets in a callback at the end of the backward pass. We queue one callback before it, which
runs when this rank's gradients are done. That one queues another, which runs after the reducer's. A hook on a few nodes
of the graph, where gradients are accumulated, detects a backward pass. Nothing is registered with the reducer or the
model. So a user's communication hook stays as it is, results cannot change, and a model is copied and saved as usual.
On a GPU both stamps are events on the compute stream, which waits for the communication stream between them.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from paceenv.live.observe.timing_source import Function, Log, Patches


class Backward:
    """Follows every existing and future DDP model, and marks iterations in which one is evaluated.

    Nothing happens while PyTorch compiles: our code must neither become part of a graph nor break it.
    """

    def __init__(self, log: Log) -> None:
        self._log, self._patches = log, Patches()
        self._models: weakref.WeakKeyDictionary[Any, _Model] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self._patches.wrap(DistributedDataParallel, "__init__", self._following)
        self._patches.wrap(DistributedDataParallel, "forward", self._marking)
        for thing in gc.get_objects():
            if issubclass(type(thing), DistributedDataParallel):  # isinstance would call code of the thing itself
                self._follow(thing)

    def stop(self) -> None:
        self._patches.stop()

    def remove(self) -> None:
        self._patches.restore()
        for model in self._models.values():
            model.remove()
        self._models.clear()

    def _follow(self, ddp: Any) -> None:
        if ddp not in self._models:
            self._models[ddp] = _Model(self._log, self._patches, ddp)

    def _following(self, original: Function) -> Function:
        def init(ddp: Any, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            if self._patches.active:
                try:
                    self._follow(ddp)
                except Exception as error:
                    self._log.fail(error)

        return init

    def _marking(self, original: Function) -> Function:
        import torch

        is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled

        def forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling() and not ddp.training and not is_grad_enabled() and self._patches.active:
                self._log.mark("evaluation")
            return original(ddp, *args, **kwargs)

        return forward


class _Model:
    """The backward passes of one DDP model; constants of the model are read once."""

    def __init__(self, log: Log, patches: Patches, ddp: Any) -> None:
        import torch
        from torch.autograd import Variable
        from torch.autograd.graph import get_gradient_edge

        self._log, self._ddp, self._queue = log, weakref.ref(ddp), Variable._execution_engine.queue_callback
        self._is_compiling, self._patches = torch.compiler.is_compiling, patches
        parameters = [p for p in ddp.parameters() if p.requires_grad]
        self._group = log.group(ddp.process_group)
        self._bytes = sum(p.numel() * p.element_size() for p in parameters)
        self._running_in = -1
        self._entry: Any = None
        # any one of them is enough; three, because a pass may leave parameters out
        told_by = {0, len(parameters) // 2, len(parameters) - 1} if parameters else set()
        self._nodes = [get_gradient_edge(parameters[i]).node for i in told_by]
        self._handles = [node.register_prehook(self._backward_runs) for node in self._nodes]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _backward_runs(self, gradients: Any) -> None:
        """A gradient of the model is done: queue a callback for the end of this rank's own part."""
        if self._running_in == self._log.ticks or self._is_compiling() or not self._patches.active:
            return  # a failed pass is forgotten at the tick
        try:
            ddp = self._ddp()
            if ddp is not None and ddp.require_backward_grad_sync:
                self._running_in = self._log.ticks
                self._queue(self._own_part_ends)
        except Exception as error:
            self._log.fail(error)

    def _own_part_ends(self) -> None:
        try:
            self._log.release(self._entry)  # of a reduction that failed
            self._entry = self._log.stamps.record()
            self._queue(self._reduction_ends)
        except Exception as error:
            self._log.fail(error)

    def _reduction_ends(self) -> None:
        try:
            self._running_in = -1
            entry, self._entry = self._entry, None
            self._log.add("all_reduce", self._group, self._bytes, entry)
        except Exception as error:
            self._log.fail(error)
