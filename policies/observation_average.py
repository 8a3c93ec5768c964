"""Averages of a rank's observations: an exponential mean, the same in training and on a live rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceenv.core import signals


class ObservationEMA:
    """Exponential means of views, one a row, over about ``intervals`` control intervals; the first view starts them.

    A single view does not separate a co-tenant of our own period from one that drifts past, nor short contention from
    lasting contention; the recent views do. Float32, row by row, so a batch of one rounds as any other.
    """

    def __init__(self, intervals: int) -> None:
        self.intervals, self._weight = intervals, np.float32(1.0 / intervals)
        self.reset(0)

    def reset(self, rows: int) -> None:
        """Forget everything and prepare for ``rows``."""
        self.mean_BO = np.full((rows, signals.SIGNALS), np.nan, np.float32)
        self._is_new = True

    def update(self, views_BO: NDArray[np.float32]) -> NDArray[np.float32]:
        """Take in one view of every row; the means with it, ``(B, O)``. Another number of rows starts anew."""
        if len(views_BO) != len(self.mean_BO):
            self.reset(len(views_BO))
        if self._is_new:
            self.mean_BO[:], self._is_new = views_BO, False
        else:
            self.mean_BO += self._weight * (views_BO - self.mean_BO)
        return self.mean_BO

    def start(self, which: NDArray[np.int64], views_BO: NDArray[np.float32]) -> None:
        """Start the rows ``which`` anew from their views."""
        self.mean_BO[which] = views_BO[which]
