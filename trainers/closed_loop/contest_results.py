"""What a real contest showed: each candidate's effect on mean step time, how they compare, and the agents' reports.

The effects are of the steps that the job itself recorded, not of the agents' reports. Those only say for how many pairs
a candidate paced on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import numpy as np

from paceenv.live.decide.contest import Contest
from paceenv.live.record.snapshot import Snapshot, entry, number, text
from paceenv.live.testbed.testbed_run import RunResult
from paceenv.trainers.closed_loop.loop_directory import Found
from paceenv.trainers.closed_loop.paired_blocks import (
    Array,
    PairedBlocks,
    difference,
    effect,
    gain_share,
    job_steps,
    log_ratios,
    mean_step,
    other_log_ratios,
)

PACED_STATES = ("canary", "active")


def contest_results(result: RunResult, job: str, contest: Contest, policies: Sequence[str], ranks: int) -> Found:
    """The measured effects of a contest's candidates and the differences between them, as plain data.

    Args:
        result: the real run.
        job: name of the job with the agent.
        contest: by which it was paced.
        policies: the candidates, in the contest's order.
        ranks: of the job.
    """
    mine = result.jobs[job]
    end_s_T, step_s_T = job_steps(mine.steps_s_TR)
    beside = {name: job_steps(other.steps_s_TR)[0] for name, other in result.jobs.items() if name != job}
    rows, ratios, unpaced = list[Found](), dict[str, Array](), list[Array]()
    for k, policy in enumerate(policies):
        agents = candidate_agents(mine.snapshots, k, ranks)
        blocks = PairedBlocks.of(contest, len(step_s_T), k).first(agents["paced_pairs"])
        ratios[policy] = log_ratios(step_s_T[None], blocks)[0]
        off, on = blocks.both()
        unpaced.append(step_s_T[off])
        rows.append(
            {
                "policy": policy,
                "measured": effect(ratios[policy]).as_dict(),
                "others": {
                    name: effect(other_log_ratios(end_s_T, ends, blocks)).as_dict() for name, ends in beside.items()
                },
                "steps": {"unpaced": mean_step(step_s_T[off]), "paced": mean_step(step_s_T[on])},
                "agents": agents,
            }
        )
    return {
        "candidates": rows,
        "differences": [
            {
                "policy": one,
                "than": other,
                "measured": difference(ratios[one], ratios[other]).as_dict(),
                "share": dict(zip(("value", "low", "high"), gain_share(ratios[one], ratios[other]), strict=True)),
            }
            for one, other in permutations(policies, 2)
        ],
        "unpaced": mean_step(np.concatenate(unpaced)),
        "delays": delays(mine.snapshots),
    }


def candidate_agents(snapshots: Sequence[Snapshot], candidate: int, ranks: int) -> Found:
    """What the ranks' agents reported of one candidate, and for how many pairs it paced on all of them.

    ``paced_pairs`` is None where it paced to the end on every rank. A rank that rolled it back stopped after the
    evaluation that caused it; later blocks compare nothing. Where one of the ``ranks`` reported nothing at all, no
    block compares anything.

    Args:
        snapshots: the ranks' last statuses.
        candidate: its number.
        ranks: number of ranks of the job.
    """
    verdicts, texts, reasons, pairs = Counter[str](), set[str](), set[str](), list[int]()
    for snapshot in snapshots:
        one = _candidate(snapshot, candidate)
        verdicts[text(one, "verdict") or "no verdict"] += 1
        texts.add(text(one, "text"))
        stopped = text(one, "stopped") or ("" if text(snapshot, "state") in PACED_STATES else text(snapshot, "reason"))
        if stopped or text(snapshot, "state") not in PACED_STATES:
            reasons.add(stopped)
            pairs.append(int(number(one, "pairs") or 0))
    if silent := ranks - len(snapshots):
        reasons.add(f"{silent} of {ranks} agents reported nothing")
    return {
        "verdicts": dict(verdicts),
        "texts": sorted(texts),
        "stopped": sorted(reasons),
        "paced_pairs": 0 if silent else min(pairs, default=None),
    }


def _candidate(snapshot: Snapshot, candidate: int) -> Mapping[str, Any]:
    listed = entry(snapshot, "canary", "candidates")
    found = listed[candidate] if isinstance(listed, list) and candidate < len(listed) else None
    return found if isinstance(found, Mapping) else {}


def delays(snapshots: Sequence[Snapshot]) -> Found:
    """The delays of all ranks and candidates: how many, their mean in seconds, and how often each limit cut one.

    ``held`` is how many transfers rule defer held back, ``holds`` in how many iterations it would have, and ``unheld``
    what agents said of transfers that they do not hold.
    """
    taken = sum(number(s, "pacing", "taken") or 0.0 for s in snapshots)
    total_s = sum(number(s, "pacing", "total_s") or 0.0 for s in snapshots)
    cut: Counter[str] = Counter()
    for snapshot in snapshots:
        cut.update({name: int(count) for name, count in (entry(snapshot, "pacing", "cut") or {}).items()})
    events = [event for s in snapshots for event in entry(s, "events") or [] if isinstance(event, Mapping)]
    return {
        "taken": int(taken),
        "mean_s": total_s / taken if taken else 0.0,
        "cut": dict(cut),
        "holds": int(sum(number(s, "pacing", "holds") or 0.0 for s in snapshots)),
        "held": int(sum(number(s, "pacing", "held") or 0.0 for s in snapshots)),
        "unheld": sorted({said for event in events if "not held back" in (said := text(event, "text"))}),
    }
