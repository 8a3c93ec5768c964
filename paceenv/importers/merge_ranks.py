"""The timelines of all ranks made into one trace on one clock, of the whole steps that all ranks have.

A rank's compute is whatever it does in a step that is not waiting for a collective with nothing else to do. Between the
begins of two collectives it has two pieces, before and after such a wait, which may be empty: so every step of one kind
has the same operations in the same order, on all ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.core.trace import COMPUTE_OPS, Trace, TraceMetadata
from paceenv.core.wording import duration, name_ranks, steps_left_out
from paceenv.importers.shared_collectives import (
    MOST_OFFSET,
    Meetings,
    Steps,
    align_clocks,
    ends_apart,
    fill_sizes,
    find_meetings,
    name_groups,
)
from paceenv.importers.timelines import Array, RankActivity, Step, Timeline, union, without

_MIN_WAIT: Final = 0.002
"""Share of a step: shorter waits are compute."""
_WOKEN: Final = 0.02
"""Share of a step by which who waits may seem to go on before the end of what it waited for."""
_EMPTY: Final = 1e-4
"""Share of a step: a piece of compute that is never longer, in no step and on no rank, is left out."""
_WAITED: Final = 0.25
"""Share of ranks and steps that wait at a place: from there on what comes after it depends on the wait."""
_NAMED: Final = 8
"""Ranks or steps named in a line."""
_SAME_CLOCK_S: Final = 1e-3
"""Clocks that differ by less need no line."""
_LEAST_STEPS: Final = 0.5
"""Share of the steps that most ranks have: a rank with fewer would take the others' from them."""
_TOO_FAR: Final = 0.25
"""Share of a step: collectives that end further apart are not the same ones."""
_MAX_ERROR: Final = 0.01
"""Share of a step: ends of collectives that lie further apart are worth a line."""

Signature = tuple[tuple[str, str, int], ...]
"""Operation, group and bytes of each collective of a step."""


class Merged(NamedTuple):
    """A trace, lines on what was left out, and what the ranks did in its steps.

    ``clock_error_s`` of the trace's job is how far, in nine of ten shared collectives, the ends of the members lie from
    their middle one.
    """

    trace: Trace
    notes: tuple[str, ...]
    activity: tuple[RankActivity, ...]


def merge_ranks(timelines: list[Timeline], name: str) -> Merged:
    """One trace of all ranks, on the clock of the lowest rank.

    Raises InputError: a rank shares no steps or too few collectives with the others, or nothing is left.

    Args:
        timelines: at least one; one of a rank.
        name: of the job.
    """
    ordered, notes = _belong_together(sorted(timelines, key=lambda t: t.rank))
    shift_s, renumber = align_clocks(ordered)
    for t in ordered:
        for step in t.steps:
            step.iteration += renumber[t.rank]
            step.shift(shift_s[t.rank])
    steps_of = {t.rank: {step.iteration: step for step in t.steps if step.iteration >= 0} for t in ordered}
    notes += [
        f"{t.path}: its steps are numbered {renumber[t.rank]:+d} against those of rank {ordered[0].rank}"
        for t in ordered
        if renumber[t.rank]
    ]
    common = sorted(set.intersection(*(set(steps) for steps in steps_of.values())))
    if not common:
        named = ", ".join(f"rank {t.rank} has {len(t.steps)}" for t in ordered[:8])
        raise InputError(f"{name}: no step that all ranks have ({named}); allowed: files of the same steps of one job")
    recorded = set().union(*steps_of.values())
    if left_out := len(recorded) - len(common):
        lacks, rank = max((len(recorded) - len(steps), -rank) for rank, steps in steps_of.items())
        notes.append(steps_left_out(left_out, len(recorded), -rank, lacks))
    name_groups(steps_of, common, _world_size(timelines))
    met = find_meetings(steps_of)
    fill_sizes(met)
    error_s, early_s, shared = ends_apart(met)
    step_s = float(np.median([steps[i].end_s - steps[i].start_s for steps in steps_of.values() for i in common]))
    if error_s > _TOO_FAR * step_s and early_s > 0.0:  # on a busy host threads end late, but none before all begin
        raise InputError(
            f"{name}: collectives of the same group and place end up to {duration(error_s)} apart on any "
            f"clocks, {error_s / step_s:.0%} of a step, so these are not the same collectives; allowed: "
            "complete files of the same steps of one job"
        )
    kept, dropped = _whole(steps_of, met, common)
    notes += dropped
    if not kept:
        raise InputError(f"{name}: {len(common)} steps that all ranks have, none of them whole; {dropped[0]}")
    _release(steps_of, met, kept)
    columns = _columns(steps_of, kept)
    if not columns:
        raise InputError(f"{name}: steps without any operation")
    origin_s = float(columns["start_s"].min())
    columns |= {key: columns[key] - origin_s for key in ("start_s", "end_s")}
    notes += _missing(timelines)
    apart_s = max(shift_s.values()) - min(shift_s.values())
    if apart_s >= _SAME_CLOCK_S or error_s >= _MAX_ERROR * step_s:
        said = f"clocks differ by up to {apart_s:.6f} s, removed by " if apart_s >= _SAME_CLOCK_S else ""
        agree = f"{', which agree' if said else ' agree'} within {duration(error_s)} (nine in ten)"
        notes.append(f"{said}the ends of {shared} collectives{agree}")
    ranks = tuple({"rank": t.rank, "dp_rank": i, "stage": 0} | t.about for i, t in enumerate(ordered))
    job = {"name": name, "ranks": _world_size(timelines), "clock_error_s": error_s, "steps_left_out": left_out}
    trace = Trace.from_columns({"job": name, **columns}, TraceMetadata(job, ranks, "PyTorch profiler"), name)
    steps = (steps[i] for steps in steps_of.values() for i in kept)
    activity = tuple(step for step in steps if isinstance(step, RankActivity))
    for step in activity:
        step.shift(-origin_s)
    return Merged(trace, tuple(notes), activity)


def _belong_together(timelines: list[Timeline]) -> tuple[list[Timeline], list[str]]:
    """Ranks that share steps, and lines on those left out: a minority that has few of the steps that most ranks have.

    Ranks that only count otherwise are kept where that may be: their clocks will tell.
    """
    having = Counter(step.iteration for t in timelines for step in t.steps)
    usual = {i for i, ranks in having.items() if 2 * ranks > len(timelines)}
    near = {i + k for i in usual for k in range(-MOST_OFFSET, MOST_OFFSET + 1)}
    has = {t.rank: sum(step.iteration in near for step in t.steps) for t in timelines}
    apart = [t for t in timelines if has[t.rank] < _LEAST_STEPS * len(usual)]
    if not apart or len(apart) * 2 >= len(timelines):
        return timelines, []
    notes = [
        f"{t.path}: rank {t.rank} left out: it has {has[t.rank]} of the {len(usual)} steps that most ranks have"
        for t in apart
    ]
    return [t for t in timelines if t not in apart], notes


def _world_size(timelines: list[Timeline]) -> int:
    """How many ranks the job has, as far as its files say."""
    return max(len(timelines), *(int(t.about.get("world_size", 0)) for t in timelines))


def _missing(timelines: list[Timeline]) -> list[str]:
    """A line on ranks of the job that no file is of."""
    size = _world_size(timelines)
    missing = size - len(timelines)
    if missing <= 0:
        return []
    known = {t.rank for t in timelines}
    named = f": {name_ranks([rank for rank in range(size) if rank not in known])}" if size < 1 << 16 else ""
    return [f"{missing} of {size} ranks have no file{named}; whoever waits for them seems to wait for a late peer"]


def signature(step: Step) -> Signature:
    return tuple((c.op, c.group, c.bytes) for c in step.collectives)


def _whole(steps_of: Steps, met: Meetings, common: list[int]) -> tuple[list[int], list[str]]:
    """Steps that are whole, and lines on the others.

    A step is not whole if members of one group have not as many collectives of a kind in it; and the first or the last
    is not if it looks like the end or the begin of another one and its own kind occurs nowhere else.
    """
    members: dict[tuple[str, str], set[int]] = defaultdict(set)
    steps = set(common)
    named = {place: of_rank for place, of_rank in met.items() if place[1] and place[0] in steps}
    for (_, group, op, _), of_rank in named.items():
        members[group, op] |= of_rank.keys()
    uneven = sorted({i for (i, group, op, _), of_rank in named.items() if len(of_rank) < len(members[group, op])})
    notes = []
    if uneven:
        more = f" and {len(uneven) - _NAMED} more" if len(uneven) > _NAMED else ""
        listed = f"step{'s' * (len(uneven) > 1)} {', '.join(map(str, uneven[:_NAMED]))}{more}"
        notes.append(f"{listed} left out: not all ranks have the same collectives in them")
    kept = [i for i in common if i not in set(uneven)]
    kinds = {i: tuple(signature(steps[i]) for steps in steps_of.values()) for i in kept}
    for place, edge in ((0, "first"), (-1, "last")):
        if len(kept) < 2:
            break
        at = kept[place]
        others = {kinds[i] for i in kept if i != at}
        if kinds[at] not in others and any(_part(kinds[at], other, end=place == 0) for other in others):
            kept = [i for i in kept if i != at]
            notes.append(f"step {at} left out: the {edge} one, and only part of a step like the others")
    return kept, notes


def _part(one: tuple[Signature, ...], other: tuple[Signature, ...], *, end: bool) -> bool:
    """Whether a step is on every rank the end of another one, or else its begin."""
    return all(a == (b[len(b) - len(a) :] if end else b[: len(a)]) for a, b in zip(one, other, strict=True))


def _release(steps_of: Steps, met: Meetings, kept: list[int]) -> None:
    """Take off what a backend's thread marks of a collective after those who waited for it have gone on.

    A rank waited for it that was idle when its last member came, and for most of the time from then on. A device's
    collectives end when they end.
    """
    of_hosts = [(r, i) for r, steps in steps_of.items() for i in kept if not isinstance(steps[i], RankActivity)]
    idle_of = {(rank, i): _idle(steps_of[rank][i]) for rank, i in of_hosts}
    for (i, group, *_), of_rank in met.items():
        last_s = max(c.start_s for c in of_rank.values())
        seen = [(c, idle_of[rank, i]) for rank, c in of_rank.items() if group and (rank, i) in idle_of]
        until_s = np.inf
        for c, (start_s, end_s) in seen:
            gap = int(np.searchsorted(start_s, last_s)) - 1
            if (
                gap >= 0
                and last_s < end_s[gap] < c.end_s
                and 2.0 * (end_s[gap] - start_s[gap]) > c.end_s - start_s[gap]
            ):
                until_s = min(until_s, end_s[gap])
        for rank, c in of_rank.items():
            step, ends_s = steps_of[rank][i], max(until_s, c.start_s)
            c.end_s = ends_s if c.end_s > ends_s + _WOKEN * (step.end_s - step.start_s) else c.end_s  # less is usual


def _idle(step: Step) -> tuple[Array, Array]:
    """When a rank has nothing to do while collectives run."""
    spans = union(np.array([c.start_s for c in step.collectives]), np.array([c.end_s for c in step.collectives]))
    return without(spans, union(step.busy_start_s, step.busy_end_s))


def _columns(steps_of: Steps, kept: list[int]) -> dict[str, NDArray[Any]]:
    """All rows of the trace. Pieces of compute that are empty in all steps of a kind are left out of all of them."""
    cells = [(rank, i, steps[i]) for rank, steps in steps_of.items() for i in kept]
    of_kind: dict[Signature, list[Step]] = defaultdict(list)
    for _, _, step in cells:
        of_kind[signature(step)].append(step)
    pieces_of = {kind: iter(_alike(steps)) for kind, steps in of_kind.items()}
    groups: dict[str, int] = {}
    all_rows: list[tuple[Any, ...]] = []
    for rank, i, step in cells:
        rows = list[tuple[str, int, float, float, int, int]]()
        for k, piece in enumerate(next(pieces_of[signature(step)])):
            if k % 2:
                c = step.collectives[k // 2]
                group = groups.setdefault(c.group, len(groups)) if c.group else -1
                rows.append((c.op, group, c.start_s, max(c.end_s, c.start_s), c.bytes, c.peer))
            if piece:
                rows.append((COMPUTE_OPS[0], -1, piece[0], piece[1], 0, -1))
        all_rows += [(rank, i, seq, *row) for seq, row in enumerate(rows)]
    names = ("rank", "iteration", "seq", "op", "group", "start_s", "end_s", "bytes", "peer")
    return dict(zip(names, map(np.array, zip(*all_rows, strict=True)), strict=False))  # nothing of no rows


def _alike(steps: list[Step]) -> list[list[list[float]]]:
    """The pieces of steps of one kind, C; what most ranks begin after a wait begins on no rank before its end.

    Who comes last does not wait, and yet goes on with the same work as the others once the collective has ended. A
    piece that is empty in all of them is no piece, [].
    """
    pieces_CP2 = np.stack([_pieces(step) for step in steps])
    before_CK2, after_CK2 = pieces_CP2[:, 1::2], pieces_CP2[:, 2::2]
    waits_CK = after_CK2[..., 0] > before_CK2[..., 1]
    end_CK = np.array([[c.end_s for c in step.collectives] for step in steps]).reshape(waits_CK.shape)
    # where many go on to the next collective while this one runs, its end is no wait for whoever came last
    runs_on_K = (~waits_CK & (end_CK > after_CK2[..., 1])).mean(axis=0) >= _WAITED
    none_CK = waits_CK & runs_on_K & (end_CK <= after_CK2[..., 0])
    before_CK2[none_CK, 1] = after_CK2[none_CK, 0] = after_CK2[none_CK, 1]
    last_CK = ((waits_CK & ~none_CK).mean(axis=0) >= _WAITED) & ~(waits_CK & ~none_CK)
    before_CK2[last_CK, 1] = after_CK2[last_CK, 0] = np.minimum(end_CK, before_CK2[..., 1])[last_CK]
    step_s_C = np.array([max(step.end_s - step.start_s, 1e-12) for step in steps])
    wanted_P = (np.diff(pieces_CP2)[..., 0] / step_s_C[:, None]).max(axis=0) > _EMPTY
    return [[piece if wanted_P[k] else [] for k, piece in enumerate(pieces)] for pieces in pieces_CP2.tolist()]


def _pieces(step: Step) -> Array:
    """A rank's compute, ``(1 + 2 collectives, 2)``, s: before the first collective, and twice after each begin."""
    collectives = step.collectives
    waits = _idle(step)
    edges = np.clip([step.start_s, *(c.start_s for c in collectives), step.end_s], step.start_s, step.end_s)
    least_s = _MIN_WAIT * (step.end_s - step.start_s)
    # nobody waits for a collective beyond its end: a gap that ends while all go on is the host's own
    ended_s = np.sort([c.end_s for c in collectives])
    until = np.searchsorted(ended_s, waits[1] + _WOKEN * (step.end_s - step.start_s), side="right")
    held = until > np.searchsorted(ended_s, waits[0], side="right")
    waits = union(waits[0][held], waits[1][held] + least_s)  # what is done between two waits may be next to nothing
    waits = waits[0], waits[1] - least_s
    pieces = [(edges[0], edges[1])]
    for begin_s, end_s in pairwise(edges[1:]):
        first = np.searchsorted(waits[1], begin_s, side="right")
        last = np.searchsorted(waits[0], end_s, side="left")
        starts, ends = np.maximum(waits[0][first:last], begin_s), np.minimum(waits[1][first:last], end_s)
        longest = int(np.argmax(ends - starts)) if last > first else -1
        if longest >= 0 and ends[longest] - starts[longest] > least_s:
            pieces += [(begin_s, starts[longest]), (ends[longest], end_s)]
        else:
            pieces += [(begin_s, end_s), (end_s, end_s)]
    return np.array(pieces)
