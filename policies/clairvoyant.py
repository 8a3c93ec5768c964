"""The clairvoyant policy, a greedy look-ahead plan: forks the state, tries settings on the true noise, takes the best.

It cannot be deployed, as it knows the future. It is no bound either: it looks a few intervals ahead, tries some
settings, and gives all ranks the same one, so other policies exceed it now and then. Talks to the engine. The teacher
of the distillation looks ahead in the same way (:func:`roll_ahead`). Legend: E episodes, S episodes asked about,
C settings (the first is off), M mechanisms, T iterations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceenv.core import metrics, pacing
from paceenv.core.errors import out_of_range
from paceenv.sim.engine.simulator import Simulator

MAX_FORKED_RANKS = 2**20
"""Ranks that are rolled ahead at once, for memory: about 100 bytes each."""
_THRESHOLDS = {"slack": (0.0, 0.02), "phase_shift": (0.0, 0.1), "mean_slack": (0.01,), "stagger": (0.0,)}
_WINDOWS = (0.05, 0.1, 0.2, 0.4, 0.6)
_TOGETHER = (0.1, 0.3, 0.6), (0.05, 0.2)
"""Windows of slack and of phase_shift where both are on."""
_HOLDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Windows of defer, which is as long as a transfer and not as a step; its threshold 0 holds back without trials."""


def roll_ahead(
    simulator: Simulator, at: NDArray[np.int64], settings_CM2: NDArray[np.float64], iterations: int
) -> NDArray[np.float64]:
    """Every step ``(S, C, T)`` in seconds, if each setting is held from now on; all meet the same noise.

    Args:
        simulator: is forked, not changed.
        at: the episodes asked about, ``(S,)``.
    """
    C, parts = len(settings_CM2), 1 + len(at) * len(settings_CM2) * simulator.batch.ranks // MAX_FORKED_RANKS
    step_s = []
    for part in np.array_split(at, parts):
        future = simulator.fork(np.repeat(part, C))
        settings = np.tile(settings_CM2, (len(part), 1, 1))[:, None]
        step_s.append(future.run(settings, iterations).reshape(len(part), C, iterations))
    return np.concatenate(step_s)


def candidates(
    mechanisms: Sequence[str] = ("slack", "phase_shift", "mean_slack", "stagger"), *, can_defer: bool = False
) -> NDArray[np.float64]:
    """Settings ``(C, M, 2)`` to try: off, every mechanism at a few thresholds and windows, slack with phase_shift."""
    rows = [pacing.off()]
    for name in mechanisms:
        rows += [pacing.one_mechanism(name, t, w) for t, w in itertools.product(_THRESHOLDS[name], _WINDOWS)]
    if {"slack", "phase_shift"} <= set(mechanisms):
        slack, phase_shift = _TOGETHER
        rows += [
            pacing.one_mechanism("slack", 0.02, a) + pacing.one_mechanism("phase_shift", 0.1, b)
            for a, b in itertools.product(slack, phase_shift)
        ]
    if can_defer:
        rows += [pacing.one_mechanism("defer", 0.0, window) for window in _HOLDS]
    return np.stack(rows)


class Clairvoyant:
    """Plans one interval at a time: takes the candidate with the highest reward on the noise that will come.

    Where the job's program has transfers that can wait, settings of defer are tried too.

    Args:
        horizon: control intervals that a candidate is rolled ahead.
        preference: weight of variation in the reward (``paceenv.core.metrics.reward``), at least 0.
    """

    name = "clairvoyant"

    def __init__(self, horizon: int = 3, preference: float = 0.0) -> None:
        if not 0.0 <= preference < math.inf:
            raise out_of_range("preference", preference, "at least 0", "policy clairvoyant")
        self._horizon, self._preference = horizon, preference

    def plan(self, simulator: Simulator, interval_iterations: int) -> NDArray[np.float64]:
        """The best candidate for each environment's next interval, ``(E, 1, M, 2)``; the simulator is not changed."""
        tried = candidates(can_defer=bool(simulator.batch.program.can_wait_O.any()))
        step_s_ECT = roll_ahead(simulator, np.arange(len(simulator.batch)), tried, self._horizon * interval_iterations)
        ideal_s_E1 = simulator.batch.jobs["ideal_step_s"][:, None]
        mean_s_EC, sd_s_EC = step_s_ECT.mean(axis=2), step_s_ECT.std(axis=2)
        value_EC = metrics.reward(mean_s_EC, sd_s_EC, ideal_s_E1, self._preference)  # type: ignore[arg-type]
        return np.asarray(tried[np.asarray(value_EC).argmax(axis=1)][:, None])
