"""Projection, a k-nearest-neighbour look-ahead: it paces as simulated situations like a rank's own say that it pays.

Beforehand the calibrated simulator is driven with varied settings, on noise of its own. At ends of control intervals it
is forked, and every candidate setting is held over the same horizon on the same noise. So a bank of situations arises:
what ranks saw, and the gain of each candidate from there. At each decision a rank looks up the situations with views
most like its own and weighs them by likeness. It changes its setting only when another one is better by more than the
standard error, and paces only for a gain of at least ``MARGIN``. It does not pace

- on a cluster where no candidate helps in any simulated situation,
- while its view is unlike anything simulated, as projections do not hold there.

Every rank decides alone, from its own views. It knows the cluster's config with its ranges, but not what the episode
drew. Legend: B rows, E episodes, R ranks, J ranks watched in each episode, O signals, F features, C candidates (the
first is off), S snapshots, N remembered views (S x J), K neighbours.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from paceenv.core import pacing
from paceenv.core.errors import out_of_range
from paceenv.core.limits import LIMITS, Limits
from paceenv.core.signals import SIGNALS
from paceenv.policies.base import INTERVAL_ITERATIONS, Policy
from paceenv.policies.look_ahead import Exploration, roll_ahead, select_candidates
from paceenv.policies.networks import ObservationEMA
from paceenv.policies.rollout import start
from paceenv.sim.cluster import Cluster
from paceenv.sim.engine.simulator import Simulator

HORIZON_INTERVALS = 4
"""Control intervals that candidates are rolled ahead. The slack rule needs two or three to settle."""
# A pilot tries these thresholds and windows before the bank is built from the few settings that matter.
SPREAD = {
    "slack": ((0.0, 0.02, 0.1), (0.1, 0.4)),
    "phase_shift": ((0.0, 0.05, 0.1, 0.2), (0.05, 0.2, 0.4)),
    "stagger": ((0.0, 0.5), (0.2, 0.4)),
    "defer": ((0.0, 0.02), (0.02, 0.1)),
    "mean_slack": ((0.02,), (0.1, 0.2)),
}
TOGETHER = ((0.02, (0.1, 0.4)), (0.1, (0.05, 0.2)))
"""Threshold and windows of slack and of phase_shift where both are on."""
MAX_CANDIDATES = 6
"""Settings besides off that a bank compares."""
LONG_MEMORY_INTERVALS = 12
"""Control intervals that a rank's mean view reaches back: it separates lasting effects from short ones."""
PILOT_EPISODES, PILOT_INTERVALS = 96, 10
EPISODE_INTERVALS, EVERY_INTERVALS = 24, 5
"""Length of an episode and distance of its snapshots."""
WATCHED_RANKS = 2
"""Ranks whose views are remembered in each episode: views of early and of critical ranks differ."""
MIN_EPISODES, MAX_EPISODES, MAX_RANK_EPISODES = 64, 512, 512 * 64
PILOT_SEED, BANK_SEED = 700_000_000, 800_000_000
"""First seeds: far from those of evaluation, searches and training."""
NEIGHBOURS = 50
"""Remembered views that are looked up for a decision; the nearer half counts most."""
MARGIN = 0.001
"""Projected gain below which pacing is left alone."""
ERRORS = 1.0
"""Standard errors by which another setting must be better than the present one."""
UNLIKE = 1.5
"""How many times farther from all that is remembered than nearly all remembered views are from each other."""
_SAMPLE = 1000
"""Remembered views from which that distance is taken."""
_TINY = 1e-9


class Projection(Policy):
    """The policy for one cluster; building it simulates a few million iterations.

    Args:
        episodes: simulated episodes to remember; None: as many as a few seconds allow at this number of ranks.
        threads: threads that simulate; the policy does not depend on it.
        limits: of every delay; the defaults are those of a live job.

    Raises:
        InputError: for less than one episode.
    """

    name = "projection"

    def __init__(
        self, cluster: Cluster, *, episodes: int | None = None, threads: int = 1, limits: Limits = LIMITS
    ) -> None:
        if episodes is not None and episodes < 1:
            raise out_of_range("episodes", episodes, "at least 1", "policy projection")
        count = affordable_episodes(cluster.ranks) if episodes is None else episodes
        self._bank = build(cluster, count, threads, limits)
        if len(self._bank.settings_CM2) > 1:
            self._neighbours = min(NEIGHBOURS, len(self._bank.features_NF))
            self._tree = cKDTree(self._bank.features_NF)
            some_NF = self._bank.features_NF[:: max(1, len(self._bank.features_NF) // _SAMPLE)]
            self._reach = UNLIKE * float(np.quantile(self._look_up(some_NF)[2], 0.99))
        self.reset(0)

    @property
    def candidates(self) -> NDArray[np.float64]:
        """The settings ``(C, M, 2)`` it chooses from; the first is off."""
        return self._bank.settings_CM2

    def constant(self) -> NDArray[np.float64] | None:
        return self.candidates[0] if len(self.candidates) == 1 else None

    def reset(self, rows: int) -> None:
        self._memory = ObservationEMA(LONG_MEMORY_INTERVALS)
        self._choice_B = np.zeros(rows, np.int64)

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        if len(self.candidates) > 1:
            self._choose(features(self._memory, signals_BO))
        return self.candidates[self._choice_B]

    def _choose(self, features_BF: NDArray[np.float64]) -> None:
        index_BK, weight_BK, distance_B = self._look_up(features_BF)
        gain_BKC = self._bank.gain_NC[index_BK]
        projected_BC = np.einsum("bk,bkc->bc", weight_BK, gain_BKC)
        is_worth_it = projected_BC > MARGIN
        is_worth_it[:, 0] = True
        rows, best_B = np.arange(len(features_BF)), np.where(is_worth_it, projected_BC, -np.inf).argmax(axis=1)
        better_BK = gain_BKC[rows, :, best_B] - gain_BKC[rows, :, self._choice_B]
        mean_B = np.einsum("bk,bk->b", weight_BK, better_BK)
        spread_B = np.einsum("bk,bk->b", weight_BK, (better_BK - mean_B[:, None]) ** 2)
        # the ranks watched in one situation share its gains: as many fewer independent neighbours
        error_B = np.sqrt(spread_B * np.einsum("bk,bk->b", weight_BK, weight_BK) * self._bank.watched)
        self._choice_B = np.where(mean_B > ERRORS * error_B, best_B, self._choice_B)
        self._choice_B[distance_B > self._reach] = 0

    def _look_up(
        self, features_BF: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """The nearest remembered views ``(B, K)``, their weights, and how far the middle one is ``(B,)``."""
        nearest = np.arange(1, self._neighbours + 1)
        distance_BK, index_BK = self._tree.query(features_BF, nearest)
        middle_B = np.maximum(distance_BK[:, self._neighbours // 2], _TINY)
        weight_BK = np.exp(-0.5 * (distance_BK / middle_B[:, None]) ** 2)
        return index_BK, weight_BK / weight_BK.sum(axis=1, keepdims=True), middle_B


def features(memory: ObservationEMA, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
    """The features by which a rank compares situations, ``(B, F)``: its last view and its averages with that view.

    Args:
        signals_BO: what each rank observed in the last interval, ``(B, O)``.
    """
    return np.concatenate([signals_BO, memory.update(signals_BO)], axis=1).astype(np.float64)


@dataclass(frozen=True)
class RolloutBank:
    """Views of simulated situations with the gain of every candidate setting from there.

    Attributes:
        features_NF: what ranks saw.
        gain_NC: gain of each candidate over off (:func:`project`).
        settings_CM2: the candidates; the first is off.
        watched: J, the ranks watched in each situation; their views share its gains.
    """

    features_NF: NDArray[np.float64]
    gain_NC: NDArray[np.float64]
    settings_CM2: NDArray[np.float64]
    watched: int


def affordable_episodes(ranks: int) -> int:
    """How many episodes a few seconds allow for a job of ``ranks``."""
    return min(max(MAX_RANK_EPISODES // ranks, MIN_EPISODES), MAX_EPISODES)


def spread_of_settings(cluster: Cluster) -> NDArray[np.float64]:
    """Settings ``(C, M, 2)`` worth a try: off, the cluster's own, every mechanism alone, slack with phase_shift."""
    own = cluster.pacing
    rows = [pacing.off(), pacing.one_mechanism(own.mechanism, own.threshold, own.window)]
    for name, (thresholds, windows) in SPREAD.items():
        if name == "defer" and not cluster.can_defer:
            continue
        rows += [pacing.one_mechanism(name, t, w) for t, w in itertools.product(thresholds, windows)]
    (slack, slack_windows), (phase_shift, phase_shift_windows) = TOGETHER
    for a, b in itertools.product(slack_windows, phase_shift_windows):
        rows.append(pacing.one_mechanism("slack", slack, a) + pacing.one_mechanism("phase_shift", phase_shift, b))
    return np.stack(rows)


def project(simulator: Simulator, at: NDArray[np.int64], settings_CM2: NDArray[np.float64]) -> NDArray[np.float64]:
    """The gain of every candidate over the first one, ``(len(at), C)``, if it is held over the horizon from now on.

    Gains are of throughput, as a share of the ideal; all candidates meet the same noise.
    """
    step_s_SC = roll_ahead(simulator, at, settings_CM2, HORIZON_INTERVALS * INTERVAL_ITERATIONS).mean(axis=2)
    throughput_SC = simulator.batch.jobs["ideal_step_s"][at][:, None] / step_s_SC
    return np.asarray(throughput_SC - throughput_SC[:, :1])


def drive(
    simulator: Simulator, settings_CM2: NDArray[np.float64], rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Run episodes under varied settings and collect snapshots.

    Returns:
        Features ``(N, F)`` and gains ``(N, C)`` of the snapshots.
    """
    E, R = len(simulator.batch), simulator.batch.ranks
    exploration = Exploration(E, R, len(settings_CM2), WATCHED_RANKS, EVERY_INTERVALS, rng)
    watched_EJ, memory = exploration.watched_EJ, ObservationEMA(LONG_MEMORY_INTERVALS)
    J, seen, gains = watched_EJ.shape[1], [], []
    for t in range(EPISODE_INTERVALS):
        simulator.run(settings_CM2[exploration.choice_E][:, None], INTERVAL_ITERATIONS)
        view_EJO = np.take_along_axis(simulator.observe(every_rank=True), watched_EJ[:, :, None], axis=1)
        feature_EJF = features(memory, view_EJO.reshape(E * J, -1)).reshape(E, J, -1)
        at = exploration.at(t)
        seen.append(feature_EJF[at].reshape(len(at) * J, -1))
        gains.append(np.repeat(project(simulator, at, settings_CM2), J, axis=0))
        exploration.change(t)
    return np.concatenate(seen), np.concatenate(gains)


def build(cluster: Cluster, episodes: int, threads: int = 1, limits: Limits = LIMITS) -> RolloutBank:
    """The bank of a cluster; the same arguments always give the same bank.

    It holds only "off" where no other setting helps.

    Args:
        threads: threads of the engine; the bank does not depend on it.
        limits: of every delay; the defaults are those of a live job.
    """
    every = spread_of_settings(cluster)
    pilot = start(cluster, np.arange(PILOT_SEED, PILOT_SEED + PILOT_EPISODES), threads, limits)
    pilot.run(pilot.off(), PILOT_INTERVALS * INTERVAL_ITERATIONS)
    chosen = select_candidates(project(pilot, np.arange(PILOT_EPISODES), every), MAX_CANDIDATES)
    if len(chosen) == 1:
        return RolloutBank(np.zeros((1, 2 * SIGNALS)), np.zeros((1, 1)), every[:1], 1)
    simulator = start(cluster, np.arange(BANK_SEED, BANK_SEED + episodes), threads, limits)
    features_NF, gain_NC = drive(simulator, every[chosen], np.random.default_rng(BANK_SEED))
    return RolloutBank(features_NF, gain_NC, every[chosen], min(simulator.batch.ranks, WATCHED_RANKS))
