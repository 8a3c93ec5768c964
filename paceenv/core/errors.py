"""The one exception a user's mistake becomes; the command line turns it into a single line and exit code 2."""

from __future__ import annotations

from typing import Any


class InputError(ValueError):
    """Bad input: the message names the value, what is allowed, and where the value came from, in one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))


def out_of_range(name: str, value: Any, allowed: str, where: str) -> InputError:
    """An :class:`InputError` in the house form ``where: name = value; allowed: ...``."""
    return InputError(f"{where}: {name} = {value!r}; allowed: {allowed}")
