"""Findings in words: which rank is late and since when, who waits for it and where, what late ranks have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceenv.core.lateness import common_place
from paceenv.core.lateness.words import late_line, past_line, share_of, teams
from paceenv.core.wording import count, duration, name_ranks, percent
from paceenv.live.record.course import LISTED, Course
from paceenv.live.record.history import STOPPED
from paceenv.live.record.rank_sets import RankSet
from paceenv.live.record.side_by_side import Job, Wait
from paceenv.live.record.snapshot import EARLY, ON_TIME, UNKNOWN, Snapshot, number, text

STOPS = f"steps of over {STOPPED:g} times the median"
STOPPED_SHARE = 0.02
"""Stopped steps are told with the ranks where they took so much of the time."""


def describe(job: Job, course: Course, sets: Sequence[RankSet], verdicts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    late = sorted(
        ((rank_set.late[team[0]].late_s, team, rank_set) for rank_set in sets for team in _teams(rank_set)),
        key=lambda row: -row[0],
    )
    told_first = course.broke_off or course.still is not None
    lines = [*course.silent, *(course.ended if told_first else [])]
    if told_first and not any(number(s, "iterations") for s in job.snapshots):
        return lines
    lines += [_late_line(rank_set, team) for _, team, rank_set in late[:LISTED]]
    if len(late) > LISTED:
        more = sum(len(team) for _, team, _ in late[LISTED:])
        lines.append(f"and {count(more)} more ranks are late")
    most = max(job.snapshots, key=lambda s: stopped(s)[0])
    if stopped(most)[0] >= STOPPED_SHARE:
        share, longest = percent(stopped(most)[0]), duration(number(most, "stopped", "longest_s"))
        said = f"{STOPS} took {share} of the time, the longest {longest}"
        own_s_R = job.numbers(range(len(job.ranks)), "stopped", "own_s")
        more_s = float(own_s_R.max() - np.sort(own_s_R)[-2:].min())
        if more_s > 0.5 * (number(most, "stopped", "total_s") or 0.0):
            late_s = more_s / (number(most, "stopped", "count") or 1.0)
            said += f"; the others waited in them for rank {job.ranks[int(own_s_R.argmax())]}, {duration(late_s)} each"
        lines.append(said)
    hosts = {rank: text(s, "host") for rank, s in zip(job.ranks, job.snapshots, strict=True)}
    named = [job.ranks[place] for rank_set in sets for place in rank_set.named]
    lines += filter(None, [common_place.in_common(named, hosts, {common_place.HOST: hosts})])
    for rank_set in sets:
        lines += _refused(rank_set)[:LISTED]
        lines += _past_and_lost(rank_set)
    if told_first:  # then nobody asks who was on time
        behind = {str(rank) for rank in course.still.behind} if course.still is not None else set()
        verdicts = {rank: one for rank, one in verdicts.items() if one["verdict"] != ON_TIME and rank not in behind}
    lines += _counted(verdicts, late=bool(late), uneven=any(rank_set.lost_s for rank_set in sets))
    unattributed = [f"{job.names(one.places)}: {reason}" for one in sets for reason in one.reasons]
    lines += [f"not attributable: {line}" for line in unattributed[:LISTED]]
    if len(unattributed) > LISTED:
        lines.append(f"not attributable: {len(unattributed) - LISTED} further reasons")
    return [*lines, *([] if told_first else course.ended)]


def stopped(snapshot: Snapshot) -> tuple[float, float]:
    """The share of a rank's time that stopped steps took, which are left out of its means; and the mean with them."""
    steps, stops = number(snapshot, "regular") or 0.0, number(snapshot, "stopped", "count") or 0.0
    stopped_s = number(snapshot, "stopped", "total_s") or 0.0
    all_s = stopped_s + steps * (number(snapshot, "step", "mean_s") or 0.0)
    return stopped_s / max(all_s, 1e-9), all_s / max(steps + stops, 1.0)


def _teams(rank_set: RankSet) -> list[list[int]]:
    """The late ranks, those that are late alike together; the latest first."""
    rows = sorted((rank_set.late[place] for place in rank_set.named), key=lambda late: -late.late_s)
    return [[rank_set.compared[late.rank] for late in team] for team in teams(rows, 0)]


def _late_line(rank_set: RankSet, team: list[int]) -> str:
    job, late = rank_set.job, rank_set.late[team[0]]
    hosts = sorted({text(job.snapshots[place], "host") for place in team} - {""})
    on = f" ({hosts[0]})" if len(hosts) == 1 else f" (on {len(hosts)} hosts)" if hosts else ""
    head = late_line([job.ranks[place] for place in team], late, job.span(late)[0], on)
    clauses = _clauses(rank_set, team)
    missing = "; ranks without a snapshot may be later" if job.missing else ""
    return head + (f": {', '.join(clauses)}" if clauses else "") + missing


def _clauses(rank_set: RankSet, team: list[int]) -> list[str]:
    """Who waits for the late ranks ``team``, each rank where it waits for longest: one clause for each operation."""
    floor_s = 0.5 * min(rank_set.late[place].late_s for place in rank_set.named)  # a shorter wait is not told
    longest: dict[int, tuple[float, Wait]] = {}
    for wait in rank_set.waits:
        for place, seconds in zip(wait.places.tolist(), wait.wait_s_E.tolist(), strict=True):
            if seconds > (longest[place][0] if place in longest else floor_s):
                longest[place] = seconds, wait
    waiting: dict[int, tuple[Wait, list[int]]] = {}
    for place, (_, wait) in longest.items():
        last = wait.places[wait.wait_s_E <= floor_s]
        if place not in rank_set.named and np.isin(last, team).any():
            waiting.setdefault(id(wait), (wait, []))[1].append(place)
    rows = sorted(waiting.values(), key=lambda row: (len(row[0].places), row[0].op, row[1][0]))
    clauses = [
        f"{rank_set.job.names(places)} {'waits' if len(places) == 1 else 'wait'} for "
        f"{'it' if len(team) == 1 else 'them'} in {wait.op} of {name_ranks(wait.group.ranks)}"
        for wait, places in rows[:LISTED]
    ]
    if len(rows) > LISTED:
        more = sum(len(places) for _, places in rows[LISTED:])
        clauses.append(f"{count(more)} more ranks wait in {len(rows) - LISTED} other groups")
    return clauses


def _refused(rank_set: RankSet) -> list[str]:
    """Longer work that is not called late, and why; ranks with the same reason in one line."""
    reasons: dict[str, list[int]] = {}
    for place in rank_set.late:
        if place in rank_set.refused and place not in rank_set.named and rank_set.late[place].spans[-1].last is None:
            reasons.setdefault(rank_set.refused[place], []).append(place)
    lines = []
    for why, places in reasons.items():
        longest = duration(max(rank_set.late[place].late_s for place in places))
        takes = "its own work takes" if len(places) == 1 else "their own work takes up to"
        lines.append(f"{rank_set.job.names(places)}: {takes} {longest} longer than that of the others, but {why}")
    return lines


def _past_and_lost(rank_set: RankSet) -> list[str]:
    """Lateness that is over, and time that is lost although nobody is late on average."""
    lines = []
    if rank_set.lost_s:
        waits = f"waited at least {duration(rank_set.lost_s)} per step{share_of(rank_set.lost_s, rank_set.step_s)}"
        lines.append(
            f"each of {rank_set.job.names(rank_set.compared)} {waits}, "
            "and none was surely the last on average: so far their work or the network varied"
        )
    for place in sorted(rank_set.late):
        late = rank_set.late[place]
        first, last = rank_set.job.span(late, 0)
        if late.spans[-1].last is not None and first != last:  # a single long iteration is nothing to look into
            lines.append(past_line([rank_set.job.ranks[place]], late, first, last))
    if len(lines) > LISTED:
        lines = [*lines[: LISTED - 1], f"{len(lines) - LISTED + 1} more ranks were late for a while"]
    return lines


def _counted(verdicts: Mapping[str, Mapping[str, Any]], *, late: bool, uneven: bool) -> list[str]:
    """Early, on time and not judged, in one line each."""
    early, unknown, on_time = (
        [int(rank) for rank, verdict in verdicts.items() if verdict["verdict"] == kind]
        for kind in (EARLY, UNKNOWN, ON_TIME)
    )
    lines = []
    if early:
        longest = duration(max(float(verdicts[str(rank)]["early_s"]) for rank in early))
        each = longest if len(early) == 1 else f"up to {longest} each"
        lines.append(f"early, and waiting: {name_ranks(early)}, {each}")
    if unknown:
        [(why, _)] = Counter(str(verdicts[str(rank)]["evidence"]) for rank in unknown).most_common(1)
        lines.append(f"insufficient evidence: {name_ranks(unknown)}; {why}")
    if on_time:
        everyone = len(on_time) == len(verdicts) and not late
        average = " on average" if uneven else ""
        lines.append(f"all ranks arrive on time{average}" if everyone else f"on time: {name_ranks(on_time)}")
    return lines
