"""Attaches the launcher's agent when the script makes its first optimizer, and not before; also in its children.

Until then the launcher has not imported PyTorch. So everything the script does before its own ``import torch``
(environment variables, warning filters, a usage message) has its usual effect. The first optimizer is early enough for
the agent: it finds the existing models, and without an optimizer there is no iteration to watch.

A script may start its ranks by itself. A forked one has this module's hook from its parent. Any other Python process
finds the settings in the environment, and the folder ``children`` in its ``PYTHONPATH``, whose ``sitecustomize`` calls
:func:`inherited`. A child is watched only as a rank of a process group.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from paceenv.live.log_once import Messages, described  # now: later, no file may be readable
from paceenv.live.options import IN_A_GROUP_ONLY, KILL_SWITCH, LAUNCHER_SETTINGS

SETTINGS_VARIABLE = "PACEENV_LIVE_SETTINGS"
"""Environment variable with the launcher's settings for the processes that the script starts, as JSON."""
_CHILDREN = str(Path(__file__).parents[1] / "children")
_OPTIMIZER_MODULE = "torch.optim.optimizer"


def attach_later(**arguments: Any) -> None:
    """Call ``live.attach(**arguments)`` with the first optimizer; these arguments replace the script's own."""
    LAUNCHER_SETTINGS.update(arguments)
    atexit.register(_explain_absence, os.getpid())
    _hand_down(arguments)
    loaded = sys.modules.get(_OPTIMIZER_MODULE)
    if loaded is not None:
        _wait_for_optimizer(loaded)
    else:
        sys.meta_path.insert(0, _Finder())


def inherited() -> _Finder | None:
    """What sees the first optimizer in a process that a launched script has started; None if that has its own agent."""
    if LAUNCHER_SETTINGS or os.environ.get(KILL_SWITCH):
        return None
    LAUNCHER_SETTINGS.update(json.loads(os.environ[SETTINGS_VARIABLE]) | {IN_A_GROUP_ONLY: True})
    return _Finder()


def _hand_down(settings: dict[str, Any]) -> None:
    if not os.path.isdir(_CHILDREN):  # in a zip archive
        return
    os.environ[SETTINGS_VARIABLE] = json.dumps(settings, default=os.fspath)
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    os.environ["PYTHONPATH"] = os.pathsep.join([_CHILDREN, *(f for f in folders if f != _CHILDREN)])


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
            if os.getpid() != process:  # a child that the script forked before
                LAUNCHER_SETTINGS[IN_A_GROUP_ONLY] = True
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
        Messages().log_once(f"could not be attached: {described(error)}; the job goes on without it")


def _explain_absence(process: int) -> None:
    """At the end of a script that made no optimizer: log why the agent was never attached."""
    if (
        "torch" in sys.modules
        and "paceenv.live.agent" not in sys.modules
        and os.getpid() == process
        and os.environ.get("RANK", "0") == "0"
    ):
        Messages().log_once("this process made no optimizer of torch.optim, so there was nothing to watch in it")
