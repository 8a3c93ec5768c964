"""Findings in words: which rank is late and since when, who waits for it and where, what late ranks have in common."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceenv.core.lateness import common_place
from paceenv.core.lateness.words import late_line, past_line, share_of, teams
from paceenv.core.wording import IN_VAIN, count, duration, name_ranks, percent
from paceenv.live.record.history import STOPPED
from paceenv.live.record.rank_sets import RankSet
from paceenv.live.record.run_folder import SILENT_PERIODS, SILENT_S, age_s, is_silent, patience_s, status_period_s
from paceenv.live.record.side_by_side import Job, Wait
from paceenv.live.record.snapshot import ASKED, EARLY, ON_TIME, UNKNOWN, Snapshot, number, text

RESTART = (
    "to restart all ranks after such an end: torchrun --max-restarts N, on gloo with "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; the script has to load its last checkpoint"
)
UNHEARD = "nothing heard for"
STILL_S, STILL_STEPS = 5.0, 10.0
"""Steps have stopped where none has ended for so long, for so many times the 99 % quantile, and for longer than any
before; :data:`SILENT_S` is always long enough for the first and the last."""
STOPS = f"steps of over {STOPPED:g} times the median"
STOPPED_SHARE = 0.02
"""Stopped steps are told with the ranks where they took so much of the time."""
LISTED = 4
"""Ranks, groups and reasons that are listed; further ones are counted."""


def describe(job: Job, sets: Sequence[RankSet], verdicts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    ended = describe_end(job.snapshots)
    late = sorted(
        ((rank_set.late[team[0]].late_s, team, rank_set) for rank_set in sets for team in _teams(rank_set)),
        key=lambda row: -row[0],
    )
    still = stands_still(job.snapshots)
    told_first = broke_off(job.snapshots) or still is not None
    lines = [*silent(job.snapshots), *(ended if told_first else [])]
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
        behind = {str(rank) for rank in still.behind} if still is not None else set()
        verdicts = {rank: one for rank, one in verdicts.items() if one["verdict"] != ON_TIME and rank not in behind}
    lines += _counted(verdicts, late=bool(late), uneven=any(rank_set.lost_s for rank_set in sets))
    unattributed = [f"{job.names(one.places)}: {reason}" for one in sets for reason in one.reasons]
    lines += [f"not attributable: {line}" for line in unattributed[:LISTED]]
    if len(unattributed) > LISTED:
        lines.append(f"not attributable: {len(unattributed) - LISTED} further reasons")
    return [*lines, *([] if told_first else ended)]


def stopped(snapshot: Snapshot) -> tuple[float, float]:
    """The share of a rank's time that stopped steps took, which are left out of its means; and the mean with them."""
    steps, stops = number(snapshot, "regular") or 0.0, number(snapshot, "stopped", "count") or 0.0
    stopped_s = number(snapshot, "stopped", "total_s") or 0.0
    all_s = stopped_s + steps * (number(snapshot, "step", "mean_s") or 0.0)
    return stopped_s / max(all_s, 1e-9), all_s / max(steps + stops, 1.0)


def describe_end(snapshots: Sequence[Snapshot]) -> list[str]:
    """How a job broke off: who ended without a last word, and who raised what; nothing of one that ended as it should.

    A rank that loses another one in a collective raises, too, so the first counts, in order of time. Where that was
    interrupted by its user, nothing broke.
    """
    raised, interrupted, gone = _broke_off(snapshots)
    lines, earlier = [], list[int]()
    if gone:
        how = "as one does that SIGKILL (out of memory), SIGSEGV, SIGABRT or os._exit ends"
        how += "; before a first step SIGTERM, too" * any(number(s, "iterations") == 0.0 for s in snapshots)
        lines.append(f"{name_ranks(gone)} left no last word, {how}")
    if raised:
        first, *others = raised
        before_s = number(first, "unix_time_s") or 0.0
        ended = [s for s in snapshots if s.get("final") and not text(s, "ended")]
        earlier = [int(s["rank"]) for s in ended if (number(s, "unix_time_s") or before_s) < before_s]
        if earlier:
            lines.append(f"{name_ranks(earlier)} ended before the others, without an exception")
        after = f"; after it, {name_ranks([int(s['rank']) for s in others])} raised, too" if others else ""
        seen = count(number(first, "iterations"))
        lost, quiet = Job(snapshots).missing, [int(s["rank"]) for s in snapshots if s not in raised]
        if (lost or (quiet and not gone)) and all(any(words in text(s, "ended") for words in IN_VAIN) for s in raised):
            who = f"{name_ranks(lost)} left no status" if lost else f"{name_ranks(quiet)} raised nothing"
            lines.append(f"{who}, and the others waited in vain: look there first")
        how = "was interrupted:" if interrupted else "raised"
        lines.append(f"rank {first['rank']} {how} {text(first, 'ended')}, after {seen} iterations{after}")
    still = stands_still(snapshots)
    may_help = gone or (raised and "onnection" in text(raised[0], "ended") and not earlier)
    if may_help and not (still is not None and still.behind):
        lines.append(RESTART)  # elsewhere, the same would come again
    return lines


def broke_off(snapshots: Sequence[Snapshot]) -> bool:
    """Whether a job did not end as it should, nor by its user."""
    raised, interrupted, gone = _broke_off(snapshots)
    return bool(gone or (raised and not interrupted))


def _broke_off(snapshots: Sequence[Snapshot]) -> tuple[list[Snapshot], bool, list[int]]:
    """Who raised, the first one first; whether that was an interrupt; and who left no last word."""
    raised = sorted(
        (s for s in snapshots if text(s, "ended") not in ("", ASKED)), key=lambda s: number(s, "unix_time_s") or 0.0
    )
    interrupted = bool(raised) and text(raised[0], "ended").startswith(KeyboardInterrupt.__name__)
    left = [s for s in snapshots if not s.get("final") and (s.get("gone") or is_silent(s, time.time()))]
    return raised, interrupted, [int(s["rank"]) for s in left] if _is_over(snapshots) else []


def unheard(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """The ranks that have not ended, as far as is known, and were not heard from for too long: a hang, perhaps."""
    return [] if _is_over(snapshots) else [s for s in snapshots if is_silent(s, time.time())]


def silent(snapshots: Sequence[Snapshot]) -> list[str]:
    """Ranks that were not heard from, and whether steps have stopped.

    Agents of ranks that wait in a hang write on: where none is heard, none waits.
    """
    now_s = time.time()
    ages_s = {int(s["rank"]): age_s(s, now_s) or 0.0 for s in unheard(snapshots)}
    least_s = min(ages_s.values(), default=0.0)
    longer = [rank for rank, one_s in ages_s.items() if one_s > least_s + patience_s(len(ages_s))]
    who, said = name_ranks(ages_s), f"{UNHEARD} {duration(least_s)}"
    where = "".join(f"; {_where(s)}" for s in snapshots if int(s["rank"]) in list(ages_s)[:1])
    if len(ages_s) == len(snapshots):
        who, said = "the job is gone or cut off", f"{said} from any rank"
        said, where = said + f", for longer from {name_ranks(longer)}" * bool(longer), ""
    lines = [f"{who}: {said}; the rest is from before{where}"] * bool(ages_s)
    stopped = [one.said for one in [stands_still(snapshots)] if one is not None]
    return [*stopped, *lines] if len(ages_s) == len(snapshots) else [*lines, *stopped]


class Standstill(NamedTuple):
    """That no step ends, or that none did when the job was over; ``behind`` are the ranks that others wait for."""

    still_s: float
    behind: list[int]
    said: str


def stands_still(snapshots: Sequence[Snapshot]) -> Standstill | None:
    """Whether steps have stopped, by the ranks that are heard; of a job that is over, by the last status of each."""
    now_s = time.time()
    running = [s for s in snapshots if not (s.get("final") or s.get("gone"))]
    over = any(s.get("final") for s in snapshots) or all(is_silent(s, now_s) for s in running)
    heard, most_s = (list(snapshots), float("inf")) if over else (running, now_s)  # clocks may differ
    written_s = {int(s["rank"]): min(number(s, "unix_time_s") or now_s, most_s) for s in heard}
    # a rank that holds Python's lock writes no status any more, and starts nothing
    recent_s = max(written_s.values(), default=0.0) - 0.5 * SILENT_PERIODS * status_period_s(len(heard))
    old = {int(s["rank"]) for s in heard if not s.get("final") and written_s[int(s["rank"])] < recent_s}
    newer_s = [one_s for rank, one_s in written_s.items() if rank not in old]
    until_s = min(newer_s, default=0.0) if over else now_s
    still_s = min(((number(s, "still_s") or 0.0) + until_s - written_s[int(s["rank"])] for s in heard), default=0.0)
    usual_s = max((number(s, "step", "p99_s") or 0.0 for s in heard), default=0.0)
    longest_s = max((number(s, "step", "longest_s") or 0.0 for s in heard), default=0.0)
    aged_s = [until_s - one_s for one_s in newer_s]  # statuses of different moments show no standstill
    if still_s <= max(min(max(STILL_S, longest_s), SILENT_S), STILL_STEPS * usual_s, *aged_s):
        return None
    job = Job(heard)
    behind, waiting = job.held_up(old)
    ranks = [job.ranks[place] for place in behind]
    if still_s <= SILENT_S and not (longest_s and (behind or not over)):
        return None
    said = _stood(job, behind, waiting, still_s) if over else _stands(job, behind, waiting, still_s, longest_s)
    return Standstill(still_s, ranks, said) if said else None


def _stood(job: Job, behind: list[int], waiting: list[int], still_s: float) -> str:
    """Of a job that is over; "" where it ended as it should, or broke off by what a rank raised first."""
    raised, interrupted, _ = _broke_off(job.snapshots)
    if not any(text(s, "ended") or s.get("gone") or is_silent(s, time.time()) for s in job.snapshots):
        return ""
    if raised and not interrupted and (not behind or raised[0]["rank"] in [job.ranks[place] for place in behind]):
        return ""
    said = f"the last step ended {duration(still_s)} before the job did"
    said = said if any(number(s, "iterations") for s in job.snapshots) else "the job ended before its first step"
    if not behind:
        return f"{said}: it hung, evaluated or saved"
    at = text(job.snapshots[behind[0]], "at")
    said += f"; rank {job.ranks[behind[0]]} was at {at}" * bool(at)
    return f"{job.names(behind)} had not started the collective that {job.names(waiting)} waited in; {said}"


def _stands(job: Job, behind: list[int], waiting: list[int], still_s: float, longest_s: float) -> str:
    said = f"no step has ended for {duration(still_s)}"
    said += f"; the longest before took {duration(longest_s)}" * (longest_s > 0.0)
    if not behind:
        begun = any(number(s, "iterations") for s in job.snapshots)
        said += f"; no status of {name_ranks(job.missing)}" * (bool(job.missing) and not begun)
        ranks_at = dict[str, list[int]]()
        for rank, snapshot in zip(job.ranks, job.snapshots, strict=True):
            ranks_at.setdefault(text(snapshot, "at"), []).append(rank)
        known = [(ranks, at) for at, ranks in ranks_at.items() if at][:LISTED]
        said += "".join(f"; {name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} at {at}" for ranks, at in known)
        return f"{said}: the job hangs, {'evaluates or saves' if begun else 'loads or compiles'}"
    has, it, acts = "has", "it", "it hangs, evaluates or saves"
    if len(behind) > 1:
        has, it, acts = "have", "the first one", "they hang, evaluate or save"
    waits, where = "waits" if len(waiting) == 1 else "wait", _where(job.snapshots[behind[0]], it)
    which = f"the collective that {job.names(waiting)} {waits} in"
    return f"{job.names(behind)} {has} not started {which}: {acts}; {where}; {said}"


def _where(of: Snapshot, it: str = "it") -> str:
    process, host, at = text(of, "locality", "process").rpartition(" ")[2], text(of, "host"), text(of, "at")
    said = f"{it} is at {at}; " * bool(at)
    return f"{said}py-spy dump --pid {process} on {host} shows where {it} stands"


def _is_over(snapshots: Sequence[Snapshot]) -> bool:
    """Whether a rank has ended; then silent ones have, too, without a last word."""
    return any(s.get("final") or s.get("gone") for s in snapshots)


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
        if late.spans[-1].last is not None:
            lines.append(past_line([rank_set.job.ranks[place]], late, *rank_set.job.span(late, 0)))
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
