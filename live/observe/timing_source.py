"""Common parts of the timing sources: each source watches one part of PyTorch and writes into the log of its rank.

A source is installed once and removed completely. Removing it leaves PyTorch as it was before, unless other code has
wrapped ours meanwhile: then ours stays underneath and does nothing. A source never raises into the training code:
errors go to ``Log.fail``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from paceenv.live.observe.stamps import Stamps

Function = Callable[..., Any]

MAX_OPERATIONS = 20_000
"""Operations kept between two ticks."""


class Source(Protocol):
    """Watches one part of PyTorch."""

    def install(self) -> None:
        """Start to watch."""

    def stop(self) -> None:
        """Stop watching; safe at any moment, also within PyTorch's own loops over hooks."""

    def remove(self) -> None:
        """Stop, and restore PyTorch; call it from the script and not from a hook."""


class Observed(NamedTuple):
    """One observed blocking operation: kind, process group, bytes, and the stamps of entry and exit."""

    op: str
    group: int
    bytes: int
    entry: Any
    exit: Any


class Log:
    """The observations of one rank's sources since the last tick.

    Args:
        stamps: where stamps come from.
        fail: called with an error in a source.
        log_once: called with a message when ticks are missing.
    """

    def __init__(
        self, stamps: Stamps, fail: Callable[[BaseException], None], log_once: Callable[[str], None] = lambda _: None
    ) -> None:
        self.stamps, self.fail, self._log_once = stamps, fail, log_once
        self.operations: list[Observed] = []
        self._marks: list[tuple[int, str]] = []
        """Kinds of irregular events, each with the number of operations before it."""
        self.ticks = 0
        self.members: dict[int, tuple[int, int]] = {}
        """This rank's place in every observed process group, and the group's size."""

    def add(self, op: str, group: int, size_bytes: int, entry: Any) -> None:
        """Log an operation that ends now.

        Args:
            op: its kind, such as ``all_reduce``.
            group: number of its process group.
            size_bytes: its payload, bytes.
            entry: the stamp of its start, or None.
        """
        self.operations.append(Observed(op, group, size_bytes, entry, self.stamps.record()))
        if len(self.operations) > MAX_OPERATIONS:
            self.release(*(stamp for o in self.operations for stamp in (o.entry, o.exit)))
            self.operations.clear()
            self._log_once(
                f"{MAX_OPERATIONS} collectives without an optimizer's step: call agent.tick() in each iteration"
            )

    def release(self, *stamps: Any) -> None:
        """Return stamps that will not be read to the pool."""
        self.stamps.release(stamp for stamp in stamps if stamp is not None)

    def mark(self, kind: str) -> None:
        """Mark an irregular event that happens now, such as a checkpoint."""
        mark = (len(self.operations), kind)
        if mark not in self._marks[-1:]:  # an evaluation makes one for every batch
            self._marks.append(mark)

    @property
    def marked(self) -> bool:
        """Whether there is a mark that has not been taken yet."""
        return bool(self._marks)

    def take(self) -> tuple[list[Observed], str]:
        """The operations since the last call, and the mark of their iteration, or "".

        An iteration ends with its last operation, so a later mark belongs to the next iteration.
        """
        self.ticks += 1
        taken, self.operations = self.operations, []
        here = [kind for seen, kind in self._marks if seen < len(taken)]
        self._marks = [(-1, kind) for seen, kind in self._marks if seen >= len(taken)]
        return taken, here[-1] if here else ""

    def group(self, group: Any) -> int:
        """A number for a process group, the same on all its ranks; -1 for a group without a name in PyTorch."""
        try:
            name = str(group.group_name)
        except RuntimeError:
            return -1
        number = int(name) if name.isdecimal() and len(name) < 9 else _hash31(name)
        if number not in self.members:
            self.members[number] = (int(group.rank()), int(group.size()))
        return number


class Patches:
    """Attributes of PyTorch that are replaced until :meth:`restore`.

    ``active`` tells whether they are in force. If other code has wrapped a replacement meanwhile, the replacement stays
    underneath; it must do nothing once ``active`` is false.
    """

    def __init__(self) -> None:
        self.active = False
        self._replaced: list[tuple[Any, str, Any, Function]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Function], Function]) -> None:
        """Replace an attribute, if ``owner`` itself has it.

        Args:
            owner: a class or a module.
            name: the attribute.
            make: makes the replacement from the original function.
        """
        found = vars(owner).get(name)  # not getattr: a class of C++ would return something else than the method
        if found is not None:
            original = getattr(owner, name)
            ours = functools.wraps(original)(make(original))
            setattr(owner, name, ours)
            self._replaced.append((owner, name, found, ours))
        self.active = True

    def stop(self) -> None:
        """Leave everything in place, but inactive."""
        self.active = False

    def restore(self) -> None:
        """Restore the originals."""
        self.active = False
        while self._replaced:
            owner, name, found, ours = self._replaced.pop()
            if vars(owner).get(name) is ours:
                setattr(owner, name, found)


def _hash31(name: str) -> int:
    import zlib

    return zlib.crc32(name.encode()) & 0x7FFFFFFF
