"""Search a fixed setting with Optuna, and find out how much of the winner was luck.

You learn: how a setting is scored in the simulator in a fraction of a second, why both sides of a comparison need the
same noise, and why a search needs seeds that it never saw: the best of many noisy scores is too good. It prints the
winner's gain in throughput on the seeds of the search and on fresh ones, beside the setting in the cluster's config.

    python examples/optuna_search.py --trials 60
"""

import argparse

import numpy as np
import optuna

from paceenv.core import metrics
from paceenv.policies.base import Policy
from paceenv.policies.rollout import run, start
from paceenv.policies.rules import Static, passive
from paceenv.sim.cluster import Cluster, load_cluster


def step_s(policy: Policy, cluster: Cluster, seeds: range, iterations: int) -> np.ndarray:
    """Seconds for each iteration that counts, one value a seed; the same seeds give the same noise."""
    return run(policy, start(cluster, np.array(seeds)), iterations).useful_step_E


def main(argv: list[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", default="two-jobs", help="a cluster config, by name or file (%(default)s)")
    parser.add_argument("--trials", type=int, default=60, help="settings to try (%(default)s)")
    parser.add_argument("--seeds", type=int, default=4, help="of the search; fresh ones are 8 times as many")
    parser.add_argument("--iterations", type=int, default=600, help="length of an episode (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of Optuna's sampler (%(default)s)")
    options = parser.parse_args(argv)

    cluster = load_cluster(options.cluster)
    searched, fresh = range(options.seeds), range(1000, 1000 + 8 * options.seeds)
    unpaced = {seeds: step_s(passive(), cluster, seeds, options.iterations) for seeds in (searched, fresh)}

    def gain_E(policy: Policy, seeds: range) -> np.ndarray:
        return unpaced[seeds] / step_s(policy, cluster, seeds, options.iterations) - 1.0

    def objective(trial: optuna.Trial) -> float:
        mechanism = trial.suggest_categorical("mechanism", ["slack", "phase_shift"])
        threshold = trial.suggest_float("threshold", 0.005, 0.25, log=True)
        window = trial.suggest_float("window", 0.01, 0.5, log=True)
        return float(gain_E(Static({mechanism: (threshold, window)}), searched).mean())

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=options.seed))
    study.optimize(objective, n_trials=options.trials)

    best = study.best_params
    winner = Static({best["mechanism"]: (best["threshold"], best["window"])})
    config = Static({cluster.pacing.mechanism: (cluster.pacing.threshold, cluster.pacing.window)})
    print(f"{cluster.name}: throughput against no pacing")
    print(f"  winner of {options.trials}: {best['mechanism']} = {best['threshold']:.3f}/{best['window']:.3f}")
    print(f"  on the {len(searched)} seeds of the search   {study.best_value:+.2%}")
    for name, policy in (("winner", winner), ("config", config)):
        mean, low, high = metrics.bootstrap_interval(gain_E(policy, fresh))
        print(f"  {name} on {len(fresh)} fresh seeds   {mean:+.2%} ({low:+.2%} to {high:+.2%})")
    print("  only the fresh seeds count: the search has picked the setting for the others")
    return study.best_value, float(gain_E(winner, fresh).mean())


if __name__ == "__main__":
    main()
