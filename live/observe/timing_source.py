"""Where timing comes from: each source watches one thing of PyTorch and writes what it saw into the log of its rank.

A source is installed once and removed completely; removing it leaves PyTorch as it was found, unless somebody else has
put something on top meanwhile, in which case what is ours stays underneath and does nothing. Nothing a source does may
raise into the training code: what goes wrong goes to ``Log.fail``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from paceenv.live.observe.stamps import Stamps

MAX_OPERATIONS = 20_000
"""Operations kept between two ticks."""


class Source(Protocol):
    """Something that watches."""

    def install(self) -> None:
        """Start to watch."""

    def stop(self) -> None:
        """See nothing more; safe at any moment, from within PyTorch's own loops over hooks too."""

    def remove(self) -> None:
        """Stop, and leave no trace; to be called from the script and not from a hook."""


class Observed(NamedTuple):
    """One blocking operation as it was seen: kind, process group, bytes, and the stamps of entry and exit."""

    op: str
    group: int
    bytes: int
    entry: Any
    exit: Any


class Log:
    """What the sources of one rank saw since the last tick.

    ``fail`` takes what went wrong in a source; ``say`` is how to tell, once, that ticks are missing.
    """

    def __init__(
        self, stamps: Stamps, fail: Callable[[BaseException], None], say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.stamps, self.fail, self._log_once = stamps, fail, say
        self.operations: list[Observed] = []
        self._marks: list[tuple[int, str]] = []
        """What is unlike the usual, and how many operations had been seen before it."""
        self.ticks = 0
        self.members: dict[int, tuple[int, int]] = {}
        """For every process group seen: this rank's place in it and its size."""

    def add(self, op: str, group: int, size_bytes: int, entry: Any) -> None:
        """An operation ends now."""
        self.operations.append(Observed(op, group, size_bytes, entry, self.stamps.record()))
        if len(self.operations) > MAX_OPERATIONS:
            self.release(*(stamp for o in self.operations for stamp in (o.entry, o.exit)))
            self.operations.clear()
            self._log_once(
                f"{MAX_OPERATIONS} collectives without an optimizer's step: call agent.tick() in each iteration"
            )

    def release(self, *stamps: Any) -> None:
        """Give back stamps that nobody will read."""
        self.stamps.release(stamp for stamp in stamps if stamp is not None)

    def mark(self, kind: str) -> None:
        """Something unlike the usual goes on now, a checkpoint say."""
        mark = (len(self.operations), kind)
        if mark not in self._marks[-1:]:  # an evaluation makes one for every batch
            self._marks.append(mark)

    @property
    def marked(self) -> bool:
        """Whether there is a mark that nobody has taken yet."""
        return bool(self._marks)

    def take(self) -> tuple[list[Observed], str]:
        """The operations since the last call, and the mark of their iteration, empty if it has none.

        An iteration ends with its last operation, so what was marked after that is the next one's.
        """
        self.ticks += 1
        taken, self.operations = self.operations, []
        here = [kind for seen, kind in self._marks if seen < len(taken)]
        self._marks = [(-1, kind) for seen, kind in self._marks if seen >= len(taken)]
        return taken, here[-1] if here else ""

    def group(self, group: Any) -> int:
        """A number for a process group, the same on all its ranks; -1 for one that PyTorch does not know by name."""
        try:
            name = str(group.group_name)
        except RuntimeError:
            return -1
        number = int(name) if name.isdecimal() and len(name) < 9 else _hash31(name)
        if number not in self.members:
            self.members[number] = (int(group.rank()), int(group.size()))
        return number


def _hash31(name: str) -> int:
    import zlib

    return zlib.crc32(name.encode()) & 0x7FFFFFFF
