"""A policy of your own as a Python class: what it sees, what it returns, how it is scored.

You learn: the whole interface of a policy is ``act``, from what ranks see of themselves to a threshold and a delay
window of each mechanism. This one looks at a single signal, how much longer its collective takes than it does alone,
and shifts its phase only where that is a lot. It prints its gain over no pacing, beside the rules that ship, where
pacing can help and where it cannot. A rule that gains on the first and costs on the second is no good rule.

    python examples/policy_in_python.py
    paceenv evaluate examples.policy_in_python:WhenContended --suite demo
"""

import argparse

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, signals
from paceenv.policies.base import Policy
from paceenv.policies.rollout import run
from paceenv.policies.rules import Adaptive, Static
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import start

CLUSTERS = ("two-jobs", "two-jobs-other-period", "one-job")


class WhenContended(Policy):
    """Shift the phase of the job while its collectives take much longer than alone.

    A batch row is one rank; rows never see each other, as in a live job. Axes: B rows, O signals, M mechanisms.
    """

    name = "when-contended"
    mechanisms = ("phase_shift",)

    def __init__(self, inflation: float = 0.15, threshold: float = 0.05, window: float = 0.15) -> None:
        self.inflation = inflation
        self.setting = pacing.settings({"phase_shift": (threshold, window)})

    def reset(self, rows: int) -> None:
        """Nothing to forget: it has no memory, which shows where contention comes and goes."""

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        """Settings ``(B, M, 2)``, threshold and window as ratios, for the next control interval."""
        entry_B = signals_BO[:, signals.NAMES.index("comm_inflation")]
        contended_B = np.expm1(signals.unsquash("comm_inflation", entry_B)) > self.inflation
        settings = pacing.off(len(signals_BO))
        settings[contended_B] = self.setting
        return settings


def gains(policy: Policy, cluster: str, seeds: int, iterations: int) -> NDArray[np.float64]:
    """Relative gain in throughput over no pacing on the same noise, one value a seed."""
    numbers = np.arange(seeds)
    paced = run(policy, start(load_cluster(cluster), numbers), iterations)
    unpaced = run(Static({}, "passive"), start(load_cluster(cluster), numbers), iterations)
    return unpaced.useful_step_E / paced.useful_step_E - 1.0


def main(argv: list[str] | None = None) -> dict[tuple[str, str], float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=32, help="episodes for each cluster (%(default)s)")
    parser.add_argument("--iterations", type=int, default=1280, help="length of an episode (%(default)s)")
    options = parser.parse_args(argv)

    policies = [WhenContended(), Static({"phase_shift": (0.05, 0.15)}, "always on"), Adaptive()]
    print(f"gain in throughput over no pacing, {options.seeds} seeds: mean and standard error")
    print(f"{'':24}" + "".join(f"{policy.name:>22}" for policy in policies))
    found = {}
    for cluster in CLUSTERS:
        row = [gains(policy, cluster, options.seeds, options.iterations) for policy in policies]
        cells = [f"{gain_E.mean():+.2%} ± {gain_E.std() / options.seeds**0.5:.2%}" for gain_E in row]
        print(f"{cluster:24}" + "".join(f"{cell:>22}" for cell in cells))
        found |= {(policy.name, cluster): float(gain_E.mean()) for policy, gain_E in zip(policies, row, strict=True)}
    print("a rule without memory paces a job that drifts past, too: look at two-jobs-other-period before you deploy")
    return found


if __name__ == "__main__":
    main()
