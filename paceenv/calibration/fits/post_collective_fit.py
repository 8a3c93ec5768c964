"""Work after the payload: which groups have it, for how long, always or in episodes; and the time of the barrier.

Axes: T iterations, G process groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from paceenv.calibration.fits.two_state_fit import Episodes, find_episodes, fit_two_states
from paceenv.calibration.structure import JobStamps

USUAL_SPREAD: Final = 0.5
"""Usual distance of single episodes from their mean, as in ``episode_spread``."""
PRIOR_EPISODES: Final = 2
MIN_WORK_SHARE: Final = 0.02
"""Share of a step; less work cannot be separated from the overhead of every group."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PostCollectiveFit:
    """``always`` are the groups that always have it, ``work_s`` how long on average, with its standard error.

    ``episode_s`` is an episode's mean per step and ``spread`` how far single ones lie from it (uniform, as a share).
    ``barrier_s`` is the time after the last group is ready, with the overhead that all groups have.
    """

    always: tuple[int, ...]
    work_s: float
    work_se: float
    episodes: Episodes | None
    episode_s: float
    episode_se: float
    spread: float
    barrier_s: float
    barrier_se: float


def fit_post_collective(stamps: JobStamps) -> PostCollectiveFit:
    """Fit the time between the end of a group's payload and the end of the step."""
    rest_TG = stamps.ready_TG - stamps.finish_TG
    after_T = stamps.step_T - stamps.ready_TG.max(axis=1)
    least_s = MIN_WORK_SHARE * float(np.median(stamps.step_T))
    on_TG = np.stack([fit_two_states(x, least_s) for x in rest_TG.T], axis=1)
    usual_G = np.array([np.median(rest_TG[~on_TG[:, g], g]) for g in range(stamps.groups)])
    common_s = float(usual_G.min())
    always = tuple(int(g) for g in np.flatnonzero(usual_G - common_s > least_s))
    work_TG = rest_TG - usual_G
    work_s, work_se = 0.0, 0.0
    if always:
        own_T = np.where(on_TG, np.nan, rest_TG)[:, list(always)].ravel() - common_s
        own = own_T[np.isfinite(own_T)]
        work_s, work_se = float(own.mean()), float(own.std(ddof=1) / math.sqrt(len(own)))
    episodes = find_episodes(on_TG)
    single = _episode_means(work_TG, on_TG)
    episode_s, se, spread = _of_episodes(single) if episodes else (0.0, 0.0, 0.0)
    barrier_s, barrier_se = float(after_T.mean()), float(after_T.std(ddof=1) / math.sqrt(len(after_T)))
    return PostCollectiveFit(always, work_s, work_se, episodes, episode_s, se, spread, barrier_s + common_s, barrier_se)


def _of_episodes(single: list[float]) -> tuple[float, float, float]:
    """Mean work of episodes, its standard error, and how far single ones lie from it (uniform, as a share).

    The spread of a few episodes is hardly known, so USUAL_SPREAD counts as two more of them. Student's t widens the
    error.
    """
    mean_s, n = float(np.mean(single)), len(single)
    usual_s = USUAL_SPREAD / math.sqrt(3.0) * mean_s
    freedom = PRIOR_EPISODES + n - 1
    sd_s = math.sqrt((PRIOR_EPISODES * usual_s**2 + float(np.sum((np.array(single) - mean_s) ** 2))) / freedom)
    wider = float(stats.t.ppf(0.975, freedom) / stats.norm.ppf(0.975))
    spread = min(math.sqrt(3.0) * float(np.std(single)) / mean_s, 1.0) if n > 2 else 0.0
    return mean_s, wider * sd_s / math.sqrt(n), spread


def _episode_means(work_TG: Array, on_TG: NDArray[np.bool_]) -> list[float]:
    """The mean work of every single episode."""
    means = []
    for work_T, on_T in zip(work_TG.T, on_TG.T, strict=True):
        bounds = np.flatnonzero(np.diff(on_T.astype(np.int8))) + 1
        parts = np.split(np.arange(len(on_T)), bounds)
        means += [float(work_T[part].mean()) for part in parts if on_T[part[0]]]
    return means
