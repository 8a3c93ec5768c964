"""The one exception for a user's mistake; the command line prints it as a single line and exits with code 2."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any, Final

MAX_MESSAGE: Final = 4000
"""Most characters of a message."""
MAX_VALUE: Final = 200
"""Most characters of a value in a message."""
_MAX_PARTS: Final = 12
"""Parts of a list or a dict that are shown; a few hundred bytes of YAML with aliases may stand for billions."""


class InputError(ValueError):
    """Bad input: the message names the value, what is allowed, and where the value came from, in one line."""

    def __init__(self, message: str) -> None:
        line = " ".join(str(message).split())
        super().__init__(line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]} ...")


def out_of_range(name: str, value: Any, allowed: str, where: str) -> InputError:
    """An :class:`InputError` of the form ``where: name = value; allowed: ...``."""
    return InputError(f"{where}: {name} = {short_repr(value)}; allowed: {allowed}")


def needs(what: str, module: str | None, extra: str) -> InputError:
    """An :class:`InputError` that says which extra of paceenv has a module that is not there."""
    return InputError(f"{what} needs {module}; install it: pip install '/path/to/checkout[{extra}]'")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean ...?`` with the nearest of the known names; "" where none is near."""
    import difflib  # only here: importing the live agent must not load it

    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def short_repr(value: Any) -> str:
    """``repr(value)``, shortened where it is long; quick and small for any value, however nested."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # of a class of its own
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE // 2]} ... {text[-MAX_VALUE // 4 :]}"


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = _MAX_PARTS
        self.maxstring = self.maxother = MAX_VALUE

    def repr_int(self, value: int, level: int) -> str:
        """A number of thousands of digits cannot be printed."""
        return repr(value) if value.bit_length() < MAX_VALUE else f"<a whole number of {value.bit_length()} bits>"


_SHORT: Final = _Short()
