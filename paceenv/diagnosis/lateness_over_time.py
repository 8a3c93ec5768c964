"""When ranks of a trace turned late, by how much, and how soon a live watch would have named them.

The ranks' own work, step by step, goes through the detector that a running job uses, too
(:mod:`paceenv.core.lateness.watch`). Ranks are compared with those of the same pipeline stage only.
Axes: N operations, T steps, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceenv.core.lateness import common_place, watch, words
from paceenv.core.operation_matrix import Array, OperationMatrix
from paceenv.core.wording import duration, name_ranks

TOGETHER_STEPS: Final = 8
"""Ranks that began within so many steps are told together."""
LISTED: Final = 8


@dataclass(frozen=True)
class LateTeam:
    """Ranks that are late, or were, in the same way; ``late_s`` is of the latest, ``since`` and ``until`` iterations.

    ``until`` is None for lateness that lasts to the end.
    """

    ranks: tuple[int, ...]
    kind: str
    late_s: float
    since: int
    until: int | None
    text: str


@dataclass(frozen=True)
class LatenessOverTime:
    """What the watch said at the end of the trace; ``why_not`` tells why it could say nothing, else is empty.

    ``lost_s`` is the mean lateness of each step's last rank, ``pattern`` that of ``watch.Findings``. ``places``
    says what all late ranks have in common, ``alone`` are ranks without a peer to compare with. ``text`` is all of it
    in words, the most important first.
    """

    late: tuple[LateTeam, ...]
    past: tuple[LateTeam, ...]
    pattern: str
    lost_s: float
    step_s: float
    steps: int
    places: tuple[str, ...]
    alone: tuple[int, ...]
    why_not: str
    text: tuple[str, ...]


def own_work(matrix: OperationMatrix) -> Array:
    """Each rank's own work in each step ``(R, T)``, seconds: everything but communication and delays of pacing."""
    return matrix.seconds_RT(~(matrix.is_collective_N | matrix.is_transfer_N | matrix.is_pace_N))


def lateness(matrix: OperationMatrix) -> Array:
    """How much longer each rank works in a step than the median of the others of its stage ``(R, T)``, seconds.

    0 where it does not, not a number without others.
    """
    own_s_RT = own_work(matrix)
    late_RT = np.full(own_s_RT.shape, np.nan)
    for places in alike(matrix):
        late_RT[places] = np.maximum(watch.lateness_of(own_s_RT[places].T).T, 0.0)
    return late_RT


def alike(matrix: OperationMatrix) -> list[list[int]]:
    """The places of the ranks of each pipeline stage."""
    return [np.flatnonzero(matrix.stage_R == stage).tolist() for stage in np.unique(matrix.stage_R)]


def find_lateness(matrix: OperationMatrix, *, named: int | None = None) -> LatenessOverTime:
    """Watch a trace from its first step to its last; ``named`` is the rank that its arrivals name."""
    groups = alike(matrix)
    alone = [matrix.ranks[places[0]] for places in groups if len(places) == 1]
    own_s_RT = own_work(matrix)
    why_not = _why_not(matrix, len(alone), own_s_RT)
    seen = slice(0, 0 if why_not else None)
    table = own_s_RT.T[seen], matrix.step_s_T[seen], matrix.iteration_T[seen]
    findings = watch.find_late_ranks(*table, alike=groups)
    late, past = (
        tuple(_team(matrix, team, findings.step_s) for team in words.teams(rows, TOGETHER_STEPS))
        for rows in (findings.late, findings.past)
    )
    of_ranks = {common_place.STAGE: matrix.stage_R.tolist(), common_place.HOST: matrix.hosts}
    places = {name: dict(zip(matrix.ranks, of, strict=True)) for name, of in of_ranks.items()}
    ranks = [rank for team in late for rank in team.ranks]
    place = tuple(filter(None, [common_place.in_common(ranks, matrix.ranks, places)]))
    if findings.pattern == watch.IN_TURNS:
        ranks = sorted({rank for team in (*late, *past) for rank in team.ranks})
        lines = [words.turns_line(ranks, findings.lost_s, findings.step_s), *place]
    else:
        lines = [*(team.text for team in late), *place, *(team.text for team in past[:LISTED])]
        lines += [f"{len(past) - LISTED} more ranks were late for a while"] * (len(past) > LISTED)
    if named is not None:
        if not any(named in team.ranks for team in late):
            lines.append(f"rank {named} arrives last in nearly every step; since when is not settled")
    elif findings.pattern == watch.VARIATION:
        share = findings.lost_s / findings.step_s
        lines.append(f"no rank is late for long, but the last one of each step is late by {share:.0%} of it")
    if alone:
        lines.append(f"{name_ranks(alone)}: no other rank has the same stage, so lateness cannot be determined")
    if why_not:
        alone, lines = [], [f"when ranks turned late cannot be determined: {why_not}"]
    text = tuple(lines) or ("no rank is late",)
    found = findings.pattern, findings.lost_s, findings.step_s
    return LatenessOverTime(late, past, *found, matrix.steps, place, tuple(alone), why_not, text)


def _why_not(matrix: OperationMatrix, alone: int, own_s_RT: Array) -> str:
    if matrix.steps < watch.FIRST_STEPS:
        return f"{matrix.steps} steps; at least {watch.FIRST_STEPS} are needed"
    if len(matrix.ranks) < 2:
        return "one rank, without a peer to compare it with"
    if alone == len(matrix.ranks):
        return "each rank is the only one of its pipeline stage"
    if not own_s_RT.any():
        return "the trace has no work besides communication"
    return ""


def _team(matrix: OperationMatrix, rows: Sequence[watch.LateRank], step_s: float) -> LateTeam:
    latest = max(rows, key=lambda row: row.late_s)
    span, ranks = latest.spans[-1], sorted(matrix.ranks[row.rank] for row in rows)
    begin, named = (int(np.searchsorted(matrix.iteration_T, i)) for i in (span.first, span.named))
    took = slice(begin, begin if span.first == span.last == span.named else named + 1)
    since = latest.spans[0].first if latest.kind == watch.SOMETIMES else span.first
    if span.last is None:
        share = latest.late_s / step_s if step_s > 0.0 else 0.0
        soon = f"named after {took.stop - took.start} steps, {duration(float(matrix.step_s_T[took].sum()))}"
        error = f"standard error {duration(latest.error_s)}"
        text = f"{words.late_line(ranks, latest, span.first)}, {share:.0%} of the step ({error}; {soon})"
    else:
        text = words.past_line(ranks, latest, since, span.last)
    return LateTeam(tuple(ranks), latest.kind, latest.late_s, since, span.last, text)
