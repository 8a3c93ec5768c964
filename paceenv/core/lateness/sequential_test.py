"""The sequential test of :mod:`paceenv.core.lateness.watch`: scores, and the usual noise that sets their price.

The noise of ranks against each other is learned while they run: how wide, how heavy tails, how long it lasts. The price
of a step is the logarithm of the mean of ``exp(weight * noise)``, measured on the ranks themselves, so no distribution
is assumed.
Suffixes: R ranks, J weights, B steps. Noise is in units of a rank's own standard deviation, limited to ``CLIP``.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

WEIGHTS: Final = np.array([2.4, 1.2, 0.6, 0.3])
"""Of the test's scores. A large one finds large differences within a few steps, a small one small ones in hundreds."""
STRETCHES: Final = (4, 16, 64, 256)
"""Steps until a score of each weight decides. Noise that lasts is measured over as many."""
CLIP: Final = 4.0
"""Standard deviations to which noise is limited: a single step, however late, cannot decide anything."""
LEAST_SCALE_S: Final = 1e-12
"""Noise counts as at least this, seconds, so that nothing is divided by zero; no clock sees it."""
MEMORY: Final = 1024
"""Steps that an average remembers."""
PRIOR_STEPS: Final = 8
"""A rank's own spread counts as much as that of all ranks after so many steps."""
_UNSEEN: Final = 3.0
"""Rule of three: noise as large as CLIP that was not seen in N values has, with 95 %, a share below 3 / N."""
_EFFICIENCY: Final = 0.64
"""Of a median against a mean."""
_SIGNS: Final = 2.0
"""Standard deviations by which late steps must outnumber the others."""

Times = NDArray[np.float64]
Flags = NDArray[np.bool_]


class UsualNoise:
    """Running estimates from steps of R ranks; each step costs O(R)."""

    def __init__(self, first_s_BR: Times, steps_B: Times, spread_B: Times) -> None:
        """Learn from the first steps.

        Args:
            first_s_BR: how much later than the others each rank was, seconds; not-a-number where unknown.
            steps_B: each row is the mean of so many steps,
            spread_B: and its noise so many times that of a typical one.
        """
        known_BR = ~np.isnan(first_s_BR)
        ranks = first_s_BR.shape[1]
        self.centre_s_R = _medians_R(first_s_BR)
        """Each rank's usual difference to the others, seconds."""
        away_BR = np.where(known_BR, (first_s_BR - self.centre_s_R) / spread_B[:, None], 0.0)
        size = np.abs(away_BR[known_BR])
        limit_s = CLIP * 1.4826 * float(np.median(size)) if size.size else 0.0
        clipped = np.minimum(size, limit_s) if limit_s > 0.0 else size
        freedom = len(first_s_BR) / max(len(first_s_BR) - 1, 1)
        variance = float(np.mean(clipped**2)) * freedom if size.size else 0.0
        self._variance_R = np.full(ranks, variance)
        self._steps_R = np.zeros(ranks)
        self._steps = 0
        self._values = 0.0
        self._moments_2J = np.ones((2, len(WEIGHTS)))
        self._square = 1.0
        self._sums_JR, self._counts_JR = np.zeros((len(WEIGHTS), ranks)), np.zeros((len(WEIGHTS), ranks))
        self._block_variance_JR, self._blocks_J = np.zeros((len(WEIGHTS), ranks)), np.zeros(len(WEIGHTS))
        self.scale_s_R = self._scale_s_R()
        """Standard deviation of each rank's difference to the others, seconds; at first that of all ranks."""
        self.persistence_J = np.ones(len(WEIGHTS))
        """Variance of sums of STRETCHES steps over that of independent ones, a standard error up, at least 1.

        That of the middle rank: a rank that turns late must not hide behind its own lateness.
        """
        for away_R, known_R, steps, spread in zip(away_BR, known_BR, steps_B, spread_B, strict=True):
            self._learn(away_R, known_R, float(steps), float(spread))

    def _scale_s_R(self) -> Times:
        weight_R = self._steps_R / (self._steps_R + PRIOR_STEPS)
        return np.asarray(np.sqrt(weight_R * self._variance_R + (1.0 - weight_R) * self._variance_R.mean()))

    def _persistence_J(self) -> Times:
        persistence_J = np.ones(len(WEIGHTS))
        blocks_J = np.maximum(self._blocks_J, 1.0)
        middle_J = np.median(self._block_variance_JR, axis=1) / (1.0 - 2.0 / (9.0 * blocks_J)) ** 3
        freedom_J = blocks_J * max(_EFFICIENCY * (len(self._steps_R) - 1), 1.0)
        upper_J = middle_J / max(self._square, np.finfo(np.float64).tiny) * (1.0 + np.sqrt(2.0 / freedom_J))
        for j in range(len(WEIGHTS)):
            if self._blocks_J[j] >= 2:
                persistence_J[j] = max(upper_J[j], 1.0)
            elif j:
                persistence_J[j] = persistence_J[j - 1]
        return persistence_J

    @property
    def price_J(self) -> Times:
        """What a step of usual noise adds to a score at most, on average; the score must earn more than that."""
        seen_J = self._moments_2J.max(axis=0)
        unseen_J = self.persistence_J * _UNSEEN * np.exp(WEIGHTS * CLIP)
        values_J = self._values + self.persistence_J * _UNSEEN
        tail_J = np.log((seen_J * self._values + unseen_J) / values_J) - np.log(seen_J)
        return np.asarray(np.log(seen_J) * self.persistence_J + np.maximum(tail_J, 0.0))

    def add(self, late_s_R: Times, usual_R: Flags, steps: float, spread: float) -> None:
        self._learn(np.where(usual_R, (late_s_R - self.centre_s_R) / spread, 0.0), usual_R, steps, spread)

    def move(self, rank: int, centre_s: float) -> None:
        """A rank's usual difference to the others is another one from now on."""
        self.centre_s_R[rank] = centre_s

    def _learn(self, away_s_R: Times, usual_R: Flags, steps: float, spread: float) -> None:
        ranks = int(np.count_nonzero(usual_R))
        if not ranks:
            return
        scale_s_R = np.maximum(self.scale_s_R, LEAST_SCALE_S)
        noise_R = np.clip(away_s_R / scale_s_R, -CLIP, CLIP)
        self._steps_R += usual_R
        self._steps += 1
        gain_R = usual_R / np.minimum(self._steps_R + 1.0, MEMORY)
        self.centre_s_R += gain_R * noise_R * scale_s_R * spread
        self._variance_R += gain_R * ((noise_R * scale_s_R) ** 2 - self._variance_R)
        self.scale_s_R = self._scale_s_R()
        gain = 1.0 / min(self._steps, MEMORY)
        self._values = min(self._values + ranks * steps, float(MEMORY * len(self._steps_R)))
        used = noise_R[usual_R]
        powers = np.exp(WEIGHTS[:, None] * used)
        moments_2J = np.stack([powers.mean(axis=1), (1.0 / powers).mean(axis=1)])
        self._moments_2J += gain * (moments_2J - self._moments_2J)
        self._square += gain * (float(np.mean(used**2)) - self._square)
        self._sums_JR += noise_R
        self._counts_JR += usual_R
        for j, length in enumerate(STRETCHES):
            if self._steps % length == 0:
                self._blocks_J[j] = min(self._blocks_J[j] + 1, max(MEMORY // length, 8))
                variance_R = self._sums_JR[j] ** 2 / np.maximum(self._counts_JR[j], 1.0)
                self._block_variance_JR[j] += (variance_R - self._block_variance_JR[j]) / self._blocks_J[j]
                self._sums_JR[j] = self._counts_JR[j] = 0.0
        if self._steps % STRETCHES[0] == 0:
            self.persistence_J = self._persistence_J()


class Scores:
    """Scores of R ranks with J weights, and what happened since each of them began."""

    def __init__(self, ranks: int, threshold: float) -> None:
        shape = (len(WEIGHTS), ranks)
        self._threshold = threshold
        self.height_JR = np.zeros(shape)
        self.steps_JR, self.signs_JR, self.sum_JR = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.first_JR = np.zeros(shape, np.int64)

    def add(self, noise_R: Times, price_J: Times, value_R: Times, known_R: Flags, iteration: int) -> Flags:
        """Add a step; returns which ranks have passed the threshold, ``(R,)``."""
        fresh_JR = (self.height_JR <= 0.0) & known_R
        self.first_JR[fresh_JR] = iteration
        for table_JR in (self.steps_JR, self.signs_JR, self.sum_JR):
            table_JR[fresh_JR] = 0.0
        self.steps_JR += known_R
        self.signs_JR += np.where(known_R, np.sign(noise_R), 0.0)
        self.sum_JR += np.where(known_R, value_R, 0.0)
        gain_JR = WEIGHTS[:, None] * np.where(known_R, noise_R, 0.0) - price_J[:, None] * known_R
        self.height_JR = np.minimum(np.maximum(self.height_JR, 0.0) + gain_JR, self._threshold)
        if self.height_JR.max() < self._threshold:
            return np.zeros(len(known_R), np.bool_)
        return np.asarray(self._passed().any(axis=0) & known_R)

    def _passed(self) -> Flags:
        clear = self.signs_JR >= _SIGNS * np.sqrt(np.maximum(self.steps_JR, 1.0))
        return np.asarray((self.height_JR >= self._threshold) & clear)

    def begin_of(self, rank: int) -> tuple[int, int, float]:
        """When the score that passed began: iteration, steps since, and their sum; of several the latest."""
        j = max(np.flatnonzero(self._passed()[:, rank]).tolist(), key=lambda j: int(self.first_JR[j, rank]))
        return int(self.first_JR[j, rank]), int(self.steps_JR[j, rank]), float(self.sum_JR[j, rank])

    def clear(self, rank: int) -> None:
        self.height_JR[:, rank] = 0.0


def _medians_R(first_s_BR: Times) -> Times:
    """The median of what is known of each rank; 0 where nothing is."""
    known_R = np.asarray(~np.isnan(first_s_BR).all(axis=0))
    centre_s_R = np.zeros(first_s_BR.shape[1])
    centre_s_R[known_R] = np.nanmedian(first_s_BR[:, known_R], axis=0)
    return centre_s_R
