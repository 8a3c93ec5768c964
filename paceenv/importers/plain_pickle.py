"""Reads what a pickle holds if that is plain data, without running anything: a machine with data opcodes only.

Python's own reader is a machine whose program is the file, and it can call what the file names. This one knows numbers,
strings, lists, tuples and dicts, and stops at any other opcode, so a file can at worst be refused. Python's
``pickletools`` takes the file apart. Of a file that breaks off, what was complete by then is given back.

Format: ``pickletools`` of the standard library, protocols 2 to 5.
"""

from __future__ import annotations

import io
import pickletools
import warnings
from collections.abc import Callable
from typing import Any, Final

MAX_BYTES, MAX_OPERATIONS = 1 << 26, 1 << 23
"""Of a file, unpacked; an operation may be one byte and make a container."""
_KEYS: Final = (str, int)
_MAGIC: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def is_pickle(head: bytes) -> bool:
    """Whether a file that begins like this is a pickle of a supported protocol."""
    return head[:2] in _MAGIC


def read_plain_pickle(content: bytes) -> tuple[Any, str]:
    """The content of a pickle, and "" or one line on why it could not be read to its end.

    In that case the content is a list of the complete objects, nested no deeper than the innermost unfinished
    container.
    """
    machine = _Machine()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of escapes, where text is refused anyway
            return machine.run(content)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return machine.left(), " ".join(str(error).split()) or type(error).__name__


class _Machine:
    """Stack, the stacks below marks, and the memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, content: bytes) -> tuple[Any, str]:
        """As :func:`read_plain_pickle`; raises whatever damage makes ``pickletools`` or an operation raise."""
        for number, (opcode, argument, at) in enumerate(pickletools.genops(io.BytesIO(content))):
            if number >= MAX_OPERATIONS:
                return self.left(), f"more than {MAX_OPERATIONS} operations"
            if opcode.name == "STOP":
                return self.pop(), ""
            step = _STEPS.get(opcode.name)
            if step is None:
                return self.left(), f"{opcode.name} at byte {at} is no plain data and is not run"
            step(self, argument)
        return self.left(), "it has no end"

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def tuple_of(self, size: int) -> None:
        if len(self.stack) < size:
            raise ValueError("a tuple of more than there is")
        self.stack[len(self.stack) - size :] = [tuple(self.stack[len(self.stack) - size :])]

    def append(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("items for what is no list")
        self.stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not dict or len(items) % 2:
            raise ValueError("entries for what is no dict")
        if not all(type(key) in _KEYS for key in items[::2]):  # to hash a tuple of tuples of ... can take for ever
            raise ValueError("a key that is neither text nor a number")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def left(self) -> list[Any]:
        """What is on the stacks, from the bottom, with what the lists there hold."""
        values: list[Any] = []
        for stack in [*self.below, self.stack]:
            for value in stack:
                values += value if type(value) is list else [value]
        return values


def _pair(machine: _Machine) -> list[Any]:
    value = machine.pop()
    return [machine.pop(), value]


_STEPS: Final[dict[str, Callable[[_Machine, Any], Any]]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, argument: None),
    **dict.fromkeys(
        (
            "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE",
            "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
        ),
        _Machine.push,
    ),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": lambda machine, _: machine.mark(),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.to_mark())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.to_mark()),
    "SETITEM": lambda machine, _: machine.set_items(_pair(machine)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.to_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda machine, key: machine.memo.__setitem__(key, machine.stack[-1])),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, key: machine.push(machine.memo[key])),
    "MEMOIZE": lambda machine, _: machine.memo.__setitem__(len(machine.memo), machine.stack[-1]),
}  # fmt: skip
