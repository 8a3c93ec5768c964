"""The pacing rules: pure functions from a rank's own recent timing and (threshold, window) to a delay in seconds.

Contract 1 of the house. The engine compiles these functions and a live rank calls them as plain Python. A policy that
was tuned on the simulator therefore acts through the same arithmetic on a real job. The module needs only ``math`` and
numpy, and the scalar rules use only what Numba compiles.

A mechanism is a pair (threshold, window). :data:`DEFINITIONS` lists the mechanisms; every other table of them is made
from it. Always ``0 <= delay <= window <= cap``; a rule with window 0 is off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Candidate = Mapping[str, tuple[float, float]]
"""One setting: (threshold, window) by mechanism, ratios; mechanisms that are not named are off."""
SLACK_GAIN = 0.7
"""Share of the observed low-quantile slack that is used; the rest is the margin for the next step's noise."""
PHASE_SHIFT_GAIN = 2.0
"""Seconds of shift per second of inflation: more than one, so that a job leaves another behind at once."""


class Mechanism(NamedTuple):
    """One pacing rule."""

    name: str
    compares: str
    """What the rule compares with its threshold, a ratio."""
    max_threshold: float
    """Upper end of the threshold; the lower end is 0."""
    delay: str
    """The delay that it asks for, before the window cuts it."""
    source: str


DEFINITIONS = (
    Mechanism(
        "slack",
        "low quantile of own recent slack / step",
        0.25,
        f"{SLACK_GAIN:g} times that slack, approached slowly",
        "paceenv; bounded early rank",
    ),
    Mechanism(
        "phase_shift",
        "own collective's inflation over its uncontended baseline",
        1.0,
        f"{PHASE_SHIFT_GAIN:g} times the inflation in seconds",
        "paceenv; phase shift of a whole job against another",
    ),
    Mechanism(
        "paper",
        "standard deviation of own recent waits / step",
        0.25,
        "mean of own recent waits, on ranks that were early in the last step",
        '"When Scaling Fails", section 5.3',
    ),
    Mechanism(
        "stagger",
        "mean step's inflation over its baseline, while collectives collapse",
        2.0,
        "the rank's place in its group, as a share of the window",
        "paceenv; incast at shallow buffers",
    ),
    Mechanism(
        "defer",
        "mean step without holding transfers back / with it, less 1",
        0.5,
        "the window, or until a needed transfer is through: one that can wait is held back, no rank stands still",
        "paceenv; Lina (2023) and ByteScheduler (2019) order transfers by priority",
    ),
    Mechanism(
        "mean_slack",
        "standard deviation of own recent waits / step",
        0.25,
        "as paper, but in the pauses of slack and after a loss",
        "paceenv; the paper's rule where it pays",
    ),
)
"""The mechanisms, in the order of the second-to-last axis of a settings array."""
MECHANISMS = tuple(mechanism.name for mechanism in DEFINITIONS)
SLACK, PHASE_SHIFT, PAPER, STAGGER, DEFER, MEAN_SLACK = range(len(MECHANISMS))
THRESHOLD, WINDOW = 0, 1
"""Index into the last axis of a settings array ``(..., M, 2)``."""

SLACK_STEP = 0.1
"""How far a delay moves in one iteration towards what the slack allows."""
RELEASE_SHARE = 0.05
"""A wait at least this long, as a share of the longest hold, was for a transfer that was needed; shorter ones are not
told from a return at once."""
NEGLIGIBLE_S = 1e-6
"""A delay that has faded to this is over: fading alone never ends, and ends in subnormal numbers, which are slow."""
CLUSTER_DEFAULT: Final = ("slack", 0.0, 0.1)
"""(mechanism, threshold, window) where section ``pacing`` of a cluster config leaves them out."""
MAX_THRESHOLD = tuple(mechanism.max_threshold for mechanism in DEFINITIONS)
"""Upper end of each mechanism's threshold, as a ratio."""
MAX_WINDOW = 0.6
"""Upper end of a delay window, as a share of the job's own baseline step time."""
OFF_BELOW = -0.5
"""A normalised window action at or below this is exactly off, so that a policy can rest there and not only at -1."""


def mechanism_table() -> str:
    """:data:`DEFINITIONS` as a Markdown table: what each threshold compares, its range, and the delay."""
    rows = [f"| `{m.name}` | {m.compares} | 0 to {m.max_threshold:g} | {m.delay} | {m.source} |" for m in DEFINITIONS]
    head = "| Mechanism | Threshold compares | Range | Delay, at most the window | Source |"
    return "\n".join([head, "| --- | --- | --- | --- | --- |", *rows])


def action_table() -> str:
    """What :func:`decode_action` makes of an action, as a Markdown table with bounds."""
    thresholds = ", ".join(f"{m.max_threshold:g} (`{m.name}`)" for m in DEFINITIONS)
    return "\n".join(
        [
            "| Num | Action | Min | Max | Decoded to, both a ratio |",
            "| --- | --- | --- | --- | --- |",
            f"| 2k | threshold of mechanism `k`, quadratic | -1 | 1 | 0 to {thresholds} |",
            f"| 2k + 1 | delay window / baseline step; off up to {OFF_BELOW:g}, then quadratic | -1 | 1 "
            f"| 0 to {MAX_WINDOW:g} |",
        ]
    )


def bounded(delay_s: float, window_s: float) -> float:
    """``delay_s`` limited to ``[0, window_s]``; not-a-number counts as no delay. Seconds.

    Args:
        delay_s: the delay that a rule asks for, seconds.
        window_s: the longest delay allowed, seconds.
    """
    if delay_s > 0.0 and window_s > 0.0:
        return delay_s if delay_s < window_s else window_s
    return 0.0


def slack_delay_s(slack_low_s: float, before_s: float, step_s: float, threshold: float, window_s: float) -> float:
    """Delay of a rank that repeatedly finishes early, in seconds.

    The rule uses a low quantile of the slack. A rank that is early on average but critical now and then must not be
    delayed: on real sockets a rule on the mean lost 9 to 26 %.

    The delay goes only ``SLACK_STEP`` of the way to what the slack would allow. A little head start is often all that
    the critical group needs. The slack is then gone *because* of the pacing, and a rule that jumps would overshoot,
    stop and relapse, over and over.

    Args:
        slack_low_s: low quantile of the rank's recent slack, seconds.
        before_s: delay that this rule asked for in the last iteration, seconds.
        step_s: baseline step time, seconds.
        threshold: least slack that is used, as a share of ``step_s``.
        window_s: largest delay, seconds; 0 is off.
    """
    wanted_s = SLACK_GAIN * slack_low_s if slack_low_s > threshold * step_s else 0.0
    delay_s = bounded(before_s + SLACK_STEP * (wanted_s - before_s), window_s)
    return delay_s if wanted_s > 0.0 or delay_s > NEGLIGIBLE_S else 0.0


def phase_shift_delay_s(comm_s: float, comm_baseline_s: float, threshold: float, window_s: float) -> float:
    """Delay that shifts the phase of a job against that of a co-tenant, in seconds.

    It is proportional to the inflation of the collective over its uncontended baseline, and so finds a free phase. A
    random shift of the same bound gained nothing in the prototype.

    Args:
        comm_s: recent low of the time in the collective, seconds.
        comm_baseline_s: the same without contention, seconds; infinite while unknown.
        threshold: least inflation that is acted on, a ratio.
        window_s: largest delay, seconds; 0 is off.
    """
    if comm_s > (1.0 + threshold) * comm_baseline_s:
        return bounded(PHASE_SHIFT_GAIN * (comm_s - comm_baseline_s), window_s)
    return 0.0


def paper_delay_s(
    wait_s: float, wait_mean_s: float, wait_sd_s: float, step_s: float, threshold: float, window_s: float
) -> float:
    """The rule of the paper, in seconds: where waits vary more than the threshold, early ranks are delayed.

    Source: "When Scaling Fails", section 5.3.

    Args:
        wait_s: the rank's wait in the last step, seconds; longer than the mean counts as early.
        wait_mean_s: mean of its recent waits, seconds.
        wait_sd_s: standard deviation of its recent waits, seconds.
        step_s: baseline step time, seconds.
        threshold: least standard deviation that is acted on, as a share of ``step_s``.
        window_s: largest delay, seconds; 0 is off.
    """
    if wait_sd_s > threshold * step_s and wait_s > wait_mean_s:
        return bounded(wait_mean_s, window_s)
    return 0.0


def stagger_delay_s(inflation: float, place: float, threshold: float, window_s: float) -> float:
    """Delay of a rank that takes its place in a stagger while its job holds one, in seconds.

    Many senders that start at once overflow a shallow buffer; the windows of a few fit.
    ``paceenv.core.switchback`` decides when to hold.

    Args:
        inflation: mean step without stagger over the baseline step, less 1.
        place: from 0 for the first member of a process group to 1 for the last.
        threshold: least inflation that is acted on, a ratio; 0: the places are fixed.
        window_s: delay of the last member, seconds; 0 is off.
    """
    return bounded(place * window_s, window_s) if threshold == 0.0 or inflation > threshold else 0.0


def defer_hold_s(gain: float, threshold: float, window_s: float) -> float:
    """How long a rank holds back each of its transfers that can wait, in seconds.

    Transfers that can wait (gradient reductions, early prefetches) take the link from those that are needed now. The
    rule does not delay the rank. ``paceenv.core.switchback`` decides when to hold and measures the gain.
    What is held goes earlier where :func:`releases` says so.

    Args:
        gain: mean step without holding over the mean step with it, less 1; 0 while unknown.
        threshold: least gain for which transfers are held, a ratio; 0: they always are.
        window_s: how long, seconds; 0 is off.
    """
    return bounded(window_s, window_s) if threshold == 0.0 or gain > threshold else 0.0


def releases(waited_s: float, hold_s: float) -> bool:
    """Whether a wait for another transfer ends what a rank holds back: that transfer was needed, and it is through.

    Args:
        waited_s: how long the rank was blocked, seconds.
        hold_s: how long it holds transfers back at most, seconds.
    """
    return waited_s > RELEASE_SHARE * hold_s


def off(*shape: int) -> NDArray[np.float64]:
    """Settings ``(*shape, M, 2)`` with every mechanism off: window 0."""
    return np.zeros((*shape, len(MECHANISMS), 2))


def settings(candidate: Candidate) -> NDArray[np.float64]:
    """A candidate as settings ``(M, 2)``.

    Args:
        candidate: (threshold, window) by mechanism; others than :data:`MECHANISMS` raise ValueError.
    """
    settings_M2 = off()
    for mechanism, pair in candidate.items():
        settings_M2[MECHANISMS.index(mechanism)] = pair
    return settings_M2


def by_rank(settings_SM2: NDArray[np.float64], settings_M2R: NDArray[np.float64], on_M: NDArray[np.bool_]) -> None:
    """Lay settings out as the rules read them.

    Args:
        settings_SM2: (threshold, window) of each mechanism, ratios, for all ranks (S = 1) or for each (S = R).
        settings_M2R: the same on each rank, written to; rows of mechanisms that are off for all are left as they are.
        on_M: which mechanisms any rank has on, those with a window; written to, ``(M,)``.
    """
    settings, each = settings_SM2.shape[0], np.int64(settings_SM2.shape[0] > 1)
    for m in range(settings_SM2.shape[1]):
        on_M[m] = False
        for s in range(settings):
            on_M[m] |= settings_SM2[s, m, WINDOW] > 0.0
        if on_M[m]:
            for k in range(2):
                for r in range(settings_M2R.shape[2]):
                    settings_M2R[m, k, r] = settings_SM2[r * each, m, k]


def decode_action(action_BA: NDArray[np.floating], mechanisms: Sequence[str]) -> NDArray[np.float64]:
    """Settings ``(B, M, 2)`` for normalised actions ``(B, 2 * len(mechanisms))`` in [-1, 1].

    The environment, training, evaluation and a live rank all decode here. For mechanism ``k`` action ``2k`` is the
    threshold, from 0 to ``MAX_THRESHOLD``. Action ``2k + 1`` is the window: exactly off up to ``OFF_BELOW``, then from
    0 to ``MAX_WINDOW``. Both grow with the square, because small values need resolution. Values outside [-1, 1] are
    clipped; not-a-number is off.

    Args:
        action_BA: a row each, ``(B, 2 * len(mechanisms))``.
        mechanisms: their names, in the order of the actions.
    """
    action = np.fmin(np.fmax(np.asarray(action_BA, dtype=np.float64), -1.0), 1.0)  # fmax passes over not-a-number
    settings = off(action.shape[0])
    threshold = (0.5 * (action[:, ::2] + 1.0)) ** 2
    window = MAX_WINDOW * (np.maximum(action[:, 1::2] - OFF_BELOW, 0.0) / (1.0 - OFF_BELOW)) ** 2
    for k, name in enumerate(mechanisms):
        m = MECHANISMS.index(name)
        settings[:, m, THRESHOLD] = MAX_THRESHOLD[m] * threshold[:, k]
        settings[:, m, WINDOW] = window[:, k]
    return settings


def encode_action(mechanism: str, threshold: float, window: float) -> tuple[float, float]:
    """The two actions of a mechanism, -1 to 1, that :func:`decode_action` turns into these settings, up to rounding.

    Args:
        mechanism: one of :data:`MECHANISMS`; others raise ValueError.
        threshold: a ratio, 0 to its end in ``MAX_THRESHOLD``.
        window: largest delay as a share of the baseline step, 0 to ``MAX_WINDOW``.
    """
    most, share = MAX_THRESHOLD[MECHANISMS.index(mechanism)], math.sqrt(window / MAX_WINDOW)
    return 2.0 * math.sqrt(threshold / most) - 1.0, OFF_BELOW + (1.0 - OFF_BELOW) * share
