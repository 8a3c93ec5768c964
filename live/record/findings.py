"""Findings about a job, from the snapshots of all its ranks: which rank is late, which ranks wait for it, and where.

The step is common to all ranks that process groups connect. So the rank whose own work takes longer than that of the
others is late by the difference, and the others wait for it in collectives. A rank that comes late to one collective
because it waited in another has no longer work of its own; it is not late. A rank is named only if its work takes
longer *and* the members of its groups wait for it. Everything else that could explain the waits is listed as not
attributable, with its reason: collectives that the agents could not see or put aside, ranks without an agent.

Findings are plain JSON data: ``verdicts`` by rank (as text), the field ``arrival`` of a snapshot (:func:`verdict_of`),
and ``text``: all in words, for the page. Times are seconds per step; null means unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.core.wording import duration
from paceenv.live.record import findings_text as words
from paceenv.live.record.rank_sets import Job, RankSet, judge
from paceenv.live.record.run_folder import json_bytes, read_json
from paceenv.live.record.side_by_side import FLOOR_S, connected_sets
from paceenv.live.record.snapshot import ARRIVALS, EARLY, LATE, ON_TIME, UNKNOWN, Snapshot, entry, number, text

SCHEMA: Final = "paceenv.findings/1"
TOO_NOISY_SHARE = 0.25
"""Where this share of the step would still count as noise, early and late cannot be identified."""
FINDINGS: Final = "findings.json"
MIN_PERIOD_S: Final = 60.0
PERIOD_S_PER_RANK: Final = 0.6
MAX_BYTES: Final = 32 << 20

Findings = dict[str, Any]


def find(snapshots: Sequence[Snapshot]) -> Findings:
    """The findings about one attempt of a job, from the last snapshot of each rank, at least one."""
    job = Job(snapshots)
    sets = [judge(job, places) for places in connected_sets(len(job.ranks), job.traffic)]
    verdicts: dict[str, Any] = {}
    for rank_set in sets:
        for place in rank_set.places:
            verdicts[str(job.ranks[place])] = _verdict(job, rank_set, place)
    return {
        "schema": SCHEMA,
        "verdicts": verdicts,
        "text": words.describe(job, sets, verdicts),
    }


def in_short(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """What the page leads with, for the metadata of a trace: ``text``, the ``late`` ranks, whether it
    ``ended`` as it should not, and ``aside_s``.

    The last is the most time of a rank in collectives beside the compute, seconds per step. Empty without a snapshot.
    """
    if not snapshots:
        return {}
    findings = find(snapshots)
    late = [int(rank) for rank, verdict in findings["verdicts"].items() if verdict["verdict"] == LATE]
    aside_s = max(sum(number(s, "side", name) or 0.0 for name in ("seconds", "streams_s")) for s in snapshots)
    leads, ended = findings["text"][0] if findings["text"] else "", words.RESTART in words.describe_end(snapshots)
    return {"text": leads, "late": late, "ended": ended, "aside_s": aside_s}


def verdict_of(verdict: str, evidence: str, *, early_s: float = 0.0, late_s: float = 0.0) -> dict[str, Any]:
    """The field ``arrival`` of a snapshot: a verdict (of ``snapshot.ARRIVALS``) and what it rests on."""
    known = {} if verdict == UNKNOWN else {"early_s": early_s, "late_s": late_s}
    return {"verdict": verdict, "evidence": evidence, **known}


ALONE: Final = verdict_of(UNKNOWN, "one rank alone")
"""What the times of a single rank say about early and late."""


def with_verdicts(snapshots: Sequence[Snapshot], findings: Findings) -> list[Snapshot]:
    """The snapshots, each with its ``arrival`` from the findings."""
    verdicts = findings["verdicts"]
    return [s | {"arrival": verdicts.get(str(s.get("rank")), s.get("arrival"))} for s in snapshots]


def _verdict(job: Job, rank_set: RankSet, place: int) -> dict[str, Any]:
    """The verdict on the rank at ``place``, and its evidence in words."""
    if place not in rank_set.compared:
        return verdict_of(UNKNOWN, rank_set.reasons[0] if rank_set.reasons else "not compared")
    margin_s = rank_set.margin_s.get(place, math.inf)
    pattern = rank_set.late.get(place)

    def because(verdict: str, why: str, **times_s: float) -> dict[str, Any]:
        return verdict_of(verdict, ": ".join(filter(None, (rank_set.sides, why))), **times_s)

    if place in rank_set.named and pattern is not None:
        return because(LATE, "its own work takes longer", late_s=pattern.late_s)
    early_s = max((_earlier_s(rank_set, place, late) for late in rank_set.named), default=0.0)
    if pattern is not None and (refused := rank_set.refused.get(place)):
        return because(UNKNOWN, f"its own work takes {duration(pattern.late_s)} longer, but {refused}")
    if early_s > max(margin_s, FLOOR_S) and math.isfinite(margin_s):
        return because(EARLY, "it waits in collectives", early_s=early_s)
    if not rank_set.complete:
        return because(UNKNOWN, rank_set.reasons[0])
    if not margin_s <= TOO_NOISY_SHARE * rank_set.step_s:
        limit = duration(margin_s) if math.isfinite(margin_s) else "any difference"
        return because(UNKNOWN, f"too noisy to identify less than {limit}")
    like = [p for p in rank_set.compared if p != place and rank_set.stages.get(p) == rank_set.stages.get(place)]
    later_s = rank_set.own_s[place] - max((rank_set.own_s[p] for p in like), default=math.inf)
    if later_s > max(margin_s, FLOOR_S):
        return because(UNKNOWN, f"its own work takes {duration(later_s)} longer, and varies too much to be sure")
    return because(ON_TIME, f"arrives within {duration(margin_s)}")


def _earlier_s(rank_set: RankSet, place: int, late: int) -> float:
    """How much earlier a rank is than a late one, seconds. The own times of two stages of a pipeline say nothing."""
    if rank_set.stages.get(place) != rank_set.stages.get(late):
        return rank_set.late[late].late_s
    return rank_set.own_s[late] - rank_set.own_s[place]


def findings_period_s(world_size: int) -> float:
    """Seconds between two writes, and between two reads: a minute, and ten minutes at 1,000 ranks."""
    return max(MIN_PERIOD_S, PERIOD_S_PER_RANK * world_size)


def write_findings(folder: Path, findings: Findings) -> None:
    """Write ``findings.json`` into an attempt's folder, completely or not at all. Raises InputError."""
    atomic_write(folder / FINDINGS, json_bytes(findings))


def read_verdict(folder: Path, rank: int) -> dict[str, Any] | None:
    """The verdict on ``rank`` from ``findings.json`` in an attempt's folder; None where none can be read."""
    try:
        verdict = entry(read_json(folder / FINDINGS, MAX_BYTES), "verdicts", str(rank))
    except InputError:
        return None
    return verdict if text(verdict, "verdict") in ARRIVALS else None
