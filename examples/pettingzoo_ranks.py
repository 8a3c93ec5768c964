"""Every rank an agent: which ranks should hold back? PettingZoo's parallel environment asks each of them.

You learn: the multi-agent environment gives each rank its own view and takes its own action, with one reward for all,
as step time is common. On this cluster four pairs of nodes share an uplink and one pair has work after its collective.
Early pairs take the uplink from the critical one. So the same rule helps on the early ranks and hurts on the critical
ones. It prints what no pacing, everybody, only the early and only the critical ranks get, in % of throughput.

    pip install 'paceenv[multiagent]'
    python examples/pettingzoo_ranks.py
"""

import argparse
from collections.abc import Callable

import numpy as np

from paceenv.core import pacing
from paceenv.core.limits import Limits
from paceenv.envs.multi_agent import PacingParallelEnv

CLUSTER, CRITICAL = "unequal-slack", ("rank_6", "rank_7")
ON = pacing.encode_action(pacing.one_mechanism("paper", 0.0, 0.12)[None], ["paper"])[0]
OFF = np.array([-1.0, -1.0], np.float32)

Chosen = Callable[[str], bool]
CHOICES: dict[str, Chosen] = {
    "nobody": lambda agent: False,
    "everybody": lambda agent: True,
    "early ranks": lambda agent: agent not in CRITICAL,
    "critical ranks": lambda agent: agent in CRITICAL,
}


def step_s(env: PacingParallelEnv, chosen: Chosen, seed: int) -> float:
    """Mean step of an episode in which the chosen ranks pace, seconds."""
    env.reset(seed=seed)
    steps_s = []
    while env.agents:
        actions = {agent: ON if chosen(agent) else OFF for agent in env.agents}
        _, _, _, _, infos = env.step(actions)
        steps_s.append(infos["rank_0"]["step_mean_s"])
    return float(np.mean(steps_s))


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--intervals", type=int, default=24, help="control intervals of an episode (%(default)s)")
    parser.add_argument("--seeds", type=int, default=8, help="episodes (%(default)s)")
    options = parser.parse_args(argv)

    env = PacingParallelEnv(
        CLUSTER, mechanisms=("paper",), episode_intervals=options.intervals, limits=Limits(budget_s_per_minute=60.0)
    )
    print(f"{CLUSTER}: {len(env.possible_agents)} ranks, {options.seeds} episodes; throughput against nobody pacing")
    steps_s = {
        name: np.array([step_s(env, chosen, seed) for seed in range(options.seeds)]) for name, chosen in CHOICES.items()
    }
    gains = {}
    for name, paced_s in steps_s.items():
        gain = steps_s["nobody"] / paced_s - 1.0
        gains[name] = float(gain.mean())
        print(f"  {name:16} {gain.mean():+.2%} ± {gain.std() / options.seeds**0.5:.2%}")
    return gains


if __name__ == "__main__":
    main()
