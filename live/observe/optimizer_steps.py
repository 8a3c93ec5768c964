"""Watches the optimizers: the end of one optimizer's step is the tick of an iteration, and where pacing happens.

With several optimizers the largest owns the tick, the first seen among equals. So one iteration has one tick, and a
small optimizer that only some ranks run does not count. If the owner stops stepping, another takes over. A step that a
gradient scaler skips has no tick: two iterations become one, which is irregular and left out.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

_PATIENCE = 16
"""After this many steps of other optimizers, the owner of the tick counts as stopped."""


class OptimizerTick:
    """Calls ``tick`` after each step of the optimizer that owns the tick; a given one owns it from the start."""

    def __init__(self, tick: Callable[[], None], optimizer: Any = None) -> None:
        self._tick, self._given, self._active = tick, optimizer is not None, False
        self._owner: weakref.ref[Any] | None = None if optimizer is None else weakref.ref(optimizer)
        self._sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._others = 0
        self._handle: Any = None

    def install(self) -> None:
        import torch
        from torch.compiler import is_compiling
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._is_compiling: Callable[[], bool] = is_compiling
        # PyTorch's own mark: ``torch.compiler.disable`` would load the compiler, 2 s of CPU in a job without one
        disable = getattr(torch, "_disable_dynamo", torch.compiler.disable)
        self._outside: Callable[[Any], None] = disable(self._stepped)
        self._handle, self._active = register_optimizer_step_post_hook(self._after_step), True

    def stop(self) -> None:
        self._active = False

    def remove(self) -> None:
        self._active = False
        if self._handle is not None and not _in_a_step():  # there PyTorch is walking through its hooks
            self._handle.remove()
            self._handle = None

    @property
    def on_device(self) -> bool | None:
        """Whether the owner's parameters are on a GPU; None without an owner."""
        owner = self._owner() if self._owner is not None else None
        if owner is None:
            return None
        return any(p.is_cuda for group in owner.param_groups for p in group["params"])

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # in a compiled step, which PyTorch itself breaks into several graphs, our code must not become part of one
        (self._outside if self._is_compiling() else self._stepped)(optimizer)

    def _stepped(self, optimizer: Any) -> None:
        if not self._active:
            return
        owner = self._owner() if self._owner is not None else None
        if owner is not optimizer:
            self._others += 1
            larger = not self._given and owner is not None and self._size(optimizer) > self._size(owner)
            if owner is not None and not larger and self._others < _PATIENCE:
                return
            self._owner = weakref.ref(optimizer)
        self._others = 0
        self._tick()

    def _size(self, optimizer: Any) -> int:
        if optimizer not in self._sizes:
            self._sizes[optimizer] = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        return self._sizes[optimizer]


def _in_a_step() -> bool:
    """Whether an optimizer's step is on the stack of this thread."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.optim.optimizer":
            return True
        frame = frame.f_back
    return False
