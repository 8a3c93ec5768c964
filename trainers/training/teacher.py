"""The privileged teacher: it forks a simulated job and holds each of some settings on the job's true future.

It finds the gain of every candidate setting over no pacing, from exactly the state that a rank is in and on the same
noise. Nothing deployable can know that. A student that is fitted to many such answers learns what they have in common.
Training clusters only. Legend: E episodes, R ranks, J ranks watched in each episode, S questions, N views (S x J),
C candidates (without off), I inputs of the student, K clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.core.pacing import Candidate
from paceenv.policies.clairvoyant import grid, roll_ahead, settings_of
from paceenv.policies.distilled import Distilled
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import start
from paceenv.sim.engine.simulator import Simulator, training_seeds
from paceenv.trainers.training.train_config import Distill, Environment

FINER = (0.7, 1.4)
"""Factors of threshold and window by which a second pilot looks around what the first one chose."""
PILOT_SEED = 3 << 30
PILOT_EPISODES, PILOT_INTERVALS = 24, 10
WORTH_IT = 0.5
"""Gain, % of the step, from which on a cluster counts as one that pacing helps."""
MAX_GAIN = 200.0
"""Gains beyond, in % of the step, count as this: one collapsed step more or less decides there."""

Gains = NDArray[np.float32]
"""What settings gain over no pacing, % of the step, and after that by how much less step times vary with them."""
CHANGE_RATES = (1.0 / 3.0, 1.0 / 12.0, 0.0)
"""How often an episode changes the setting that drives it, one rate an episode: answers must contain short trials and
settings that have been on for long."""
OFF_SHARE = 0.4
"""Share of that time without pacing."""
MIN_GAIN = 0.0005
"""The gain that one more candidate must add, if the best were always known."""


@dataclass(frozen=True)
class Answers:
    """What the teacher said: inputs of the student ``(N, I)``, gains ``(N, X)``, cluster ``(N,)``; X: outputs."""

    inputs_NI: NDArray[np.float32]
    gain_NX: NDArray[np.float32]
    cluster_N: NDArray[np.int64]

    @classmethod
    def joined(cls, parts: Sequence[Answers]) -> Answers:
        """Several as one."""
        return cls(
            np.concatenate([part.inputs_NI for part in parts]),
            np.concatenate([part.gain_NX for part in parts]),
            np.concatenate([part.cluster_N for part in parts]),
        )


def gains(
    simulator: Simulator,
    at: NDArray[np.int64],
    settings: NDArray[np.float64],
    iterations: int,
    interval_iterations: int | None = None,
) -> Gains:
    """What each setting but the first gains over the first, ``(len(at), C)`` or ``(len(at), 2 C)``.

    First come gains in throughput, in % of the step. With ``interval_iterations`` there follows by how much less step
    times vary within an interval, in units such that gain plus ``cv_weight`` times this is the difference of the reward
    (``paceenv.core.metrics.reward``), in % of the throughput without pacing. The simulator is forked, not changed.
    """
    step_s_SCT = roll_ahead(simulator, at, settings, iterations)
    step_s_SC, less_SX = step_s_SCT.mean(axis=2), np.zeros((len(at), 0))
    if interval_iterations is not None:
        ideal_s_S = simulator.batch.jobs["ideal_step_s"][at]
        sd_s_SC = step_s_SCT.reshape(*step_s_SC.shape, -1, interval_iterations).std(axis=3).mean(axis=2)
        less_SX = 100.0 * (sd_s_SC[:, :1] - sd_s_SC[:, 1:]) * (step_s_SC[:, :1] / ideal_s_S[:, None] ** 2)
    gain_SX = np.concatenate([100.0 * (step_s_SC[:, :1] / step_s_SC[:, 1:] - 1.0), less_SX], axis=1)
    return np.asarray(np.clip(gain_SX, -MAX_GAIN, MAX_GAIN), np.float32)


def select_candidates(gain_SC: NDArray[np.float64], most: int) -> list[int]:
    """The candidates that add most to the gain if the best were always known; one after the other, off first."""
    chosen, best_S = [0], gain_SC[:, 0]
    while len(chosen) <= most:
        value_C = np.maximum(gain_SC, best_S[:, None]).mean(axis=0)
        c = int(value_C.argmax())
        if value_C[c] < best_S.mean() + MIN_GAIN:
            break
        chosen.append(c)
        best_S = np.maximum(best_S, gain_SC[:, c])
    return chosen


def finer_grid(chosen: Sequence[Candidate]) -> list[Candidate]:
    """The chosen settings and their neighbours: window and threshold a factor of :data:`FINER` away."""
    candidates = list(chosen)
    for candidate in chosen:
        for mechanism, (threshold, window) in candidate.items():
            m = pacing.MECHANISMS.index(mechanism)
            for factor in FINER:
                wider = round(min(window * factor, pacing.MAX_WINDOW), 4)
                candidates.append({**candidate, mechanism: (threshold, wider)})
                if threshold > 0.0:
                    higher = round(min(threshold * factor, pacing.MAX_THRESHOLD[m]), 4)
                    candidates.append({**candidate, mechanism: (higher, window)})
    return [dict(key) for key in dict.fromkeys(tuple(sorted(one.items())) for one in candidates)]


def choose_candidates(
    clusters: Sequence[Cluster], environment: Environment, section: Distill, run_seed: int
) -> tuple[list[Candidate], NDArray[np.float64]]:
    """The settings that the student will choose from, and what the best of them gains on each cluster, ``(K,)``, in %.

    A first pilot tries the grid of the look-ahead, a second one the neighbourhood of what it chose. Settings are chosen
    one after the other, by what each adds if the best were always known; every cluster counts alike, whatever its
    gains.
    """
    interval = environment.interval_iterations
    candidates, scale_K = grid(environment.mechanisms), np.ones(len(clusters))
    for pilot in range(2):
        parts = []
        for k, cluster in enumerate(clusters):
            episodes = max(PILOT_EPISODES * 16 // max(cluster.rank_phases, 16) * 32 // max(len(clusters), 32), 6)
            first = PILOT_SEED + (pilot * len(clusters) + k) * PILOT_EPISODES
            seeds = training_seeds(run_seed, first, episodes)
            simulator = start(cluster, seeds, environment.threads, environment.limits)
            simulator.run(simulator.off(), PILOT_INTERVALS * interval)
            settings = settings_of(candidates)
            gain_EC = gains(simulator, np.arange(episodes), settings, section.horizon_intervals * interval)
            parts.append(gain_EC.astype(np.float64))
            scale_K[k] = max(float(gain_EC.mean(axis=0).max()), 0.0)
        weight_K = 1.0 / np.maximum(scale_K, 1.0)
        # the mean over a cluster's episodes for a half of them: what is chosen is not only the luck of single futures
        shrunk = [w * 0.5 * (part + part.mean(axis=0)) / len(part) for w, part in zip(weight_K, parts, strict=True)]
        helped = max(int((scale_K >= WORTH_IT).sum()), 1)  # a candidate must pay where any does, however many nulls
        gain_SC = np.concatenate([np.zeros((sum(map(len, parts)), 1)), np.concatenate(shrunk)], axis=1)
        chosen = [c - 1 for c in select_candidates(gain_SC * len(gain_SC) / helped, section.candidates)[1:]]
        candidates = [candidates[c] for c in chosen] or candidates[:1]
        candidates = finer_grid(candidates) if pilot == 0 else candidates
    return candidates, scale_K


def ask(
    cluster: Cluster,
    seeds: NDArray[np.integer],
    student: Distilled,
    environment: Environment,
    section: Distill,
    rng: np.random.Generator,
    explore_share: float,
) -> tuple[NDArray[np.float32], Gains]:
    """Drive episodes by the student or at random, and ask the teacher on the way.

    Every rank drives itself on its own view, as it will when deployed. Exploring episodes take a random setting for all
    ranks and change it now and then, so that the answers contain short trials and settings that have been on for long.
    Returns inputs ``(N, I)`` and gains ``(N, X)``.
    """
    simulator = start(cluster, seeds, environment.threads, environment.limits)
    settings = settings_of(student.candidates)
    interval, horizon = environment.interval_iterations, section.horizon_intervals * environment.interval_iterations
    E, R = len(seeds), simulator.batch.ranks
    watched_EJ = rng.permuted(np.tile(np.arange(R), (E, 1)), axis=1)[:, : section.watched_ranks]
    phase_E, rate_E = rng.integers(0, section.every_intervals, E), rng.choice(CHANGE_RATES, E)
    choice_E = np.zeros(E, np.int64)
    explores_E, J = rng.random(E) < explore_share, watched_EJ.shape[1]
    variation = interval if environment.preference_range is not None else None
    inputs, targets = [], []
    student.reset(E * R)
    simulator.quiet_start()
    simulator.run(simulator.off(), interval)
    for t in range(section.episode_intervals):
        x_BI = student.inputs(simulator.observe(every_rank=True).reshape(E * R, -1))
        at = np.flatnonzero((t + phase_E) % section.every_intervals == 0)
        if len(at):
            kept_SJ = at[:, None] * R + watched_EJ[at]
            inputs.append(x_BI[kept_SJ.ravel()])
            targets.append(np.repeat(gains(simulator, at, settings, horizon, variation), J, axis=0))
        changes_E = rng.random(E) < (rate_E if t else 1.0)
        new_E = np.where(rng.random(E) < OFF_SHARE, 0, rng.integers(0, len(settings), E))
        choice_E = np.where(changes_E, new_E, choice_E)
        choice_ER = np.repeat(choice_E[:, None], R, axis=1)
        if not explores_E.all():
            own_ER = student.choose(_outputs(student, x_BI)).reshape(E, R)
            choice_ER = np.where(explores_E[:, None], choice_ER, own_ER)
        simulator.run(settings[choice_ER], interval)
    return np.concatenate(inputs), np.concatenate(targets)


def _outputs(student: Distilled, x_BI: NDArray[np.float32]) -> NDArray[np.float32]:
    """As ``student.outputs``, some times faster: nothing is compared here with a batch of another size."""
    for weight, bias in student.layers[:-1]:
        x_BI = np.tanh(x_BI @ weight.T + bias)
    weight, bias = student.layers[-1]
    return np.asarray(x_BI @ weight.T + bias)
