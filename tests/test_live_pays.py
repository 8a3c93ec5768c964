"""It helps where help exists, and says so; elsewhere it stays out of the way, and says that: real jobs on a real link.

Four pairs of ranks reduce gradients over one token bucket, one pair has work to do afterwards. A little head start for
that pair shortens everybody's step: measured on sockets (evidence of unequal slack), here under the agent's canary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from live_bodies import side_by_side
from live_jobs import results, run_ranks
from live_link import limited_link, pairs

from paceenv import live
from paceenv.core.limits import LIMITS
from paceenv.live.decide.blocks import Plan, block_plan
from paceenv.policies.rules import Static

pytestmark = pytest.mark.alone

LINK_MBPS, BLOCK, QUIET, PAIRS_OF_BLOCKS = 200.0, 20, 20, 8
POLICY = Static({"slack": (0.05, 0.4)})
POLICY.interval_iterations = 10
CANARY: dict[str, Any] = {"mode": "canary", "quiet_first": QUIET, "block_iterations": BLOCK, "seed": 7}
PLAN = Plan(CANARY["seed"], [block_plan(POLICY, BLOCK)], begin=QUIET)
ITERATIONS = 1 + PLAN.after(PAIRS_OF_BLOCKS) + 5
"""The tick that begins, the quiet time, blocks to warm up, the judged pairs, and a few to take them in."""

TRIES, MOST_TRIES, NOISY = 1, 4, 0.2
"""A try whose canary knows the gain only to ``NOISY`` of a step is about the machine's noise, and does not count."""


def _measured_gain(steps_s: Sequence[float]) -> float:
    """The fall of mean step time by this rank's own clock, outside the agent: judged blocks with pacing and without."""
    blocks: dict[bool, list[float]] = {True: [], False: []}
    for iteration, step_s in enumerate(steps_s, start=-1):  # the agent counts from its second tick
        turn = PLAN.turn(iteration)
        if turn.counted:
            blocks[turn.arm is not None].append(step_s)
    return float(1.0 - np.mean(blocks[True]) / np.mean(blocks[False]))


def _said(found: Sequence[dict[str, Any]]) -> str:
    """The verdict, if all ranks are of one mind."""
    said = {rank["summary"]["canary"]["verdict"] for rank in found}
    return said.pop() if len(said) == 1 else f"not of one mind: {sorted(said)}"


def _is_precise(canary: dict[str, Any]) -> bool:
    return None not in (canary["low"], canary["high"]) and canary["high"] - canary["low"] <= NOISY


def _judged(tmp_path: Path, ranks: int, wanted: str, **job: Any) -> list[dict[str, Any]]:
    """Results of all ranks of the jobs that say ``wanted``, which must be the majority of ``TRIES`` jobs."""
    agreed: list[list[dict[str, Any]]] = []
    heard = []
    with limited_link(LINK_MBPS) as link:
        for _ in range(MOST_TRIES):
            found = results(run_ranks(pairs, ranks, tmp_path, namespace=link, iterations=ITERATIONS, **job, **CANARY))
            if not all(_is_precise(rank["summary"]["canary"]) for rank in found):
                continue
            heard.append(_said(found))
            agreed += [found] if heard[-1] == wanted else []
            if len(agreed) > TRIES / 2:
                return [rank for found in agreed for rank in found]
            if len(heard) - len(agreed) > TRIES / 2:
                break
    raise AssertionError(f"wanted {wanted!r}, heard {heard}: {[rank['summary']['canary'] for rank in found]}")


def test_unequal_slack_on_a_shared_link_is_turned_into_shorter_steps(tmp_path: Path) -> None:
    job = {"payload_bytes": 100_000, "buckets": 5, "compute_s": 0.004, "post_work_s": 0.032}
    for k, found in enumerate(_judged(tmp_path, 8, "helps", **job)):
        canary, paced = found["summary"]["canary"], found["summary"]["pacing"]
        assert 0.0 < canary["low"] <= canary["gain"], canary
        assert canary["gain"] > 0.05, canary
        assert abs(_measured_gain(found["steps_s"]) - canary["gain"]) < 0.05
        if k % 8 < 2:  # the pair that all wait for
            assert paced["total_s"] < 0.01 * sum(found["steps_s"])
        else:
            assert paced["taken"] > 0
            assert paced["max_s"] <= 1.2 * LIMITS.cap_share * found["summary"]["step"]["mean_s"]


SKEWS_S = (0.0, 0.005, 0.02)
WORK_S = 0.006


def skewed(*, skews_s: Sequence[float], late: int, iterations: int, out: str) -> list[dict[str, Any]]:
    """For each skew the agent's last status, after rank ``late`` was late by it in every iteration.

    The ranks write their status, in a folder for each skew, and look at that of the others.
    """
    found, payload = [], torch.ones(4096)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    for skew_s in skews_s:
        agent = live.attach(None, mode="observe", out=Path(out) / f"{1e3 * skew_s:g}ms")
        for _ in range(iterations):
            time.sleep(WORK_S + skew_s * (dist.get_rank() == late))
            dist.all_reduce(payload)
            optimizer.step()
        agent.detach()
        dist.barrier()  # all have written their last status
        found.append(side_by_side(Path(out) / f"{1e3 * skew_s:g}ms")[dist.get_rank()])
    return found


def test_a_constant_skew_is_seen_by_ranks_side_by_side(tmp_path: Path) -> None:
    """Late from the first iteration on: only a comparison can tell, from the status files of all ranks."""
    job = {"skews_s": SKEWS_S, "late": 1, "iterations": 96}
    ended = run_ranks(skewed, 2, tmp_path, out=str(tmp_path / "out"), **job)
    for k, skew_s in enumerate(SKEWS_S):
        early, late = (found[k]["arrival"] for found in results(ended))
        assert "side by side" in early["evidence"]
        tolerance_s = max(0.002, 0.2 * skew_s)
        assert late.get("early_s", 0.0) <= (tolerance_s if skew_s else 0.0), late
        assert abs(early.get("early_s", 0.0) - skew_s) <= tolerance_s, early
        assert early.get("late_s", 0.0) <= tolerance_s, early
        assert (early["verdict"], late["verdict"]) == ("early", "late") or skew_s <= tolerance_s
