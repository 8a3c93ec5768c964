"""What the sources of one rank have seen: operations of the iteration under way, iterations that are over, and tables.

Everything here runs on the training thread (or on autograd's, while the training thread waits for it), so it is lean:
one row per operation, and what an operation is becomes a small number, its *kind*.
"""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from threading import RLock, get_ident
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from paceenv.core.wording import format_list
from paceenv.live.observe.batch import THREAD, Kind
from paceenv.live.observe.stamps import Stamps

T = TypeVar("T")
MAX_ROWS, MAX_WAITING = 100_000, 20_000
"""Operations of one iteration or step: with more, some are left out, and it is marked; and operations that wait for
whoever takes them: with more, the training thread does."""
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

Row = tuple[int, Any, Any]
"""Kind, and the stamps of entry and exit; None for a stamp that could not be recorded."""


class Delay(NamedTuple):
    """A delay under way, with its two stamps. ``slept_s`` is the host's sleep or the device's planned spin, seconds."""

    slept_s: float
    before: Any
    after: Any | None
    cycles: int = 0


Tick = tuple[int, list[Row] | None, str, Delay | None, Any]
"""An iteration: its number, operations, mark, the delay at its start, the stamp of its end. Operations are None for the
last of some that were not watched."""


class Group:
    """A process group as the agent knows it.

    ``listed`` has its global ranks (``0-3,8``), ``seen`` counts the collectives that were started in it, and
    ``opaque`` is true where nothing can be said about their number: PyTorch's C++ starts some by itself, or there are
    reduce-scatters of lists, which gloo counts as one reduction for each rank.
    """

    def __init__(
        self, number: int, name: str, member: int, size: int, ranks: list[int] | None, group: Any, begun: bool = False
    ) -> None:
        self.number, self.name, self.member, self.size = number, name, member, size
        self.listed = format_list(ranks) if ranks is not None else None
        self.seen, self.opaque = 0, False
        # weak: a reference that keeps a process group would change when it is destroyed
        self._group: Callable[[], Any] = tried(lambda: weakref.ref(group), lambda: None)
        self.first = None if begun else self.counted()
        self._paused: int | None = None
        self.before: int | None = None
        """What it had counted at :meth:`Log.count_from_here`."""

    @property
    def ended(self) -> bool:
        """Whether the process group has been destroyed."""
        return self._group() is None

    def counted(self) -> int | None:
        """Collectives that the group itself has counted so far; None where it does not count."""
        group = self._group()
        if group is None:
            return None
        if (count := tried(lambda: _counted(group), None)) is not None:
            return count
        # with a backend for each device ("cpu:gloo,cuda:nccl") the group itself may not count
        return tried(lambda: sum(map(_counted, {group._get_backend(device) for device in group._device_types})), None)

    def pause(self) -> None:
        """What is started from now on is not watched; nobody asks how much an opaque group started."""
        self._paused = None if self.opaque else self.counted()

    def resume(self) -> None:
        """It is watched again."""
        if self._paused is not None and (now := self.counted()) is not None and self.first is not None:
            self.first += now - self._paused
        self._paused = None

    def started(self, method: str) -> None:
        """A call of a method of ``ProcessGroup`` has just been made. The one that met the group is its first."""
        if self.first is None:
            self.first = self.counted()
        else:
            self.seen += 1
        if method == LISTS:
            self.opaque = True

    def unseen(self) -> int:
        """Collectives that the group has counted since it was first met, and the agent has not seen."""
        now = self.counted() if self._paused is None else self._paused
        return 0 if self.opaque or now is None or self.first is None else max(now - self.first - self.seen, 0)


class Log:
    """The observations of one rank."""

    def __init__(self, stamps: Stamps) -> None:
        self.stamps, self.on_device = stamps, False
        self.rows = list[Row]()
        """The operations of the iteration under way."""
        self.over = deque[Tick]()
        """Iterations that are over: written here and taken by one reader, which may be another thread."""
        self.delay: Delay | None = None
        """At the start of the iteration under way."""
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
        self._in_graph = _graph_task()
        self.thread = get_ident()
        """Whose waiting blocks the step."""
        self.every, self.hurry = 1, False
        """One iteration in so many is watched; with ``hurry`` the next one is, and all that follow."""
        self.on_watch: Callable[[bool], None] = lambda watching: None
        self.count, self.ticked_s = 0, monotonic()
        """Iterations that are over, watched or not, and when the last one was."""
        self.uneven = False
        """Whether this rank has done, since it counts, what groups count for some of their members only: sends and
        receives, also those of a monitored barrier."""
        self._new: int | None = None  # what a group that nobody knows yet has counted
        self._to_skip = 0
        self._mark, self._late, self._place = "", "", 0  # of the iteration; one after so many operations, if none came
        self._held, self._noted = list[str](), False  # marks under way; whether any mark is set

    def add(self, kind: int, entry: Any) -> None:
        """Log an operation that ends now."""
        if len(self.rows) >= MAX_ROWS:  # without a tick: an evaluation, say
            self._mark, self._noted = self._mark or self._late or TOO_MANY, True
            self.release(entry)
            return
        exit_ = self.stamps.record()
        if get_ident() != self.thread and self._in_graph() == -1:
            kind = self.on_the_side(kind)
        self.rows.append((kind, entry, exit_))

    def tick(self) -> Tick | None:
        """An iteration ends now; None where it was not watched."""
        while self.chores:
            chore, arguments = self.chores.popleft()
            chore(*arguments)
        if self._to_skip and self.skips():
            return None
        rows = self.rows
        mark = self._mark_of(len(rows)) if self._noted else ""
        tick = self.count, rows, mark, self.delay, self.stamps.record()
        self.rows, self.delay = [], None
        self.count, self.ticked_s = self.count + 1, monotonic()
        self.over.append(tick)
        if len(self.over) * (1 + len(rows)) > MAX_WAITING:  # iterations are alike
            self.overflow()
        if self.every > 1 and not self.hurry:
            self._to_skip = watched_next(self.count, self.every) - self.count
            if self._to_skip:
                self._watch(False)
        return tick

    @property
    def marked(self) -> bool:
        """Whether the iteration that has just begun is marked already."""
        return bool(self._late or self._held)

    def _mark_of(self, operations: int) -> str:
        """The mark of the iteration that ends now; one after its last operation belongs to the one that follows."""
        self._move_to(operations)
        mark, self._mark, self._place, self._noted = self._mark, "", 0, self.marked
        return self._held[-1] if self._held else mark

    def _move_to(self, operations: int) -> None:
        """A mark is the iteration's as soon as an operation follows it; of several, the first."""
        if operations > self._place:
            self._mark, self._late, self._place = self._mark or self._late, "", operations

    def count_from_here(self, groups: Iterable[Any]) -> None:
        """All ranks are at the same place of the script, with these process groups: the first tick, say."""
        for one in groups:
            self.known(one)
        self.uneven, self._new, self.ticked_s = False, 0, monotonic()
        for group in self.groups.values():
            group.first, group.seen, group.before = (now := group.counted()), 0, now

    def started(self, group: Group) -> int | None:
        """Collectives of a group since then, also in C++; None where members may not count alike."""
        now = group.counted()
        return None if now is None or group.before is None or self.uneven else now - group.before

    def forget(self) -> None:
        """Forget what was logged so far."""
        self.release(*(stamp for _, *stamps in self.rows for stamp in stamps))
        self.rows, self._mark, self._late, self._place = [], "", "", 0

    def skips(self) -> bool:
        """Whether the iteration that ends now was not watched."""
        if not self._to_skip:
            return False
        self._to_skip -= 1
        self.count, self.ticked_s = self.count + 1, monotonic()
        if not self._to_skip or self.hurry:
            self._to_skip = 0
            self._mark_of(0)
            self._late = ""
            self.over.append((self.count - 1, None, "", None, self.stamps.record()))
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

    def end(self, token: tuple[int, Any], result: Any) -> None:
        """An operation ends now: its kind, and the stamp of its entry."""
        self.add(token[0], token[1])

    def give_up(self, token: tuple[Any, Any]) -> None:
        """An operation that raised: what was to be logged, and the stamp of its entry."""
        self.release(token[1])

    def mark(self, kind: str, change: int | None = None) -> None:
        """Mark an irregular event that happens now, such as a checkpoint; 1 and -1 mark its beginning and its end."""
        self._move_to(len(self.rows))
        self._late, self._noted = kind, True
        if change == 1:
            self._held.append(kind)
        elif change == -1 and self._held:
            self._held.pop()

    def known(self, group: Any, *, begun: bool = False) -> Group:
        """What is known about a process group.

        Args:
            begun: whether a collective of it has just been started, which :meth:`Group.started` is still to hear of.
        """
        known_group = self._by_identity.get(id(group))
        if known_group is not None:
            return known_group
        name = tried(lambda: str(group.group_name), "")
        hashed = zlib.crc32(name.encode()) & 0x7FFFFFFF if name else -1
        number = int(name) if name.isdecimal() and len(name) < 9 else hashed
        described = self.groups.get(number)
        if described is None or described.ended:
            member, size = tried(lambda: (int(group.rank()), int(group.size())), (0, 0))
            described = Group(number, name, member, size, tried(lambda: _ranks(group), None), group, begun)
            described.before = self._new
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


def tried(read: Callable[[], T], otherwise: T) -> T:
    """What ``read`` returns; drivers, containers and groups that are written in Python may raise anything."""
    try:
        return read()
    except Exception:
        return otherwise


def _ranks(group: Any) -> list[int]:
    from torch.distributed import get_process_group_ranks

    return [int(rank) for rank in get_process_group_ranks(group)]


def _counted(one: Any) -> int:
    return int(one._get_sequence_number_for_group())


def _graph_task() -> Callable[[], int]:
    """Whether a backward pass is running on this thread, and which: -1 is none."""
    import torch

    return getattr(torch._C, "_current_graph_task_id", lambda: -1)
