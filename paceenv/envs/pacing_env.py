"""``paceenv/Pacing-v0``: the simulator as a Gymnasium environment, scalar and vector, one physics.

``PacingEnv`` is row 0 of the batch that ``PacingVectorEnv`` steps; both are thin faces of ``_Batch``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from paceenv.core import metrics, pacing, signals
from paceenv.core.errors import out_of_range
from paceenv.core.limits import LIMITS, Limits
from paceenv.core.renames import mechanism_name
from paceenv.envs.registration import register_envs
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.cluster.derive import ClusterMix
from paceenv.sim.cluster.draw import Draw
from paceenv.sim.cluster.quantity import Uniform
from paceenv.sim.engine.simulator import Simulator, episode_keys

ClusterLike = str | os.PathLike[str] | Cluster

_WHERE = "paceenv/Pacing-v0"


class _Preference:
    """The weight of variation in the reward: one number, or drawn for each episode from a range."""

    def __init__(self, cv_weight: float | Sequence[float], environments: int) -> None:
        ends = [float(end) for end in np.ravel(cv_weight)]
        self.is_drawn = np.ndim(cv_weight) > 0
        if len(ends) != 1 + self.is_drawn or not (ends[0] >= 0.0 and ends[-1] < np.inf) or ends != sorted(set(ends)):
            raise out_of_range("cv_weight", cv_weight, "a number of at least 0, or two, the lower one first", _WHERE)
        # uniform as the agent sees it: a weight of 0 is possible, and every part of the input is met equally often
        self._squashed = Uniform(uniform=[signals.squashed_preference(end) for end in (ends[0], ends[-1])])
        self.weight_E = np.full(environments, ends[0])

    def draw(self, which: NDArray[np.int64], keys: NDArray[np.uint64]) -> None:
        """Draw the weights of new episodes from their keys; by name, so that no other draw moves."""
        if self.is_drawn:
            squashed = Draw(keys, 1).named("cv_weight", self._squashed)
            self.weight_E[which] = signals.PREFERENCE_SCALE * squashed / (1.0 - squashed)

    def beside(self, observation_EO: NDArray[np.float32]) -> NDArray[np.float32]:
        """The observation, with the weight as one entry more where it is drawn."""
        if not self.is_drawn:
            return observation_EO
        squashed_E = np.array([signals.squashed_preference(w) for w in self.weight_E.tolist()], np.float32)
        return np.column_stack([observation_EO, squashed_E])


class _Batch:
    """E episodes side by side: seeds, draws, physics, observations and rewards; no autoreset."""

    def __init__(
        self,
        environments: int,
        cluster: ClusterLike | Sequence[ClusterLike],
        weights: Sequence[float] | None,
        mechanisms: Sequence[str],
        interval_iterations: int,
        episode_intervals: int,
        cv_weight: float | Sequence[float],
        threads: int,
        limits: Limits,
    ) -> None:
        for name, value in (
            ("interval_iterations", interval_iterations),
            ("episode_intervals", episode_intervals),
            ("threads", threads),
            ("num_envs", environments),
        ):
            if value < 1:
                raise out_of_range(name, value, "an integer of at least 1", _WHERE)
        mechanisms = [mechanism_name(m) for m in mechanisms]
        unknown = [m for m in mechanisms if m not in pacing.MECHANISMS]
        if unknown or not mechanisms or len(set(mechanisms)) < len(mechanisms):
            allowed = f"one or more different ones of {', '.join(pacing.MECHANISMS)}"
            raise out_of_range("mechanisms", tuple(mechanisms), allowed, _WHERE)
        self.preference = _Preference(cv_weight, environments)
        one = isinstance(cluster, (str, os.PathLike, Cluster))
        clusters: list[ClusterLike] = [cluster] if one else list(cluster)  # type: ignore[list-item, arg-type]
        self.mix = ClusterMix([c if isinstance(c, Cluster) else load_cluster(c) for c in clusters], weights)
        self.mechanisms, self.interval_iterations = tuple(mechanisms), interval_iterations
        self.episode_intervals, self.threads, self.limits = episode_intervals, threads, limits
        self.seeds_E = np.random.default_rng().integers(0, 2**63, environments, dtype=np.uint64)
        self.episode_E = np.full(environments, -1)
        self.elapsed_E, self.cluster_E = np.zeros(environments, np.int64), np.zeros(environments, np.int64)
        self.simulator: Simulator | None = None
        entries = signals.SIGNALS + self.preference.is_drawn
        self.observation_space = gymnasium.spaces.Box(signals.LOW, signals.HIGH, (entries,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2 * len(mechanisms),), np.float32)

    def start(self, which: NDArray[np.int64], seeds: NDArray[np.uint64] | None) -> NDArray[np.float32]:
        """Start the next episode (the first one of ``seeds``, if given) in ``which``; observations of the whole batch.

        An episode begins as a live job does: the quiet start and one interval without pacing, which is what the first
        observation shows.
        """
        if seeds is not None:
            self.seeds_E[which], self.episode_E[which] = seeds, -1
        self.episode_E[which] += 1
        self.elapsed_E[which] = 0
        keys = episode_keys(self.seeds_E[which], self.episode_E[which])
        self.preference.draw(which, keys)
        self.cluster_E[which] = self.mix.which(keys) if len(self.mix.clusters) > 1 else 0
        if self.simulator is None:
            all_keys = episode_keys(self.seeds_E, np.maximum(self.episode_E, 0))
            self.simulator = Simulator(self.mix.derive(all_keys), all_keys, self.threads, self.limits)
        else:
            self.simulator.reset(which, keys, self.mix.derive(keys))
        for iterations in (self.limits.quiet_first, self.interval_iterations):
            self.simulator.run(self.simulator.off(), iterations, which)
        return self.preference.beside(self.simulator.observe())

    def step(
        self, action_EA: NDArray[np.floating]
    ) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_], dict[str, NDArray[np.float64]]]:
        """One control interval: observations, rewards, truncations and the raw terms."""
        expected = (len(self.seeds_E), *(self.action_space.shape or ()))
        if np.shape(action_EA) != expected:
            raise ValueError(f"{_WHERE}: actions have shape {np.shape(action_EA)}; allowed: {expected}")
        return self.advance(pacing.decode_action(action_EA, self.mechanisms)[:, None])

    def advance(
        self, settings: NDArray[np.float64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_], dict[str, NDArray[np.float64]]]:
        """As :meth:`step`, with settings ``(E, 1, M, 2)`` for all ranks of a job, or ``(E, R, M, 2)`` for each."""
        if self.simulator is None:
            raise gymnasium.error.ResetNeeded("call reset() before step()")
        kept_E = self.simulator.outcome().useful_iterations
        step_ET = self.simulator.run(settings, self.interval_iterations)
        self.elapsed_E += 1
        mean_E, sd_E = step_ET.mean(axis=1), step_ET.std(axis=1)
        reference_E = self.simulator.batch.jobs["ideal_step_s"]
        rewards_E = metrics.reward(mean_E, sd_E, reference_E, self.preference.weight_E)  # type: ignore[arg-type]
        lost_E = self.interval_iterations - (self.simulator.outcome().useful_iterations - kept_E)
        lost_ratio_E = lost_E * reference_E / step_ET.sum(axis=1)  # what failures undid, also of earlier intervals
        rewards_E = rewards_E - lost_ratio_E
        terms = {
            "step_mean_s": mean_E,
            "step_cv": sd_E / mean_E,
            "throughput_ratio": reference_E / mean_E - lost_ratio_E,
            "reference_step_s": reference_E.copy(),
            "cv_weight": self.preference.weight_E.copy(),
        }
        truncated_E = self.elapsed_E >= self.episode_intervals
        return self.preference.beside(self.simulator.observe()), np.asarray(rewards_E), truncated_E, terms


def _seed(seed: int) -> int:
    """A seed as the 64 bits that count."""
    if seed < 0:
        raise out_of_range("seed", seed, "an integer of at least 0", _WHERE)
    return int(seed) % 2**64


class PacingEnv(gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):
    """Tune the pacing of a synchronous training job on a simulated cluster.

    ## Description

    A job of R ranks iterates: every rank computes, the ranks of a process group all-reduce over links they may share
    with other groups and other jobs, and the step ends when the last rank is through. A *pacing rule* on each rank may
    delay the start of its own next iteration by a bounded amount. The agent sets the rule's threshold and delay window
    once per control interval of ``interval_iterations`` iterations; all ranks use the same setting. Delays help only
    where early work takes a shared resource from the critical path; elsewhere every delay can only cost.

    ## Action Space

    `Box(-1, 1, (2 * len(mechanisms),), float32)`; for mechanism ``k`` of ``mechanisms``:

    ACTION_TABLE

    MECHANISM_TABLE

    ## Observation Space

    `Box(-1, 1, (SIGNALS,), float32)`: what one rank, drawn for each episode, sees of itself. Where ``cv_weight`` is a
    range, `Box(-1, 1, (SIGNALS + 1,), float32)` with the preference as the last entry, so that one policy can learn the
    whole trade-off of throughput against variation. Entries have no unit. Except where noted an entry is
    ``x / (1 + |x|)`` with ``x`` = value / scale.

    OBSERVATION_TABLE

    ## Rewards

    ``reference / mean - cv_weight * sd / reference`` with mean and standard deviation of the interval's step times and
    the cluster's closed-form ideal step as reference. Slowing every step down lowers it although the CV falls.
    Iterations that a failure undoes are taken off, as ``reference`` each over the interval's time. The terms are in
    ``info``, as is the weight.

    ## Starting State

    The cluster's random quantities, the noise, the tenants' phases and the preference are drawn from the seed and the
    episode number; the quiet start and one interval have run without pacing.

    ## Episode End

    Truncated after ``episode_intervals`` steps; never terminated.

    ## Arguments

    * ``cluster``: a name in `configs/clusters`, a file, a `Cluster`, or a list of them (default ``"null-jitter"``)
    * ``weights``: with a list, how often each is drawn (default: equally)
    * ``mechanisms``: which of them the action sets, in this order (``("slack",)``)
    * ``interval_iterations``: iterations in one step of the environment (default 20)
    * ``episode_intervals``: steps in an episode (default 64)
    * ``cv_weight``: weight of the variation in the reward (default 0.5), or a pair, lowest and highest, from which each
      episode draws its own, uniformly as the last entry shows it
    * ``limits``: of every delay, a ``paceenv.core.limits.Limits`` (default: those of a live job)
    * ``threads``: threads that share a batch, vector environment only (default 1)
    * ``render_mode``: not supported; None

    ```python
    >>> import gymnasium
    >>> env = gymnasium.make("paceenv/Pacing-v0", cluster="two-jobs", mechanisms=("phase_shift",))
    >>> envs = gymnasium.make_vec("paceenv/Pacing-v0", num_envs=64, vectorization_mode="vector_entry_point")
    ```

    ## Version History

    * v0: first version
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(
        self,
        cluster: ClusterLike | Sequence[ClusterLike] = "null-jitter",
        *,
        weights: Sequence[float] | None = None,
        mechanisms: Sequence[str] = ("slack",),
        interval_iterations: int = 20,
        episode_intervals: int = 64,
        cv_weight: float | Sequence[float] = 0.5,
        limits: Limits = LIMITS,
        render_mode: None = None,
    ) -> None:
        self._batch = _Batch(
            1, cluster, weights, mechanisms, interval_iterations, episode_intervals, cv_weight, 1, limits
        )
        self.observation_space, self.action_space = self._batch.observation_space, self._batch.action_space
        self.render_mode = render_mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start the first episode of ``seed``, or without a seed the next episode."""
        super().reset(seed=seed)
        seeds = None if seed is None else np.array([_seed(seed)], np.uint64)
        return self._batch.start(np.array([0]), seeds)[0], {}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Run one control interval; ``info`` holds the raw terms of the reward."""
        observation, reward, truncated, terms = self._batch.step(np.asarray(action)[None])
        return observation[0], float(reward[0]), False, bool(truncated[0]), {k: float(v[0]) for k, v in terms.items()}


def _document(env: type[PacingEnv]) -> None:
    """Put the tables into the docstring, from the definitions that the code uses; without docstrings (-OO) nothing."""
    tables = {
        "ACTION_TABLE": pacing.action_table(),
        "MECHANISM_TABLE": pacing.mechanism_table(),
        "OBSERVATION_TABLE": signals.table(),
        "SIGNALS + 1": str(signals.SIGNALS + 1),
        "SIGNALS": str(signals.SIGNALS),
    }
    for name, table in tables.items():
        env.__doc__ = env.__doc__ and env.__doc__.replace(name, table.replace("\n", "\n    "))


_document(PacingEnv)


class PacingVectorEnv(gymnasium.vector.VectorEnv[NDArray[np.float32], NDArray[np.float32], NDArray[Any]]):
    """A batch of :class:`PacingEnv`, stepped by one call of the compiled engine.

    Row ``n`` after ``reset(seed=s)`` equals the scalar environment with seed ``s + n``, byte for byte, across
    autoresets too. Autoreset happens in the same step: the observation is the new episode's, ``info["final_obs"]`` and
    ``info["final_info"]`` hold the old one's last.

    Args:
        num_envs: rows of the batch, at least 1.
        cluster: as in :class:`PacingEnv`, as are the next five.
        weights: with several clusters, how often each is drawn; default: equally.
        mechanisms: names of the mechanisms that the action sets.
        interval_iterations: iterations in one step of the environment, at least 1.
        episode_intervals: steps in an episode, at least 1.
        cv_weight: weight of the variation in the reward, at least 0, or a pair of which each episode draws its own.
        threads: most threads that share the batch, at least 1; results do not depend on it.
        limits: of every delay; the defaults are those of a live job.
        render_mode: not supported; None.

    Raises:
        InputError: for an argument outside its range, with the range.
    """

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self,
        num_envs: int = 1,
        cluster: ClusterLike | Sequence[ClusterLike] = "null-jitter",
        *,
        weights: Sequence[float] | None = None,
        mechanisms: Sequence[str] = ("slack",),
        interval_iterations: int = 20,
        episode_intervals: int = 64,
        cv_weight: float | Sequence[float] = 0.5,
        threads: int = 1,
        limits: Limits = LIMITS,
        render_mode: None = None,
    ) -> None:
        self._batch = _Batch(
            num_envs, cluster, weights, mechanisms, interval_iterations, episode_intervals, cv_weight, threads, limits
        )
        self.num_envs, self.render_mode = num_envs, render_mode
        self.single_observation_space, self.single_action_space = (
            self._batch.observation_space,
            self._batch.action_space,
        )
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start the first episodes of the seeds (row ``n`` gets ``seed + n``), or without seeds the next episodes."""
        everyone = np.arange(self.num_envs)
        if seed is None:
            return self._batch.start(everyone, None), {}
        seeds = [int(seed) + n for n in range(self.num_envs)] if isinstance(seed, (int, np.integer)) else list(seed)
        if len(seeds) != self.num_envs:
            raise out_of_range("seed", f"{len(seeds)} numbers", f"one for each of {self.num_envs} rows", _WHERE)
        given = [int(old) if s is None else _seed(s) for s, old in zip(seeds, self._batch.seeds_E, strict=True)]
        return self._batch.start(everyone, np.array(given, np.uint64)), {}

    def step(
        self, actions: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Run one control interval in every row; rows whose episode ends start the next one at once."""
        observation, reward, truncated, terms = self._batch.step(actions)
        everyone = np.ones(self.num_envs, np.bool_)
        info: dict[str, Any] = {}
        for name, value in terms.items():
            info[name], info[f"_{name}"] = value, everyone
        if truncated.any():
            final_obs = np.full(self.num_envs, None, object)
            for n in np.flatnonzero(truncated):
                final_obs[n] = observation[n]
            info["final_obs"], info["_final_obs"] = final_obs, truncated.copy()
            info["final_info"] = {name: np.where(truncated, value, 0.0) for name, value in terms.items()}
            info["final_info"] |= {f"_{name}": truncated.copy() for name in terms}
            info["_final_info"] = truncated.copy()
            observation = self._batch.start(np.flatnonzero(truncated), None)
        return observation, reward, np.zeros(self.num_envs, np.bool_), truncated, info

    @property
    def clusters(self) -> int:
        """How many clusters episodes draw from."""
        return len(self._batch.mix.clusters)

    @property
    def cluster_E(self) -> NDArray[np.int64]:
        """Which of them each row's present episode has drawn, ``(E,)``."""
        return self._batch.cluster_E.copy()

    def desync_episodes(self) -> None:
        """Spread the ends of the running episodes evenly over time, for trainers that act on every end."""
        self._batch.elapsed_E[:] = np.arange(self.num_envs) * self._batch.episode_intervals // self.num_envs


register_envs()  # also where paceenv was imported before Gymnasium
