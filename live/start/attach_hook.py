"""Brings the launcher's agent into a script's processes through the environment, and attaches it with an optimizer.

Any Python process below the launcher, the script first of all, finds the settings in its environment, and the folder
``children`` in its ``PYTHONPATH``, whose ``sitecustomize`` calls :func:`spec_of_optimizers`. A forked process has the
hook from its parent. A process that the script has started is watched only as a rank of a process group.

The agent is attached when the first optimizer is made, and not before. Until then nothing of ours imports PyTorch, so
all that the script does before its own ``import torch`` has its usual effect. It is early enough: the agent finds the
existing models, and without an optimizer there is no iteration to watch.
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

import paceenv
from paceenv.core.errors import InputError
from paceenv.live.log_once import Messages, described  # now: later, no file may be readable
from paceenv.live.options import IN_A_GROUP_ONLY, KILL_SWITCH, LAUNCHER_SETTINGS, SWITCHED_ON

SETTINGS_VARIABLE = "PACEENV_LIVE_SETTINGS"
"""Environment variable with the launcher's settings, as JSON."""
SCRIPT_S_PROCESS, ROOT = "process", "root"
"""Beside them: the number of the process that becomes the script, or minus the number of the one that starts those
which do; and the folder in which this package lies."""
_CHILDREN = str(Path(__file__).parents[1] / "children")


def hand_down(settings: dict[str, Any], *, below: bool) -> None:
    """Leave the settings, in place of the arguments of ``live.attach``, to the script.

    This process becomes the script, or those which it starts, where the script is ``below``. Raises InputError where
    the interpreter takes nothing from the environment.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise InputError("the interpreter's options -E, -I and -S keep the agent out; allowed: without them")
    root = str(Path(paceenv.__file__).parents[1])
    settings = settings | {SCRIPT_S_PROCESS: -os.getpid() if below else os.getpid(), ROOT: root}
    os.environ[SETTINGS_VARIABLE] = json.dumps(settings, default=os.fspath)
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    os.environ["PYTHONPATH"] = os.pathsep.join([_CHILDREN, *(f for f in folders if f != _CHILDREN)])


def spec_of_optimizers(name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """The spec of PyTorch's module of optimizers, whose first one attaches the agent."""
    spec = PathFinder.find_spec(name, path, target)
    loader = spec.loader if spec is not None else None
    if spec is None or loader is None or os.environ.get(KILL_SWITCH, "") not in SWITCHED_ON:
        return None
    settings = json.loads(os.environ[SETTINGS_VARIABLE])
    script = os.getpid() if settings.pop(SCRIPT_S_PROCESS) in (os.getpid(), -os.getppid()) else -1
    del settings[ROOT]
    LAUNCHER_SETTINGS.update(settings)

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # it was the loader's own again
        loader.exec_module(module)
        _wait_for_optimizer(module, script)

    loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


def _wait_for_optimizer(module: ModuleType, script: int) -> None:
    optimizer = module.Optimizer
    original: Callable[..., None] = optimizer.__init__
    done = False
    atexit.register(_explain_absence, script)

    @functools.wraps(original)
    def first(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal done
        if not done:
            done = True
            atexit.unregister(_explain_absence)
            if optimizer.__init__ is first:
                optimizer.__init__ = original
            LAUNCHER_SETTINGS[IN_A_GROUP_ONLY] = os.getpid() != script
            try:
                from paceenv.live.agent import attach, attached

                if attached() is None:
                    attach()
            except Exception as error:
                Messages().log_once(f"could not be attached: {described(error)}; the job goes on without it")
        original(self, *args, **kwargs)

    optimizer.__init__ = first


def _explain_absence(script: int) -> None:
    """At the end of a script that made no optimizer: log why the agent was never attached."""
    if "paceenv.live.agent" not in sys.modules and os.getpid() == script and os.environ.get("RANK", "0") == "0":
        Messages().log_once("this process made no optimizer of torch.optim, so there was nothing to watch in it")
