"""Findings about a job, from the snapshots of all its ranks: which rank is late, which ranks wait for it, and where.

The step is common to all ranks that process groups connect. So the rank whose own work takes longer than that of the
others is late by the difference, and the others wait for it in collectives. A rank that comes late to one collective
because it waited in another has no longer work of its own; it is not late.

Findings are plain JSON data: ``verdicts`` by rank (as text), each the field ``arrival`` of a snapshot, and ``text``:
all in words, for the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from paceenv.live.record import findings_text as words
from paceenv.live.record.course import Course
from paceenv.live.record.rank_sets import RankSet, unknown
from paceenv.live.record.side_by_side import Job
from paceenv.live.record.snapshot import LATE, ON_TIME, UNKNOWN, Snapshot, number

SCHEMA: Final = "paceenv.findings/1"
ALONE: Final = unknown("one rank alone")
"""What the times of a single rank say about early and late."""

Findings = dict[str, Any]


def find(snapshots: Sequence[Snapshot]) -> Findings:
    """The findings about one attempt of a job, from the last snapshot of each rank, at least one."""
    job = Job(snapshots)
    sets = [RankSet(job, places) for places in job.connected()]
    verdicts = {str(job.ranks[place]): verdict for one in sets for place, verdict in one.verdicts.items()}
    course = Course(job)
    unheard = [str(s["rank"]) for s in course.unheard]
    verdicts |= {rank: unknown("nothing heard from it") for rank in unheard if verdicts[rank]["verdict"] == ON_TIME}
    if (still := course.still) is not None:
        of = unknown("awaited by the others")
        verdicts |= {str(rank): of for rank in still.behind if verdicts[str(rank)]["verdict"] in (ON_TIME, UNKNOWN)}
    return {"schema": SCHEMA, "verdicts": verdicts, "text": words.describe(job, course, sets, verdicts)}


def in_short(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """What the page leads with, for the metadata of a trace: ``text``, the ``late`` ranks, whether it
    ``ended`` as it should not or hangs, and ``aside_s``.

    The last is the most time of a rank in collectives beside the compute, seconds per step. Empty without a snapshot.
    """
    if not snapshots:
        return {}
    findings = find(snapshots)
    late = [int(rank) for rank, verdict in findings["verdicts"].items() if verdict["verdict"] == LATE]
    aside_s = max(sum(number(s, "side", name) or 0.0 for name in ("seconds", "streams_s")) for s in snapshots)
    leads = findings["text"][0] if findings["text"] else ""
    course = Course(Job(snapshots))
    ended = course.broke_off or bool(course.silent)
    return {"text": leads, "late": late, "ended": ended, "aside_s": aside_s}


def with_verdicts(snapshots: Sequence[Snapshot], findings: Findings) -> list[Snapshot]:
    """The snapshots, each with its ``arrival`` from the findings."""
    return [s | {"arrival": findings["verdicts"].get(str(s.get("rank")), s.get("arrival"))} for s in snapshots]
