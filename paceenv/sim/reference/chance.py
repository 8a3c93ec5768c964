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
    """Events that are rare in every place (a rank, a group) of every step: counted over steps and places.

    Args:
        probability: of one in a place and step.
        draw: a uniform number for the gap after the n-th event.
        first: where the first one may be.
    """

    def __init__(self, probability: float, draw: Callable[[int], float], first: int = 0) -> None:
        self._probability, self._draw, self._n = probability, draw, 0
        self._at = first - 1 + geometric(draw(0), probability)

    def of_step(self, t: int, places: int) -> Iterator[tuple[int, int]]:
        """The places where one happens in step ``t``, and its number, from 1."""
        while self._at < (t + 1) * places:
            self._n += 1
            yield self._at - t * places, self._n
            self._at += geometric(self._draw(self._n), self._probability)


class Chance:
    """The draws of one episode of a job of so many ranks in so many groups; those of steps are asked step by step."""

    def __init__(self, job: Any, skewness: float, key: np.uint64, ranks: int, groups: int) -> None:
        self.job, self.key, self._ranks, self._groups = job, key, range(ranks), range(groups)
        self._gamma = draws.gamma_table(skewness)
        self._factor_R = np.maximum(1.0 + job["persistent_cv"] * self.normal_R(draws.PERSISTENT, ONCE), 1e-6)
        self._factor_R *= np.where(self._some(draws.SLOW_RANK, ranks, job["slow_ranks"]), job["slow_factor"], 1.0)
        self._drift_R = job["drift_cv"] * self.normal_R(draws.DRIFT, ONCE)
        self._stalls = Rare(job["stall_rate"], self._gap(draws.STALL, 2))
        under_way, onset, end = _episodes(job["fail_slow_share"], job["fail_slow_mean_iterations"])
        fail_key = key_of(key, draws.FAIL_SLOW, ONCE)
        self._fails_R = np.array([uniform(fail_key, draws.FAIL_SLOW, r) < under_way for r in self._ranks])
        self._slow = Rare(onset, lambda n: uniform(key, draws.FAIL_SLOW, n))
        self._well = Rare(end, lambda n: uniform(key, draws.RECOVERY, n), first=ranks)
        under_way, onset, end = _episodes(job["post_work_share"], job["post_work_mean_iterations"])
        has_it_G = self._some(draws.POST_WORK, groups, job["post_work_groups"])
        self._always_G, self._until_G = np.where(has_it_G, job["post_work_s"], 0.0), np.zeros(groups)
        start_key = key_of(key, draws.POST_WORK, ONCE)
        for g in self._groups:
            u = uniform(start_key, draws.POST_WORK, g)
            if u < under_way:
                self._until_G[g] = geometric(max(u / under_way, 1e-300), end)
        self._episode_G = np.array([self._episode_s(uniform(start_key, draws.COMMON, g)) for g in self._groups])
        self._post_work = Rare(onset, self._gap(draws.POST_WORK, 3))

    def _some(self, stream: int, places: int, some: int) -> NDArray[np.bool_]:
        """So many places, one after the other from a drawn one on."""
        first = int(uniform(self.key, stream, ONCE) * places)
        return np.asarray((np.arange(places) - first) % places < some)

    def _bits_R(self, stream: int, t: int) -> list[np.uint32]:
        key = key_of(self.key, stream, t)
        return [bits32(key, r) for r in self._ranks]

    def _normal(self, stream: int, t: int, place: int) -> float:
        """A standard normal draw."""
        return quantile(draws.normal_table(), bits32(key_of(self.key, stream, t), place))

    def normal_R(self, stream: int, t: int) -> Array:
        """A standard normal draw of every rank in step ``t``."""
        return np.array([quantile(draws.normal_table(), bits) for bits in self._bits_R(stream, t)])

    def uniform_R(self, stream: int, t: int) -> Array:
        """A draw from 0 up to 1 of every rank in step ``t``."""
        return np.array(self._bits_R(stream, t), np.float64) * 2.0**-32

    def _gap(self, stream: int, place: int) -> Callable[[int], float]:
        """Draws of gaps, each beside other draws of the event before."""
        key = self.key
        return lambda n: uniform(key_of(key, stream, n), stream, place) if n else uniform(key, stream, 0)

    def compute_R(self, t: int) -> tuple[Array, Array]:
        """How long every rank computes in step ``t``, and how long it stalls besides, seconds."""
        job, common_key = self.job, key_of(self.key, draws.COMMON, t)
        common = 1.0 + job["common_cv"] * quantile(draws.normal_table(), np.uint32(common_key >> np.uint64(32)))
        for r, _ in self._well.of_step(t, len(self._ranks)):
            self._fails_R[r] = False
        for r, _ in self._slow.of_step(t, len(self._ranks)):
            self._fails_R[r] = True
        imbalance_R = np.array([quantile(self._gamma, bits) for bits in self._bits_R(draws.IMBALANCE, t)])
        relative_R = 1.0 + job["jitter_cv"] * self.normal_R(draws.JITTER, t) + job["imbalance_cv"] * imbalance_R
        # Ornstein-Uhlenbeck: it forgets over drift_iterations, its innovations are uniform
        keep = math.exp(-1.0 / job["drift_iterations"])
        innovation_R = math.sqrt(12.0 * (1.0 - keep * keep)) * (self.uniform_R(draws.DRIFT, t) - 0.5)
        self._drift_R = keep * self._drift_R + job["drift_cv"] * innovation_R
        factor_R = self._factor_R * np.where(self._fails_R, job["fail_slow_factor"], 1.0)
        stall_R = np.zeros(len(self._ranks))
        for r, n in self._stalls.of_step(t, len(self._ranks)):
            stall_R[r] -= job["stall_mean_s"] * math.log(uniform(key_of(self.key, draws.STALL, n), draws.STALL, 1))
        compute_R = job["compute_s"] * max(common, 0.0) * factor_R * np.maximum(relative_R + self._drift_R, 0.0)
        return compute_R, stall_R

    def length(self, t: int, r: int, micro_batch: int) -> float:
        """How much longer a micro-batch of rank ``r`` takes than the mean one: its sequences are longer."""
        drawn = self._normal(draws.LENGTH, t * 4096 + micro_batch, r)
        return max(1.0 + float(self.job["length_cv"]) * drawn, 0.0)

    def _episode_s(self, u: float) -> float:
        return float(self.job["post_work_episode_s"] * (1.0 + self.job["post_work_spread"] * (2.0 * u - 1.0)))

    def post_work_G(self, t: int) -> Array:
        """Work after the collective in step ``t``, seconds: of some groups always, of others in episodes."""
        for g, n in self._post_work.of_step(t, len(self._groups)):
            key = key_of(self.key, draws.POST_WORK, n)
            if self._until_G[g] <= t:
                length = geometric(uniform(key, draws.POST_WORK, 1), 1.0 / self.job["post_work_mean_iterations"])
                self._until_G[g] = t + length
                self._episode_G[g] = self._episode_s(uniform(key, draws.POST_WORK, 2))
        return self._always_G + np.where(self._until_G > t, self._episode_G, 0.0)

    def transfer(self, t: int, number: int) -> float:
        """How much longer a transfer takes than on the mean: lognormal with mean 1."""
        variance = math.log1p(self.job["transfer_cv"] ** 2)
        return math.exp(math.sqrt(variance) * self._normal(draws.TRANSFER, t, number) - 0.5 * variance)


def _episodes(share: float, mean_steps: float) -> tuple[float, float, float]:
    """For a place that spends such a share of its time in episodes: how likely one is under way from before as it all
    begins, how likely one starts in a step, and ends in a step."""
    return share * (1.0 - 1.0 / mean_steps), share / (share + (1.0 - share) * mean_steps), 1.0 / mean_steps
