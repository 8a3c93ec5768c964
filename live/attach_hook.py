"""Attaches the launcher's agent when the script makes its first optimizer, and not before.

Until then the launcher has not imported PyTorch. So everything the script does before its own ``import torch``
(environment variables, warning filters, a usage message) has its usual effect. The first optimizer is early enough for
the agent: it finds the existing models, and without an optimizer there is no iteration to watch.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from paceenv.live.options import LAUNCHER_SETTINGS

_OPTIMIZER_MODULE = "torch.optim.optimizer"


def attach_later(**arguments: Any) -> None:
    """Call ``live.attach(**arguments)`` with the first optimizer; these arguments replace the script's own."""
    LAUNCHER_SETTINGS.update(arguments)
    atexit.register(_explain_absence, os.getpid())
    loaded = sys.modules.get(_OPTIMIZER_MODULE)
    if loaded is not None:
        _wait_for_optimizer(loaded)
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Sees the import of the optimizers' module once, and removes itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _OPTIMIZER_MODULE:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = PathFinder.find_spec(name, path, target)
        loader = spec.loader if spec is not None else None
        if spec is None or loader is None:
            return None

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # it was the loader's own again
            loader.exec_module(module)
            _wait_for_optimizer(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wait_for_optimizer(module: ModuleType) -> None:
    optimizer, process = module.Optimizer, os.getpid()
    original: Callable[..., None] = optimizer.__init__
    done = False

    @functools.wraps(original)
    def first(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal done
        if not done:
            done = True
            atexit.unregister(_explain_absence)
            if optimizer.__init__ is first:
                optimizer.__init__ = original
            if os.getpid() == process:  # not in a child that the script forked before
                attach_now()
        original(self, *args, **kwargs)

    optimizer.__init__ = first


def attach_now() -> None:
    """Attach; any error is logged, and the script goes on without the agent."""
    try:
        from paceenv.live.agent import attach, attached

        if attached() is None:
            attach()
    except Exception as error:
        from paceenv.live.log_once import Messages

        Messages().log_once(f"could not be attached: {type(error).__name__}: {error}; the job goes on without it")


def _explain_absence(process: int) -> None:
    """At the end of a script that made no optimizer: log why the agent was never attached."""
    if (
        "torch" in sys.modules
        and "paceenv.live.agent" not in sys.modules
        and os.getpid() == process
        and os.environ.get("RANK", "0") == "0"
    ):
        from paceenv.live.log_once import Messages

        Messages().log_once("the script made no optimizer of torch.optim, so there was nothing to watch")
