"""Registers ``paceenv/Pacing-v0`` with Gymnasium, which since its version 1.0 has no plugin entry points of its own."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

import gymnasium

from paceenv.core.errors import out_of_range

ENV_ID = "paceenv/Pacing-v0"
P = ParamSpec("P")


def register_envs() -> None:
    """Register the environments, once; cheap, as the engine is imported only when one is made."""
    if ENV_ID not in gymnasium.registry:
        gymnasium.register(
            id=ENV_ID,
            entry_point="paceenv.envs.pacing_env:PacingEnv",
            vector_entry_point="paceenv.envs.pacing_env:PacingVectorEnv",
        )


def lists_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """An ``__init__`` that raises InputError for an unknown argument, where Python's TypeError lists none.

    Args:
        init: the method that is decorated.
    """
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name, value in kwargs.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise out_of_range(f"argument {name}", value, f"the arguments {', '.join(known)}{hint}", ENV_ID)
        init(*args, **kwargs)

    return checked


register_envs()
