"""Why a rank arrives late, from what its device and its host did: computing, copying, or waiting for its own host.

A rank's device and the other ranks' devices do the same work between two collectives. What a late rank spent more time
on than its peers made it late. Where that is waiting for its host, the ranges of the host say what took it longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, NamedTuple

import numpy as np

from paceenv.core.operation_matrix import Integers, OperationMatrix
from paceenv.core.wording import duration
from paceenv.diagnosis.arrivals import Arrivals, LateRank
from paceenv.importers.timelines import OUTSIDE, Collective, RankActivity

_MAX_CLOCK_ERROR: Final = 0.05
"""Share of a mean step: on clocks that are off by more, nobody is named."""
_LEAST_SHARE: Final = 0.01
"""Share of a rank's lateness: where it was late by less, what its host did tells nothing."""
_LEAST_PART: Final = 0.5
"""Share of the lateness that a reason must explain."""
_SAID_RANGES: Final = 3

PARTS: Final = (
    ("kernels", "compute_s"), ("copies to it", "to_device_s"), ("other copies", "other_copies_s"),
    ("collectives exposed", "exposed_s"), ("hidden", "hidden_s"), ("waiting for its host", "host_wait_s"),
    ("idle", "idle_s"), ("host in data loader", "loader_s"),
)  # fmt: skip
"""Where a step's time goes on a device, and what :class:`RankActivity` calls it."""

Reason = Literal["host", "compute", "copies", "launch", "not shown"]
_WHY: Final[dict[Reason, tuple[str, str]]] = {
    "compute": (
        "its kernels take {extra} more than its peers' for the same work",
        "look at this device's clock, temperature and share of the work",
    ),
    "copies": ("its copies take {extra} more than its peers'", "look at pinned memory and the bus of this device"),
    "launch": (
        "its host launched late, {extra} after its peers'",
        "look at what its host did before: data loader, garbage collection, other processes",
    ),
    "host": (
        "in these steps, up to the collectives that it is late to, its GPU is idle {extra} more than its peers', "
        "waiting for its host{host}",
        "launch less from the host (CUDA graphs, fewer and larger kernels), or free it: garbage collection, other "
        "processes and the clock of its CPU",
    ),
    "not shown": ("the profile does not show why", ""),
}
"""What was seen, and what to do about it."""
_LOADER_CURE: Final = "more or faster workers of its data loader, or fetch ahead"
_LOADER: Final = ("DataLoader", "dataloader_next")


class Late(NamedTuple):
    """One collective that a rank was the last to enter; ``place`` is its place among its like in the step."""

    iteration: int
    place: int
    late_s: float
    mine: Collective
    peers: tuple[Collective, ...]


@dataclass(frozen=True)
class LateHost(LateRank):
    """One rank that arrives last, and what it spent more time on than its peers; times are means over the steps, s.

    Attributes:
        worst: the collective to which it was late most.
        extra_s: time beyond its peers' before collectives that it was late to, in those steps, by reason.
        ranges: what its host did longer than its peers' before these collectives, largest first, by outermost range.
    """

    steps: int  # steps looked at
    worst: Late
    reason: Reason  # what most of its lateness comes from
    extra_s: dict[Reason, float]
    ranges: dict[str, float]
    SHOWN: ClassVar = ("rank", "steps", "iterations", "late_s", "reason", "extra_s", "ranges")

    @property
    def text(self) -> str:
        usual, often = " on average" if len(self.late_s) > 1 else "", f"{len(self.iterations)} of {self.steps} steps"
        return f"rank {self.rank} arrives last in {often}, by {duration(self.mean_late_s)}{usual}; {self._why}"

    @property
    def why(self) -> str:
        """The same where the headline has said already how late the rank is."""
        return f"rank {self.rank}, why it arrives last: {self._why}"

    @property
    def cure(self) -> str:
        """What to do about it, "" where the profile does not show why it is late."""
        first = next(iter(self.ranges), "")
        if any(word in first for word in _LOADER):
            return _LOADER_CURE
        return _WHY["launch" if first == OUTSIDE else self.reason][1]

    @property
    def _why(self) -> str:
        worst, after = self.worst, f"{duration(self.worst.late_s)} after the others"
        said = f"most in one collective at {worst.mine.op} #{worst.place} of step {worst.iteration} ({after})"
        words = {OUTSIDE: "no recorded operation (Python, or not running)"}
        named = ", ".join(f"{words.get(name, name)} (+{duration(s)})" for name, s in self.ranges.items())
        host = f"; on its host more time than on its peers' goes into {named}" if named else ""
        seen = _WHY[self.reason][0].format(extra=duration(self.extra_s.get(self.reason)), host=host)
        return f"{said}; {seen}" + (f": {self.cure}" if self.cure else "")


def find_late_hosts(
    matrix: OperationMatrix, arrivals: Arrivals, activity: Sequence[RankActivity], *, clock_error_s: float = 0.0
) -> tuple[LateHost, ...]:
    """Why ranks arrive last, the one that costs most first."""
    if not activity or clock_error_s > _MAX_CLOCK_ERROR * arrivals.step_s:
        return ()
    of_rank: dict[tuple[int, int], list[tuple[_Place, Collective]]] = {}
    met: dict[tuple[int, _Place], dict[int, Collective]] = defaultdict(dict)
    for one in activity:
        placed = list(one.placed())
        of_rank[one.rank, one.iteration] = placed
        for place, c in placed:
            met[one.iteration, place][one.rank] = c
    late: dict[int, list[Late]] = defaultdict(list)
    nth_NT = _nth(matrix)
    for n, t, begin_s, end_s in zip(*arrivals.waits, strict=True):
        rank, iteration = matrix.ranks[matrix.rank_N[n]], int(matrix.iteration_T[t])
        if end_s - begin_s > clock_error_s and (rank, iteration) in of_rank:
            place, mine = of_rank[rank, iteration][nth_NT[n, t]]
            peers = tuple(c for other, c in met[iteration, place].items() if other != rank)
            late[rank] += [Late(iteration, place[2], float(end_s - begin_s), mine, peers)] if peers else []
    ones_of = ((one, [each for each in late[one.rank] if each.iteration in one.iterations]) for one in arrivals.late)
    return tuple(_finding(one, arrivals.steps, ones, activity) for one, ones in ones_of if ones)


def _nth(matrix: OperationMatrix) -> Integers:
    """Which of its rank's collectives in the step each operation is, in the order of their begin, from 0."""
    nth_NT = np.zeros(matrix.start_NT.shape, np.int64)
    for r in range(len(matrix.ranks)):
        mine = np.flatnonzero((matrix.rank_N == r) & ~matrix.is_compute_N)
        nth_NT[mine] = np.lexsort((matrix.end_NT[mine], matrix.start_NT[mine]), axis=0).argsort(axis=0)
    return nth_NT


def one_rank(activity: Sequence[RankActivity]) -> str:
    """What one rank shows by itself: where a mean step's time went that is not computing, the largest first."""
    parts = (
        ("in its data loader", "loader_s"), ("in collectives with nothing else to do", "exposed_s"),
        ("waiting for its host", "host_wait_s"), ("idle", "idle_s"),
    )  # fmt: skip
    step_s = float(np.mean([one.end_s - one.start_s for one in activity]))
    costs = [(float(np.mean([getattr(one, name) for one in activity])), words) for words, name in parts]
    said = [f"{duration(cost_s)} {words}" for cost_s, words in sorted(costs, reverse=True) if cost_s > 1e-3 * step_s]
    return f"of its mean step of {duration(step_s)}: {', '.join(said) or 'all of it is computing'}"


_Place = tuple[str, str, int]
"""Group, operation, and place among its like in the step."""


def _finding(rank: LateRank, steps: int, late: list[Late], activity: Sequence[RankActivity]) -> LateHost:
    kinds: list[tuple[Reason, str]] = [("compute", "compute_s"), ("copies", "copy_s"), ("host", "host_wait_s")]
    if any(np.isnan(one.host_wait_s) for one in activity if one.iteration in rank.iterations):
        del kinds[-1]
    extra_s = {kind: 0.0 for kind, _ in kinds}
    ranges: dict[str, float] = defaultdict(float)
    for one in late:
        for kind, attribute in kinds:
            usual_s = float(np.median([getattr(peer, attribute) for peer in one.peers]))
            extra_s[kind] += (getattr(one.mine, attribute) - usual_s) / len(rank.iterations)
        if one.late_s >= _LEAST_SHARE * rank.mean_late_s:
            mine, peers = one.mine.host_s, [peer.host_s for peer in one.peers]
            for name in {*mine, *(name for peer in peers for name in peer)}:
                usual_s = float(np.median([peer.get(name, 0.0) for peer in peers]))
                ranges[name] += (mine.get(name, 0.0) - usual_s) / len(rank.iterations)
    best = max(kinds, key=lambda kind: extra_s[kind[0]])[0]
    launches = [one.mine.launched_s - float(np.median([peer.launched_s for peer in one.peers])) for one in late]
    known = {one.iteration for one, launch_s in zip(late, launches, strict=True) if np.isfinite(launch_s)}
    extra_s["launch"] = float(np.nansum(launches)) / max(len(known), 1)
    # A host that waits for its device launches late, too: that its device did more counts first.
    shown = [kind for kind in (best, "launch") if extra_s[kind] >= _LEAST_PART * rank.mean_late_s]
    reason: Reason = shown[0] if shown else "not shown"
    largest = sorted(ranges.items(), key=lambda entry: -entry[1])[:_SAID_RANGES]
    return LateHost(
        **vars(rank),
        steps=steps,
        worst=max(late, key=lambda one: one.late_s),
        reason=reason,
        extra_s=extra_s,
        ranges={name: s for name, s in largest if s >= 0.05 * rank.mean_late_s} if reason == "host" else {},
    )
