"""Looking ahead: a simulated job is forked, and each of some settings is held on the same true future.

The look-ahead plan, the projection policy and the teacher of the distillation ask this way; only where the future is
simulated can anything know it. Legend: E episodes, R ranks, J ranks watched in each episode, S questions, C settings
(the first is off), T iterations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.engine.simulator import Simulator

MAX_FORKED_RANKS = 2**20
"""Ranks that are rolled ahead at once, for memory: about 100 bytes each."""
CHANGE_RATES = (1.0 / 3.0, 1.0 / 12.0, 0.0)
"""How often an episode changes the setting that drives it, one rate an episode: answers must contain short trials and
settings that have been on for long."""
OFF_SHARE = 0.4
"""Share of that time without pacing."""
MIN_GAIN = 0.0005
"""The gain that one more candidate must add, if the best were always known."""


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


def select_candidates(gain_SC: NDArray[np.float64], most: int) -> list[int]:
    """The candidates that add most to the gain if the best were always known; one after the other, off first.

    Args:
        gain_SC: gain of each candidate in each situation, ``(S, C)``.
        most: candidates besides off.
    """
    chosen, best_S = [0], gain_SC[:, 0]
    while len(chosen) <= most:
        value_C = np.maximum(gain_SC, best_S[:, None]).mean(axis=0)
        c = int(value_C.argmax())
        if value_C[c] < best_S.mean() + MIN_GAIN:
            break
        chosen.append(c)
        best_S = np.maximum(best_S, gain_SC[:, c])
    return chosen


class Exploration:
    """Which ranks of episodes are watched, when they are asked about, and the varied settings that drive them.

    Args:
        watched: J at most.
        every_intervals: distance of an episode's questions.
    """

    def __init__(
        self, episodes: int, ranks: int, settings: int, watched: int, every_intervals: int, rng: np.random.Generator
    ) -> None:
        self._settings, self._every, self._rng = settings, every_intervals, rng
        self.watched_EJ = rng.permuted(np.tile(np.arange(ranks), (episodes, 1)), axis=1)[:, : min(ranks, watched)]
        self._phase_E, self._rate_E = rng.integers(0, every_intervals, episodes), rng.choice(CHANGE_RATES, episodes)
        self.choice_E = np.zeros(episodes, np.int64)
        """The setting that drives each episode."""

    def at(self, t: int) -> NDArray[np.int64]:
        """The episodes that are asked about after interval ``t``."""
        return np.flatnonzero((t + self._phase_E) % self._every == 0)

    def change(self, t: int) -> None:
        """Draw another setting for some episodes, at the first interval for all."""
        E, rng = len(self.choice_E), self._rng
        changes_E = rng.random(E) < (self._rate_E if t else 1.0)
        new_E = np.where(rng.random(E) < OFF_SHARE, 0, rng.integers(0, self._settings, E))
        self.choice_E = np.where(changes_E, new_E, self.choice_E)
