"""Late ranks in words, the same for a trace and for the page of a live job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceenv.core.lateness.watch import ONCE, SINCE, SOMETIMES, LateRank
from paceenv.core.wording import duration, name_ranks

ALIKE: Final = 0.75
"""Ranks whose lateness is at least this share of the latest one's are told together with it."""


def teams(rows: Sequence[LateRank], together: int) -> list[list[LateRank]]:
    """Ranks that are late alike, and began within so many iterations of each other; the order of ``rows`` stays."""
    grouped: list[list[LateRank]] = []
    for row in rows:
        for team in grouped:
            near = abs(row.spans[-1].first - team[0].spans[-1].first) <= together
            if row.kind == team[0].kind and near and row.late_s >= ALIKE * team[0].late_s:
                team.append(row)
                break
        else:
            grouped.append([row])
    return grouped


def late_line(ranks: Sequence[int], late: LateRank, since: int, host: str = "") -> str:
    """Who is late by how much, and since when."""
    verb, each = ("are", " each") if len(ranks) > 1 else ("is", "")
    when = {SINCE: f" since iteration {since:,}", SOMETIMES: f" again since iteration {since:,}"}.get(late.kind, "")
    return f"{name_ranks(ranks)}{host} {verb} late by {duration(late.late_s)}{each}{when}"


def past_line(ranks: Sequence[int], late: LateRank, first: int, last: int) -> str:
    """Who was late, and when: from the first of these iterations to the last."""
    verb = "were" if len(ranks) > 1 else "was"
    where = f"iterations {first:,} to {last:,}" if last != first else f"iteration {first:,}"
    often = "once" if late.kind == ONCE else f"now and then, {len(late.spans)} times"
    return f"{name_ranks(ranks)} {verb} late {often}, by {duration(late.late_s)} a step, in {where}"


def turns_line(ranks: Sequence[int], lost_s: float, step_s: float) -> str:
    """Ranks that are late in turns, and what that costs."""
    whose = f"another of {name_ranks(ranks)} comes last, {duration(lost_s)} lost per step"
    return f"the ranks take turns: in different iterations {whose}{share_of(lost_s, step_s)}"


def share_of(seconds: float, step_s: float) -> str:
    """As `` , 5.0 % of the step``; "" where the step is not known."""
    return f", {seconds / step_s:.1%} of the step" if step_s > 0.0 else ""
