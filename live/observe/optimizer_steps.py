"""Watches the optimizers: the end of one optimizer's step is the tick of an iteration, and where pacing happens.

With several optimizers the largest owns the tick, the first seen among equals. So one iteration has one tick, and a
small optimizer that only some ranks run does not count. If the owner stops stepping, another takes over. A step inside
another step (of a subclass that calls ``super().step()``, of an optimizer that drives another) is part of that one. A
step that a gradient scaler skips has no tick: two iterations become one, which is irregular and left out. So is one in
which a checkpoint is written.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from traceback import walk_stack
from typing import Any

from paceenv.live.observe.hooks import Hooks
from paceenv.live.observe.log import Log, tried

_PATIENCE = 16
"""After this many steps of other optimizers, the owner of the tick counts as stopped."""
_KNOWN = 64
"""Optimizers whose size is remembered."""
_FRAMES = 12
"""An outer step is at most so many frames away."""
CHECKPOINTS = (
    ("torch", "save"),
    ("torch.distributed.checkpoint", "save"),
    ("torch.distributed.checkpoint", "async_save"),
)


class OptimizerTick:
    """Calls ``tick`` after each step of the optimizer that owns the tick; a given one owns it from the start."""

    def __init__(self, tick: Callable[[], object], hooks: Hooks, optimizer: Any = None) -> None:
        self.tick, self._hooks, self._given = tick, hooks, optimizer is not None
        self._owner: Callable[[], Any] | None = None if optimizer is None else _reference(optimizer)
        self._sizes: list[tuple[Callable[[], Any], int]] = []
        self._others = 0
        self._step_code: Any = None
        self._may_nest = True
        """Whether a step may run inside another one; walking up the stack costs."""

    def install(self) -> None:
        from torch.optim import optimizer

        # of PyTorch's wrapper around every step; without it no step counts as inner
        self._step_code = tried(lambda: optimizer.Optimizer.profile_hook_step(lambda self: None).__code__, None)
        self._hooks.register(optimizer.register_optimizer_step_post_hook, self._stepped, traced=True)

    @property
    def device(self) -> Any:
        """The device of the owner's first parameter on a GPU, else of its first one; None without any."""
        owner = self._owner() if self._owner is not None else None
        devices = [p.device for group in owner.param_groups for p in group["params"]] if owner is not None else []
        return next((device for device in devices if device.type == "cuda"), devices[0] if devices else None)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._owner is None or self._owner() is not optimizer:
            self._may_nest = True
            if self._is_nested() or not self._takes_over(optimizer):
                return
        elif self._may_nest and self._is_nested():
            return
        self._others = 0
        self.tick()

    def _takes_over(self, optimizer: Any) -> bool:
        """Whether an optimizer that does not own the tick owns it from now on."""
        self._others += 1
        owner = self._owner() if self._owner is not None else None
        larger = not self._given and owner is not None and self._size(optimizer) > self._size(owner)
        if owner is not None and not larger and self._others < _PATIENCE:
            return False
        self._owner = _reference(optimizer)
        steps = [vars(kind)["step"] for kind in type(optimizer).__mro__ if "step" in vars(kind)]
        self._may_nest = owner is not None or len(steps) > 2  # its own and that of the abstract class are two
        return True

    def _is_nested(self) -> bool:
        """Whether the step that ends here is part of another step on this thread's stack."""
        frames = itertools.islice(walk_stack(sys._getframe(1)), _FRAMES)
        return sum(frame.f_code is self._step_code for frame, _ in frames) > 1

    def _size(self, optimizer: Any) -> int:
        for known, size in self._sizes:
            if known() is optimizer:
                return size
        size = sum(int(p.numel()) for group in optimizer.param_groups for p in group["params"])
        alive = [(known, of) for known, of in self._sizes if known() is not None]
        self._sizes = [*alive, (_reference(optimizer), size)][-_KNOWN:]
        return size


class Checkpoints:
    """Wraps PyTorch's own checkpoint functions, of modules that the job has imported: one of them takes 50 MB.

    Their iteration is marked, and neither measured nor delayed.
    """

    def __init__(self, log: Log, hooks: Hooks) -> None:
        self._log, self._hooks = log, hooks
        self._left = list(CHECKPOINTS)

    def install(self) -> None:
        """Wrap what has been imported by now; call it again for what is imported later."""
        for module, name in [(module, name) for module, name in self._left if module in sys.modules]:
            self._left.remove((module, name))
            self._hooks.around(sys.modules[module], name, lambda *_: self._log.mark("checkpoint"), lambda *_: None)


def _reference(optimizer: Any) -> Callable[[], Any]:
    """A weak reference, compared by identity only: the object may refuse to be hashed or compared, or have slots."""
    return tried(lambda: weakref.ref(optimizer), lambda: optimizer)
