"""The grid of static settings: every mechanism alone, then the best settings of each together with the others'."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceenv.trainers.sweep.score import Setting
from paceenv.trainers.sweep.sweep_config import GridOf
from paceenv.ui.config_files import Mechanism


def singles(mechanisms: Sequence[Mechanism], grid: Callable[[Mechanism], GridOf]) -> list[Setting]:
    """One mechanism at a time."""
    return [((m, t, w),) for m in mechanisms for t, w in itertools.product(grid(m).threshold, grid(m).window)]


def joint(settings: Sequence[Setting], value_S: NDArray[np.float64], combine: int) -> list[Setting]:
    """The ``combine`` best of each mechanism's own ``settings``, by ``value_S``, with those of other mechanisms."""
    order = np.argsort(-value_S, kind="stable")
    mechanisms = dict.fromkeys(setting[0][0] for setting in settings)
    top = [[settings[s] for s in order if settings[s][0][0] == m][:combine] for m in mechanisms]
    return [
        tuple(part for choice in chosen for part in choice)
        for chosen in itertools.product(*([(), *choices] for choices in top))
        if sum(map(len, chosen)) > 1
    ]
