"""What makes one step differ from the next. Every draw is a hash of the episode's key, what it is for, step and rank.

A rank computes in step t

    compute_s * factor[rank] * (1 + common[t]) * max(0, 1 + jitter[t, rank] + imbalance[t, rank] + drift[t, rank])

and ``fail_slow_factor`` times as long while it is in an episode. Now and then it stalls on top of that. Nothing here
depends on time or on pacing: two policies meet the same noise. ``job`` is a record of ``layout.JOB``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.engine import draws
from paceenv.sim.engine.draws import bits32, geometric, key_of, quantile, uniform

Array = NDArray[np.float64]

ONCE = 1 << 62
"""In place of a step, of draws made once, at the start of an episode."""


class Rare:
    """Events that are rare for every rank in every step: counted over steps and ranks.

    Args:
        probability: of one for a rank in a step.
        draw: a uniform number for the gap after the n-th event.
        first: where the first one may be.
    """

    def __init__(self, ranks: int, probability: float, draw: Callable[[int], float], first: int = 0) -> None:
        self._ranks, self._probability, self._draw, self._n = ranks, probability, draw, 0
        self._at = first - 1 + geometric(draw(0), probability)

    def of_step(self, t: int) -> Iterator[tuple[int, int]]:
        """The ranks for which one happens in step ``t``, and its number, from 1."""
        while self._at < (t + 1) * self._ranks:
            self._n += 1
            yield self._at - t * self._ranks, self._n
            self._at += geometric(self._draw(self._n), self._probability)


class Chance:
    """How long the ranks of a job compute in an episode, asked step by step."""

    def __init__(self, job: Any, key: np.uint64, ranks: int) -> None:
        self._job, self._key, self._ranks = job, key, ranks
        self._normal, self._gamma = draws.normal_table(), draws.gamma_table(float(job["imbalance_skew"]))
        first_slow = int(uniform(key, draws.SLOW_RANK, ONCE) * ranks)
        is_slow_R = (np.arange(ranks) - first_slow) % ranks < job["slow_ranks"]
        self._factor_R = np.maximum(1.0 + job["persistent_cv"] * self._draw_R(draws.PERSISTENT, ONCE), 1e-6)
        self._factor_R *= np.where(is_slow_R, job["slow_factor"], 1.0)
        self._drift_R = job["drift_cv"] * self._draw_R(draws.DRIFT, ONCE)
        # episodes, of which the first ones are under way: how often they begin follows from their share and length
        share, mean_steps = job["fail_slow_share"], job["fail_slow_mean_iterations"]
        fail_key, under_way = key_of(key, draws.FAIL_SLOW, ONCE), share * (1.0 - 1.0 / mean_steps)
        self._fails_R = np.array([uniform(fail_key, draws.FAIL_SLOW, r) < under_way for r in range(ranks)])
        onset = share / (share + (1.0 - share) * mean_steps)
        self._slow = Rare(ranks, onset, lambda n: uniform(key, draws.FAIL_SLOW, n))
        self._well = Rare(ranks, 1.0 / mean_steps, lambda n: uniform(key, draws.RECOVERY, n), first=ranks)
        first = uniform(key, draws.STALL, 0)
        self._stalls = Rare(ranks, job["stall_rate"], lambda n: self._of_stall(n, 2) if n else first)

    def _draw_R(self, stream: int, t: int, table: Array | None = None) -> Array:
        """A draw of every rank in step ``t``, standard normal by default."""
        key, table = key_of(self._key, stream, t), self._normal if table is None else table
        return np.array([quantile(table, bits32(key, r)) for r in range(self._ranks)])

    def _of_stall(self, n: int, place: int) -> float:
        """A uniform number of the n-th stall."""
        return uniform(key_of(self._key, draws.STALL, n), draws.STALL, place)

    def compute_R(self, t: int) -> tuple[Array, Array]:
        """How long every rank computes in step ``t``, and how long it stalls besides, seconds."""
        job, common_key, drift_key = self._job, key_of(self._key, draws.COMMON, t), key_of(self._key, draws.DRIFT, t)
        common = 1.0 + job["common_cv"] * quantile(self._normal, np.uint32(common_key >> np.uint64(32)))
        for r, _ in self._well.of_step(t):
            self._fails_R[r] = False
        for r, _ in self._slow.of_step(t):
            self._fails_R[r] = True
        relative_R = 1.0 + job["jitter_cv"] * self._draw_R(draws.JITTER, t)
        relative_R += job["imbalance_cv"] * self._draw_R(draws.IMBALANCE, t, self._gamma)
        # Ornstein-Uhlenbeck: it forgets over drift_iterations, its innovations are uniform
        keep, drawn_R = math.exp(-1.0 / job["drift_iterations"]), [bits32(drift_key, r) for r in range(self._ranks)]
        innovation_R = math.sqrt(12.0 * (1.0 - keep * keep)) * (np.array(drawn_R) * 2.0**-32 - 0.5)
        self._drift_R = keep * self._drift_R + job["drift_cv"] * innovation_R
        stall_R = np.zeros(self._ranks)
        for r, n in self._stalls.of_step(t):
            stall_R[r] -= job["stall_mean_s"] * math.log(self._of_stall(n, 1))
        factor_R = self._factor_R * np.where(self._fails_R, job["fail_slow_factor"], 1.0)
        compute_R = job["compute_s"] * max(common, 0.0) * factor_R * np.maximum(relative_R + self._drift_R, 0.0)
        return compute_R, stall_R
