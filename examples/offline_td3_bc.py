"""Offline RL: collect a data set in Minari's format, learn from it without the simulator, score what was learned.

You learn: what a data set of pacing holds (views of a rank, normalised actions, rewards paired with an unpaced twin),
that ``minari.load_dataset`` reads it, and what the data decide. From random settings TD3+BC finds a setting that pays;
behaviour cloning of the same data cannot, and from data in which nobody paced nothing can be learned at all.
It prints each policy's gain in throughput over no pacing, with 95 % intervals.

    python examples/offline_td3_bc.py
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from paceenv.core.errors import InputError
from paceenv.policies.policy_file import save_policy
from paceenv.sim.cluster import load_cluster
from paceenv.trainers.evaluation.evaluate import evaluate
from paceenv.trainers.evaluation.suites import Case, Suite
from paceenv.trainers.offline.minari_dataset import read_dataset, write_dataset
from paceenv.trainers.offline.simulated_episodes import simulated_episodes
from paceenv.trainers.offline.td3_bc import OfflineConfig, learn_offline

CLUSTER, MECHANISMS, NAME = "two-jobs", ("phase_shift",), "paceenv/example-{}-v0"


def collect(behaviour: str, episodes: int, folder: Path) -> str:
    """A data set of one behaviour, as ``paceenv dataset simulate`` makes it; its name.

    With the folder in ``MINARI_DATASETS_PATH``, ``minari.load_dataset(name)`` reads it like any other.
    """
    name = NAME.format(behaviour)
    found = simulated_episodes(load_cluster(CLUSTER), [behaviour], mechanisms=MECHANISMS, episodes=episodes, seed=10**6)
    write_dataset(name, found, MECHANISMS, description=f"{behaviour} on {CLUSTER}", folder=folder)
    return name


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=128, help="episodes of 64 control intervals (%(default)s)")
    parser.add_argument("--updates", type=int, default=4000, help="gradient steps of each learner (%(default)s)")
    parser.add_argument("--seeds", type=int, default=32, help="of the score (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the learners (%(default)s)")
    options = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as place:
        folder, files = Path(place), dict[str, str]()
        data = read_dataset(collect("random", options.episodes, folder), folder)
        print(f"{len(data.reward_N)} intervals of random settings, mean paired reward {data.reward_N.mean():+.4f}")
        for algorithm in ("bc", "td3_bc"):
            config = replace(OfflineConfig(seed=options.seed, updates=options.updates), algorithm=algorithm)
            files[algorithm] = str(folder / f"{algorithm}.safetensors")
            save_policy(files[algorithm], learn_offline(data, config))
        try:
            learn_offline(read_dataset(collect("passive", 8, folder), folder), OfflineConfig(updates=1))
        except InputError as refused:
            print(f"from data of no pacing: {refused}")

        suite = Suite(name="example", cases=[Case(cluster=CLUSTER)], seeds=options.seeds, iterations=1280)
        result = evaluate([*files.values(), "static", "learned"], suite)
        print(f"{CLUSTER}: throughput against no pacing, {options.seeds} seeds, 95 % interval")
        gains = {}
        for name, policy in (files | {"config's static": "static", "released": "learned"}).items():
            found = result.score(policy, suite.cases[0])
            gains[name] = found.gain
            print(f"  {name:16} {found.gain:+.2%} ({found.gain_ci95[0]:+.2%} to {found.gain_ci95[1]:+.2%})")
    return gains


if __name__ == "__main__":
    main()
