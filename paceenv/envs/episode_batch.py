"""Episodes side by side: what the environments, scalar and vector, have in common; it knows no autoreset.

Legend: E environments (rows), C clusters, T iterations, A numbers of an action.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import gymnasium
import numpy as np
from numpy.typing import NDArray

from paceenv.core import metrics, pacing, signals
from paceenv.core.errors import InputError, did_you_mean, out_of_range
from paceenv.core.limits import LIMITS, Limits
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.cluster.derive import ClusterMix
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.simulator import JobBatch, Simulator, episode_keys

ClusterLike: TypeAlias = str | os.PathLike[str] | Cluster
Reward: TypeAlias = Literal["paired", "raw"]

WHERE = "environment"
"""What messages name as the place of a wrong value."""
DEFAULT_CLUSTER, DEFAULT_MECHANISMS = ("two-jobs", "two-jobs-other-period", "one-job"), ("phase_shift",)
"""A job with a twin on its uplink, with a job of another period, and alone: no constant setting suits all three."""
PACED, UNPACED = 0, 1
"""Index into the simulators of a batch."""


@dataclass(frozen=True)
class Rules:
    """What an episode is: where, what an action sets, how long, what is rewarded; see ``PacingEnv`` for each."""

    cluster: ClusterLike | Sequence[ClusterLike] = DEFAULT_CLUSTER
    weights: Sequence[float] | None = None
    mechanisms: str | Sequence[str] = DEFAULT_MECHANISMS
    interval_iterations: int = 20
    episode_intervals: int = 64
    cv_weight: float = 0.5
    reward: Reward = "paired"
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        mechanisms = (self.mechanisms,) if isinstance(self.mechanisms, str) else tuple(self.mechanisms)
        object.__setattr__(self, "mechanisms", mechanisms)
        for name in ("interval_iterations", "episode_intervals"):
            at_least_1(name, getattr(self, name))
        if not (isinstance(self.cv_weight, (int, float, np.floating)) and 0.0 <= self.cv_weight < np.inf):
            raise out_of_range("cv_weight", self.cv_weight, "a number of at least 0", WHERE)
        if not isinstance(self.limits, Limits):
            raise out_of_range("limits", self.limits, "a paceenv.core.limits.Limits", WHERE)
        if self.reward not in get_args(Reward):
            raise out_of_range("reward", self.reward, " or ".join(get_args(Reward)), WHERE)
        unknown = [m for m in mechanisms if m not in pacing.MECHANISMS]
        if unknown or not mechanisms or len(set(mechanisms)) < len(mechanisms):
            allowed = f"one or more different ones of {', '.join(pacing.MECHANISMS)}"
            raise out_of_range("mechanisms", mechanisms, allowed, WHERE)

    @property
    def has_copy(self) -> bool:
        """Whether every episode runs a second time, without pacing."""
        return self.reward == "paired"

    def clusters(self) -> list[Cluster]:
        """The clusters that episodes draw from, loaded."""
        one = isinstance(self.cluster, (str, os.PathLike, Cluster))
        given: list[ClusterLike] = [self.cluster] if one else list(self.cluster)  # type: ignore[list-item, arg-type]
        return [cluster if isinstance(cluster, Cluster) else load_cluster(cluster) for cluster in given]


def taken_rules(cluster: ClusterLike | Sequence[ClusterLike], given: Mapping[str, Any], *others: str) -> Rules:
    """The :class:`Rules` of an environment that takes ``others`` besides; InputError for an unknown argument."""
    known = [*inspect.signature(Rules).parameters, *others]
    for name, value in given.items():
        if name not in known[: -len(others)]:
            listed = f"the arguments {', '.join(known)}{did_you_mean(name, known)}"
            raise out_of_range(f"argument {name}", value, listed, WHERE)
    return Rules(cluster, **given)


def at_least_1(name: str, value: int) -> None:
    """Refuse what is not a count of at least 1."""
    if not isinstance(value, (int, np.integer)) or value < 1:
        raise out_of_range(name, value, "an integer of at least 1", WHERE)


class EpisodeBatch:
    """E episodes side by side: seeds, draws, physics, observations and rewards.

    Attributes:
        simulators: the paced one and, where rules ask for it, its unpaced copy on the same noise; none before the
            first episode.
    """

    def __init__(self, environments: int, rules: Rules, threads: int = 1, *, keeps_stamps: bool = False) -> None:
        at_least_1("threads", threads)
        at_least_1("num_envs", environments)
        self.rules, self.mechanisms = rules, tuple(rules.mechanisms)
        self.clusters = rules.clusters()
        if not self.clusters:
            raise InputError("clusters: none given; allowed: at least one")
        self._can_fail = any(cluster.reliability.mtbf_iterations is not None for cluster in self.clusters)
        self.names_C = np.array([cluster.name for cluster in self.clusters], object)
        self._mix = ClusterMix(self.clusters, rules.weights)
        self._threads, self._keeps_stamps = threads, keeps_stamps
        self.simulators: list[Simulator] = []
        self._recording: Recording | None = None
        self.seeds_E = np.random.default_rng().integers(0, 2**63, environments, dtype=np.uint64)
        self.episode_E = np.full(environments, -1)
        self.keys_E = np.zeros(environments, np.uint64)
        self.elapsed_E, self.cluster_E = np.zeros(environments, np.int64), np.zeros(environments, np.int64)
        self.terms: dict[str, NDArray[np.float64]] = {}
        self._passive_of: dict[tuple[int, int], NDArray[np.float64]] | None = None
        """Mean step and reward of each interval without pacing ``(T, 2)``, by key and cluster, where they are kept."""
        self._derived: dict[bytes, JobBatch] | None = None
        self._passive_ETV, self._age_E = np.zeros((environments, 0, 2)), np.zeros(environments, np.int64)
        self.observation_space = gymnasium.spaces.Box(signals.LOW, signals.HIGH, (signals.SIGNALS,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2 * len(self.mechanisms),), np.float32)

    def seed(self, which: NDArray[np.int64], seeds: Sequence[int]) -> None:
        """Give rows a seed each, of at least 0; the next episode to start there is its first one."""
        for seed in seeds:
            if seed < 0:
                raise out_of_range("seed", seed, "an integer of at least 0", WHERE)
        self.seeds_E[which] = np.array([int(seed) % 2**64 for seed in seeds], np.uint64)  # the 64 bits that count
        self.episode_E[which] = -1

    def start(self, which: NDArray[np.int64]) -> None:
        """Start the next episode in some rows.

        An episode begins as a live job does: the quiet start and one interval without pacing, which is what the first
        observation shows. The first time all rows start.
        """
        self.episode_E[which] += 1
        self.elapsed_E[which] = 0
        keys = episode_keys(self.seeds_E[which], self.episode_E[which])
        self.keys_E[which] = keys
        self.cluster_E[which] = self._mix.draw(keys)
        self._start(which, (PACED, UNPACED) if self.rules.has_copy and self._passive_of is None else (PACED,))
        if self._passive_of is not None:
            self._look_up_passive(which, self._passive_of)

    def _start(self, which: NDArray[np.int64], simulators: Sequence[int]) -> None:
        """Start the present episodes of some rows in some simulators; the first time in all rows."""
        keys, jobs, limits = self.keys_E[which], self._jobs(which), self.rules.limits
        if not self.simulators:
            self.simulators = [Simulator(jobs, keys, self._threads, limits) for _ in range(1 + self.rules.has_copy)]
        for k in simulators:
            self.simulators[k].reset(which, keys, jobs)
            self.simulators[k].quiet_start(which)
            self._run(k, self.simulators[k].off(), which, self.rules.interval_iterations)

    def _jobs(self, which: NDArray[np.int64]) -> JobBatch:
        """Those of the present episodes of some rows; where episodes are kept, the same rows often start together."""
        keys, cluster = self.keys_E[which], self.cluster_E[which]
        if self._derived is None:
            return self._mix.derive(keys, cluster)
        if (started := keys.tobytes() + cluster.tobytes()) not in self._derived:
            self._derived[started] = self._mix.derive(keys, cluster)
        return self._derived[started].take(np.arange(len(which)))

    def _look_up_passive(self, which: NDArray[np.int64], known: dict[tuple[int, int], NDArray[np.float64]]) -> None:
        """Episodes start in some rows: their intervals without pacing; of those not known, the whole copy runs."""
        episodes = [(int(self.keys_E[row]), int(self.cluster_E[row])) for row in which]
        new = {episode: row for episode, row in zip(episodes, which, strict=True) if episode not in known}
        if new:
            rows, off = np.array(list(new.values())), pacing.off(len(self.seeds_E), 1)
            self._start(rows, (UNPACED,))
            running = np.isin(np.arange(len(self.seeds_E)), rows)
            count = self.rules.episode_intervals
            at_once = 1 if self._can_fail else count  # what failures undid is counted after each interval
            runs = [self._intervals(UNPACED, off, running, at_once) for _ in range(count // at_once)]
            of_all_ETV = np.concatenate(
                [np.stack([terms["step_mean_s"], reward_EI], 2) for reward_EI, terms in runs], 1
            )
            known |= {episode: of_all_ETV[row].copy() for episode, row in new.items()}
        for episode, row in zip(episodes, which, strict=True):
            self._passive_ETV[row] = known[episode]
        self._age_E[which] = 0

    def keep_episodes(self) -> None:
        """Keep the jobs and unpaced copies of episodes, for when their seeds come again; before the first episode.

        An episode's key decides its cluster's draws and its noise, so its copy does the same every time. Results do not
        depend on it.
        """
        if self.simulators:
            raise InputError(f"{WHERE}: keep_episodes() after an episode has begun; allowed: before the first reset()")
        self._derived = {}
        if self.rules.has_copy:
            self._passive_of = {}
            self._passive_ETV = np.zeros((len(self.seeds_E), self.rules.episode_intervals, 2))

    def observe(self) -> NDArray[np.float32]:
        """What the observer rank of each row saw in its last interval, ``(E, O)``."""
        return self.simulators[PACED].observe()

    def step(
        self, action_EA: NDArray[np.floating], running: NDArray[np.bool_] | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_], dict[str, NDArray[np.float64]]]:
        """One control interval: rewards, truncations and the raw terms, 0 in rows that do not run.

        Finite and infinite actions are clipped to the space. A policy in a job that sends not-a-number is off there,
        for the job's sake. Here it is refused: a learner whose network has diverged would otherwise train on as if it
        did nothing.
        """
        given, expected = np.shape(action_EA), (len(self.seeds_E), *(self.action_space.shape or ()))
        if given != expected:
            axis = int(given[:1] == expected[:1])  # 1: so many as expected, and who sends one sees no batch
            raise InputError(f"{WHERE}: actions have shape {given[axis:]}; allowed: {expected[axis:]}")
        invalid_E = np.isnan(action_EA).any(axis=1) & (True if running is None else running)
        if invalid_E.any():
            row, allowed = int(np.argmax(invalid_E)), "numbers from -1 to 1; those beyond are clipped"
            name = f"action of row {row}" if len(invalid_E) > 1 else "action"
            raise out_of_range(name, np.asarray(action_EA)[row].tolist(), allowed, WHERE)
        settings = pacing.decode_action(action_EA, self.mechanisms)[:, None]
        if not self.simulators:
            raise gymnasium.error.ResetNeeded("call reset() before step()")
        rewards_E, terms = self._interval(PACED, settings, running)
        if self.rules.has_copy:
            passive_mean_E, passive_E = self._passive(running)
            terms["passive_step_mean_s"], terms["passive_reward"] = passive_mean_E, passive_E
            terms["gain"] = passive_mean_E / terms["step_mean_s"] - 1.0
            rewards_E = rewards_E - passive_E
        if running is None:
            self.elapsed_E += 1
            truncated_E = self.elapsed_E >= self.rules.episode_intervals
        else:
            self.elapsed_E[running] += 1
            truncated_E = running & (self.elapsed_E >= self.rules.episode_intervals)
            rewards_E = np.where(running, rewards_E, 0.0)
            terms = {name: np.where(running, value, 0.0) for name, value in terms.items()}
        self.terms = terms
        return rewards_E, truncated_E, terms

    def _passive(self, running: NDArray[np.bool_] | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean step in seconds and reward of the coming interval without pacing, ``(E,)`` each."""
        if self._passive_of is None:
            rewards_E, terms = self._interval(UNPACED, pacing.off(len(self.seeds_E), 1), running)
            return terms["step_mean_s"], rewards_E
        age_E = np.minimum(self._age_E, self.rules.episode_intervals - 1)
        self._age_E += True if running is None else running
        mean_E, rewards_E = self._passive_ETV[np.arange(len(age_E)), age_E].T
        return mean_E.copy(), rewards_E.copy()

    def _interval(
        self, k: int, settings: NDArray[np.float64], running: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
        """One interval of all paced or all unpaced episodes: rewards and their terms."""
        rewards_E1, terms = self._intervals(k, settings, running, 1)
        return rewards_E1[:, 0], {name: value_E1[:, 0] for name, value_E1 in terms.items()}

    def _intervals(
        self, k: int, settings: NDArray[np.float64], running: NDArray[np.bool_] | None, count: int
    ) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
        """As :meth:`_interval`, ``(E, I)``: several under the same settings, only one where a job can fail."""
        before_E = self._useful_iterations(k)
        rows = None if running is None else np.flatnonzero(running)
        step_ET = self._run(k, settings, rows, count * self.rules.interval_iterations)
        if running is not None:
            step_ET = np.where(running[:, None], step_ET, 1.0)
        step_EIT = step_ET.reshape(len(settings), count, -1)
        mean_EI = step_EIT.mean(axis=2)
        sd_EI = step_EIT.std(axis=2, mean=mean_EI[:, :, None])
        reference_E = self.simulators[k].batch.jobs["ideal_step_s"]
        reference_EI = np.repeat(reference_E[:, None], count, axis=1)
        rewards_EI = metrics.reward(mean_EI, sd_EI, reference_EI, self.rules.cv_weight)  # type: ignore[arg-type]
        lost_ratio_EI: NDArray[np.float64] | float = 0.0
        if self._can_fail:
            lost_E = self.rules.interval_iterations - (self._useful_iterations(k) - before_E)
            lost_ratio_EI = (lost_E * reference_E)[:, None] / step_EIT.sum(axis=2)  # also of earlier intervals
        terms = {
            "step_mean_s": mean_EI,
            "step_cv": sd_EI / mean_EI,
            "throughput_ratio": reference_EI / mean_EI - lost_ratio_EI,
            "reference_step_s": reference_EI,
        }
        return np.asarray(rewards_EI - lost_ratio_EI), terms

    def _useful_iterations(self, k: int) -> NDArray[np.float64] | float:
        """Iterations of each row's episode that no failure has undone, ``(E,)``; 0 where no job can fail."""
        return self.simulators[k].useful_iterations() if self._can_fail else 0.0

    def _run(
        self, k: int, settings: NDArray[np.float64], rows: NDArray[np.int64] | None, iterations: int
    ) -> NDArray[np.float64]:
        """Some iterations of simulator ``k`` in ``rows`` (None: all); step times ``(E, T)``, seconds."""
        if rows is not None and not len(rows):
            return np.ones((len(settings), iterations))
        if k != PACED or not self._keeps_stamps:
            return self.simulators[k].run(settings, iterations, rows)
        new = self.simulators[k].record(settings, iterations, rows)
        if self._recording is None or rows is None:
            self._recording = new
        else:
            for kept, array in zip(self._recording, new, strict=True):
                kept[rows] = array[rows]
        return new.step_ET

    def where(self) -> dict[str, NDArray[Any]]:
        """The number of the cluster of each row's present episode, as an info has it."""
        return {"cluster": self.cluster_E.copy()}

    def last_interval(self, n: int) -> tuple[Recording, JobBatch]:
        """What row ``n`` did in its last interval, with every stamp, and its job; for a batch that keeps stamps."""
        if self._recording is None:
            raise gymnasium.error.ResetNeeded("call reset() before render()")
        recording = Recording._make(array[n : n + 1] for array in self._recording)
        return recording, self.simulators[PACED].batch.take(np.array([n]))
