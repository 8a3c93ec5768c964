"""What the sources of one rank have seen since the last tick: rows of numbers, and the tables that explain them.

Everything here runs on the training thread (or on autograd's, while the training thread waits for it), so it is lean:
one row per operation, and what an operation is becomes a small number, its *kind*.
"""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Callable
from threading import RLock, get_ident
from typing import Any

from paceenv.core.wording import format_list
from paceenv.live.observe.batch import THREAD, Kind
from paceenv.live.observe.stamps import Stamps

MAX_ROWS = 20_000
"""Rows kept until somebody takes them; with more, operations are left out and the iteration is marked."""
TOO_MANY = "too many operations"
"""Mark of an iteration from which operations are left out."""
MAX_KINDS = 60_000
_SCATTER = 0x9E3779B97F4A7C15
EXACT_KINDS = 1_000
"""With more kinds, sizes are rounded up to a power of two: in some jobs each payload has its own."""

LISTS = "reduce_scatter"
"""The method of a process group that scatters lists of tensors."""

UNKNOWN_WAIT = 0
"""The kind of a wait for something that was started where the agent does not see it."""

TICK, MARK, SKIP = -1, -2, -3
"""In place of a kind: the end of an iteration, with its stamp and its mark or ""; an irregular event, with its name; of
iterations that were not watched, their number and the stamp of the last one's end."""

Row = tuple[int, Any, Any]
"""Kind, and the stamps of entry and exit; None for a stamp that could not be recorded."""


class Group:
    """A process group as the agent knows it.

    ``listed`` has its global ranks (``0-3,8``), ``seen`` counts the collectives that were started in it, and
    ``opaque`` is true where PyTorch's C++ starts collectives by itself, so that nothing can be said about their number.
    ``lists`` is how many the group counts for a reduce-scatter of lists, 0 while that is unknown: gloo makes it of as
    many reductions as there are ranks, NCCL does not.
    """

    def __init__(
        self, number: int, name: str, member: int, size: int, ranks: list[int] | None, group: Any, begun: bool = False
    ) -> None:
        self.number, self.name, self.member, self.size = number, name, member, size
        self.listed = format_list(ranks) if ranks is not None else None
        self.seen, self.lists, self.opaque = 0, 0, False
        self._group = _reference(group)
        self._first = None if begun else self.counted()
        self._paused: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the process group has been destroyed."""
        return self._group() is None

    def counted(self) -> int | None:
        """Collectives that the group itself has counted so far; None where it does not count."""
        group = self._group()
        try:
            return int(group._get_sequence_number_for_group()) if group is not None else None
        except Exception:
            return None

    def pause(self) -> None:
        """What is started from now on is not watched."""
        self._paused = self.counted()

    def resume(self) -> None:
        """It is watched again."""
        now = self.counted()
        if now is not None and self._first is not None and self._paused is not None:
            self._first += now - self._paused
        self._paused = None

    def started(self, method: str) -> None:
        """A call of a method of ``ProcessGroup`` has just been made. The one that met the group is its first."""
        if self._first is None:
            self._first = self.counted()
        elif method == LISTS and not self.lists:
            self.lists = self.size if self.unseen() == self.size else 1
            self.seen += self.lists
        else:
            self.seen += self.counts(method)

    def counts(self, method: str) -> int:
        """How many collectives the group counts for one call of a method."""
        return self.lists if method == LISTS else 1

    def unseen(self) -> int:
        """Collectives that the group has counted since it was first met, and the agent has not seen."""
        now = self.counted() if self._paused is None else self._paused
        return 0 if self.opaque or now is None or self._first is None else max(now - self._first - self.seen, 0)


class Log:
    """The observations of one rank."""

    def __init__(self, stamps: Stamps) -> None:
        self.stamps, self.on_device = stamps, False
        self.rows = deque[Row]()
        """Written here and taken by one reader, which may be another thread."""
        self.overflow: Callable[[], None] = lambda: None
        self.chores = deque[tuple[Callable[..., None], tuple[Any, ...]]]()
        """Functions and arguments, called once each at the next tick; any thread may add some."""
        self.kinds: list[Kind] = [Kind("wait", -1, 0)]
        self._numbers: dict[tuple[str, int, int, int], int] = {}
        self._adding = RLock()
        self.groups: dict[int, Group] = {}
        """By number; those with members are the ones that PyTorch could name."""
        self._by_identity: dict[int, Group] = {}
        self._followed: dict[tuple[int, int], Any] = {}
        self._thread, self._in_graph = get_ident(), _graph_task()
        self.cut = ""
        """The mark of this iteration if something of it is left out."""
        self.every, self.hurry = 1, False
        """One iteration in so many is watched; with ``hurry`` the next one is, and all that follow."""
        self.on_watch: Callable[[bool], None] = lambda watching: None
        self._iteration = self._skipped = self._to_skip = 0
        self._unlogged = 0  # marks under way whose beginning is left out, and whose end must be

    def add(self, kind: int, entry: Any) -> None:
        """Log an operation that ends now."""
        if len(self.rows) >= MAX_ROWS:  # nobody takes them before the next tick: an evaluation, say
            self.cut = TOO_MANY
            self.release(entry)
            return
        exit_ = self.stamps.record()
        if get_ident() != self._thread and self._in_graph() == -1:
            kind = self.on_the_side(kind)
        self.rows.append((kind, entry, exit_))

    def tick(self) -> None:
        """An iteration ends now."""
        while self.chores:
            chore, arguments = self.chores.popleft()
            chore(*arguments)
        if self.skips():
            return
        cut, self.cut = self.cut, ""
        self.rows.append((TICK, self.stamps.record(), cut))
        self._iteration += 1
        if len(self.rows) > MAX_ROWS:
            self.overflow()
        if self.every > 1 and not self.hurry:
            self._to_skip = watched_next(self._iteration, self.every) - self._iteration
            if self._to_skip:
                self._watch(False)

    @property
    def ticks(self) -> int:
        """Iterations so far, watched or not."""
        return self._iteration + self._skipped

    def skips(self) -> bool:
        """Whether the iteration that ends now was not watched."""
        if not self._to_skip:
            return False
        self._to_skip -= 1
        self._skipped += 1
        if not self._to_skip or self.hurry:
            self.rows.append((SKIP, self._skipped, self.stamps.record()))
            self._iteration += self._skipped
            self._skipped = self._to_skip = 0
            self._watch(True)
        return True

    def _watch(self, watching: bool) -> None:
        for group in list(self.groups.values()):
            (group.resume if watching else group.pause)()
        self.on_watch(watching)

    def kind(self, op: str, group: int, size_bytes: int, side: int = 0) -> int:
        """The number of a kind of operation."""
        number = self._numbers.get((op, group, size_bytes, side))
        if number is not None:
            return number
        with self._adding:  # a transfer that was held back starts on another thread
            return self._added(Kind(op, group, size_bytes, side))

    def _added(self, kind: Kind) -> int:
        if kind not in self._numbers and len(self.kinds) > EXACT_KINDS and kind.bytes > 0:
            kind = kind._replace(bytes=1 << (kind.bytes - 1).bit_length())
        if kind in self._numbers:
            return self._numbers[kind]
        if len(self.kinds) >= MAX_KINDS:
            return UNKNOWN_WAIT
        self._numbers[kind] = len(self.kinds)
        self.kinds.append(kind)
        return len(self.kinds) - 1

    def on_the_side(self, number: int, side: int = THREAD) -> int:
        return self.kind(*self.kinds[number][:3], side=side)

    def release(self, *stamps: Any) -> None:
        """Return stamps that will not be read to the pool."""
        self.stamps.release([stamp for stamp in stamps if stamp is not None])

    def give_up(self, token: tuple[Any, Any]) -> None:
        """An operation that raised: what was to be logged, and the stamp of its entry."""
        self.release(token[1])

    def mark(self, kind: str, change: int | None = None) -> None:
        """Mark an irregular event that happens now, such as a checkpoint; 1 and -1 mark its beginning and its end."""
        if change == -1 and self._unlogged:
            self._unlogged -= 1
            return
        if change != -1 and len(self.rows) >= MAX_ROWS:
            self.cut = TOO_MANY
            self._unlogged += change == 1
            return
        mark = (MARK, kind, change)
        if change is not None or not self.rows or self.rows[-1] != mark:  # an evaluation makes one for every batch
            self.rows.append(mark)

    def on_this_thread(self) -> None:
        """From now on, this is the thread whose waiting blocks the step."""
        self._thread = get_ident()

    def group(self, group: Any) -> int:
        """A number for a process group, the same on all its ranks; -1 for a group without a name in PyTorch."""
        return self.known(group).number

    def known(self, group: Any, *, begun: bool = False) -> Group:
        """What is known about a process group.

        Args:
            begun: whether a collective of it has just been started, which :meth:`Group.started` is still to hear of.
        """
        found = self._by_identity.get(id(group))
        if found is not None:
            return found
        name = _name(group)
        number = (
            -1
            if not name
            else int(name)
            if name.isdecimal() and len(name) < 9
            else zlib.crc32(name.encode()) & 0x7FFFFFFF
        )
        described = self.groups.get(number)
        if described is None or described.ended:
            described = Group(number, name, *_place(group), _ranks(group), group, begun)
            if described.size > 0:
                self.groups[number] = described
        if self.follows(group, self._by_identity):
            self._by_identity[id(group)] = described
        return described

    def follows(self, group: Any, table: dict[Any, Any]) -> bool:
        """Whether entries of ``table`` with the identity of ``group`` in their key will go when the group ends."""
        key = id(group)
        if (id(table), key) in self._followed:
            return True

        def forget(reference: Any) -> None:
            self._followed.pop((id(table), key), None)
            for entry in [e for e in list(table) if e == key or (isinstance(e, tuple) and e[0] == key)]:
                table.pop(entry, None)

        try:
            self._followed[id(table), key] = weakref.ref(group, forget)
        except TypeError:
            return False
        return True


def watched_next(iteration: int, every: int) -> int:
    """The first iteration from ``iteration`` on that is watched where one in ``every`` is, a power of 2.

    One in each window of ``every`` iterations, at no fixed distance: what a job does periodically would be in all of
    them or in none. Ranks agree without a word; who watches half as often watches iterations that the others do, too.
    """
    window = iteration // every
    while True:
        place, half = window, every // 2
        while half:
            place = 2 * place + (_SCATTER * (place + 1) >> 30 + half.bit_length() & 1)
            half //= 2
        if place >= iteration:
            return place
        window += 1


def _reference(group: Any) -> Callable[[], Any]:
    """A weak reference: one that keeps a process group would change when it is destroyed."""
    try:
        return weakref.ref(group)
    except TypeError:
        return lambda: None


def _name(group: Any) -> str:
    try:
        return str(group.group_name)
    except Exception:  # groups that are written in Python may have none
        return ""


def _place(group: Any) -> tuple[int, int]:
    try:
        return int(group.rank()), int(group.size())
    except Exception:
        return 0, 0


def _ranks(group: Any) -> list[int] | None:
    try:
        from torch.distributed import get_process_group_ranks

        return [int(rank) for rank in get_process_group_ranks(group)]
    except Exception:
        return None


def _graph_task() -> Callable[[], int]:
    """Whether a backward pass is running on this thread, and which: -1 is none."""
    import torch

    return getattr(torch._C, "_current_graph_task_id", lambda: -1)
