"""What a finished run with paired blocks shows: each policy's A-B effect on mean step time, and how policies compare.

The measure is that of the running job (``paceenv.core.differences``). Here the plan of blocks is applied to the steps
that the job itself recorded, so the result does not depend on the agents' reports. Those only say for how many pairs a
candidate paced on every rank. Legend: E episodes, P pairs, T iterations, R ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.core.differences import Array, Mean, log_ratio
from paceenv.core.intervals import Interval
from paceenv.live.decide.blocks import Plan
from paceenv.live.record.snapshot import Snapshot, entry, number, text, total
from paceenv.live.testbed.testbed_run import RunResult

Found = dict[str, Any]

ERROR = 0.05
"""Share of intervals that may miss the truth."""
PACED_STATES = ("canary", "active")
PARTS = 20
"""Parts of a run whose means give the error of its mean, also for correlated steps."""


class Effect(NamedTuple):
    """A-B effect: relative change of mean step time with its 95 % interval; below 0 steps are shorter with pacing.

    It rests on so many ``units``: pairs of blocks, or simulated clusters; with fewer than two there is no interval, and
    its ends are not-a-number.
    """

    change: float
    low: float
    high: float
    units: int

    @classmethod
    def of_logs(cls, log_ratio: Interval, units: int) -> Effect:
        """From the logarithm of the ratio of the means, with pacing over without."""
        change, low, high = map(math.expm1, log_ratio)
        return cls(change, low, high, units)

    def __str__(self) -> str:
        if math.isnan(self.change):
            return "not known"
        return f"{100 * self.change:+z.1f} % [{100 * self.low:+z.1f}, {100 * self.high:+z.1f}]"


Pairs = list[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""The counted iterations of each pair's block without and with pacing, of pairs that are whole."""


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


def effect(log_ratio_P: Array) -> Effect:
    """The mean of independent log ratios as a relative change, with Student's interval."""
    return Effect.of_logs(Mean(log_ratio_P.tolist()).interval(ERROR), len(log_ratio_P))


def difference(log_ratio_P: Array, other_P: Array) -> Effect:
    """Mean step under one policy relative to that under another, both paired with no pacing, by the same rounds."""
    rounds = min(len(log_ratio_P), len(other_P))
    return effect(log_ratio_P[:rounds] - other_P[:rounds])


def mean_step(step_s_T: Array) -> dict[str, float]:
    """Mean, its 95 % interval and CV of a run's steps; the interval from the means of its parts one after the other."""
    if not len(step_s_T):
        return step_summary(Interval(math.nan), math.nan)
    mean, parts = float(step_s_T.mean()), np.array_split(step_s_T, min(PARTS, len(step_s_T)))
    of_parts = Mean(float(part.mean()) for part in parts).interval(ERROR)
    moved = (x - of_parts.value + mean for x in of_parts)  # all steps know the mean better than the parts
    return step_summary(Interval(*moved), float(step_s_T.std() / mean))


def step_summary(step_s: Interval, cv: float) -> dict[str, float]:
    """Mean step with its interval, in seconds, and CV, as reports write them."""
    return {"mean_s": step_s.value, "low_s": step_s.low, "high_s": step_s.high, "cv": cv}


def contest_results(result: RunResult, job: str, contest: Plan, policies: Sequence[str], ranks: int) -> Found:
    """The measured effects of a contest's candidates and the differences between them, as plain data."""
    mine = result.jobs[job]
    end_s_T, step_s_T = mine.end_s_T, mine.step_s_T
    rows, ratios, unpaced = list[Found](), dict[str, Array](), [np.empty(0)]
    for k, policy in enumerate(policies):
        agents = candidate_agents(mine.snapshots, k, ranks)
        pairs = paired_blocks(contest, len(step_s_T), k)[1][: agents["paced_pairs"]]
        ratios[policy] = log_ratios(step_s_T[None], pairs)[0]
        unpaced += [step_s_T[off] for off, _ in pairs]
        rows.append({"policy": policy, "measured": effect(ratios[policy]), "agents": agents})
    differences = [
        {"policy": one, "than": other, "measured": difference(ratios[one], ratios[other])}
        for one, other in permutations(policies, 2)
    ]
    return {
        "candidates": rows,
        "differences": differences,
        "unpaced": mean_step(np.concatenate(unpaced)),
        "delays": held_back(mine.snapshots),
        "blocks": _course(contest, policies, end_s_T - end_s_T[0], step_s_T),
    }


def _course(contest: Plan, policies: Sequence[str], end_s_T: Array, step_s_T: Array) -> list[Found]:
    """Each block's policy (None: no pacing), end and mean step, seconds; without the steps in which the job settles."""
    blocks = list[list[int]]()
    turns = [contest.turn(i) for i in range(len(step_s_T))]
    for i, turn in enumerate(turns):
        if turn.counted and i and turns[i - 1].counted and turns[i - 1].arm == turn.arm:
            blocks[-1].append(i)
        elif turn.counted:
            blocks.append([i])
    named: list[str | None] = [*policies, None]
    return [
        {
            "policy": named[-1 if (arm := turns[block[0]].arm) is None else arm],
            "end_s": float(end_s_T[block[-1] + 1]),
            "mean_s": float(step_s_T[block].mean()),
        }
        for block in blocks
    ]


def candidate_agents(snapshots: Sequence[Snapshot], candidate: int, ranks: int) -> Found:
    """What the ranks' agents reported of one candidate, and for how many pairs it paced on all of them.

    ``paced_pairs`` is None where it paced to the end on every rank. A rank that rolled it back stopped after the
    evaluation that caused it; later blocks compare nothing. Where one of the ``ranks`` reported nothing at all, no
    block compares anything.
    """
    verdicts, reasons, pairs = Counter[str](), set[str](), list[int]()
    for snapshot in snapshots:
        one = _candidate(snapshot, candidate)
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


def _candidate(snapshot: Snapshot, candidate: int) -> Mapping[str, Any]:
    listed = entry(snapshot, "canary", "candidates")
    row = listed[candidate] if isinstance(listed, list) and candidate < len(listed) else None
    return row if isinstance(row, Mapping) else {}


def held_back(snapshots: Sequence[Snapshot]) -> Found:
    """How many transfers rule defer held back, and in how many iterations of ranks it would have (``holds``).

    ``unheld`` is what agents said of transfers that they do not hold.
    """
    events = [event for s in snapshots for event in entry(s, "events") or [] if isinstance(event, Mapping)]
    return {
        "holds": int(total(snapshots, "pacing", "holds")),
        "held": int(total(snapshots, "pacing", "held")),
        "unheld": sorted({said for event in events if "not held back" in (said := text(event, "text"))}),
    }
