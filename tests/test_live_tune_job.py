"""Mode tune on real jobs: all ranks follow the words of rank 0, the best candidate is deployed, a lost word is none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from live_jobs import results, run_ranks

GOOD, BAD = "static:slack=0.05/0.4", "static:stagger=0/0.3"
"""Head starts for the pair that all wait for; and fixed places, which delay the job's last members for nothing."""
TUNE: dict[str, Any] = {
    "mode": "tune",
    "candidates": f"{GOOD};{BAD}",
    "quiet_first": 20,
    "interval_iterations": 10,
    "block_iterations": 20,
    "seed": 7,
}


def _hasten() -> None:
    """Words as often as the job's own pace allows: a test cannot wait for minutes."""
    from paceenv.live import store_messages
    from paceenv.live.decide import modes

    modes.MIN_GAIN = 0.03  # this machine's noise is more than a real job's

    store_messages.POLL_S, store_messages.LEAD_S, store_messages.WORD_S, store_messages.LEASE_S = 0.2, 1.0, 0.3, 10.0


def watched(*, iterations: int, silent_after: int = 0, helps_s: float = 0.0, **options: Any) -> dict[str, Any]:
    """Whose turn it was in every iteration, as this rank had it; from an iteration on rank 0 says nothing more.

    A step is shorter by ``helps_s`` where it is the first candidate's turn.
    """
    import torch
    import torch.distributed as dist

    from paceenv import live
    from paceenv.live import store_messages

    _hasten()
    store_messages.LEASE_S = 1.0
    agent = live.attach(None, **options)
    control, tensor, turns = agent._loop.control, torch.ones(1 << 12), []
    tune: Any = control.chosen
    apply_delay = control.apply_delay

    def noted(iteration: int) -> Any:
        turns.append([iteration, tune.plan.turn(iteration).arm])
        return apply_delay(iteration)

    control.apply_delay = noted  # type: ignore[method-assign]
    for iteration in range(iterations):
        time.sleep(0.004 + helps_s * (not turns or turns[-1][1] != 0))
        dist.all_reduce(tensor)
        if silent_after and iteration == silent_after and dist.get_rank() == 0:
            tune.search.next = lambda now, lead, lease: None
        agent.tick()
    words = [list(word) for word in tune.plan.words]
    found = {"turns": turns, "words": words, "state": agent.state, "tune": agent.summary()["tune"]}
    agent.detach()
    return found | {"reason": agent.reason}


@pytest.mark.slow
def test_all_ranks_are_of_one_mind_in_every_iteration_and_without_words_nobody_paces(tmp_path: Path) -> None:
    ranks = results(run_ranks(watched, 2, tmp_path, iterations=1500, silent_after=600, **TUNE))
    assert {rank["state"] for rank in ranks} == {"tune"}
    one, other = (dict(map(tuple, rank["turns"])) for rank in ranks)
    both = sorted(one.keys() & other.keys())
    assert len(both) > 700
    assert {one[i] for i in both} == {None, 0, 1}
    assert [one[i] for i in both] == [other[i] for i in both]
    last = ranks[0]["words"][-1][2]
    assert 600 < last < 1450
    assert {one[i] for i in both if i >= last} == {None}


@pytest.mark.slow
def test_the_candidate_that_helps_is_deployed_on_every_rank(tmp_path: Path) -> None:
    leader, other = results(run_ranks(watched, 2, tmp_path, iterations=1500, helps_s=0.004, **TUNE))
    assert (leader["tune"]["phase"], leader["tune"]["winner"]) == ("deployed", GOOD), leader["tune"]
    assert other["tune"] == {"phase": "deployed", "in": [GOOD]}
