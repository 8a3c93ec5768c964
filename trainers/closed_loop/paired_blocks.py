"""What a finished run with paired blocks shows: each policy's effect on mean step time, and how policies compare.

The measure is that of the running job (``paceenv.core.differences``). Here the plan of blocks is applied to the steps
that the job itself recorded, so the result does not depend on the agents' reports. Those only say for how many pairs a
candidate paced on every rank. Legend: E episodes, P pairs, N simulated values, T iterations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from paceenv.core.differences import Array, log_ratio
from paceenv.core.intervals import Interval
from paceenv.core.metrics import mean_interval
from paceenv.live.decide.blocks import Plan
from paceenv.live.record.snapshot import Snapshot, entry, number, text, total
from paceenv.live.testbed.testbed_run import JobResult
from paceenv.trainers.evaluation.evaluate import NULL_LIMIT
from paceenv.whatif.predictions import one_more

Found = dict[str, Any]

PACED_STATES = ("canary", "active")
PARTS = 20
"""Parts of a run whose means give the error of its mean, also for correlated steps."""

Pairs = list[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""The counted iterations of each pair's block without and with pacing, of pairs that are whole."""


@dataclass(eq=False)
class Candidate:
    """A policy of the loop: what it is predicted to do to the job, and once measured what it did.

    The arrays are logarithms of mean step times with pacing over those without: simulated, always on and in blocks,
    and measured, pair by pair. Effects are relative changes of the mean step; below 0 steps are shorter with pacing.
    """

    policy: str
    always_N: Array
    blocks_N: Array
    cv: float
    mean_delay_s: float
    roles: Sequence[str] = ()
    sha256: str | None = None
    measured_P: Array = field(default_factory=lambda: np.empty(0))
    agents: Found = field(default_factory=dict)
    SHOWN: ClassVar = (
        *("policy", "roles", "sha256", "always", "blocks", "cv", "mean_delay_s", "measured", "pairs", "agents"),
        "agreement",
    )

    @property
    def always(self) -> Interval:
        return change(one_more(self.always_N))

    @property
    def blocks(self) -> Interval:
        """Predicted as it is measured."""
        return change(one_more(self.blocks_N))

    @property
    def measured(self) -> Interval:
        return effect(self.measured_P)

    @property
    def pairs(self) -> int:
        return len(self.measured_P)

    @property
    def agreement(self) -> Found:
        return compare(self.blocks, self.measured)

    def against(self, other: Candidate) -> Found:
        """The mean step relative to that under another policy: simulated always on, and measured in the same rounds."""
        rounds = min(self.pairs, other.pairs)
        measured = effect(self.measured_P[:rounds] - other.measured_P[:rounds])
        return {"always": change(one_more(self.always_N - other.always_N)), "measured": measured, "rounds": rounds}


def change(log_ratio: Interval) -> Interval:
    """The relative change that the logarithm of a ratio stands for."""
    return Interval(*map(math.expm1, log_ratio))


def effect(log_ratio_P: Array) -> Interval:
    """The mean of independent log ratios as a relative change, with Student's interval."""
    return change(mean_interval(log_ratio_P))


def shown(change: Interval) -> str:
    """A change of the mean step with its interval."""
    if math.isnan(change.value):
        return "not known"
    value, low, high = (f"{100 * one:+z.1f}" for one in change)
    return f"{value} % [{low}, {high}]"


def compare(predicted: Interval, measured: Interval) -> Found:
    """Whether a prediction agrees with the measurement, in words.

    ``inside``: the predicted change lies in the measured interval. ``sign``: both have the same sign. Where the
    measured interval contains 0, a prediction inside it or within the limit of a null has the right sign.
    """
    said = f"predicted {shown(predicted)}, measured {shown(measured)}"
    if not measured.is_bounded:
        return {"verdict": f"{said}: too few pairs", "inside": None, "sign": None}
    inside = predicted.value in measured
    sign = predicted.value * measured.value > 0.0
    if 0.0 in measured:
        sign = inside or abs(predicted.value) <= NULL_LIMIT
    if inside and abs(predicted.value) > NULL_LIMIT and 0.0 in measured:
        how = "cannot tell: the measured interval holds both the prediction and no effect"
    elif inside:
        how = "agrees"
    elif predicted.low <= measured.high and measured.low <= predicted.high:
        how = "agrees within the error of the prediction"
    elif not sign:
        how = f"disagrees: predicted {_does(predicted.value)}, measured {_does(measured.value)}"
    else:
        more = abs(predicted.value) > abs(measured.value)
        by = 100 * abs(predicted.value - measured.value)
        how = f"disagrees: right in sign, predicted {by:.1f} points too {'much' if more else 'little'}"
    return {"verdict": f"{said}: {how}", "inside": inside, "sign": sign}


def _does(change: float) -> str:
    return "shorter steps" if change < -NULL_LIMIT else "longer steps" if change > NULL_LIMIT else "no difference"


def paired_blocks(plan: Plan, iterations: int, candidate: int = 0) -> tuple[NDArray[np.bool_], Pairs]:
    """The blocks of one candidate over so many iterations: where it may pace ``(T,)``, and its pairs."""
    turns = [plan.turn(i) for i in range(iterations)]
    on_T = np.array([turn.arm == candidate for turn in turns], np.bool_)
    counted: dict[int, list[int]] = {}
    for i, turn in enumerate(turns):
        if turn.counted and turn.pair is not None and turn.pair[1] == candidate:
            counted.setdefault(turn.pair[0], []).append(i)
    whole, pairs = plan.blocks[candidate].counted_iterations, []
    for here in map(np.array, counted.values()):
        off, on = here[~on_T[here]], here[on_T[here]]
        if len(off) == len(on) == whole:
            pairs.append((off, on))
    return on_T, pairs


def log_ratios(step_s_ET: Array, pairs: Pairs) -> Array:
    """Logarithm of the mean step with pacing over that without, ``(E, P)``, pair by pair."""
    ratios = [log_ratio(step_s_ET[:, off], step_s_ET[:, on]) for off, on in pairs]
    return np.stack(ratios, axis=1) if ratios else np.empty((len(step_s_ET), 0))


def mean_step(step_s_T: Array) -> Found:
    """Mean with its 95 % interval, seconds, and CV of a run's steps; the interval from the means of its parts."""
    if not len(step_s_T):
        return {"step_s": Interval(math.nan), "cv": math.nan}
    mean, parts = float(step_s_T.mean()), np.array_split(step_s_T, min(PARTS, len(step_s_T)))
    of_parts = mean_interval(np.array([part.mean() for part in parts]))
    moved = (x - of_parts.value + mean for x in of_parts)  # all steps know the mean better than the parts
    return {"step_s": Interval(*moved), "cv": float(step_s_T.std() / mean)}


def measure(result: JobResult, schedule: Plan, candidates: Sequence[Candidate], ranks: int) -> Found:
    """Fill in what a run measured of its candidates; returns its steps without pacing, its blocks and a note."""
    step_s_T, unpaced = result.step_s_T, [np.empty(0)]
    for k, candidate in enumerate(candidates):
        candidate.agents = candidate_agents(result.snapshots, k, ranks)
        pairs = paired_blocks(schedule, len(step_s_T), k)[1][: candidate.agents["paced_pairs"]]
        candidate.measured_P = log_ratios(step_s_T[None], pairs)[0]
        unpaced += [step_s_T[off] for off, _ in pairs]
    blocks = _course(schedule, [one.policy for one in candidates], result.end_s_T - result.end_s_T[0], step_s_T)
    return {"unpaced": mean_step(np.concatenate(unpaced)), "blocks": blocks, "unheld": unheld(result.snapshots)}


def _course(schedule: Plan, policies: Sequence[str], end_s_T: Array, step_s_T: Array) -> list[Found]:
    """Each block's policy (None: no pacing), end and mean step, seconds; without the steps in which the job settles."""
    turns = [schedule.turn(i) for i in range(len(step_s_T))]
    blocks = [list(block) for _, block in groupby(range(len(turns)), lambda i: (turns[i].counted, turns[i].arm))]
    return [
        {
            "policy": None if (arm := turns[block[0]].arm) is None else policies[arm],
            "end_s": float(end_s_T[block[-1] + 1]),
            "mean_s": float(step_s_T[block].mean()),
        }
        for block in blocks
        if turns[block[0]].counted
    ]


def candidate_agents(snapshots: Sequence[Snapshot], candidate: int, ranks: int) -> Found:
    """What the ranks' agents reported of one candidate, and for how many pairs it paced on all of them.

    ``paced_pairs`` is None where it paced to the end on every rank. A rank that rolled it back stopped after the
    evaluation that caused it; later blocks compare nothing. Where one of the ``ranks`` reported nothing at all, no
    block compares anything.
    """
    verdicts, reasons, pairs = Counter[str](), set[str](), list[int]()
    for snapshot in snapshots:
        listed = entry(snapshot, "canary", "candidates")
        one = listed[candidate] if isinstance(listed, list) and candidate < len(listed) else None
        verdicts[text(one, "verdict") or "no verdict"] += 1
        stopped = text(one, "stopped") or ("" if text(snapshot, "state") in PACED_STATES else text(snapshot, "reason"))
        if stopped or text(snapshot, "state") not in PACED_STATES:
            reasons.add(stopped)
            pairs.append(int(number(one, "pairs") or 0))
    if silent := ranks - len(snapshots):
        reasons.add(f"{silent} of {ranks} agents reported nothing")
    return {
        "verdicts": dict(verdicts),
        "stopped": sorted(reasons),
        "paced_pairs": 0 if silent else min(pairs, default=None),
    }


def unheld(snapshots: Sequence[Snapshot]) -> str:
    """A sentence where rule defer was on and held no transfer back, with what the agents say of it; else empty."""
    holds = int(total(snapshots, "pacing", "holds"))
    if not holds or total(snapshots, "pacing", "held"):
        return ""
    events = {text(event, "text") for s in snapshots for event in entry(s, "events") or []}
    why = "; ".join(sorted(said for said in events if "not held back" in said))
    why = why or "no transfer of the named communicators was started asynchronously"
    return f"rule defer was on in {holds} iterations of ranks and held no transfer back: {why}"
