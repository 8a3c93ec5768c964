"""Offline data from a trace of a job, simulated, on the testbed or live: every rank is an episode.

A trace holds times, not decisions. Views are exact: the times go through the estimator of a live rank
(``paceenv.live.decide.pacer``). The action has to be known from elsewhere: without a delay in the whole trace it was
the null action, and otherwise the settings must be given. A trace of one behaviour has one action, and from one action
nothing can be learned about others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.structure import JobStamps, read_job
from paceenv.core import metrics, pacing, signals
from paceenv.core.errors import InputError
from paceenv.core.limits import LIMITS
from paceenv.core.trace import Trace
from paceenv.envs.episode_batch import Reward
from paceenv.live.decide.pacer import RankPacer
from paceenv.policies.names import rule
from paceenv.policies.rules import passive
from paceenv.trainers.offline.episodes import Episode

MIN_INTERVALS = 2
_DELAY = signals.NAMES.index("delay_share")


def trace_episodes(
    trace: Trace,
    *,
    mechanisms: Sequence[str],
    settings: str | None = None,
    intervals: int = 64,
    interval_iterations: int = 20,
    reward: Reward = "raw",
    cv_weight: float = 0.1,
    job: str | None = None,
) -> list[Episode]:
    """Episodes of all ranks of a job, at most ``intervals`` long.

    The reward is the environment's, with the mean step of the iterations without any delay (of all, if none has one)
    in place of the ideal step, which a trace does not show. ``paired`` subtracts the mean reward of the intervals
    without a delay: a trace has no twin. An interval in which a rank was delayed has the action of ``settings``, one
    without any delay the null action; so the first interval after a change has the view of the one before, as in the
    environment.

    Args:
        trace: of the job.
        mechanisms: those that the actions set.
        settings: the hand-written policy with fixed settings that made the delays, such as ``static:slack=0.02/0.3``.
        intervals: longest episode, control intervals.
        interval_iterations: iterations of one.
        reward: ``raw`` or ``paired``.
        cv_weight: weight of the variation in the reward.
        job: which of several jobs.

    Raises:
        InputError: delays without settings, settings without delays, or a trace that is too short.
    """
    stamps = read_job(trace, job=job)
    count = len(stamps.step_T) // interval_iterations
    if count < MIN_INTERVALS + 1:
        least = (MIN_INTERVALS + 1) * interval_iterations
        raise InputError(f"trace of {stamps.name}: {len(stamps.step_T)} iterations alike; allowed: at least {least}")
    null_A = np.full(2 * len(mechanisms), -1.0, np.float32)
    action_A = _action(stamps, settings, mechanisms)
    paced_T = ~stamps.unpaced_T[: count * interval_iterations]
    paced_K = np.asarray(paced_T.reshape(count, -1).any(axis=1))
    action_KA = np.where(paced_K[:, None], action_A, null_A)
    reward_K = _rewards(stamps, paced_K, interval_iterations, reward, cv_weight)
    record = {
        "source": f"trace of {stamps.name} ({stamps.source})",
        "behaviour": settings or "passive",
        "reward": reward,
    }
    found = []
    for r, rank in enumerate(stamps.order_R):
        view_KO = rank_views(stamps, r, interval_iterations)
        for first in range(0, count - 1, intervals):
            last = min(first + intervals, count - 1)
            if last - first >= MIN_INTERVALS:  # the first interval of a trace is a view only
                inside = slice(first + 1, last + 1)
                parts = view_KO[first : last + 1], action_KA[inside], reward_K[inside]
                found.append(Episode(*parts, record | {"rank": rank, "first_interval": first}))
    return found


def rank_views(stamps: JobStamps, r: int, interval_iterations: int) -> NDArray[np.float32]:
    """What a rank saw at the end of each control interval, ``(K, O)``, by a live rank's own estimator.

    Args:
        stamps: of the job.
        r: the rank's place in them.
        interval_iterations: iterations of an interval.
    """
    group = r // (stamps.ranks // stamps.groups)
    comm_T = np.maximum(stamps.finish_TG[:, group] - stamps.entry_TR[:, r], 0.0)
    barrier_T = np.maximum(stamps.step_T - stamps.ready_TG[:, group], 0.0)
    alone_T = np.maximum(stamps.step_T - stamps.ready_TG.max(axis=1), 0.0)  # what the live ranks find out together
    pacer = RankPacer(
        passive(),
        cap_s=LIMITS.cap_s,
        has_barrier=stamps.barrier,
        barrier_alone_s=float(np.median(alone_T)),
        interval_iterations=interval_iterations,
    )
    views, delay_s_T = [], [*stamps.delay_TR[:, r].tolist(), 0.0]
    rows = zip(comm_T.tolist(), barrier_T.tolist(), stamps.step_T.tolist(), strict=True)
    for t, (comm_s, barrier_s, step_s) in enumerate(rows):
        pacer.iteration(comm_s, barrier_s, step_s, delay_s=delay_s_T[t])
        if (t + 1) % interval_iterations == 0:
            view_O, mean_s = pacer.view(), float(stamps.step_T[t + 1 - interval_iterations : t + 1].mean())
            # the delay before the next step is the one that the trace shows, not what the passive policy decides
            view_O[_DELAY] = signals.squash(delay_s_T[t + 1] / mean_s, signals.SCALES[_DELAY])
            views.append(view_O)
    return np.stack(views)


def _action(stamps: JobStamps, settings: str | None, mechanisms: Sequence[str]) -> NDArray[np.float32]:
    """The action behind the delays of a trace; the null action where there is none."""
    delayed = int((stamps.delay_TR > 0.0).sum())
    if settings is None and delayed:
        raise InputError(
            f"trace of {stamps.name}: {delayed} delays, but not the settings behind them; add --settings "
            "static:MECHANISM=THRESHOLD/WINDOW, or take a trace without pacing"
        )
    if settings is None:
        return np.full(2 * len(mechanisms), -1.0, np.float32)
    if not delayed:
        raise InputError(f"trace of {stamps.name}: --settings {settings}, but nobody was delayed; leave them out")
    policy = rule(settings)
    constant = policy.constant() if policy is not None else None
    if constant is None:
        raise InputError(f"settings {settings}; allowed: fixed ones, such as static:slack=0.02/0.3")
    try:
        return np.asarray(pacing.encode_action(constant[None], mechanisms)[0])
    except ValueError as error:
        raise InputError(f"settings {settings}: {error}") from None


def _rewards(
    stamps: JobStamps, paced_K: NDArray[np.bool_], interval_iterations: int, kind: Reward, cv_weight: float
) -> NDArray[np.float64]:
    step_KT = stamps.step_T[: len(paced_K) * interval_iterations].reshape(len(paced_K), -1)
    unpaced_T = stamps.unpaced_T
    reference_s = float(stamps.step_T[unpaced_T].mean() if unpaced_T.any() else stamps.step_T.mean())
    reward_K = np.array(
        [metrics.reward(float(step_T.mean()), float(step_T.std()), reference_s, cv_weight) for step_T in step_KT]
    )
    if kind == "raw":
        return reward_K
    if paced_K.all():
        raise InputError(
            f"trace of {stamps.name}: every interval was paced, so there is nothing to pair with; allowed: reward raw"
        )
    return np.asarray(reward_K - reward_K[~paced_K].mean())
