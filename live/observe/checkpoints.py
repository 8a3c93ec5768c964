"""Watches the functions that write checkpoints: their iteration is marked, and neither measured nor delayed."""

from __future__ import annotations

import importlib
from typing import Any

from paceenv.live.observe.timing_source import Function, Log, Patches

FUNCTIONS = (
    ("torch", "save"),
    ("torch.distributed.checkpoint", "save"),
    ("torch.distributed.checkpoint", "async_save"),
)


class Checkpoints:
    """Wraps PyTorch's own checkpoint functions."""

    def __init__(self, log: Log) -> None:
        self._log, self._patches = log, Patches()

    def install(self) -> None:
        for module, name in FUNCTIONS:
            self._patches.wrap(importlib.import_module(module), name, self._marking)

    def stop(self) -> None:
        self._patches.stop()

    def remove(self) -> None:
        self._patches.restore()

    def _marking(self, original: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._patches.active:
                self._log.mark("checkpoint")
            return original(*args, **kwargs)

        return call
