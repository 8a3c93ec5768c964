"""Every rank an agent: which ranks should hold back? PettingZoo's parallel environment asks each of them.

You learn: in the multi-agent environment each rank has its own view and takes its own action, with one reward for all,
as step time is common. On this cluster four pairs of ranks share an uplink, and in each episode another pair has work
after its collective. The others are early: their traffic takes the uplink from the pair that everybody waits for. Who
is early stands in each rank's own view, as slack. It prints the throughput when nobody, everybody, the ranks with slack
or the two without hold back by the same time: only those who see slack should.

    pip install '/path/to/checkout[train]'
    python examples/pettingzoo_ranks.py
"""

import argparse
from collections.abc import Callable

import numpy as np

from paceenv.core import pacing, signals
from paceenv.envs.multi_agent import PacingParallelEnv

CLUSTER, MECHANISM, WINDOW = "unequal-slack", "stagger", 0.25
# with threshold 0 this mechanism delays every second rank by the window, whatever it sees: who does it is our choice
ON = np.array(pacing.encode_action(MECHANISM, 0.0, WINDOW), np.float32)
OFF = np.array([-1.0, -1.0], np.float32)
SLACK = signals.NAMES.index("slack_share")

Choice = Callable[[float], bool]
CHOICES: dict[str, Choice] = {
    "nobody": lambda slack: False,
    "everybody": lambda slack: True,
    "ranks with slack": lambda slack: slack > 0.1,
    "ranks without": lambda slack: slack <= 0.1,
}


def step_s(env: PacingParallelEnv, choice: Choice, seed: int) -> float:
    """Mean step of an episode in which the chosen ranks hold back, seconds. Each chooses by its own first view."""
    views, _ = env.reset(seed=seed)
    actions = {agent: ON if choice(float(view[SLACK])) else OFF for agent, view in views.items()}
    steps_s = []
    while env.agents:
        _, _, _, _, infos = env.step(actions)
        steps_s.append(infos["rank_0"]["step_mean_s"])
    return float(np.mean(steps_s))


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--intervals", type=int, default=24, help="control intervals of an episode (%(default)s)")
    parser.add_argument("--seeds", type=int, default=8, help="episodes (%(default)s)")
    options = parser.parse_args(argv)

    env = PacingParallelEnv(CLUSTER, mechanisms=(MECHANISM,), episode_intervals=options.intervals)
    print(f"{CLUSTER}: {len(env.possible_agents)} ranks, {options.seeds} episodes; throughput against nobody")
    gains, nobody_s = {}, np.zeros(0)
    for name, choice in CHOICES.items():
        paced_s = np.array([step_s(env, choice, seed) for seed in range(options.seeds)])
        nobody_s = paced_s if name == "nobody" else nobody_s
        gain = nobody_s / paced_s - 1.0
        gains[name] = float(gain.mean())
        print(f"  {name:18} {gain.mean():+.2%} ± {gain.std() / options.seeds**0.5:.2%}")
    return gains


if __name__ == "__main__":
    main()
