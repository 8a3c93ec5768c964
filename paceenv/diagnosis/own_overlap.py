"""What a job's own reductions in the background cost collectives that its ranks stand still for.

Both use the links of the same ranks. Where transfers of one kind run now alone and now beside a reduction of another
communicator, the difference is measured. Where they never run alone, both are taken to get equal shares of a link,
unless one moves its bytes so much faster that it must use other links, as a group inside a node does.

Axes: N operations, K process groups side by side, T steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from paceenv.core.operation_matrix import Array, Integers, OperationMatrix

REDUCTIONS: Final = ("all_reduce", "reduce_scatter")
MIN_BESIDE: Final = 0.2
"""Share of a collective's time beside a reduction, in the median step, from which on the reduction is its partner."""
ALONE, BESIDE = 0.05, 0.5
"""Shares of its time beside a reduction up to which a transfer runs alone, and from which on it does not."""
MIN_SAMPLES: Final = 8
EQUAL_SHARES: Final = 0.5
MIN_LOST: Final = 0.1
"""Smallest share of the speed that a partner takes."""
MAX_LOST: Final = 0.9
ALIKE: Final = 4.0
"""Factor up to which the rates of two transfers on one link may differ: their operations move different volumes."""
_BLOCKS: Final = 0.9
"""A rank stands still for a collective that is through, as to this share of it, before it begins anything else."""


@dataclass(frozen=True)
class Partner:
    """The job's own reduction beside a class of collectives."""

    op: str  # its name
    share: float  # how much of the collectives' time it runs beside them
    factor_KT: Array  # how many times as long each takes as it would alone
    is_measured: bool  # whether the trace has such collectives without it; else both are taken to get equal shares


def find_partners(matrix: OperationMatrix, classes: list[list[Integers]], own_NT: Array) -> dict[int, Partner]:
    communicates = matrix.is_collective_N & matrix.usual_N
    reductions = np.flatnonzero(matrix.is_op(*REDUCTIONS) & communicates)
    behind = np.array([n for n in reductions.tolist() if not _stands_still(matrix, n)], np.int64)
    kinds: dict[tuple[int, int], list[list[Integers]]] = {}
    for members in classes:
        first = int(members[0][0])
        is_needed = matrix.ops[matrix.op_N[first]] not in REDUCTIONS or _stands_still(matrix, first)
        if len(behind) and communicates[first] and is_needed:
            kinds.setdefault((int(matrix.op_N[first]), int(matrix.bytes_N[first])), []).append(members)
    partners: dict[int, Partner] = {}
    for alike in kinds.values():
        partners |= _look(matrix, own_NT, behind, alike)
    return partners


def _stands_still(matrix: OperationMatrix, n: int) -> bool:
    """Whether the rank begins nothing while the operation runs, in most steps."""
    mine = np.flatnonzero((matrix.rank_N == matrix.rank_N[n]) & (np.arange(len(matrix.rank_N)) != n))
    start_T, until_T = matrix.start_NT[n], matrix.start_NT[n] + _BLOCKS * (matrix.end_NT[n] - matrix.start_NT[n])
    begins_NT = (matrix.start_NT[mine] >= start_T) & (matrix.start_NT[mine] < until_T)
    return bool(begins_NT.any(axis=0).mean() < 0.5)


def _look(matrix: OperationMatrix, own_NT: Array, behind: Integers, alike: list[list[Integers]]) -> dict[int, Partner]:
    """The partner of transfers of one kind, at all places of a step together."""
    shares = [[_share(matrix, own_NT, behind, m) for m in members] for members in alike]
    shares_KT = [np.stack([share_T for share_T, _ in of]) for of in shares]
    lasts = [np.stack([own_NT[m].max(axis=0) for m in members]) for members in alike]
    share, lasts_s = np.concatenate([x.ravel() for x in shares_KT]), np.concatenate([x.ravel() for x in lasts])
    alone, beside = share <= ALONE, share >= BESIDE
    is_measured = alone.sum() >= MIN_SAMPLES and beside.sum() >= MIN_SAMPLES
    lost = EQUAL_SHARES
    if is_measured:
        longer = float(np.median(lasts_s[alone])) / max(float(np.median(lasts_s[beside])), 1e-12)
        lost = min((1.0 - longer) / float(np.median(share[beside])), MAX_LOST)
    if lost < MIN_LOST:
        return {}
    partners = {}
    for members, share_KT, ((_, partner), *_) in zip(alike, shares_KT, shares, strict=True):
        middle, first = float(np.median(share_KT)), int(members[0][0])
        # both on one link, by their rates; so, too, where the trace has no bytes
        rates = [matrix.bytes_N[i] / max(float(np.median(own_NT[i])), 1e-12) for i in (first, partner)]
        if middle >= MIN_BESIDE and (is_measured or min(rates) <= 0.0 or max(rates) <= ALIKE * min(rates)):
            op, factor_KT = matrix.ops[matrix.op_N[partner]], 1.0 / (1.0 - lost * share_KT)
            partners[first] = Partner(op, middle, factor_KT, bool(is_measured))
    return partners


def _share(matrix: OperationMatrix, own_NT: Array, behind: Integers, members: Integers) -> tuple[Array, int]:
    """Share of a group's collective beside reductions, ``(T,)``, the mean of its ranks; and the longest one."""
    total_T = np.zeros(matrix.steps)
    longest, most_s = -1, -1.0
    for n in members.tolist():
        others = behind[(matrix.rank_N[behind] == matrix.rank_N[n]) & (matrix.group_N[behind] != matrix.group_N[n])]
        low_OT = np.maximum(matrix.end_NT[n] - own_NT[n], matrix.start_NT[others])
        both_OT = np.nan_to_num(np.maximum(np.minimum(matrix.end_NT[n], matrix.end_NT[others]) - low_OT, 0.0))
        total_T += np.minimum(both_OT.sum(axis=0) / np.maximum(own_NT[n], 1e-12), 1.0)
        for other, both_s in zip(others.tolist(), both_OT.mean(axis=1).tolist(), strict=True):
            longest, most_s = (other, both_s) if both_s > most_s else (longest, most_s)
    return total_T / len(members), longest
