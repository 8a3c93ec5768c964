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

from paceenv.core import timing
from paceenv.sim.engine import draws
from paceenv.sim.engine.draws import bits32, geometric, key_of, quantile, uniform

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


def _onset(share: float, mean_steps: float) -> float:
    """How likely an episode starts in a step, so that a place spends such a share of its time in them."""
    return share / (share + (1.0 - share) * mean_steps)


def _under_way(share: float, mean_steps: float) -> float:
    """How likely one is under way from before the first step."""
    return share * (1.0 - 1.0 / mean_steps)


class Chance:
    """The draws of one episode of a job of so many ranks in so many groups."""

    def __init__(self, job: Any, skewness: float, key: np.uint64, ranks: int, groups: int) -> None:
        self.job, self.key, self.ranks, self.groups = job, key, ranks, groups
        self._normal, self._gamma = draws.normal_table(), draws.gamma_table(skewness)
        first_slow = int(uniform(key, draws.SLOW_RANK, ONCE) * ranks)
        self._factor_R, self._is_slow_R, self._drift_R = [1.0] * ranks, [False] * ranks, [0.0] * ranks
        fail_key, slow_share = key_of(key, draws.FAIL_SLOW, ONCE), job["fail_slow_share"]
        slow_steps = job["fail_slow_mean_iterations"]
        for r in range(ranks):
            self._factor_R[r] = max(1.0 + job["persistent_cv"] * self._of(draws.PERSISTENT, ONCE, r), 1e-6)
            if (r - first_slow) % ranks < job["slow_ranks"]:
                self._factor_R[r] *= job["slow_factor"]
            self._is_slow_R[r] = uniform(fail_key, draws.FAIL_SLOW, r) < _under_way(slow_share, slow_steps)
            self._drift_R[r] = job["drift_cv"] * self._of(draws.DRIFT, ONCE, r)
        self._stalls = Rare(job["stall_rate"], self._gap(draws.STALL, 2))
        self._slow = Rare(_onset(slow_share, slow_steps), lambda n: uniform(key, draws.FAIL_SLOW, n))
        self._well = Rare(1.0 / slow_steps, lambda n: uniform(key, draws.RECOVERY, n), first=ranks)
        self._start_post_work()

    def _of(self, stream: int, t: int, r: int) -> float:
        """A standard normal draw."""
        return quantile(self._normal, bits32(key_of(self.key, stream, t), r))

    def _gap(self, stream: int, place: int) -> Callable[[int], float]:
        """Draws of gaps, each beside other draws of the event before."""
        key = self.key
        return lambda n: uniform(key_of(key, stream, n), stream, place) if n else uniform(key, stream, 0)

    # compute

    def compute_s(self, t: int) -> tuple[list[float], list[float]]:
        """How long every rank computes in step ``t``, and how long it stalls besides, seconds; asked step by step."""
        job, compute_R, stall_R = self.job, [0.0] * self.ranks, [0.0] * self.ranks
        common = 1.0
        if job["common_cv"] > 0.0:
            bits = np.uint32(key_of(self.key, draws.COMMON, t) >> np.uint64(32))
            common += job["common_cv"] * quantile(self._normal, bits)
        if job["fail_slow_share"] > 0.0:
            for r, _ in self._well.of_step(t, self.ranks):
                self._is_slow_R[r] = False
            for r, _ in self._slow.of_step(t, self.ranks):
                self._is_slow_R[r] = True
        for r in range(self.ranks):
            relative = 1.0
            if job["jitter_cv"] > 0.0:
                relative += job["jitter_cv"] * self._of(draws.JITTER, t, r)
            if job["imbalance_cv"] > 0.0:
                skewed = quantile(self._gamma, bits32(key_of(self.key, draws.IMBALANCE, t), r))
                relative += job["imbalance_cv"] * skewed
            if job["drift_cv"] > 0.0:
                relative += self._drift(t, r)
            factor = self._factor_R[r] * (job["fail_slow_factor"] if self._is_slow_R[r] else 1.0)
            compute_R[r] = job["compute_s"] * max(common, 0.0) * factor * max(relative, 0.0)
        for r, n in self._stalls.of_step(t, self.ranks):
            u = uniform(key_of(self.key, draws.STALL, n), draws.STALL, 1)
            stall_R[r] -= job["stall_mean_s"] * math.log(u)
        return compute_R, stall_R

    def _drift(self, t: int, r: int) -> float:
        """Ornstein-Uhlenbeck: it forgets over ``drift_iterations``, its innovations are uniform."""
        job, keep = self.job, math.exp(-1.0 / self.job["drift_iterations"])
        u = float(bits32(key_of(self.key, draws.DRIFT, t), r)) * 2.0**-32 - 0.5
        innovation = job["drift_cv"] * math.sqrt(1.0 - keep * keep) * math.sqrt(12.0)
        self._drift_R[r] = keep * self._drift_R[r] + innovation * u
        return self._drift_R[r]

    def length(self, t: int, replica: int, micro_batch: int) -> float:
        """How much longer a micro-batch of one replica takes than the mean one: its sequences are longer."""
        return max(1.0 + float(self.job["length_cv"]) * self._of(draws.LENGTH, t * 4096 + micro_batch, replica), 0.0)

    # work after the collective, in some groups always, in others in episodes

    def _start_post_work(self) -> None:
        job, key, share = self.job, self.key, self.job["post_work_share"]
        mean_steps, start_key = job["post_work_mean_iterations"], key_of(key, draws.POST_WORK, ONCE)
        first = int(uniform(key, draws.POST_WORK, ONCE) * self.groups)
        self._always_G, self._until_G, self._episode_G = [0.0] * self.groups, [0] * self.groups, [0.0] * self.groups
        for g in range(self.groups):
            self._always_G[g] = job["post_work_s"] if (g - first) % self.groups < job["post_work_groups"] else 0.0
            u, running = uniform(start_key, draws.POST_WORK, g), _under_way(share, mean_steps)
            if u < running:
                self._until_G[g] = geometric(max(u / running, 1e-300), 1.0 / mean_steps)
            self._episode_G[g] = self._episode_s(uniform(start_key, draws.COMMON, g))
        self._post_work = Rare(_onset(share, mean_steps), self._gap(draws.POST_WORK, 3))

    def _episode_s(self, u: float) -> float:
        return float(self.job["post_work_episode_s"] * (1.0 + self.job["post_work_spread"] * (2.0 * u - 1.0)))

    def post_work_s(self, t: int) -> list[float]:
        """Of every group in step ``t``, seconds; asked step by step."""
        for g, n in self._post_work.of_step(t, self.groups):
            key = key_of(self.key, draws.POST_WORK, n)
            if self._until_G[g] <= t:
                length = geometric(uniform(key, draws.POST_WORK, 1), 1.0 / self.job["post_work_mean_iterations"])
                self._until_G[g] = t + length
                self._episode_G[g] = self._episode_s(uniform(key, draws.POST_WORK, 2))
        groups = zip(self._always_G, self._until_G, self._episode_G, strict=True)
        return [always + (episode if until > t else 0.0) for always, until, episode in groups]

    # transfers

    def transfer(self, t: int, number: int) -> float:
        """How much longer a transfer takes than on the mean: lognormal with mean 1."""
        variance = math.log1p(self.job["transfer_cv"] ** 2)
        if variance == 0.0:
            return 1.0
        return math.exp(math.sqrt(variance) * self._of(draws.TRANSFER, t, number) - 0.5 * variance)

    def loss(self, t: int, stream: int, number: int) -> float:
        """A uniform draw that decides whether a window of packets is lost."""
        return uniform(key_of(self.key, draws.INCAST, t), stream, number)

    def until_failure(self, n: int) -> float:
        """The hazard that the job lives through after its n-th failure: exponential with mean 1."""
        return -math.log(uniform(self.key, draws.FAILURE, n))

    # what a live rank does and measures imperfectly

    def is_missing(self, t: int, r: int) -> bool:
        """Whether a rank cannot measure a step; an agent first learns the shape of a step, and misses none."""
        bits = bits32(key_of(self.key, draws.MISSING, t), r) if t >= timing.BLOCK_ITERATIONS else 2**32
        return bool(bits < self.job["missing_share"] * 2.0**32)

    def late_wake_s(self, t: int, r: int) -> float:
        """How much later than decided a delay is over: exponential."""
        u = (float(bits32(key_of(self.key, draws.LATE_WAKE, t), r)) + 0.5) * 2.0**-32
        return -float(self.job["late_wake_s"]) * math.log(u)

    def stamp_error_s(self, t: int, r: int) -> tuple[float, float]:
        """Of the two durations that a rank measures in a step."""
        size_s = self.job["stamp_noise_s"]
        return size_s * self._of(draws.STAMPS, 2 * t, r), size_s * self._of(draws.STAMPS, 2 * t + 1, r)


class TenantChance:
    """The draws of the k-th tenant; ``record`` is one of ``paceenv.sim.engine.layout.TENANT``."""

    def __init__(self, record: Any, key: np.uint64, k: int) -> None:
        self.record, self.place, self._key, self._place = record, k, key, draws.PER_TENANT * k
        self._transfer_s = record["uplink_work_s"] / record["rate_cap"]
        self._period_s = record["compute_s"] + self._transfer_s

    def _uniform(self, cycle: int, place: int) -> float:
        return uniform(key_of(self._key, draws.TENANT, cycle), draws.TENANT, self._place + place)

    def first(self) -> tuple[float, float]:
        """When its next transfer begins, and what is left of one that is under way, a share.

        It starts at any point of its period; or in a pause, of which it has had more the longer it is.
        """
        record, compute_s = self.record, float(self.record["compute_s"])
        away = 0.5 * record["pause_rate"] * record["pause_periods"] if record["pause_periods"] > 1.0 else 0.0
        u = uniform(self._key, draws.TENANT, ONCE + self._place + 1) * (1.0 + away)
        if u < away:
            return record["pause_periods"] * (1.0 - math.sqrt(1.0 - u / away)) * self._period_s + compute_s, 0.0
        at_s = uniform(self._key, draws.TENANT, ONCE + self._place) * self._period_s
        return (compute_s - at_s, 0.0) if at_s < compute_s else (0.0, 1.0 - (at_s - compute_s) / self._transfer_s)

    def compute_s(self, cycle: int) -> float:
        """How long it computes before its next transfer: as its slowest rank, and a pause now and then."""
        record, u = self.record, self._uniform(cycle, 0)
        if record["bursty"]:
            return float(-record["compute_s"] * math.log(u))
        slowest = quantile(draws.normal_table(), draws.uniform_bits(u ** (1.0 / record["ranks"])))
        compute_s = record["compute_s"] * max(1.0 + record["jitter_cv"] * slowest, 0.0)
        if record["pause_rate"] > 0.0:
            share = self._uniform(cycle, 2) / record["pause_rate"]
            compute_s += share * record["pause_periods"] * self._period_s if share < 1.0 else 0.0
        return float(compute_s)

    def transfer(self, cycle: int) -> float:
        """How much it transfers, relative to its mean."""
        return -math.log(self._uniform(cycle, 1)) if self.record["bursty"] else 1.0
