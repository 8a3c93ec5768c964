"""The environment for several agents, one on each rank: a PettingZoo ``ParallelEnv`` on the same physics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

from paceenv.core.errors import InputError
from paceenv.envs.episode_batch import DEFAULT_CLUSTER, ClusterLike, EpisodeBatch, taken_rules

Array = NDArray[np.float32]


class PacingParallelEnv(ParallelEnv[str, Array, Array]):  # type: ignore[misc]
    """Every rank of the job is an agent that acts on its own view, as a deployed policy does.

    ``paceenv/Pacing-v0`` shows the view of one rank and gives its action to all ranks. Here agent ``rank_3`` sees what
    rank 3 sees and sets the pacing of rank 3 alone. Step time is common to all ranks of a synchronous job, and so is
    the reward: the game is cooperative. With the same actions the run is, bit for bit, that of
    :func:`paceenv.policies.rollout.run`, which ``paceenv evaluate`` uses.

    Observations, actions and the reward are those of :class:`paceenv.envs.pacing_env.PacingEnv`, and so are the
    arguments, but for ``render_mode``, which is None. All agents are there from the first step to the last; an episode
    is truncated, never terminated.
    """

    metadata: dict[str, Any] = {"name": "paceenv/Pacing-v0", "render_modes": [], "is_parallelizable": True}

    def __init__(
        self,
        cluster: ClusterLike | Sequence[ClusterLike] = DEFAULT_CLUSTER,
        *,
        render_mode: None = None,
        **rules: Any,
    ) -> None:
        given = taken_rules(cluster, rules, "render_mode")
        self._batch, self.render_mode = EpisodeBatch(1, given), render_mode
        self.possible_agents = [f"rank_{rank}" for rank in range(self._batch.clusters[0].ranks)]
        self.agents: list[str] = []
        # a space of its own for each agent, and always the same one, as each samples from its own seed
        entries, width = self._batch.observation_space, 2 * len(self._batch.mechanisms)
        self._spaces = {
            agent: (type(entries)(entries.low, entries.high, dtype=np.float32), type(entries)(-1.0, 1.0, (width,)))
            for agent in self.possible_agents
        }

    def observation_space(self, agent: str) -> Any:
        """The space of an agent's observations, a ``Box``."""
        return self._spaces[agent][0]

    def action_space(self, agent: str) -> Any:
        """The space of an agent's actions, a ``Box``."""
        return self._spaces[agent][1]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, dict[str, Any]]]:
        """Start the first episode of ``seed``, or without a seed the next episode.

        Args:
            seed: at least 0; the same one as in ``PacingEnv`` gives the same episode.
        """
        everyone = np.array([0])
        if seed is not None:
            self._batch.seed(everyone, [seed])
        self._batch.start(everyone)
        self.agents = list(self.possible_agents)
        return self._views(), {agent: {"cluster": int(self._batch.cluster_E[0])} for agent in self.agents}

    def step(
        self, actions: Mapping[str, Array]
    ) -> tuple[dict[str, Array], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Run one control interval, each rank with its own settings; ``info`` holds the raw terms of the reward.

        Args:
            actions: one for each agent, ``(2 * len(mechanisms),)``; values beyond -1 and 1 are clipped.

        Raises:
            InputError: where an agent has no action, one that is not there has one, or an action has another shape or
                not-a-number.
        """
        if not self.agents:
            return {}, {}, {}, {}, {}  # the episode is over; PettingZoo's convention
        if set(actions) != set(self.agents):
            wrong = sorted(set(actions) ^ set(self.agents))
            raise InputError(f"actions: {wrong[0]} is missing or unknown; allowed: one action for each live agent")
        given = np.stack([np.asarray(actions[agent], np.float32) for agent in self.agents])
        settings_RM2 = self._batch.decoded(given, len(given), called="rank_{}")
        reward, truncated, terms = self._batch.advance(settings_RM2[None])
        agents, over = self.agents, bool(truncated[0])
        info = {"cluster": int(self._batch.cluster_E[0])} | {name: float(value[0]) for name, value in terms.items()}
        self.agents = [] if over else agents
        ends = dict.fromkeys(agents, False), dict.fromkeys(agents, over)
        return self._views(), dict.fromkeys(agents, float(reward[0])), *ends, {agent: dict(info) for agent in agents}

    def state(self) -> Array:
        """The views of all ranks, ``(R, O)``: for a critic that is trained in one place."""
        return np.asarray(self._batch.observe_ranks()[0])

    @property
    def cluster_names(self) -> NDArray[np.object_]:
        """Names of the clusters, ``(C,)``; ``info["cluster"]`` is an index into it."""
        return self._batch.names_C.copy()

    def _views(self) -> dict[str, Array]:
        return dict(zip(self.possible_agents, self.state(), strict=True))
