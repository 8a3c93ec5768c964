"""A trace of a run in mode ``probe`` as one row per hold: the draw, the measured delay, the step time.

Reads :mod:`paceenv.core.trace` by the plan of :mod:`paceenv.core.probing`; :mod:`paceenv.calibration.response` makes
effects of it. A step ends when its last rank has left the last operation. Iterations with a checkpoint, an evaluation
or a restart are left out. Legend: T iterations, R ranks, B holds, U units, G process groups.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.probing import HOLD_ITERATIONS, Plan, unit_of
from paceenv.core.timing import BARRIER_BYTES
from paceenv.core.trace import COMPUTE_OPS, OTHER_OPS, PACE_OP, POINT_TO_POINT_OPS, Trace

MIN_ITERATIONS: Final = 3
"""Measured iterations that make a hold."""
CLIP_MEDIANS: Final = 4.0
"""A longer step counts as so many medians, as in a live rank's own comparisons: a stall must not decide everything."""
_INTERRUPTIONS: Final = ("checkpoint", "evaluation", "restart")
_NOT_PAYLOAD: Final = (*COMPUTE_OPS, *POINT_TO_POINT_OPS, *OTHER_OPS, *_INTERRUPTIONS, PACE_OP, "barrier")

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Unit:
    """Ranks that are delayed together, and the process group of their payload (-1: none)."""

    name: str
    ranks: tuple[int, ...]
    group: int


@dataclass(frozen=True)
class Probed:
    """Means over the measured iterations of each hold, seconds; not a number where not measured.

    ``level_BU`` is the share of the probe's bound that was drawn, ``delay_s_BU`` what its ranks held back on average,
    ``collective_s_BG`` from the entry of a group's last member into its first payload collective of an iteration to the
    last exit from the last one. ``hold_B`` numbers the holds; some may be missing in between. ``head_start_B`` says in
    which of them all units but one or so were to be delayed alike.
    """

    units: tuple[Unit, ...]
    groups: tuple[int, ...]
    hold_B: NDArray[np.int64]
    head_start_B: NDArray[np.bool_]
    level_BU: Array
    delay_s_BU: Array
    step_s_B: Array
    collective_s_BG: Array
    iterations: int

    def without_head_starts(self) -> Probed:
        """The holds in which each unit was delayed for itself, whose effects add up; iterations are still of all."""
        use_B = ~self.head_start_B
        by_hold = ("hold_B", "head_start_B", "level_BU", "delay_s_BU", "step_s_B", "collective_s_BG")
        return replace(self, **{name: getattr(self, name)[use_B] for name in by_hold})


def read_probed(trace: Trace) -> Probed | str:
    """The holds of a trace, or in words why it has none."""
    plan = Plan.of_job(trace.metadata.job)
    if plan is None:
        return "it is not of a run in mode probe, so that no delay in it is by chance"
    if len(trace.table["job"].unique()) > 1:
        return "it holds several jobs"
    rows = _Rows(trace)
    taken = rows.iteration_T[rows.delay_s_TR.any(axis=1)]
    if not len(taken):
        return "no probe was taken in it"
    units = _units(rows, trace.metadata.job.get("ranks"))
    within = (rows.iteration_T >= max(plan.first_iteration, int(taken[0]))) & (rows.iteration_T <= int(taken[-1]))
    used_T = within & np.isfinite(rows.step_s_T)
    hold_T = rows.iteration_T // HOLD_ITERATIONS
    hold_B, count_B = np.unique(hold_T[used_T], return_counts=True)
    hold_B = hold_B[count_B >= MIN_ITERATIONS]
    used_T &= np.isin(hold_T, hold_B)
    if not used_T.any():
        return f"no hold of {HOLD_ITERATIONS} iterations in it could be measured"
    which_T = np.searchsorted(hold_B, hold_T[used_T])

    def per_hold(values_TX: Array) -> Array:
        """Means over the used iterations of each hold, those without a value left out."""
        known = np.isfinite(values_TX[used_T])
        total, count = (np.zeros((len(hold_B), values_TX.shape[1])) for _ in range(2))
        np.add.at(total, which_T, np.where(known, values_TX[used_T], 0.0))
        np.add.at(count, which_T, known)
        return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)

    spans = {group: _clipped(rows.span_s(group)) for group in sorted({unit.group for unit, _ in units})}
    groups = tuple(group for group, span_s_T in spans.items() if np.isfinite(span_s_T[used_T]).any())
    delay_s_TU = np.stack([rows.delay_s_TR[:, np.isin(rows.rank_R, u.ranks)].mean(axis=1) for u, _ in units], axis=1)
    iterations = (hold_B * HOLD_ITERATIONS + HOLD_ITERATIONS - 1).tolist()  # the last ones: the first hold may be cut
    level_BU = np.array([[plan.level(i, unit.name, number) for unit, number in units] for i in iterations])
    head_start_B = [any(plan.has_head_start(i, unit.name, number) for unit, number in units) for i in iterations]
    return Probed(
        units=tuple(unit for unit, _ in units),
        groups=groups,
        hold_B=hold_B,
        head_start_B=np.array(head_start_B),
        level_BU=level_BU,
        delay_s_BU=per_hold(delay_s_TU),
        step_s_B=per_hold(_clipped(rows.step_s_T)[:, None])[:, 0],
        collective_s_BG=per_hold(np.array([spans[group] for group in groups]).reshape(len(groups), len(used_T)).T),
        iterations=int(used_T.sum()),
    )


class _Rows:
    """The trace's rows by iteration and rank."""

    def __init__(self, trace: Trace) -> None:
        self._start_s, self._end_s = trace.column("start_s"), trace.column("end_s")
        self._group, size = trace.column("group"), trace.column("bytes")
        self._payload = ~trace.isin("op", *_NOT_PAYLOAD) & ((size > BARRIER_BYTES) | (size == 0))  # 0: unknown
        self.rank_R, self._r = np.unique(trace.column("rank"), return_inverse=True)
        first = int(trace.column("iteration").min()) if trace.table.num_rows else 0
        self._t = trace.column("iteration").astype(np.int64) - first
        self.iteration_T = first + np.arange(int(self._t.max()) + 1 if len(self._t) else 0)
        shape = len(self.iteration_T), len(self.rank_R)
        self.delay_s_TR = np.zeros(shape)
        paced = trace.isin("op", PACE_OP)
        np.add.at(self.delay_s_TR, (self._t[paced], self._r[paced]), (self._end_s - self._start_s)[paced])
        end_s_T = self._latest(self._end_s, np.ones(len(self._t), np.bool_)).max(axis=1, initial=-np.inf)
        rows_TR = np.zeros(shape, np.int64)
        np.add.at(rows_TR, (self._t, self._r), 1)
        interrupted_T = np.isin(np.arange(shape[0]), self._t[trace.isin("op", *_INTERRUPTIONS)])
        whole_T = rows_TR.min(axis=1, initial=1) > 0
        self.step_s_T = np.full(shape[0], np.nan)
        known = 1 + np.flatnonzero(whole_T[1:] & whole_T[:-1] & ~interrupted_T[1:])
        self.step_s_T[known] = end_s_T[known] - end_s_T[known - 1]

    def _latest(self, values: Array, where: NDArray[np.bool_]) -> Array:
        out = np.full((len(self.iteration_T), len(self.rank_R)), -np.inf)
        np.maximum.at(out, (self._t[where], self._r[where]), values[where])
        return out

    def payload_groups(self) -> list[int]:
        """For every rank the process group of the last payload collective of most iterations, -1 without any."""
        last_s_TR = self._latest(self._end_s, self._payload)
        last = self._payload & (self._end_s == last_s_TR[self._t, self._r])
        found = []
        for r in range(len(self.rank_R)):
            counted = Counter(self._group[last & (self._r == r)].tolist())
            found.append(int(counted.most_common(1)[0][0]) if counted else -1)
        return found

    def span_s(self, group: int) -> Array:
        """From the entry of the group's last member to the last exit, ``(T,)``, seconds; not-a-number without."""
        of_group = self._payload & (self._group == group)
        entry_TR = -self._latest(-self._start_s, of_group)
        entry_T = np.where(np.isfinite(entry_TR), entry_TR, -np.inf).max(axis=1)
        span_s_T = np.full(len(entry_T), np.nan)
        known_T = np.isfinite(entry_T)
        span_s_T[known_T] = self._latest(self._end_s, of_group).max(axis=1)[known_T] - entry_T[known_T]
        return span_s_T


def _units(rows: _Rows, ranks: Any) -> list[tuple[Unit, int]]:
    """The units, each with how many its ranks thought there were."""
    group_R = rows.payload_groups()
    members, ranks = Counter(group_R), ranks if type(ranks) is int else len(group_R)
    found: dict[str, tuple[list[int], int, int]] = {}
    for rank, group in zip(rows.rank_R.tolist(), group_R, strict=True):
        name, number = unit_of(rank, group, members[group] if group >= 0 else 1, ranks)
        found.setdefault(name, ([], group, number))[0].append(rank)
    return [(Unit(name, tuple(of), group), number) for name, (of, group, number) in found.items()]


def _clipped(seconds_T: Array) -> Array:
    known = seconds_T[np.isfinite(seconds_T)]
    return np.minimum(seconds_T, CLIP_MEDIANS * np.median(known)) if len(known) else seconds_T
