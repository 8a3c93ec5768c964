"""``paceenv/Pacing-v0``: the simulator as a Gymnasium environment, scalar and vector, one physics.

``PacingEnv`` is row 0 of the batch that ``PacingVectorEnv`` steps; both are thin faces of ``EpisodeBatch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from paceenv.core import pacing, signals
from paceenv.core.errors import InputError, out_of_range
from paceenv.envs.episode_batch import (
    DEFAULT_CLUSTER,
    DEFAULT_MECHANISMS,
    WHERE,
    ClusterLike,
    EpisodeBatch,
    taken_rules,
)
from paceenv.envs.frames import RENDER_MODES, Frame, RenderMode, frame
from paceenv.envs.registration import register_envs

METADATA: dict[str, Any] = {"render_modes": list(RENDER_MODES), "render_fps": 4}
"""What both environments tell wrappers; a frame is one step of the environment."""


def _checked_mode(render_mode: str | None) -> str | None:
    if render_mode not in (None, *RENDER_MODES):
        raise out_of_range("render_mode", render_mode, f"None, {', '.join(RENDER_MODES)}", WHERE)
    return render_mode


def _check_options(options: dict[str, Any] | None) -> None:
    if options:
        raise InputError(f"{WHERE}: options: unknown {', '.join(map(str, options))}; allowed: no options")


class PacingEnv(gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):
    """Tune the pacing of a synchronous training job on a simulated cluster.

    ## Description

    A job of R ranks iterates: every rank computes, the ranks of a process group all-reduce over links they may share
    with other groups and other jobs, and the step ends when the slowest rank finishes. A *pacing rule* on each rank may
    delay the start of its own next iteration by a bounded amount. The agent sets the rule's threshold and delay window
    once per control interval of ``interval_iterations`` iterations; all ranks use the same setting. Delays help only
    where early work takes a shared resource from the critical path; elsewhere every delay can only cost.

    ## Action Space

    `Box(-1, 1, (2 * len(mechanisms),), float32)`; for mechanism ``k`` of ``mechanisms``:

    ACTION_TABLE

    MECHANISM_TABLE

    Values beyond -1 and 1 are clipped, as in Gymnasium's own continuous environments; not-a-number raises
    ``InputError``, a ``ValueError``.

    ## Observation Space

    `Box(-1, 1, (SIGNALS,), float32)`: the view of one rank, drawn for each episode. Entries have no unit.
    Except where noted an entry is ``x / (1 + |x|)`` with ``x`` = value / scale.

    OBSERVATION_TABLE

    ## Rewards

    The raw reward is ``reference / mean - cv_weight * sd / reference`` with mean and standard deviation of the
    interval's step times and the cluster's closed-form ideal step as reference. Slowing every step down lowers it
    although the CV falls. Iterations that a failure undoes are taken off, as ``reference`` each over the interval's
    time.

    By default (``reward="paired"``) the raw reward of the *unpaced copy* is subtracted: the same episode with the same
    cluster and noise, run beside this one without any pacing. No pacing then returns exactly 0. The copy does not see
    the action, so no action becomes better or worse than another.

    With ``cv_weight=0`` a paired reward is the gain of throughput, in units of the ideal step's throughput; times
    ``passive_step_mean_s / reference_step_s`` it is ``info["gain"]``, the gain over the unpaced copy. Otherwise the
    reward adds ``cv_weight`` times the fall of the standard deviation, as a share of the ideal step. A positive
    reward may then be steadier steps with a loss of throughput: to gain throughput, take a small ``cv_weight``.
    Raw rewards differ by far more between clusters and seeds than between actions.

    ## Info

    | Key | Meaning | Unit | Where |
    | --- | --- | --- | --- |
    | `cluster` | number of the present episode's cluster in `env.unwrapped.cluster_names` | integer | reset and step |
    | `step_mean_s` | mean step time of the interval | s | step |
    | `step_cv` | standard deviation of the step time / mean step | ratio | step |
    | `throughput_ratio` | ideal step / mean step, less what failures undid; it may exceed 1 | ratio | step |
    | `reference_step_s` | ideal step: without noise and other jobs; the job's own groups share its links | s | step |
    | `passive_step_mean_s` | mean step time of the unpaced copy | s | step, paired |
    | `passive_reward` | raw reward of the unpaced copy; with the paired one the raw reward | ratio | step, paired |
    | `gain` | mean step of the copy / mean step, less 1 | ratio | step, paired |

    ## Starting State

    The cluster's random quantities, the noise and the tenants' phases are drawn from the seed and the episode number;
    the quiet start and one interval have run without pacing. ``reset`` takes no options.

    ## Episode End

    Truncated after ``episode_intervals`` steps; never terminated. The environment does it itself, without Gymnasium's
    ``TimeLimit``, so ``env.spec.max_episode_steps`` is None. The vector environment then does as its ``autoreset_mode``
    says:

    * ``NEXT_STEP``: the step after an end starts the next episode: reward 0, its action counts for nothing
    * ``SAME_STEP``: the step that ends an episode returns the next one's first observation; the last one is in
      ``info["final_obs"]``, its info in ``info["final_info"]``

    ## Arguments

    * ``cluster``: a name in `configs/clusters`, a file, a `Cluster`, or a list of them with the same
      number of ranks, process groups and program, of which each episode draws one (default: DEFAULT_CLUSTER)
    * ``weights``: with a list, how often each is drawn (default: equally)
    * ``mechanisms``: which of them the action sets, in this order; a string is one (``("DEFAULT_MECHANISM",)``)
    * ``interval_iterations``: iterations in one step of the environment (default 20)
    * ``episode_intervals``: steps in an episode (default 64)
    * ``cv_weight``: weight of the variation in the reward (default 0.5)
    * ``reward``: ``"paired"`` (default) or ``"raw"``
    * ``limits``: of every delay, a ``paceenv.core.limits.Limits`` (default: those of a live job)
    * ``autoreset_mode``: vector environment only (default ``AutoresetMode.NEXT_STEP``, as Gymnasium's)
    * ``threads``: threads that share a batch, vector environment only (default 1)
    * ``render_mode``: ``"rgb_array"``, the timeline of ranks in the last iterations (default None)

    ```python
    >>> import gymnasium
    >>> env = gymnasium.make("paceenv/TwoJobs-v0")
    >>> env = gymnasium.make("paceenv/Pacing-v0", cluster="two-jobs", mechanisms="phase_shift")  # the same
    >>> envs = gymnasium.make_vec("paceenv/Pacing-v0", num_envs=64, vectorization_mode="vector_entry_point")
    ```

    ## Version History

    * v0: first version
    """

    metadata: dict[str, Any] = METADATA

    def __init__(
        self,
        cluster: ClusterLike | Sequence[ClusterLike] = DEFAULT_CLUSTER,
        *,
        render_mode: RenderMode | None = None,
        **rules: Any,
    ) -> None:
        given = taken_rules(cluster, rules, "render_mode")
        self.render_mode = _checked_mode(render_mode)
        self._batch = EpisodeBatch(1, given, keeps_stamps=render_mode is not None)
        self.observation_space, self.action_space = self._batch.observation_space, self._batch.action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start the first episode of ``seed``, or without a seed the next episode.

        Args:
            seed: at least 0; suites score the episodes of those from 1,000,000 on.
            options: there are none.

        Raises:
            InputError: for an option.
        """
        super().reset(seed=seed)
        _check_options(options)
        if seed is not None:
            self._batch.seed(np.array([0]), [seed])
        self._batch.start(np.array([0]))
        return self._batch.observe()[0], {"cluster": int(self._batch.cluster_E[0])}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Run one control interval; ``info`` holds the raw terms of the reward.

        Args:
            action: thresholds and windows, ``(2 * len(mechanisms),)``; values beyond -1 and 1 are clipped.

        Raises:
            InputError: for an action of another shape, or with not-a-number.
            ResetNeeded: before a first reset, and after the end of an episode.
        """
        if self._batch.elapsed_E[0] >= self._batch.rules.episode_intervals:
            raise gymnasium.error.ResetNeeded("the episode has ended: call reset() before step()")
        reward, truncated, terms = self._batch.step(np.asarray(action)[None])
        info = {"cluster": int(self._batch.cluster_E[0])} | {name: float(value[0]) for name, value in terms.items()}
        return self._batch.observe()[0], float(reward[0]), False, bool(truncated[0]), info

    def render(self) -> Frame | None:
        """The timeline of ranks in the last iterations, a picture ``(480, 800, 3)`` of bytes."""
        return None if self.render_mode is None else frame(self._batch, 0)

    @property
    def cluster_names(self) -> NDArray[np.object_]:
        """Names of the clusters, ``(C,)``; ``info["cluster"]`` is an index into it."""
        return self._batch.names_C.copy()


def _document(env: type[PacingEnv]) -> None:
    """Put the tables into the docstring, from the definitions that the code uses; without docstrings (-OO) nothing."""
    tables = {
        "ACTION_TABLE": pacing.action_table(),
        "MECHANISM_TABLE": pacing.mechanism_table(),
        "OBSERVATION_TABLE": signals.table(),
        "DEFAULT_CLUSTER": ", ".join(f"``{name}``" for name in DEFAULT_CLUSTER),
        "DEFAULT_MECHANISM": DEFAULT_MECHANISMS[0],
        "SIGNALS": str(signals.SIGNALS),
    }
    for name, table in tables.items():
        env.__doc__ = env.__doc__ and env.__doc__.replace(name, table.replace("\n", "\n    "))


_document(PacingEnv)


class PacingVectorEnv(gymnasium.vector.VectorEnv[NDArray[np.float32], NDArray[np.float32], NDArray[Any]]):
    """A batch of :class:`PacingEnv`, stepped by one call of the compiled engine.

    Row ``n`` after ``reset(seed=s)`` equals the scalar environment with seed ``s + n``, byte for byte, across
    autoresets too. Observations, rewards, ends and ``info`` are those of Gymnasium's ``SyncVectorEnv`` of scalar
    environments in the same autoreset mode.

    Args:
        num_envs: rows of the batch, at least 1.
        cluster: as in :class:`PacingEnv`, as are all that are not named here.
        autoreset_mode: ``NEXT_STEP`` or ``SAME_STEP`` of ``gymnasium.vector.AutoresetMode``, or its value; see there.
        threads: most threads that share the batch, at least 1; results do not depend on it.
        render_mode: ``"rgb_array"``; ``render`` then returns a frame for each row.

    Raises:
        InputError: for an argument outside its range, with the range.
    """

    metadata: dict[str, Any] = METADATA | {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(
        self,
        num_envs: int = 1,
        cluster: ClusterLike | Sequence[ClusterLike] = DEFAULT_CLUSTER,
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        threads: int = 1,
        render_mode: RenderMode | None = None,
        **rules: Any,
    ) -> None:
        given = taken_rules(cluster, rules, "num_envs", "autoreset_mode", "threads", "render_mode")
        modes = {mode.value: mode for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)}
        mode = getattr(autoreset_mode, "value", autoreset_mode)
        if mode not in [*modes]:
            raise out_of_range("autoreset_mode", mode, f"one of {', '.join(modes)}", WHERE)
        self.autoreset_mode = modes[mode]
        self.render_mode = _checked_mode(render_mode)
        self.metadata = METADATA | {"autoreset_mode": self.autoreset_mode}
        self._batch = EpisodeBatch(num_envs, given, threads, keeps_stamps=render_mode is not None)
        self.num_envs, self._ended = num_envs, np.zeros(num_envs, np.bool_)
        self.single_observation_space = self._batch.observation_space
        self.single_action_space = self._batch.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start the first episodes of the seeds (row ``n`` gets ``seed + n``), or without seeds the next episodes.

        Args:
            seed: one for all, or one for each row, None where a row goes on with its next episode.
            options: there are none.

        Raises:
            InputError: for an option.
        """
        _check_options(options)
        if seed is not None:
            number = isinstance(seed, (int, np.integer))
            given = [int(seed) + n for n in range(self.num_envs)] if number else list(seed)  # type: ignore[arg-type]
            if len(given) != self.num_envs:
                raise out_of_range("seed", f"{len(given)} numbers", f"one for each of {self.num_envs} rows", WHERE)
            seeds = {n: one for n, one in enumerate(given) if one is not None}
            self._batch.seed(np.array(list(seeds), np.int64), list(seeds.values()))
        self._batch.start(np.arange(self.num_envs))
        self._ended[:] = False
        return self._batch.observe(), _masked(self._batch.where(), np.ones(self.num_envs, np.bool_))

    def step(
        self, actions: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Run one control interval in every row that does not start an episode instead (autoreset in the next step).

        Args:
            actions: one for each row, ``(num_envs, 2 * len(mechanisms))``; values beyond -1 and 1 are clipped.

        Raises:
            InputError: for actions of another shape, or with not-a-number in a row that runs.
        """
        starting = self._ended if self._ended.any() else None
        reward, truncated, terms = self._batch.step(actions, None if starting is None else ~starting)
        everyone, info = np.ones(self.num_envs, np.bool_), dict[str, Any]()
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            if truncated.any():
                last, final = self._batch.observe(), np.full(self.num_envs, None, object)
                for n in np.flatnonzero(truncated):
                    final[n] = last[n]
                info = {"final_obs": final, "_final_obs": truncated.copy()}
                info["final_info"] = _masked(self._batch.where() | terms, truncated)
                info["_final_info"] = truncated.copy()
                self._batch.start(np.flatnonzero(truncated))
            info |= _masked(terms, ~truncated)
        else:
            self._ended = truncated.copy()
            if starting is not None:
                self._batch.start(np.flatnonzero(starting))
            info |= _masked(terms, everyone if starting is None else ~starting)
        info |= _masked(self._batch.where(), everyone)
        return self._batch.observe(), reward, np.zeros(self.num_envs, np.bool_), truncated, info

    def render(self) -> tuple[Frame, ...] | None:
        """A frame for each row, as :meth:`PacingEnv.render`."""
        return None if self.render_mode is None else tuple(frame(self._batch, n) for n in range(self.num_envs))

    @property
    def cluster_names(self) -> NDArray[np.object_]:
        """Names of the clusters, ``(C,)``; ``info["cluster"]`` holds indices into it."""
        return self._batch.names_C.copy()

    def keep_episodes(self) -> None:
        """Keep the jobs and unpaced copies of episodes, for trainers whose seeds come again; before the first reset.

        Results do not depend on it; memory grows with the number of different episodes.
        """
        self._batch.keep_episodes()

    def desync_episodes(self) -> None:
        """Spread the ends of the running episodes evenly over time, for trainers that act on every end."""
        self._batch.elapsed_E[:] = np.arange(self.num_envs) * self._batch.rules.episode_intervals // self.num_envs


def _masked(values: dict[str, NDArray[Any]], mask_E: NDArray[np.bool_]) -> dict[str, Any]:
    """Values as ``SyncVectorEnv`` puts them into an info: nothing where no row has them, each beside its mask."""
    if mask_E.all():
        return values | {f"_{name}": mask_E for name in values}
    if not mask_E.any():
        return {}
    info: dict[str, Any] = {}
    for name, value in values.items():
        info[name], info[f"_{name}"] = np.where(mask_E, value, 0), mask_E.copy()
    return info


register_envs()  # also where paceenv was imported before Gymnasium
