"""Steps of several kinds that take turns, such as with and without a reduction: each kind is diagnosed by itself.

Two steps are of one kind if every rank communicates as often in every operation and group. Axes: N operations, T steps.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from paceenv.diagnosis.operation_matrix import Integers, OperationMatrix

MIN_SHARE: Final = 0.2
"""Share of steps; rarer ones are exceptions, such as one with a checkpoint, and belong to the kind most like them."""
MIN_STEPS: Final = 2


def kinds_of_steps(matrix: OperationMatrix) -> list[Integers]:
    """The steps of each kind, by place and in order, the most frequent kind first."""
    communicates_N = matrix.is_collective_N | matrix.is_transfer_N
    has_TN = np.isfinite(matrix.start_NT[communicates_N]).T
    signatures, of_T, counts = np.unique(has_TN, axis=0, return_inverse=True, return_counts=True)
    large = counts >= max(MIN_STEPS, MIN_SHARE * matrix.steps)
    if large.sum() < 2:
        return [np.arange(matrix.steps)]
    order = np.flatnonzero(large)[np.argsort(-counts[large], kind="stable")]
    unlike = (signatures[:, None, :] != signatures[order][None, :, :]).sum(axis=2)
    kind_T = np.argmin(unlike, axis=1)[of_T.ravel()]
    return [np.flatnonzero(kind_T == k) for k in range(len(order))]
