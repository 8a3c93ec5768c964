"""What the ranks of a job do between its transfers: which run in the background, where they are awaited, compute.

A transfer runs in the background where a rank goes on before its end. It is awaited where ranks stand still until its
end. Where none ever stands still, gradients are awaited at the end of the step, and others as soon as they are through:
their results are needed by then at the latest.

The compute of a rank before a transfer is all time in which it neither waits for one nor is in one in the foreground.

Axes: T steps, R ranks, K transfers, L = K + 1 segments: before each transfer, and at the end; N rows of a rank.
"""

from __future__ import annotations

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
        can_wait_K: whether it may be held back: a gradient in the background that no other transfer waits for.
        compute_TRL: compute of each segment, seconds; not a number where a step or a rank lacks the segment.
    """

    background_K: NDArray[np.bool_]
    wait_K: NDArray[np.int64]
    before_K: Array
    is_seen_K: NDArray[np.bool_]
    can_wait_K: NDArray[np.bool_]
    compute_TRL: Array


class _Rows(NamedTuple):
    """All rows of one rank in the order of time; ``k`` is -1 for compute, ``label`` the segment or the transfer.

    ``counts``: transfers, and compute that takes some time.
    """

    t: NDArray[np.int64]
    k: NDArray[np.int64]
    start_s: Array
    end_s: Array
    label: NDArray[np.int64]
    counts: NDArray[np.bool_]


def read_order(stamps: ProgramStamps) -> StepOrder:
    K = len(stamps.transfers)
    tolerance_s = ROUNDING * float(np.median(stamps.step_T))
    rows = [_rows(stamps, r, tolerance_s) for r in range(stamps.ranks)]
    background_K = _background(rows, K, tolerance_s)
    compute_TRL = np.zeros((len(stamps.step_T), stamps.ranks, K + 1))
    compute_TRL[:, :, :K][~np.isfinite(stamps.start_TRK)] = np.nan
    waits, lasts = list[Array](), list[NDArray[np.int64]]()
    for r, mine in enumerate(rows):
        work_s, awaited = _work(mine, stamps.begin_T, background_K, tolerance_s)
        np.add.at(compute_TRL[:, r], (mine.t, mine.label), work_s)
        waits.append(_waits(mine, work_s, awaited, compute_TRL[:, r]))
        lasts.append(_lasts(mine, stamps.end_TRK[:, r], background_K, tolerance_s))
    (awaited_N, label_N, done_N, whole_N), (k_N, place_N) = np.concatenate(waits, axis=1), np.concatenate(lasts, axis=1)
    wait_K, before_K = np.full(K, K), np.ones(K)
    is_seen_K, is_gradient_K = np.zeros(K, np.bool_), np.array([one.op in GRADIENTS for one in stamps.transfers])
    for k in np.flatnonzero(background_K).tolist():
        seen, places = int(np.isfinite(stamps.end_TRK[:, :, k]).sum()), place_N[k_N == k]
        later = int(np.quantile(places, 1.0 - STANDS, method="lower")) if len(places) else 2 * k + 1
        labels, counts = np.unique(label_N[(awaited_N == k) & (2 * label_N >= later - 1)], return_counts=True)
        if len(labels) and counts.max() >= STANDS * seen:
            wait_K[k] = labels[counts.argmax()]
            here_N = (awaited_N == k) & (label_N == wait_K[k])
            share = float(done_N[here_N].sum() / max(whole_N[here_N].sum(), 1e-300))
            before_K[k] = 0.0 if share < _EDGE else 1.0 if share > 1.0 - _EDGE else share
            is_seen_K[k] = True
        elif not is_gradient_K[k]:
            wait_K[k], before_K[k] = (later + 1) // 2, float(later % 2 == 0)
    can_wait_K = background_K & (wait_K == K) & is_gradient_K
    return StepOrder(background_K, wait_K, before_K, is_seen_K, can_wait_K, compute_TRL)


def _rows(stamps: ProgramStamps, r: int, tolerance_s: float) -> _Rows:
    at_T, at_K = np.nonzero(np.isfinite(stamps.start_TRK[:, r]))
    compute, K = stamps.compute[r], len(stamps.transfers)
    t = np.concatenate([compute[0].astype(np.int64), at_T])
    k = np.concatenate([np.full(compute.shape[1], -1), at_K])
    start_s = np.concatenate([compute[1], stamps.start_TRK[:, r][at_T, at_K]])
    end_s = np.concatenate([compute[2], stamps.end_TRK[:, r][at_T, at_K]])
    # of rows with one start: compute that took no time, transfers in their order, compute
    tie = np.where(k >= 0, k, np.where(end_s > start_s, K, -1))
    order = np.lexsort((tie, start_s, t))
    t, k, start_s, end_s = t[order], k[order], start_s[order], end_s[order]
    transfer = np.where(k >= 0, np.arange(len(k)), len(k))
    following = np.minimum.accumulate(transfer[::-1])[::-1]  # the next transfer, which may be one of the next step
    label = np.where(np.append(t, -1)[following] == t, np.append(k, K)[following], K)
    return _Rows(t, k, start_s, end_s, label, (k >= 0) | (end_s - start_s > tolerance_s))


def _background(rows: Sequence[_Rows], K: int, tolerance_s: float) -> NDArray[np.bool_]:
    """Which transfers a rank often goes on during."""
    seen_K, over_K = np.zeros(K), np.zeros(K)
    for mine in rows:
        t, k = (column[mine.counts] for column in (mine.t, mine.k))
        start_s, end_s = (column[mine.counts] for column in (mine.start_s, mine.end_s))
        goes_on = np.zeros(len(t), np.bool_)
        goes_on[:-1] = (t[1:] == t[:-1]) & (start_s[1:] < end_s[:-1] - tolerance_s)
        np.add.at(seen_K, k[k >= 0], 1.0)
        np.add.at(over_K, k[k >= 0], goes_on[k >= 0])
    return over_K > OVERLAPS * np.maximum(seen_K, 1.0)


def _work(
    mine: _Rows, begin_T: Array, background_K: NDArray[np.bool_], tolerance_s: float
) -> tuple[Array, NDArray[np.int64]]:
    """What was computed in or before each row, beyond the rows before it, and what was waited for (-1: nothing)."""
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
    return np.where(mine.k < 0, lasts_s, 0.0) + np.maximum(gap_s - waited_s, 0.0), awaited


def _waits(mine: _Rows, work_s: Array, awaited: NDArray[np.int64], compute_TL: Array) -> Array:
    """Where a rank stood still: for what, in which segment, what it had done of its compute by then, and all of it."""
    at = np.flatnonzero(awaited >= 0)
    is_new = np.append(True, (np.diff(mine.t) != 0) | (np.diff(mine.label) != 0))
    first = np.maximum.accumulate(np.where(is_new, np.arange(len(work_s)), 0))  # of the row's segment
    done_s = [work_s[first[i] : i].sum() for i in at]
    return np.array([awaited[at], mine.label[at], done_s, compute_TL[mine.t[at], mine.label[at]]])


def _lasts(mine: _Rows, end_TK: Array, background_K: NDArray[np.bool_], tolerance_s: float) -> NDArray[np.int64]:
    """Each transfer in the background, and the last thing that the rank began before its end, ``(2, N)``.

    It is twice the segment for compute, and one more for the transfer behind the segment.
    """
    t, start_s = mine.t[mine.counts], mine.start_s[mine.counts]
    place, lasts = (2 * mine.label + (mine.k >= 0))[mine.counts], list[tuple[int, int]]()
    for step, k in np.argwhere(background_K & np.isfinite(end_TK)).tolist():
        low, high = np.searchsorted(t, [step, step + 1])
        at = low + int(np.searchsorted(start_s[low:high], end_TK[step, k] - tolerance_s)) - 1
        if at >= low:
            lasts.append((k, max(int(place[at]), 2 * k + 1)))
    return np.array(lasts, np.int64).reshape(-1, 2).T
