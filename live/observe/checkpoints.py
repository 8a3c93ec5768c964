"""Watches the functions that write checkpoints: their iteration is marked, and neither measured nor delayed."""

from __future__ import annotations

import sys
from typing import Any

from paceenv.live.observe.hooks import Hooks
from paceenv.live.observe.log import Log

FUNCTIONS = (
    ("torch", "save"),
    ("torch.distributed.checkpoint", "save"),
    ("torch.distributed.checkpoint", "async_save"),
)


class Checkpoints:
    """Wraps PyTorch's own checkpoint functions, of modules that the job has imported: one of them takes 50 MB."""

    def __init__(self, log: Log, hooks: Hooks) -> None:
        self._log, self._hooks = log, hooks
        self._left = list(FUNCTIONS)

    def install(self) -> None:
        """Wrap what has been imported by now; call it again for what is imported later."""
        for module, name in [(module, name) for module, name in self._left if module in sys.modules]:
            self._left.remove((module, name))
            self._hooks.around(sys.modules[module], name, self._mark, lambda token, result: None)

    def remove(self) -> None:
        """Nothing of its own is left."""

    def _mark(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._log.mark("checkpoint")
