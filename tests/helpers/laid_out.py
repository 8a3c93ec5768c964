"""Settings as the rules read them, in arrays of their own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing


def laid_out(settings_M2: NDArray[np.float64], ranks: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """What :func:`paceenv.core.pacing.by_rank` writes, for settings of all ranks, or of each, ``(R, M, 2)``."""
    settings_M2R, on_M = np.zeros((*pacing.off().shape, ranks)), np.zeros(len(pacing.MECHANISMS), np.bool_)
    pacing.by_rank(settings_M2.reshape(-1, *pacing.off().shape), settings_M2R, on_M)
    return settings_M2R, on_M
