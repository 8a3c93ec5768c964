"""A policy for one job within a minute: distilled on clusters that may be the job's, and compared before it is kept.

Half of the clusters, drawn from a calibration's errors (``paceenv.calibration.posterior``), is trained on, the other
half is for comparisons only. The student (``distill``), the best constant setting and the released policy run there
against no pacing, every rank deciding for itself. On one set of episodes the best of them is chosen, on another
one it is measured. Where none is better than no pacing, none is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.utils import set_random_seed

import paceenv
from paceenv.core import metrics
from paceenv.core.errors import out_of_range
from paceenv.core.intervals import Interval
from paceenv.core.limits import LIMITS, Limits
from paceenv.core.pacing import Candidate
from paceenv.core.plain import plain
from paceenv.policies.base import Policy
from paceenv.policies.clairvoyant import settings_of
from paceenv.policies.distilled import constant_policy
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import PolicyFile
from paceenv.policies.rollout import run
from paceenv.policies.rules import passive
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import start
from paceenv.trainers.evaluation.suites import Case
from paceenv.trainers.training.distill import DistillLearner
from paceenv.trainers.training.learner import Curve
from paceenv.trainers.training.train_config import TrainConfig, load_train_config
from paceenv.trainers.training.training_run import git_commit

BASE = "distilled"
"""The training config whose student this is."""
TAILORED, CONSTANT, RELEASED = "tailored", "constant", "learned"
MIN_GAIN = 0.002
"""A mean gain below which pacing is not worth having."""
TIE = 0.001
"""Gains that differ by less are equal."""
WIDER = 0.5
"""By so much of its width each end of a signal's range is moved. Clusters drawn from one trace are more alike than the
job: on sockets the measuring run moved baselines, and a policy that gained 21 % was over as a signal was at 0.80 where
0.13 to 0.64 had been met."""
CANDIDATES = 12
ROUND_EPISODES = 6
"""Episodes of every cluster in a round of the student's training."""
MAX_RANK_PHASES = 16 * 64
"""Of all training clusters together, so that a large job has fewer of them; a rank without a program counts as one."""
EVALUATION_SHARE = 0.25
"""Of the time, kept for comparisons; a round that would not fit before is not begun."""
ITERATIONS = 1200
CHOICE_SEED, FINAL_SEED = 6_000_000, 6_500_000
"""Episodes on which a policy is chosen, and on which it is measured."""
MAX_SEEDS, MIN_SEEDS, MAX_EVALUATED_RANK_PHASES = 16, 4, 2048


@dataclass(frozen=True)
class JobPolicy:
    """What was found for one job: the name of the best policy and its file, None where nothing beats no pacing.

    The tailored ``student`` and the best ``constant`` are None where no candidate setting gained anything. Gains of
    throughput over no pacing are from episodes that nothing was chosen on.
    """

    best: str | None
    file: PolicyFile | None
    student: PolicyFile | None
    constant: Candidate | None
    gains: dict[str, Interval]
    cpu_s: float

    SHOWN: ClassVar = ("best", "pacing_helps", "constant", "gains", "cpu_s")

    @property
    def pacing_helps(self) -> bool:
        return self.best is not None


def train_for_job(
    clusters: Sequence[Cluster],
    *,
    seconds: float = 60.0,
    seed: int = 0,
    mechanisms: Sequence[str] = (),
    limits: Limits = LIMITS,
    on_progress: Callable[[float], None] = lambda cpu_s: None,
) -> JobPolicy:
    """Find the best policy for a job that may have any of ``clusters``.

    Args:
        clusters: that may be the job's, such as draws from a calibration; at least 4, of one number of ranks.
        mechanisms: that the tailored policy and the constant may use; none: slack, phase_shift, stagger and
            mean_slack, and defer where transfers can wait.
        limits: of every delay; the defaults are those of a live job.

    Raises:
        InputError: for clusters or seconds that do not fit.
    """
    sizes = sorted({cluster.ranks for cluster in clusters})
    if len(clusters) < 4 or len(sizes) > 1:
        given = f"{len(clusters)} of {sizes} ranks"
        raise out_of_range("clusters", given, "at least 4, of one number of ranks", "train --job")
    if not seconds >= 5.0:
        raise out_of_range("seconds", seconds, "at least 5", "train --job")
    can_wait = ["defer"] if clusters[0].can_defer else []
    mechanisms = mechanisms or ["slack", "phase_shift", "stagger", "mean_slack", *can_wait]
    begun = time.process_time()
    released = select_policy(RELEASED, clusters[0])
    assert isinstance(released, Learned)
    trained, compared = clusters[::2][: max(MAX_RANK_PHASES // clusters[0].rank_phases, 2)], clusters[1::2]
    until = begun + (1.0 - EVALUATION_SHARE) * seconds
    learner, learned = _train(trained, mechanisms, limits, until, seed, on_progress)
    student = constant = None
    files = {RELEASED: PolicyFile(released, released.calibrated_range)}
    if learned:
        student = PolicyFile(policy := learner.policy(), _wider(learner.calibrated_range(policy)))
        constant = _best_constant(learner.candidates, trained, limits)
        interval = learner.config.environment.interval_iterations
        files |= {TAILORED: student, CONSTANT: PolicyFile(constant_policy(constant, CONSTANT, interval))}
    policies = {name: file.policy for name, file in files.items()}
    seeds = int(np.clip(MAX_EVALUATED_RANK_PHASES // (clusters[0].rank_phases * len(compared)), MIN_SEEDS, MAX_SEEDS))
    chosen_on = _gains(policies, compared, CHOICE_SEED, seeds, limits)
    on_progress(time.process_time() - begun)
    best = _best(chosen_on)
    helps = chosen_on[best].value >= MIN_GAIN and chosen_on[best].low > 0.0
    gains = _gains(policies, compared, FINAL_SEED, seeds, limits)
    cpu_s = round(time.process_time() - begun, 1)
    on_progress(cpu_s)
    found = JobPolicy(best if helps else None, files[best] if helps else None, student, constant, gains, cpu_s)
    record = {
        "paceenv": paceenv.__version__,
        "git_commit": git_commit(),
        "config": learner.config.model_dump(mode="json", exclude={"environment": {"clusters"}}),
        "algorithm": learner.label,
        "timesteps": learner.timesteps,
        "tailored": {"cluster": clusters[0].name, "seed": seed, **plain(found)},
    }
    recorded = {name: replace(file, provenance=record) for name, file in files.items()}
    return replace(found, file=recorded[best] if helps else None, student=recorded.get(TAILORED))


def _wider(calibrated: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """The range within which a tailored policy is followed, on the signals' own scale of -1 to 1."""
    moved = {signal: (low, high, WIDER * (high - low)) for signal, (low, high) in calibrated.items()}
    return {signal: (max(low - by, -1.0), min(high + by, 1.0)) for signal, (low, high, by) in moved.items()}


def _train(
    clusters: Sequence[Cluster],
    mechanisms: Sequence[str],
    limits: Limits,
    until: float,
    seed: int,
    on_progress: Callable[[float], None],
) -> tuple[DistillLearner, bool]:
    """The learner after as many rounds as fit; False where no setting gains anything on its clusters."""
    begun, rounds, data = time.process_time(), 10_000, load_train_config(BASE).model_dump()
    always = {m: pair for m, pair in data["distill"]["always"].items() if m not in mechanisms}
    decisions = ROUND_EPISODES * len(clusters) * data["distill"]["episode_intervals"]
    data |= {"name": TAILORED, "description": "", "seed": seed, "selection": None, "sb3": None}
    data |= {"total_timesteps": rounds * decisions}
    data["distill"] |= {"rounds": rounds, "random_clusters": 0, "candidates": CANDIDATES, "always": always}
    shares = [Case(cluster=cluster) for cluster in clusters]
    data["environment"] |= {"clusters": shares, "suites": [], "mechanisms": mechanisms, "limits": limits, "threads": 1}
    config = TrainConfig.model_validate(data)
    learner, round_s = DistillLearner(config, Curve(Logger(None, []))), 0.0
    if not learner.choose_candidates() or learner.scale_K.mean() < 100.0 * MIN_GAIN:
        return learner, False
    while not learner.round or time.process_time() + 1.2 * round_s < until:
        before = time.process_time()
        set_random_seed((seed + 1_000_003 * learner.round) % 2**32)
        learner.advance(learner.round, 1)
        round_s = time.process_time() - before
        on_progress(time.process_time() - begun)
    return learner, True


def _best_constant(candidates: Sequence[Candidate], clusters: Sequence[Cluster], limits: Limits) -> Candidate:
    """The setting with the highest mean gain while it stays on, on clusters and noise of the training."""
    settings, step_s = settings_of(candidates), []
    for k, cluster in enumerate(clusters):
        simulator = start(cluster, np.repeat(np.arange(2) + CHOICE_SEED - 2 * (k + 1), len(settings)), limits=limits)
        mean_s_2S = simulator.run(np.tile(settings, (2, 1, 1))[:, None], ITERATIONS).mean(axis=1).reshape(2, -1)
        step_s.append((mean_s_2S / mean_s_2S[:, :1]).mean(axis=0))
    return candidates[max(int(np.mean(step_s, axis=0)[1:].argmin()), 0)]


def _best(gains: dict[str, Interval]) -> str:
    """The policy with the highest gain; the constant, which is simpler, where nothing else gains :data:`TIE` more."""
    most = max(gains, key=lambda name: gains[name].value)
    if CONSTANT in gains and gains[most].value - gains[CONSTANT].value < TIE:
        return CONSTANT
    return most


def _gains(
    policies: Mapping[str, Policy], clusters: Sequence[Cluster], first: int, seeds: int, limits: Limits
) -> dict[str, Interval]:
    """Mean gain of each policy over no pacing with its interval, over clusters and seeds; paired on the same noise."""
    gain: dict[str, list[NDArray[np.float64]]] = {name: [] for name in policies}
    for d, cluster in enumerate(clusters):
        own = np.arange(first + d * seeds, first + (d + 1) * seeds)
        plain_s_E = run(passive(), start(cluster, own, limits=limits), ITERATIONS).useful_step_E
        for name, policy in policies.items():
            paced_s_E = run(policy, start(cluster, own, limits=limits), ITERATIONS).useful_step_E
            gain[name].append(plain_s_E / paced_s_E - 1.0)
    # a cluster is one value: its episodes have its parameters in common
    return {name: metrics.mean_interval(np.array([x.mean() for x in gains])) for name, gains in gain.items()}
