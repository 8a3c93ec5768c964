"""The one exception for a user's mistake; the command line prints it as a single line and exits with code 2."""

from __future__ import annotations

from typing import Any


class InputError(ValueError):
    """Bad input: the message names the value, what is allowed, and where the value came from, in one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))


def out_of_range(name: str, value: Any, allowed: str, where: str) -> InputError:
    """An :class:`InputError` of the form ``where: name = value; allowed: ...``.

    Args:
        name: the key or option.
        value: its invalid value.
        allowed: the allowed values, in words.
        where: the file, section or command that the value came from.
    """
    return InputError(f"{where}: {name} = {value!r}; allowed: {allowed}")
