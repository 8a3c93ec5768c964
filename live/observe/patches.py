"""Replacing attributes of PyTorch for a while, and putting back what was there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


class Patches:
    """Attributes that are replaced until :meth:`restore`.

    ``active`` says whether they are in force. Who put something of their own on top meanwhile keeps it; what is ours
    then stays underneath, and must do nothing once ``active`` is false.
    """

    def __init__(self) -> None:
        self.active = False
        self._replaced: list[tuple[Any, str, Any, Function]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Function], Function]) -> None:
        """Replace ``owner.name``, if ``owner`` itself has one, by what ``make`` makes of it."""
        found = vars(owner).get(name)  # not getattr: what a class of C++ hands out is no longer a method
        if found is not None:
            original = getattr(owner, name)
            ours = functools.wraps(original)(make(original))
            setattr(owner, name, ours)
            self._replaced.append((owner, name, found, ours))
        self.active = True

    def stop(self) -> None:
        """Leave everything in place, out of force."""
        self.active = False

    def restore(self) -> None:
        """Put back what was there."""
        self.active = False
        while self._replaced:
            owner, name, found, ours = self._replaced.pop()
            if vars(owner).get(name) is ours:
                setattr(owner, name, found)
