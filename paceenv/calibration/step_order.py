"""What the ranks of a job do between its transfers: which run in the background, where they are awaited, compute.

A transfer runs in the background where a rank goes on before its end. It is awaited where ranks stand still until its
end. Where none ever stands still, gradients are awaited at the end of the step, and others as soon as they are through:
their results are needed by then at the latest.

The compute of a rank before a transfer is all time in which it neither waits for one nor is in one in the foreground.

Axes: T steps, R ranks, K transfers, L = K + 1 segments: before each transfer, and at the end; N rows of a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.program_stamps import ProgramStamps

OVERLAPS: Final = 0.05
"""Share of observations from which on a transfer counts as one in the background."""
STANDS: Final = 0.02
"""Share of observations from which on ranks count as standing still for a transfer."""
ROUNDING: Final = 1e-4
"""Of a step: stamps that differ by less do not differ."""
_EDGE: Final = 0.02
"""A wait within this share of a segment's compute from either end is at that end."""
GRADIENTS: Final = ("all_reduce", "reduce_scatter")
"""Operations whose results are gradients, which nobody needs before the end of the backward pass."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class StepOrder:
    """Background, waits and compute of a job's steps.

    Attributes:
        background_K: whether each transfer runs in the background.
        wait_K: the segment in which it is awaited; K, the last one, also where that is the step's end.
        before_K: the share of that segment's compute that comes before the wait.
        is_seen_K: whether ranks were seen to wait for it.
        compute_TRL: compute of each segment, seconds; not a number where a step or a rank lacks the segment.
    """

    background_K: NDArray[np.bool_]
    wait_K: NDArray[np.int64]
    before_K: Array
    is_seen_K: NDArray[np.bool_]
    compute_TRL: Array

    def can_wait(self, ops: Sequence[str]) -> NDArray[np.bool_]:
        """Which transfers may be held back: gradients in the background that no other transfer waits for, ``(K,)``."""
        last = len(self.wait_K)
        is_gradient_K = np.array([op in GRADIENTS for op in ops], np.bool_)
        return np.asarray(self.background_K & (self.wait_K == last) & is_gradient_K)


class _Rows(NamedTuple):
    """All rows of one rank in the order of time; ``k`` is -1 for compute, ``label`` the segment or the transfer."""

    t: NDArray[np.int64]
    k: NDArray[np.int64]
    start_s: Array
    end_s: Array
    label: NDArray[np.int64]


def read_order(stamps: ProgramStamps) -> StepOrder:
    K = len(stamps.transfers)
    tolerance_s = ROUNDING * float(np.median(stamps.step_T))
    rows = [_rows(stamps, r) for r in range(stamps.ranks)]
    background_K = _background(rows, K, tolerance_s)
    compute_TRL = np.full((len(stamps.step_T), stamps.ranks, K + 1), np.nan)
    stands: list[Counter[int]] = [Counter() for _ in range(K)]
    before: list[dict[int, list[tuple[float, float]]]] = [{} for _ in range(K)]
    lasts: list[list[int]] = [[] for _ in range(K)]
    for r, mine in enumerate(rows):
        lasts_s, gap_s, awaited = _times(mine, stamps.begin_T, background_K, tolerance_s)
        work_s = np.where(mine.k < 0, lasts_s, 0.0) + gap_s
        segment = mine.label
        np.nan_to_num(compute_TRL[:, r], copy=False, nan=0.0)
        np.add.at(compute_TRL[:, r], (mine.t, segment), work_s)
        here_TL = np.concatenate([np.isfinite(stamps.start_TRK[:, r]), np.ones((len(stamps.step_T), 1), bool)], axis=1)
        compute_TRL[:, r][~here_TL] = np.nan
        _add_waits(mine, work_s, awaited, compute_TRL[:, r], stands, before)
        _add_lasts(mine, stamps.end_TRK[:, r], background_K, tolerance_s, lasts)
    wait_K, before_K = np.full(K, K), np.ones(K)
    is_seen_K = np.zeros(K, np.bool_)
    for k in np.flatnonzero(background_K):
        seen = int(np.isfinite(stamps.end_TRK[:, :, k]).sum())
        later = int(np.quantile(lasts[k], 1.0 - STANDS, method="lower")) if lasts[k] else 2 * int(k) + 1
        known = {label: n for label, n in stands[k].items() if 2 * label >= later - 1 and n >= STANDS * seen}
        if known:
            wait_K[k] = max(known, key=lambda label: known[label])
            pairs = np.array(before[k][int(wait_K[k])])
            share = float(pairs[:, 0].sum() / max(pairs[:, 1].sum(), 1e-300))
            before_K[k] = 0.0 if share < _EDGE else 1.0 if share > 1.0 - _EDGE else share
            is_seen_K[k] = True
        elif stamps.transfers[k].op not in GRADIENTS:
            wait_K[k], before_K[k] = (later + 1) // 2, float(later % 2 == 0)
    return StepOrder(background_K, wait_K, before_K, is_seen_K, compute_TRL)


def _rows(stamps: ProgramStamps, r: int) -> _Rows:
    at_T, at_K = np.nonzero(np.isfinite(stamps.start_TRK[:, r]))
    compute = stamps.compute[r]
    t = np.concatenate([compute[0].astype(np.int64), at_T])
    k = np.concatenate([np.full(compute.shape[1], -1), at_K])
    start_s = np.concatenate([compute[1], stamps.start_TRK[:, r][at_T, at_K]])
    end_s = np.concatenate([compute[2], stamps.end_TRK[:, r][at_T, at_K]])
    # of rows with one start: compute that took no time, transfers in their order, compute
    tie = np.where(k >= 0, k, np.where(end_s > start_s, len(stamps.transfers), -1))
    order = np.lexsort((tie, start_s, t))
    t, k, start_s, end_s = t[order], k[order], start_s[order], end_s[order]
    label, following, last_t = np.empty(len(t), np.int64), len(stamps.transfers), -1
    for i in range(len(t) - 1, -1, -1):
        if t[i] != last_t:
            following, last_t = len(stamps.transfers), t[i]
        if k[i] >= 0:
            following = k[i]
        label[i] = following
    return _Rows(t, k, start_s, end_s, label)


def _significant(mine: _Rows, tolerance_s: float) -> NDArray[np.bool_]:
    return (mine.k >= 0) | (mine.end_s - mine.start_s > tolerance_s)


def _background(rows: Sequence[_Rows], K: int, tolerance_s: float) -> NDArray[np.bool_]:
    """Which transfers a rank often goes on during."""
    seen_K, over_K = np.zeros(K), np.zeros(K)
    for mine in rows:
        some = np.flatnonzero(_significant(mine, tolerance_s))
        t, k, start_s, end_s = mine.t[some], mine.k[some], mine.start_s[some], mine.end_s[some]
        goes_on = np.zeros(len(some), np.bool_)
        goes_on[:-1] = (t[1:] == t[:-1]) & (start_s[1:] < end_s[:-1] - tolerance_s)
        is_transfer = k >= 0
        np.add.at(seen_K, k[is_transfer], 1.0)
        np.add.at(over_K, k[is_transfer], goes_on[is_transfer])
    return over_K > OVERLAPS * np.maximum(seen_K, 1.0)


def _times(
    mine: _Rows, begin_T: Array, background_K: NDArray[np.bool_], tolerance_s: float
) -> tuple[Array, Array, NDArray[np.int64]]:
    """How long each row took beyond those before, time without a row before it, and what it waited for (-1: none)."""
    blocks = (mine.k < 0) | ~background_K[np.maximum(mine.k, 0)]
    until_s = np.maximum.accumulate(np.where(blocks, mine.end_s, -np.inf))
    cursor_s = np.maximum(np.concatenate([[-np.inf], until_s[:-1]]), begin_T[mine.t])
    lasts_s = np.maximum(mine.end_s - np.maximum(mine.start_s, cursor_s), 0.0)
    gap_s = np.maximum(mine.start_s - cursor_s, 0.0)
    awaited = np.full(len(mine.t), -1)
    waited_s = np.zeros(len(mine.t))
    gaps = np.flatnonzero(gap_s > tolerance_s)
    for k in np.flatnonzero(background_K):
        at = np.flatnonzero(mine.k == k)
        end_T, place_T = np.full(len(begin_T), np.nan), np.full(len(begin_T), len(mine.t))
        end_T[mine.t[at]], place_T[mine.t[at]] = mine.end_s[at], at
        end_s = end_T[mine.t[gaps]]
        fits = (end_s > cursor_s[gaps] + tolerance_s) & (end_s <= mine.start_s[gaps] + tolerance_s)
        fits &= (place_T[mine.t[gaps]] < gaps) & (end_s - cursor_s[gaps] > waited_s[gaps])
        awaited[gaps[fits]] = k
        waited_s[gaps[fits]] = (end_s - cursor_s[gaps])[fits]
    return lasts_s, np.maximum(gap_s - waited_s, 0.0), awaited


def _add_waits(
    mine: _Rows,
    work_s: Array,
    awaited: NDArray[np.int64],
    compute_TL: Array,
    stands: list[Counter[int]],
    before: list[dict[int, list[tuple[float, float]]]],
) -> None:
    """Note where a rank stood still for which transfer, and how much of the segment's compute it had done by then."""
    for i in np.flatnonzero(awaited >= 0).tolist():
        t, label, k = int(mine.t[i]), int(mine.label[i]), int(awaited[i])
        done_s, j = 0.0, i - 1
        while j >= 0 and mine.t[j] == t and mine.label[j] == label and mine.k[j] < 0:
            done_s += float(work_s[j])
            j -= 1
        stands[k][label] += 1
        before[k].setdefault(label, []).append((done_s, float(compute_TL[t, label])))


def _add_lasts(
    mine: _Rows, end_TK: Array, background_K: NDArray[np.bool_], tolerance_s: float, lasts: list[list[int]]
) -> None:
    """Note the last thing that a rank began before the end of each transfer in the background.

    It is twice the segment for compute, and one more for the transfer behind the segment.
    """
    some = np.flatnonzero(_significant(mine, tolerance_s))
    t, start_s = mine.t[some], mine.start_s[some]
    place = 2 * mine.label[some] + (mine.k[some] >= 0)
    for step in np.unique(t).tolist():
        low, high = np.searchsorted(t, [step, step + 1])
        for k in np.flatnonzero(background_K & np.isfinite(end_TK[step])).tolist():
            at = low + int(np.searchsorted(start_s[low:high], end_TK[step, k] - tolerance_s)) - 1
            if at >= low:
                lasts[k].append(max(int(place[at]), 2 * k + 1))
