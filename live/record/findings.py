"""Findings about a job, from the snapshots of all its ranks: which rank is late, which ranks wait for it, and where.

The step is common to all ranks that process groups connect. So the rank whose own work takes longer than that of the
others is late by the difference, and the others wait for it in collectives. A rank that comes late to one collective
because it waited in another has no longer work of its own; it is not late. A rank is named only if its work takes
longer *and* the members of its groups wait for it. Everything else that could explain the waits is listed as not
attributable, with its reason: collectives that the agents could not see, ranks without an agent, other threads.

Findings are plain JSON data. Times are seconds per step; null means unknown. Fields:

============ =======================================================================================================
field        holds
============ =======================================================================================================
schema       :data:`SCHEMA`; ``job``, ``attempt``, ``world_size``, ``unix_time_s`` of the newest snapshot
ranks        number of ranks with a snapshot; ``missing``: ranks without one
verdicts     by rank (as text): the field ``arrival`` of a snapshot (:func:`verdict_of`)
sets         the sets of ranks that groups connect: ``ranks``, ``iterations`` compared (first, last), ``step_s``,
             ``late`` (ranks), ``pattern`` (``patterns.PATTERNS``), ``lost_s`` to ranks in turns or to variation,
             ``complete``: nothing is hidden, else ``reasons``
waits        the longest waits by group and operation: ``op``, ``group``, ``ranks``, ``last``, ``waiting``, ``wait_s``
places       what late ranks have in common, in words
unattributed what cannot be seen or attributed: ``text``, ``ranks``, ``seconds``
text         all of it in words, for the page
============ =======================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from paceenv.core.lateness.block_comparison import FLOOR_S, MIN_BLOCKS, compare, find_pattern
from paceenv.core.lateness.patterns import (
    CHRONIC,
    IN_TURNS,
    NONE,
    ONCE,
    SINCE,
    SOMETIMES,
    VARIATION,
    Pattern,
    pattern_of_all,
)
from paceenv.core.lateness.peers import Times, others_median, row_medians
from paceenv.core.wording import duration, name_ranks
from paceenv.live.record import findings_text as words
from paceenv.live.record.compare_blocks import Blocks, Grid, find_grid, side_by_side
from paceenv.live.record.group_waits import (
    POINT_TO_POINT,
    Traffic,
    Wait,
    connected_sets,
    measure_wait,
    read_traffic,
    used_groups,
    waited_for,
)
from paceenv.live.record.snapshot import EARLY, LATE, ON_TIME, UNKNOWN, Snapshot, entry, number, text

SCHEMA: Final = "paceenv.findings/1"
CONFIRMED_SHARE = 0.5
"""A rank is named only if the members of its groups wait for at least this share of its longer work."""
SECOND_SHARE = 0.5
"""Further ranks are named down to this share of the latest one's lateness; those below wait for longer than they are
late."""
OTHER_STEP_SHARE = 0.05
"""Ranks whose mean steps over the same iterations differ by more do not share their steps."""
TOO_NOISY_SHARE = 0.25
"""Where this share of the step would still count as noise, early and late cannot be identified."""
ALIKE_STAGES = 0.2
"""Single pipeline stages are compared where the others differ by at most this share of the lateness."""
RARE = 0.25
"""Unseen collectives in fewer blocks than this share cannot move a median over the blocks."""
LEFT_OUT_SHARE = 0.1
"""Above this share, iterations that were left out are mentioned."""
MAX_WAITS = 64

Findings = dict[str, Any]


@dataclass
class RankSet:
    """The findings about ranks that groups connect. Places are indices into the snapshots, times seconds per step."""

    places: list[int]
    compared: list[int] = field(default_factory=list)
    step_s: float = 0.0
    iterations: tuple[int, int] = (0, 0)
    blocks: int = 0
    sides: str = ""
    """Which ranks were compared over how many iterations, in words."""
    stages: dict[int, int] = field(default_factory=dict)
    """Each rank's stage of a pipeline; empty without one."""
    late: dict[int, Pattern] = field(default_factory=dict)
    named: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    """Ranks whose work takes longer, but who are not named, and why."""
    not_waited_for: list[int] = field(default_factory=list)
    margin_s: dict[int, float] = field(default_factory=dict)
    own_s: dict[int, float] = field(default_factory=dict)
    """Own time over the blocks in which the latest rank is late."""
    waits: list[Wait] = field(default_factory=list)
    pattern: str = NONE
    lost_s: float = 0.0
    reasons: list[str] = field(default_factory=list)
    """Why nobody in it can be called on time."""

    @property
    def complete(self) -> bool:
        """Whether everything about it could be seen."""
        return not self.reasons


class Job:
    """The snapshots of a job's ranks side by side: what all sets of ranks are judged from."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        by_rank = {s["rank"]: s for s in snapshots if type(s.get("rank")) is int and s["rank"] >= 0}
        self.ranks = sorted(by_rank)
        self.snapshots = [by_rank[rank] for rank in self.ranks]
        self.place = {rank: place for place, rank in enumerate(self.ranks)}
        newest = max(self.snapshots, key=lambda s: number(s, "unix_time_s") or 0.0)
        self.newest = newest
        self.world_size = int(number(newest, "world_size") or len(self.ranks))
        self.missing = sorted(set(range(min(self.world_size, 1 << 20))) - set(self.ranks))
        self.grid: Grid | None = find_grid(self.snapshots)
        self.blocks: Blocks | None = side_by_side(self.snapshots, self.grid) if self.grid else None
        self.traffic: Traffic = read_traffic(self.snapshots, self.grid)

    def names(self, places: Sequence[int]) -> list[int]:
        """The ranks at these places."""
        return [self.ranks[place] for place in places]

    def numbers(self, places: Sequence[int], *path: str) -> Times:
        """A number of the snapshots at these places; 0 where it is unknown."""
        return np.array([number(self.snapshots[place], *path) or 0.0 for place in places])


def find(snapshots: Sequence[Snapshot]) -> Findings:
    """The findings about one attempt of a job.

    Args:
        snapshots: the last snapshot of each rank, at least one, all of the same attempt.
    """
    job = Job(snapshots)
    groups = used_groups(job.traffic)
    sets = [_judge(job, places) for places in connected_sets(len(job.ranks), groups)]
    verdicts: dict[str, Any] = {}
    for rank_set in sets:
        for place in rank_set.places:
            verdicts[str(job.ranks[place])] = _verdict(job, rank_set, place)
    unattributed = _unattributed(job, sets)
    late = [place for rank_set in sets for place in rank_set.named]
    places = words.describe_places(
        [job.ranks[place] for place in late],
        {rank: text(s, "host") for rank, s in zip(job.ranks, job.snapshots, strict=True)},
    )
    return {
        "schema": SCHEMA,
        "job": text(job.newest, "job"),
        "attempt": entry(job.newest, "attempt"),
        "world_size": job.world_size,
        "unix_time_s": number(job.newest, "unix_time_s"),
        "ranks": len(job.ranks),
        "missing": job.missing,
        "verdicts": verdicts,
        "sets": [_set_data(job, rank_set) for rank_set in sets],
        "waits": _wait_data(job, sets),
        "places": places,
        "unattributed": unattributed,
        "text": words.describe(job, sets, verdicts, places, unattributed),
    }


def verdict_of(
    verdict: str,
    evidence: str,
    *,
    early_s: float = 0.0,
    late_s: float = 0.0,
    share: float | None = None,
    ranks: int = 1,
    iterations: int = 0,
) -> dict[str, Any]:
    """The field ``arrival`` of a snapshot: a verdict and what it rests on.

    Args:
        verdict: one of ``snapshot.ARRIVALS``.
        evidence: the reason for the verdict, in words.
        early_s: how early the rank is, seconds.
        late_s: how late it is, seconds.
        share: share of the compared blocks in which it is late; None where that says nothing.
        ranks: number of ranks that were compared; a verdict from one alone is no claim.
        iterations: iterations that were compared.
    """
    return {
        "verdict": verdict,
        "early_s": early_s,
        "late_s": late_s,
        "share": share,
        "evidence": evidence,
        "ranks": ranks,
        "iterations": iterations,
    }


ALONE: Final = verdict_of(UNKNOWN, "one rank alone")
"""What the times of a single rank say about early and late."""


def with_verdicts(snapshots: Sequence[Snapshot], findings: Findings) -> list[Snapshot]:
    """The snapshots, each with its ``arrival`` from the findings.

    Args:
        snapshots: the ranks' last statuses.
        findings: what was found from them.
    """
    verdicts = findings["verdicts"]
    return [s | {"arrival": verdicts.get(str(s.get("rank")), s.get("arrival"))} for s in snapshots]


def latest(findings: Findings) -> dict[str, Any]:
    """The latest rank: ``rank``, ``late_s``; with nobody late, null and 0."""
    late = [(v["late_s"], int(rank)) for rank, v in findings["verdicts"].items() if v["verdict"] == LATE]
    late_s, rank = max(late, default=(0.0, None))
    return {"rank": rank, "late_s": late_s}


def _judge(job: Job, places: list[int]) -> RankSet:
    found = RankSet(places)
    if len(places) < 2:
        why = "no process group of several ranks was seen" if job.world_size > 1 else "the job has one rank"
        found.reasons.append(why if not job.missing else "no other rank of its groups has a snapshot")
        return found
    blocks = job.blocks
    if blocks is None:
        found.reasons.append("no blocks of iterations were measured")
        return found
    _choose_compared(job, blocks, found)
    if len(found.compared) < 2:
        found.reasons.append(f"fewer than two ranks have {MIN_BLOCKS} blocks of iterations in common")
        return found
    own_s_RK = blocks.own_s_RK[found.compared]
    known = np.flatnonzero(~np.isnan(own_s_RK).all(axis=0))
    found.iterations, found.blocks = blocks.span(int(known[0]), int(known[-1])), len(known)
    first, last = found.iterations
    found.sides = f"{name_ranks(job.names(found.compared))} side by side over {last - first + 1} iterations"
    found.stages = _stages(job, found)
    patterns, late_s_RK = _patterns(job, found, own_s_RK)
    _hidden(job, found, blocks.iterations)
    _name(job, found, patterns, own_s_RK)
    _set_pattern(job, found, patterns, late_s_RK)
    return found


def _choose_compared(job: Job, blocks: Blocks, found: RankSet) -> None:
    """The ranks with enough blocks and the same steps as the others."""
    own, step = blocks.own_s_RK[found.places], blocks.step_s_RK[found.places]
    enough = (~np.isnan(own)).sum(axis=1) >= MIN_BLOCKS
    short = [place for place, is_enough in zip(found.places, enough, strict=True) if not is_enough]
    if short:
        found.reasons.append(f"{name_ranks(job.names(short))} measured too few iterations")
    if not enough.any():
        return
    common = ~np.isnan(step[enough]).any(axis=0)
    step_s_R = row_medians(np.where(common[None, :], step, math.nan) if common.any() else step)
    found.step_s = float(np.nanmedian(step_s_R[enough])) if not np.isnan(step_s_R[enough]).all() else 0.0
    others = np.abs(step_s_R - found.step_s) > OTHER_STEP_SHARE * found.step_s + 2.0 * FLOOR_S
    apart = [place for place, is_other in zip(found.places, others & enough, strict=True) if is_other]
    if apart:
        verb = "does" if len(apart) == 1 else "do"
        found.reasons.append(f"{name_ranks(job.names(apart))} {verb} not have the same steps as the other ranks")
    found.compared = [p for p, good in zip(found.places, enough & ~others, strict=True) if good]


def _stages(job: Job, found: RankSet) -> dict[int, int]:
    """The stage of each rank in a pipeline: its place in the group that sends and receives."""
    stages: dict[int, int] = {}
    for operation in job.traffic.operations:
        if operation.op in POINT_TO_POINT and operation.group.ranks:
            for place in operation.places.tolist():
                if place in found.places and job.ranks[place] in operation.group.ranks:
                    stages[place] = operation.group.ranks.index(job.ranks[place])
    return stages


def _patterns(job: Job, found: RankSet, own_s_RK: Times) -> tuple[dict[int, Pattern], Times]:
    """When which rank's own work takes longer than that of its like. In a pipeline a rank's like has the same stage."""
    stages = found.stages
    alike: list[list[int]] = [list(range(len(found.compared)))]
    if stages:
        by_stage: dict[int, list[int]] = {}
        for row, place in enumerate(found.compared):
            by_stage.setdefault(stages.get(place, -1), []).append(row)
        replicas = [rows for rows in by_stage.values() if len(rows) > 1]
        alike = replicas or alike
        single = [found.compared[rows[0]] for rows in by_stage.values() if len(rows) == 1] if replicas else []
        if single:
            found.reasons.append(f"{name_ranks(job.names(single))} have no rank of the same pipeline stage beside them")
    patterns: dict[int, Pattern] = {}
    late_s_RK = np.full(own_s_RK.shape, math.nan)
    for rows in alike:
        lateness = compare(own_s_RK[rows], found.step_s)
        late_s_RK[rows] = lateness.late_s_RK
        for i, row in enumerate(rows):
            place = found.compared[row]
            margin_s = float(lateness.margin_s_R[i])
            found.margin_s[place] = margin_s
            pattern = find_pattern(lateness.late_s_RK[i], margin_s, lateness.block_margin_s)
            if pattern is not None:
                patterns[place] = pattern
    if len(alike[0]) == len(found.compared) and len(set(stages.values())) > 1:
        _refuse_unlike_stages(found, patterns, own_s_RK)
    return patterns, late_s_RK


def _refuse_unlike_stages(found: RankSet, patterns: dict[int, Pattern], own_s_RK: Times) -> None:
    """Without a second rank of the same stage, longer work may be the model's: layers are not spread evenly."""
    middle = row_medians(own_s_RK)
    for place, pattern in patterns.items():
        others = np.delete(middle, found.compared.index(place))
        alike = len(others) > 1 and float(np.ptp(others)) <= ALIKE_STAGES * pattern.late_s
        if pattern.kind == CHRONIC and not alike:
            found.refused[place] = "pipeline stages differ in their work, and no other rank has the same stage"


def _hidden(job: Job, found: RankSet, block_iterations: int) -> None:
    """Everything about the set that could not be seen; ranks that it could explain are refused."""
    inside = set(found.places)
    groups = [group for group in job.traffic.groups if inside & set(group.places)]
    unseen = [g for g in groups if g.unseen_per_step * block_iterations >= RARE and g.size > 1]
    touched = {place for group in unseen for place in group.places}
    for unit in connected_sets(len(job.ranks), unseen):
        for place in touched & set(unit):
            ranks = sorted({*job.names(unit), *(r for g in unseen if place in g.places for r in g.ranks or ())})
            found.refused[place] = f"collectives of {name_ranks(ranks)} could not be seen"
    found.reasons += sorted({f"collectives of {words.name_group(g)} could not be seen" for g in unseen})
    used = {id(operation.group): operation.group for operation in job.traffic.operations}
    missing: set[int] = set()
    for group in used.values():
        if inside & set(group.places):
            missing |= set(group.ranks or ()) - set(job.ranks)
            if group.ranks is None and len(group.places) != group.size:
                found.reasons.append(f"the members of {words.name_group(group)} are not known")
    if missing:
        found.reasons.append(f"{name_ranks(sorted(missing))} {'has' if len(missing) == 1 else 'have'} no snapshot")
    _hidden_times(job, found)


def _hidden_times(job: Job, found: RankSet) -> None:
    """Blocked times without a group, and collectives on other threads, which the own time may include."""
    for seconds_R, what in (
        (job.traffic.other_s_R, "in smaller collectives, summed up without their group"),
        (job.traffic.ungrouped_s_R, "in collectives whose group is not known"),
    ):
        seconds = float(seconds_R[found.compared].max(initial=0.0))
        if seconds > _floor_s(found):
            found.reasons.append(f"up to {duration(seconds)} {what}")
    side_s = job.numbers(found.compared, "side", "seconds")
    if side_s.max(initial=0.0) > _floor_s(found):
        found.reasons.append(f"up to {duration(float(side_s.max()))} in collectives on other threads")


def _floor_s(found: RankSet) -> float:
    return max([FLOOR_S, *(m for m in found.margin_s.values() if math.isfinite(m))])


def _name(job: Job, found: RankSet, patterns: dict[int, Pattern], own_s_RK: Times) -> None:
    """The late ranks: longer work, that the members of their groups wait for, and that nothing hidden can explain."""
    late = {place: p for place, p in patterns.items() if p.kind in (CHRONIC, SINCE)}
    largest_s = max((p.late_s for p in late.values()), default=0.0)
    found.late = {place: p for place, p in late.items() if p.late_s >= SECOND_SHARE * largest_s}
    latest = max(found.late, key=lambda place: found.late[place].late_s, default=None)
    known = np.flatnonzero(~np.isnan(own_s_RK).all(axis=0)).tolist()
    chosen = found.late[latest].blocks if latest is not None else known
    found.own_s = dict(zip(found.compared, row_medians(own_s_RK[:, chosen]).tolist(), strict=True))
    found.waits = _waits(job, found, chosen)
    waited_s_R = waited_for(len(job.ranks), found.waits)[found.compared]
    paced_s_R = job.numbers(found.compared, "parts", "pacing_s")  # early ranks that are delayed wait for less
    waited_s_R += np.maximum(others_median(paced_s_R[:, None])[:, 0] - paced_s_R, 0.0)
    waited_s = dict(zip(found.compared, waited_s_R.tolist(), strict=True))
    for place, pattern in found.late.items():
        side_s = number(job.snapshots[place], "side", "seconds") or 0.0
        if place in found.refused:
            continue
        if waited_s[place] < max(CONFIRMED_SHARE * pattern.late_s, _floor_s(found)):
            found.not_waited_for.append(place)
            found.refused[place] = "no member of its groups was seen to wait for it"
        elif pattern.late_s - side_s < SECOND_SHARE * pattern.late_s:
            found.refused[place] = "it may be waiting for a collective on another of its threads"
        else:
            found.named.append(place)


def _waits(job: Job, found: RankSet, chosen: list[int]) -> list[Wait]:
    """The waits of the compared ranks in the operations of their groups."""
    compared, waits = np.zeros(len(job.ranks), dtype=np.bool_), []
    compared[found.compared] = True
    for operation in job.traffic.operations:
        kept = compared[operation.places]
        if kept.sum() > 1 and operation.group.consistent:
            kept_only = operation._replace(places=operation.places[kept], blocked_s_EK=operation.blocked_s_EK[kept])
            waits.append(measure_wait(kept_only, chosen))
    return waits


def _set_pattern(job: Job, found: RankSet, patterns: dict[int, Pattern], late_s_RK: Times) -> None:
    turns = {place: p for place, p in patterns.items() if p.kind in (SOMETIMES, ONCE)}
    known_K = ~np.isnan(late_s_RK).all(axis=0)
    covered = {block for pattern in turns.values() for block in pattern.blocks}
    wait_s = float(job.numbers(found.compared, "wait", "mean_s").min())
    certain = found.complete and not found.refused and wait_s > _floor_s(found) and found.step_s > 0.0
    found.pattern = pattern_of_all(
        [found.late[place].kind for place in found.named],
        len(turns),
        len(covered) / max(int(known_K.sum()), 1),
        wait_s / found.step_s if certain else 0.0,
    )
    if found.pattern == IN_TURNS:
        found.late = turns
        found.lost_s = float(np.maximum(np.nanmax(late_s_RK[:, known_K], axis=0), 0.0).mean())
    elif not found.named:
        found.late |= turns
        found.lost_s = wait_s if found.pattern == VARIATION else 0.0


def _verdict(job: Job, found: RankSet, place: int) -> dict[str, Any]:
    """The verdict on the rank at ``place``, and its evidence in words."""
    first, last = found.iterations
    rests_on = {"ranks": max(len(found.compared), 1), "iterations": last - first + 1 if last else 0}
    if place not in found.compared:
        why = found.reasons[0] if found.reasons else "not compared"
        return verdict_of(UNKNOWN, why)
    sides = found.sides
    margin_s = found.margin_s.get(place, math.inf)
    pattern = found.late.get(place)
    if place in found.named and pattern is not None:
        share = len(pattern.blocks) / max(found.blocks, 1)
        return verdict_of(LATE, f"{sides}: its own work takes longer", late_s=pattern.late_s, share=share, **rests_on)
    early_s = max((_earlier_s(found, place, late) for late in found.named), default=0.0)
    early_s = early_s if early_s > margin_s else _waits_at_least(found, place)
    refused = found.refused.get(place, "") if place in found.late else ""
    if refused and pattern is not None and (early_s <= margin_s or place not in found.not_waited_for):
        return verdict_of(
            UNKNOWN, f"{sides}: its own work takes {duration(pattern.late_s)} longer, but {refused}", **rests_on
        )
    if early_s > max(margin_s, FLOOR_S) and math.isfinite(margin_s):
        return verdict_of(EARLY, f"{sides}: it waits in collectives", early_s=early_s, **rests_on)
    if refused and not found.complete and pattern is not None:
        why = f"its own work takes {duration(pattern.late_s)} longer, but {refused}"
        return verdict_of(UNKNOWN, f"{sides}: {why}", **rests_on)
    if not found.complete:
        return verdict_of(UNKNOWN, f"{sides}, but {found.reasons[0]}", **rests_on)
    if not margin_s <= TOO_NOISY_SHARE * found.step_s:
        return verdict_of(UNKNOWN, f"{sides}: too noisy to identify less than {_limit(margin_s)}", **rests_on)
    why = f"{sides}: arrives within {duration(margin_s)}"
    if found.pattern == IN_TURNS and pattern is not None:
        why = f"{sides}: on average; late by {duration(pattern.late_s)} in {len(pattern.blocks)} blocks, in turns"
    return verdict_of(ON_TIME, why, **rests_on)


def _earlier_s(found: RankSet, place: int, late: int) -> float:
    """How much earlier a rank is than a late one, seconds. The own times of two stages of a pipeline say nothing."""
    if found.stages.get(place) != found.stages.get(late):
        return found.late[late].late_s
    return found.own_s[late] - found.own_s[place]


def _limit(margin_s: float) -> str:
    return duration(margin_s) if math.isfinite(margin_s) else "any difference"


def _waits_at_least(found: RankSet, place: int) -> float:
    """The longest wait of a rank in one group, over operations with a common end: a difference of arrivals, seconds."""
    sums: dict[int, float] = {}
    for wait in found.waits:
        if wait.common_end:
            at = np.searchsorted(wait.places, place)
            if at < len(wait.places) and wait.places[at] == place:
                sums[id(wait.group)] = sums.get(id(wait.group), 0.0) + float(wait.wait_s_E[at])
    return max(sums.values(), default=0.0)


def _set_data(job: Job, found: RankSet) -> dict[str, Any]:
    late = [
        {
            "rank": job.ranks[place],
            "late_s": found.late[place].late_s,
            "kind": found.late[place].kind,
            "iterations": list(words.block_span(job, found.late[place])),
            "named": place in found.named,
            "why_not": found.refused.get(place),
        }
        for place in sorted(found.late)
    ]
    return {
        "ranks": job.names(found.places),
        "compared": len(found.compared),
        "iterations": list(found.iterations),
        "step_s": found.step_s or None,
        "late": late,
        "pattern": found.pattern,
        "lost_s": found.lost_s,
        "complete": found.complete,
        "reasons": found.reasons,
    }


def _wait_data(job: Job, sets: Sequence[RankSet]) -> list[dict[str, Any]]:
    """The longest waits, at most :data:`MAX_WAITS`."""
    rows = []
    for found in sets:
        floor_s = _floor_s(found)
        for wait in found.waits:
            longest_s = float(wait.wait_s_E.max(initial=0.0))
            if longest_s > floor_s:
                rows.append((longest_s, wait, floor_s))
    rows.sort(key=lambda row: -row[0])
    data = []
    for longest_s, wait, floor_s in rows[:MAX_WAITS]:
        last = wait.places[wait.wait_s_E <= floor_s].tolist()
        waiting = wait.places[wait.wait_s_E > floor_s].tolist()
        members = list(wait.group.ranks) if wait.group.ranks is not None else None
        data.append(
            {
                "op": wait.op,
                "group": wait.group.name,
                "ranks": members,
                "common_end": wait.common_end,
                "last": job.names(last),
                "waiting": job.names(waiting),
                "wait_s": longest_s,
            }
        )
    return data


def _unattributed(job: Job, sets: Sequence[RankSet]) -> list[dict[str, Any]]:
    """What cannot be seen or attributed, with the ranks and the seconds per step where they are known."""
    found: list[dict[str, Any]] = []

    def add(line: str, ranks: Sequence[int], seconds: float | None = None) -> None:
        found.append({"text": line, "ranks": list(ranks), "seconds": seconds})

    if job.missing:
        blocked_s = _blocked_beside_missing(job)
        limit = f"; their groups are blocked for up to {duration(blocked_s)} per step" if blocked_s else ""
        have = "has" if len(job.missing) == 1 else "have"
        add(f"{name_ranks(job.missing)} {have} no snapshot: waits for them are not attributed{limit}", job.missing)
    for group in job.traffic.groups:
        if group.unseen_per_step > 0.0 and group.size > 1:
            why = f" ({group.unseen_why})" if group.unseen_why else ""
            line = f"{group.unseen_per_step:.3g} collectives per step of {words.name_group(group)} were not seen{why}"
            add(f"{line}: waits in them count as own work", group.ranks or job.names(group.places))
    side_s = job.numbers(range(len(job.ranks)), "side", "seconds")
    beside = np.flatnonzero(side_s > FLOOR_S).tolist()
    if beside:
        longest_s = float(side_s.max())
        line = f"{name_ranks(job.names(beside))}: collectives on other threads, {duration(longest_s)} per step"
        add(f"{line}: whether the step waits for them is not known", job.names(beside), longest_s)
    for rank_set in sets:
        mentioned = ("could not be seen", "no snapshot", "other threads")
        for reason in rank_set.reasons:
            if not any(word in reason for word in mentioned):
                add(f"{name_ranks(job.names(rank_set.places))}: {reason}", job.names(rank_set.places))
    _add_left_out(job, add)
    return found


def _add_left_out(job: Job, add: Any) -> None:
    seen, left_out = (job.numbers(range(len(job.ranks)), name) for name in ("iterations", "irregular"))
    share = left_out / np.maximum(seen, 1.0)
    many = np.flatnonzero((share > LEFT_OUT_SHARE) & (seen > 0)).tolist()
    if many:
        line = f"{name_ranks(job.names(many))}: up to {100.0 * float(share.max()):.0f} % of the iterations"
        add(f"{line} are unlike the usual or marked, and left out", job.names(many))


def _blocked_beside_missing(job: Job) -> float:
    """The longest blocked time in groups that have a missing member: the most that is waited for it, seconds."""
    lost = set(job.missing)
    times = [
        float(row_medians(operation.blocked_s_EK).max())
        for operation in job.traffic.operations
        if lost & set(operation.group.ranks or ())
    ]
    return max(times, default=0.0)
