"""Reads what a pickle holds if that is plain data, without running anything.

Python's own reader is a machine whose program is the file, and it can call what the file names. Here it has only those
of its operations that make numbers, strings, lists, tuples and dicts, and stops at any other, so a file can at worst be
refused. Of a file that breaks off, what was complete by then is given back.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections.abc import Callable
from typing import Any, Final

MAX_BYTES, MAX_OPERATIONS = 1 << 26, 1 << 23
"""Of a file, unpacked; an operation may be one byte and make a container."""
_MAGIC: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_PLAIN: Final = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE
    SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_LIST EMPTY_DICT EMPTY_TUPLE TUPLE TUPLE1
    TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS BINPUT LONG_BINPUT BINGET LONG_BINGET MEMOIZE
"""
_NAMES: Final = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_DAMAGED: Final = (
    pickle.UnpicklingError, struct.error, ArithmeticError, LookupError, ValueError, TypeError, AttributeError,
)  # fmt: skip


def is_pickle(head: bytes) -> bool:
    """Whether a file that begins like this is a pickle of a supported protocol."""
    return head[:2] in _MAGIC


def read_plain_pickle(content: bytes) -> tuple[Any, str]:
    """The content of a pickle, and "" or one line on why it could not be read to its end.

    In that case the content is a list of the complete objects, nested no deeper than the innermost unfinished
    container.
    """
    reader = _Reader(io.BytesIO(content))
    try:
        return reader.load(), ""
    except EOFError:
        return reader.left(), "it has no end"
    except _DAMAGED as error:
        return reader.left(), " ".join(str(error).split()) or type(error).__name__


class _Operations(dict[int, Callable[[Any], None]]):
    """What the reader may do, by its code, and how often."""

    done = 0

    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise pickle.UnpicklingError(f"{_NAMES.get(code, code)} is no plain data and is not run")

    def __getitem__(self, code: int) -> Callable[[Any], None]:
        self.done += 1
        if self.done > MAX_OPERATIONS:
            raise pickle.UnpicklingError(f"more than {MAX_OPERATIONS} operations")
        return super().__getitem__(code)


class _Reader(pickle._Unpickler):
    """Python's reader written in Python, which keeps what is unfinished on its stacks."""

    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.stack, self.metastack = [], []
        plain: dict[int, Any] = {code: self.dispatch[code] for code, name in _NAMES.items() if name in _PLAIN.split()}
        plain |= {pickle.SETITEM[0]: _Reader.set_item, pickle.SETITEMS[0]: _Reader.set_items}
        self.dispatch = _Operations(plain)  # type: ignore[misc]

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.update([key], [value])

    def set_items(self) -> None:
        items, self.stack = self.stack, self.metastack.pop()
        self.append = self.stack.append
        self.update(items[::2], items[1::2])

    def update(self, keys: list[Any], values: list[Any]) -> None:
        """Put entries into a dict. Raises UnpicklingError for keys that are neither text nor numbers."""
        if any(type(key) not in (str, int) for key in keys):  # to hash a tuple of tuples of ... can take for ever
            raise pickle.UnpicklingError("a key that is neither text nor a number")
        self.stack[-1].update(zip(keys, values, strict=True))

    def left(self) -> list[Any]:
        """What is on the stacks, from the bottom, with what the lists there hold."""
        values: list[Any] = []
        for stack in [*self.metastack, self.stack]:
            for value in stack:
                values += value if type(value) is list else [value]
        return values
