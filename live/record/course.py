"""How a job goes on: ranks that are silent, steps that have stopped, and how it ended; each in words, too."""

from __future__ import annotations

import time
from typing import NamedTuple

from paceenv.core.wording import IN_VAIN, count, duration, name_ranks
from paceenv.live.record.run_folder import SILENT_PERIODS, SILENT_S, age_s, is_silent, patience_s, status_period_s
from paceenv.live.record.side_by_side import Job
from paceenv.live.record.snapshot import ASKED, Snapshot, number, text

RESTART = (
    "to restart all ranks after such an end: torchrun --max-restarts N, on gloo with "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; the script has to load its last checkpoint"
)
STILL_S, STILL_STEPS = 5.0, 10.0
"""Steps have stopped where none has ended for so long, for so many times the 99 % quantile, and for longer than any
before; :data:`SILENT_S` is always long enough for the first and the last."""
LISTED = 4
"""Ranks, groups, places and reasons that are listed."""


class Standstill(NamedTuple):
    """That no step ends, or that none did when the job was over; ``behind`` are the ranks that others wait for."""

    still_s: float
    behind: list[int]
    said: str


class Course:
    """What the last snapshot of each rank says of the course of an attempt.

    Attributes:
        unheard: ranks that have not ended, as far as is known, and were not heard from for too long: a hang, perhaps.
        still: that steps have stopped, by the ranks that are heard; of a job that is over, by the last status of each.
        broke_off: whether the job did not end as it should, nor by its user.
        silent: lines on ranks that were not heard from, and whether steps have stopped.
        ended: lines on how the job broke off; none of one that ended as it should.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._snapshots, self._now_s = job, job.snapshots, (now_s := time.time())
        self._begun = any(number(s, "iterations") for s in self._snapshots)
        is_over = any(s.get("final") or s.get("gone") for s in self._snapshots)
        silent = [s for s in self._snapshots if is_silent(s, now_s)]
        self.unheard = [] if is_over else silent
        self._raised = sorted(
            (s for s in self._snapshots if text(s, "ended") not in ("", ASKED)),
            key=lambda s: number(s, "unix_time_s") or 0.0,
        )
        self._interrupted = bool(self._raised) and text(self._raised[0], "ended").startswith(KeyboardInterrupt.__name__)
        until_s = number(self._raised[0], "unix_time_s") or 0.0 if self._interrupted else float("inf")
        until_s -= SILENT_PERIODS * status_period_s(len(self._snapshots))
        gone = [s for s in self._snapshots if s in silent or (s.get("gone") and not s.get("final"))] if is_over else []
        # the launcher killed who did not hear an interrupt, because it waited in C++, say
        self._outlived = [s for s in gone if (number(s, "unix_time_s") or 0.0) > until_s]
        self._gone = [s for s in gone if s not in self._outlived]
        self.broke_off = bool(self._gone or (self._raised and not self._interrupted))
        self.still = self._find_standstill()
        self.silent, self.ended = self._describe_silence(), self._describe_end()

    def _describe_end(self) -> list[str]:
        """Who ended without a last word, and who raised what.

        A rank that loses another one in a collective raises, too, so the first counts, in order of time. Where that was
        interrupted by its user, nothing broke.
        """
        snapshots, gone = self._snapshots, [int(s["rank"]) for s in self._gone]
        lines, earlier, awaited = [], list[int](), self.still.behind if self.still is not None else []
        if gone:
            how = "SIGTERM, " * any(number(s, "iterations") == 0.0 for s in snapshots)
            how += "SIGKILL (out of memory, say), SIGSEGV, SIGABRT or os._exit"
            lines.append(f"{name_ranks(gone)} ended without a last word: by {how}")
        if self._raised:
            first, *others = self._raised
            before_s = number(first, "unix_time_s") or 0.0
            ended = [s for s in snapshots if s.get("final") and not text(s, "ended")]
            earlier = [int(s["rank"]) for s in ended if (number(s, "unix_time_s") or before_s) < before_s]
            if earlier:
                lines.append(f"{name_ranks(earlier)} ended before the others, without an exception")
            after = f"; after it, {name_ranks([int(s['rank']) for s in others])} raised, too" if others else ""
            if self._outlived:
                after += f"; {name_ranks([int(s['rank']) for s in self._outlived])} did not end by it and were killed"
            seen = count(number(first, "iterations"))
            lost, quiet = self._job.missing, [int(s["rank"]) for s in snapshots if s not in self._raised]
            in_vain = all(any(words in text(s, "ended") for words in IN_VAIN) for s in self._raised)
            if in_vain and not awaited and (lost or (quiet and not gone)):
                who = f"{name_ranks(lost)} left no status" if lost else f"{name_ranks(quiet)} raised nothing"
                lines.append(f"{who}, and the others waited in vain: look there first")
            how = "was interrupted:" if self._interrupted else "raised"
            lines.append(f"rank {first['rank']} {how} {text(first, 'ended')}, after {seen} iterations{after}")
        may_help = gone or (self._raised and "onnection" in text(self._raised[0], "ended") and not earlier)
        if may_help and self._begun and not awaited:
            lines.append(RESTART)  # elsewhere, the same would come again
        return lines

    def _describe_silence(self) -> list[str]:
        """Agents of ranks that wait in a hang write on: where none is heard, none waits."""
        ages_s = {int(s["rank"]): age_s(s, self._now_s) or 0.0 for s in self.unheard}
        least_s = min(ages_s.values(), default=0.0)
        longer = [rank for rank, one_s in ages_s.items() if one_s > least_s + patience_s(len(ages_s))]
        who, said = name_ranks(ages_s), f"nothing heard for {duration(least_s)}"
        where = "".join(f"; {_where(s)}" for s in self.unheard[:1])
        if len(ages_s) == len(self._snapshots):
            who, said = "the job is gone or cut off", f"{said} from any rank"
            said, where = said + f", for longer from {name_ranks(longer)}" * bool(longer), ""
        lines = [f"{who}: {said}; the rest is from before{where}"] * bool(ages_s)
        stopped = [self.still.said] if self.still is not None else []
        return [*stopped, *lines] if len(ages_s) == len(self._snapshots) else [*lines, *stopped]

    def _find_standstill(self) -> Standstill | None:
        now_s = self._now_s
        running = [s for s in self._snapshots if not (s.get("final") or s.get("gone"))]
        over = any(s.get("final") for s in self._snapshots) or all(is_silent(s, now_s) for s in running)
        heard, most_s = (self._snapshots, float("inf")) if over else (running, now_s)  # clocks may differ
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
        if still_s <= SILENT_S and not (longest_s and (behind or not over)) and (self._begun or not over):
            return None
        of = job, behind, waiting, still_s
        said = self._say_that_it_stood(*of) if over else _say_that_it_stands(*of, longest_s)
        return Standstill(still_s, [job.ranks[place] for place in behind], said) if said else None

    def _say_that_it_stood(self, job: Job, behind: list[int], waiting: list[int], still_s: float) -> str:
        """Of a job that is over; "" where it ended as it should, or broke off by what a rank raised first."""
        if not (self._gone or any(text(s, "ended") or is_silent(s, self._now_s) for s in self._snapshots)):
            return ""
        broke = self._raised and not self._interrupted
        if broke and (not behind or self._raised[0]["rank"] in [job.ranks[place] for place in behind]):
            return ""
        said, acts = f"the last step ended {duration(still_s)} before the job did", "evaluated or saved"
        if not self._begun:
            said, acts = "the job ended before its first step", "loaded or compiled"
        said += f": it hung, {acts}" * (not behind) + _places(job, behind, ("was", "were"))
        if not behind:
            return said
        return f"{job.names(behind)} had not started the collective that {job.names(waiting)} waited in; {said}"


def _say_that_it_stands(job: Job, behind: list[int], waiting: list[int], still_s: float, longest_s: float) -> str:
    said = f"no step has ended for {duration(still_s)}"
    said += f"; the longest before took {duration(longest_s)}" * (longest_s > 0.0)
    if not behind:
        begun = any(number(s, "iterations") for s in job.snapshots)
        said += f"; no status of {name_ranks(job.missing)}" * (bool(job.missing) and not begun)
        said += _places(job, behind)
        return f"{said}: the job hangs, {'evaluates or saves' if begun else 'loads or compiles'}"
    which = f"the collective that {job.names(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in"
    first = job.snapshots[behind[0]]
    if len(behind) == 1:
        return f"{job.names(behind)} has not started {which}: it hangs, evaluates or saves; {_where(first)}; {said}"
    acts = f"they hang, evaluate, save or are in different collectives{_places(job, behind)}"
    return f"{job.names(behind)} have not started {which}: {acts}; {_dump(first, 'the first one')}; {said}"


def _places(job: Job, places: list[int], verbs: tuple[str, str] = ("is", "are")) -> str:
    """Where ranks at these places stand in the script, or all ranks without any; "" where that is not known."""
    ranks_at = dict[str, list[int]]()
    for place in places or range(len(job.ranks)):
        ranks_at.setdefault(text(job.snapshots[place], "at"), []).append(job.ranks[place])
    known = [(ranks, at) for at, ranks in ranks_at.items() if at][:LISTED]
    return "".join(f"; {name_ranks(ranks)} {verbs[len(ranks) > 1]} at {at}" for ranks, at in known)


def _where(of: Snapshot) -> str:
    at = text(of, "at")
    return f"it is at {at}; " * bool(at) + _dump(of, "it")


def _dump(of: Snapshot, it: str) -> str:
    process, host = text(of, "locality", "process").rpartition(" ")[2], text(of, "host")
    return f"py-spy dump --pid {process} on {host} shows where {it} stands"
