"""The clairvoyant policy, a greedy look-ahead plan: forks the state, tries settings on the true noise, takes the best.

It cannot be deployed, as it knows the future. It is no bound either: it looks a few intervals ahead, tries some
settings, and gives all ranks the same one, so other policies exceed it now and then. Talks to the engine. The teacher
of the distillation looks ahead in the same way (:func:`roll_ahead`). Legend: E episodes, S episodes asked about,
C settings (the first is off), M mechanisms, T iterations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.core.pacing import Candidate
from paceenv.sim.engine.simulator import Simulator

MAX_FORKED_RANKS = 2**20
"""Ranks that are rolled ahead at once, for memory: about 100 bytes each."""
HORIZON = 3
"""Control intervals that a candidate is rolled ahead."""
_WINDOWS = (0.05, 0.1, 0.2, 0.4, 0.6)
GRID: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "slack": ((0.0, 0.02), _WINDOWS),
    "phase_shift": ((0.0, 0.1), _WINDOWS),
    "mean_slack": ((0.0, 0.02), _WINDOWS),
    "stagger": ((0.0, 0.3), _WINDOWS),  # 0: places that are held without a judgement
    "paper": ((0.0, 0.02), _WINDOWS),
    "defer": ((0.0,), (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)),  # as long as a transfer, not as a step
}
"""Thresholds and windows of a mechanism that are tried, by the look-ahead and by the teacher of the distillation."""
_TOGETHER = (
    (("slack", 0.02, (0.1, 0.3, 0.6)), ("phase_shift", 0.1, (0.05, 0.2))),
    (("slack", 0.05, (0.1, 0.3)), ("stagger", 0.3, (0.2, 0.4))),
)
"""Threshold and windows of two mechanisms where both are on."""
MECHANISMS = ("slack", "phase_shift", "mean_slack", "stagger")
"""Those whose settings are tried in every job; defer only where the program has transfers that can wait."""


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


def grid(mechanisms: Sequence[str]) -> list[Candidate]:
    """Every mechanism alone with each of its thresholds and windows, and pairs of them."""
    candidates: list[Candidate] = [{m: pair} for m in mechanisms for pair in itertools.product(*GRID[m])]
    for (a, a_threshold, a_windows), (b, b_threshold, b_windows) in _TOGETHER:
        if a in mechanisms and b in mechanisms:
            both = itertools.product(a_windows, b_windows)
            candidates += [{a: (a_threshold, one), b: (b_threshold, other)} for one, other in both]
    return candidates


def settings_of(candidates: Iterable[Candidate]) -> NDArray[np.float64]:
    """Off and the candidates as settings ``(1 + C, M, 2)``."""
    return np.stack([pacing.off(), *(pacing.settings(candidate) for candidate in candidates)])


class Clairvoyant:
    """Plans one interval at a time: takes the candidate with the highest throughput on the noise that will come.

    Where the job's program has transfers that can wait, settings of defer are tried too.
    """

    name = "clairvoyant"

    def plan(self, simulator: Simulator, interval_iterations: int) -> NDArray[np.float64]:
        """The best candidate for each environment's next interval, ``(E, 1, M, 2)``; the simulator is not changed."""
        program = simulator.batch.program
        can_defer = program is not None and program.can_wait_O.any()
        tried = settings_of(grid([*MECHANISMS, "defer"] if can_defer else MECHANISMS))
        step_s_ECT = roll_ahead(simulator, np.arange(len(simulator.batch)), tried, HORIZON * interval_iterations)
        ideal_s_E1 = simulator.batch.jobs["ideal_step_s"][:, None]
        return np.asarray(tried[(ideal_s_E1 / step_s_ECT.mean(axis=2)).argmax(axis=1)][:, None])
