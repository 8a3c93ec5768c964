"""Jobs on which pacing has nothing to win: a short paired probe, and the warning that names them.

Nothing can be learned on such a job, and an environment of nothing else is usually a mistake. The probe tries constant
settings of each mechanism against no pacing, on the same noise. A job is a null where even the upper end of the best
setting's interval is below :data:`NEGLIGIBLE`. It is a test, not a proof: a policy that changes its settings may win
where no constant does, so the message says what was tried. ``docs/reference/environment.md`` has
how often the probe agrees with the labels of the suites.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import numpy as np

from paceenv.core import metrics, pacing
from paceenv.core.limits import Limits
from paceenv.envs.episode_batch import Rules
from paceenv.envs.registration import SCENARIOS
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import Simulator, episode_keys

NEGLIGIBLE = 0.001
"""A reward of this much more a step, about 0.1 % of throughput, is nothing to win."""
_THRESHOLDS, _WINDOWS = (0.0, 0.05, 0.3), (0.05, 0.15, 0.4)
"""Settings that are tried, every pair: thresholds and windows, ratios."""
_SETTLING, _INTERVALS = 4, 8
"""Control intervals before, and in which rewards count. Delays settle in one; the first pauses, in which the slack rule
judges itself, are close together and rare later."""
_ITERATIONS = 20
"""Iterations of an interval."""
_MIN_EPISODES, _MAX_EPISODES = 4, 24
_RANK_ITERATIONS = 3_000_000
"""About what a probe may simulate, which takes less than 0.1 s; large jobs get fewer episodes."""
_SIGMAS = 2.0


class NullJobWarning(UserWarning):
    """No cluster of an environment has anything to win."""


def warn_of_nulls(clusters: Sequence[Cluster], rules: Rules) -> None:
    """Warn, once a process for each set of clusters and mechanisms, where every cluster is a null."""
    mechanisms, weights = rules.mechanism_names, tuple(float(w) for w in np.ravel(rules.cv_weight))
    best = -np.inf
    for cluster in clusters:
        best = max(best, _most_to_win(cluster.model_dump_json(), mechanisms, weights, rules.limits))
        if best >= NEGLIGIBLE:
            return
    names = ", ".join(cluster.name for cluster in clusters[:4]) + (", ..." if len(clusters) > 4 else "")
    settings = len(_THRESHOLDS) * len(_WINDOWS)
    _warn_once(
        f"nothing to learn on {names}: none of {settings} constant settings of {', '.join(mechanisms)} beats no pacing "
        f"by {NEGLIGIBLE:.1%} (the best by at most {best:+z.2%}); pacing pays for example on {_examples()}"
    )


def _examples() -> str:
    pays = [given for name, given in SCENARIOS.items() if name != "Null"]
    return ", ".join(f"{given['cluster']} ({given['mechanisms']})" for given in pays)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, NullJobWarning, stacklevel=4)


@functools.cache
def _most_to_win(cluster_json: str, mechanisms: tuple[str, ...], weights: tuple[float, ...], limits: Limits) -> float:
    """The upper end of what the best constant setting wins over no pacing, as a reward a step.

    Once a process, as environments are often made by the dozen.
    """
    cluster = Cluster.model_validate_json(cluster_json)
    tried = [pacing.off()] + [
        pacing.one_mechanism(name, threshold, window)
        for name in mechanisms
        for threshold in _THRESHOLDS
        for window in _WINDOWS
    ]
    iterations = limits.quiet_first + (_SETTLING + _INTERVALS) * _ITERATIONS
    affordable = _RANK_ITERATIONS // (len(tried) * iterations * cluster.ranks)
    episodes = min(max(affordable, _MIN_EPISODES), _MAX_EPISODES)
    keys_N = episode_keys(list(range(episodes)))
    jobs = derive(cluster, keys_N).take(np.tile(np.arange(episodes), len(tried)))
    simulator = Simulator(jobs, np.tile(keys_N, len(tried)), limits=limits)
    simulator.quiet_start()
    settings = np.repeat(np.array(tried), episodes, axis=0)[:, None]
    simulator.run(settings, _SETTLING * _ITERATIONS)
    step_ET = simulator.run(settings, _INTERVALS * _ITERATIONS)
    step_EIT = step_ET.reshape(len(step_ET), _INTERVALS, _ITERATIONS)
    mean_EI, sd_EI, reference_E1 = step_EIT.mean(axis=2), step_EIT.std(axis=2), jobs.jobs["ideal_step_s"][:, None]
    upper = -np.inf
    for weight in weights:
        reward_EI = metrics.reward(mean_EI, sd_EI, reference_E1, weight)  # type: ignore[arg-type]
        reward_SN = np.asarray(reward_EI).mean(axis=1).reshape(-1, episodes)
        paired_SN = reward_SN[1:] - reward_SN[0]
        upper_S = paired_SN.mean(axis=1) + _SIGMAS * paired_SN.std(axis=1, ddof=1) / np.sqrt(episodes)
        upper = max(upper, float(upper_S.max()))
    return upper
