"""Why a rank arrives late, from what its device and its host did: computing, copying, or waiting for its own host.

A rank's device and the other ranks' devices do the same work between two collectives. What a late rank spent more time
on than its peers made it late. Where that is waiting for its host, the ranges of the host say what took it longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np

from paceenv.core.wording import duration
from paceenv.importers.timelines import OUTSIDE, CollectiveActivity, RankActivity, union

LEAST_SHARE: Final = 0.01
"""Share of a mean step: a rank that is last by less, summed over a step, is not named."""
_MAX_CLOCK_ERROR: Final = 0.05
"""Share of a mean step: on clocks that are off by more, nobody is named."""
_LEAST_PART: Final = 0.5
"""Share of the lateness that a reason must explain."""
_SAID_RANGES: Final = 3
_LITTLE_LEAD: Final = 0.25
"""A host that is ahead of its device by this share of what others are has no reserve."""

Reason = Literal["host", "compute", "copies", "launch", "not shown"]
_WHY: Final[dict[Reason, str]] = {
    "compute": "its kernels take {extra} more than its peers' for the same work: look at this device's clock, "
    "temperature and share of the work",
    "copies": "its copies take {extra} more than its peers': look at pinned memory and the bus of this device",
    "launch": "its host launched late, {extra} after its peers': look at what its host did before: data loader, "
    "garbage collection, other processes",
    "host": "its GPU is idle {extra} a step more than its peers', waiting for its host{host}: {cure}",
    "not shown": "the profile does not show why",
}
_HOST_CURE: Final = (
    "launch less from the host (CUDA graphs, fewer and larger kernels), or free it: garbage collection, other "
    "processes and the clock of its CPU"
)
_LOADER_CURE: Final = "more or faster workers of its data loader, or fetch ahead"
_LOADER: Final = ("DataLoader", "dataloader_next")


class Worst(NamedTuple):
    """One collective: its step, operation, place among its like there, and by how much a rank was late to it, s."""

    iteration: int
    op: str
    place: int
    late_s: float


@dataclass(frozen=True)
class LateHost:
    """One rank that arrives last, and what it spent more time on than its peers; times are means over the steps, s.

    Attributes:
        late_s: by how much in each of these, summed over their collectives; time in which several waited counts once.
        worst: the collective to which it was late most.
        extra_s: time beyond its peers' before collectives that it was late to, in those steps, by reason.
        ranges: what its host did longer than its peers' before these collectives, largest first, by outermost range.
    """

    rank: int  # its number
    steps: int  # steps looked at
    iterations: tuple[int, ...]  # those in which it arrived last by at least LEAST_SHARE of a step
    late_s: tuple[float, ...]
    worst: Worst
    reason: Reason  # what most of its lateness comes from
    extra_s: dict[Reason, float]
    ranges: dict[str, float]
    lead_s: float  # how far its host is ahead of its device (median); not a number where unknown
    peers_lead_s: float  # and those of its peers

    @property
    def text(self) -> str:
        """In plain language, one line."""
        usual = " on average" if len(self.late_s) > 1 else ""
        return (
            f"rank {self.rank} arrives last in {len(self.iterations)} of {self.steps} steps, by "
            f"{duration(float(np.mean(self.late_s)))}{usual}; {self._why}"
        )

    @property
    def why(self) -> str:
        """The same where the headline has said already how late the rank is."""
        return f"rank {self.rank}, why it arrives last: {self._why}"

    @property
    def _why(self) -> str:
        step, op, place, worst_s = self.worst
        said = f"most in one collective at {op} #{place} of step {step} ({duration(worst_s)} after the others)"
        loads = any(word in name for name in list(self.ranges)[:1] for word in _LOADER)
        extra, cure = duration(self.extra_s.get(self.reason)), _LOADER_CURE if loads else _HOST_CURE
        return f"{said}; {_WHY[self.reason].format(extra=extra, host=self._host, cure=cure)}"

    @property
    def _host(self) -> str:
        """What the host did, and whether it has any reserve."""
        said = ""
        if self.ranges:
            words = {OUTSIDE: "no recorded operation (Python, or not running)"}
            named = ", ".join(f"{words.get(name, name)} (+{duration(s)})" for name, s in self.ranges.items())
            said = f"; on its host more time than on its peers' goes into {named}"
        mine_s, peers_s = self.lead_s, self.peers_lead_s
        if np.isfinite(mine_s) and np.isfinite(peers_s) and mine_s < _LITTLE_LEAD * peers_s:
            said += f"; it is {duration(max(mine_s, 0.0))} ahead of its GPU, its peers {duration(peers_s)}"
        return said


def find_late_hosts(activity: Sequence[RankActivity], *, clock_error_s: float = 0.0) -> tuple[LateHost, ...]:
    """Ranks that arrive last, and why; the one that costs most first."""
    if not activity:
        return ()
    steps = sorted({one.iteration for one in activity})
    step_s = float(np.mean([one.end_s - one.start_s for one in activity]))
    least_s = LEAST_SHARE * step_s
    if clock_error_s > _MAX_CLOCK_ERROR * step_s:
        return ()
    late: dict[int, list[_Late]] = defaultdict(list)
    for one in _late_arrivals(activity):
        if one.late_s > clock_error_s:
            late[one.rank].append(one)
    late_hosts = []
    for rank, ones in late.items():
        per_step = {
            i: _together_s([one for one in ones if one.iteration == i]) for i in {one.iteration for one in ones}
        }
        named = {i: s for i, s in per_step.items() if s >= least_s}
        counted = [one for one in ones if one.iteration in named]
        if named:
            late_hosts.append(_finding(rank, steps, named, counted, activity))
    return tuple(sorted(late_hosts, key=lambda one: -sum(one.late_s)))


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


@dataclass(frozen=True)
class _Late:
    """One collective whose last arrival stood alone."""

    rank: int
    iteration: int
    place: int
    late_s: float
    mine: CollectiveActivity
    peers: tuple[CollectiveActivity, ...]


def _together_s(late: list[_Late]) -> float:
    """How long others waited for a rank, s; where several collectives waited at once, once."""
    ends = np.array([one.mine.start_s for one in late])
    begins, ends = union(ends - np.array([one.late_s for one in late]), ends)
    return float((ends - begins).sum())


def _late_arrivals(activity: Iterable[RankActivity]) -> list[_Late]:
    """Who came last to each collective, and by how much."""
    members: dict[tuple[int, str, str, int], list[tuple[int, float, CollectiveActivity]]] = defaultdict(list)
    ended_s: dict[tuple[int, str], float] = {}
    for one in activity:
        for key, c in one.placed():
            if c.group and isinstance(c, CollectiveActivity):
                members[one.iteration, *key].append((one.rank, ended_s.get((one.rank, c.group), -np.inf), c))
                ended_s[one.rank, c.group] = c.end_s
    arrivals = []
    for (iteration, _, _, place), met in members.items():
        met.sort(key=lambda entry: entry[2].start_s)
        rank, before_s, mine = met[-1]
        peers = tuple(c for _, _, c in met[:-1])
        if peers and (late_s := mine.start_s - max(peers[-1].start_s, min(before_s, mine.start_s))) > 0.0:
            arrivals.append(_Late(rank, iteration, place, late_s, mine, peers))
    return arrivals


def _finding(
    rank: int, steps: list[int], named: dict[int, float], late: list[_Late], activity: Sequence[RankActivity]
) -> LateHost:
    kinds: list[tuple[Reason, str]] = [("compute", "compute_s"), ("copies", "copy_s"), ("host", "host_wait_s")]
    kinds = kinds[:-1] if any(np.isnan(one.host_wait_s) for one in activity if one.iteration in named) else kinds
    extra_s = {kind: 0.0 for kind, _ in kinds}
    ranges: dict[str, float] = defaultdict(float)
    for one in late:
        for kind, attribute in kinds:
            usual_s = float(np.median([getattr(peer, attribute) for peer in one.peers]))
            extra_s[kind] += (getattr(one.mine, attribute) - usual_s) / len(named)
        if one.late_s >= LEAST_SHARE * sum(named.values()) / len(named):
            mine, peers = one.mine.host_s, [peer.host_s for peer in one.peers]
            for name in {*mine, *(name for peer in peers for name in peer)}:
                usual_s = float(np.median([peer.get(name, 0.0) for peer in peers]))
                ranges[name] += (mine.get(name, 0.0) - usual_s) / len(named)
    late_s = sum(named.values()) / len(named)
    best = max(kinds, key=lambda kind: extra_s[kind[0]])[0]
    launches = [one.mine.launched_s - float(np.median([peer.launched_s for peer in one.peers])) for one in late]
    known = {one.iteration for one, launch_s in zip(late, launches, strict=True) if np.isfinite(launch_s)}
    extra_s["launch"] = float(np.nansum(launches)) / max(len(known), 1)
    # A host that waits for its device launches late, too: that its device did more counts first.
    shown = [kind for kind in (best, "launch") if extra_s[kind] >= _LEAST_PART * late_s]
    reason: Reason = shown[0] if shown else "not shown"
    largest = sorted(ranges.items(), key=lambda entry: -entry[1])[:_SAID_RANGES]
    worst = max(late, key=lambda one: one.late_s)
    return LateHost(
        rank=rank,
        steps=len(steps),
        iterations=tuple(sorted(named)),
        late_s=tuple(named[i] for i in sorted(named)),
        worst=Worst(worst.iteration, worst.mine.op, worst.place, worst.late_s),
        reason=reason,
        extra_s=extra_s,
        ranges={name: s for name, s in largest if s >= 0.05 * late_s} if reason == "host" else {},
        lead_s=_lead(activity, {rank}),
        peers_lead_s=_lead(activity, {one.rank for one in activity} - {rank}),
    )


def _lead(activity: Iterable[RankActivity], ranks: set[int]) -> float:
    """How long before a collective begins on the device it was launched (median over ranks and collectives), s."""
    leads = [
        c.start_s - c.launched_s
        for one in activity
        if one.rank in ranks
        for c in one.collectives
        if np.isfinite(c.launched_s)
    ]
    return float(np.median(leads)) if leads else float("nan")
