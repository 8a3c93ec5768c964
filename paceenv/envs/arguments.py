"""Arguments of the environments: one that is unknown is refused with the names of those that there are."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

from paceenv.core.errors import out_of_range
from paceenv.envs.registration import ENV_ID

P = ParamSpec("P")


def lists_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """An ``__init__`` that raises InputError for an unknown argument, where Python's TypeError lists none.

    Args:
        init: the method; it keeps its signature.
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
