"""Mode tune on real jobs: all ranks follow the words of rank 0, the best candidate is deployed, a lost word is none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from live_jobs import results, run_ranks
from live_link import limited_link, pairs

GOOD, BAD = "static:slack=0.05/0.4", "static:stagger=0/0.3"
"""Head starts for the pair that all wait for; and fixed places, which delay the job's last members for nothing."""
TUNE: dict[str, Any] = {
    "mode": "tune",
    "candidates": f"{GOOD};{BAD}",
    "quiet_first": 20,
    "interval_iterations": 10,
    "block_iterations": 20,
    "min_gain": 0.03,
    "seed": 7,
}


def _hasten() -> None:
    """Words as often as the job's own pace allows: a test cannot wait for minutes."""
    from paceenv.live import control_file, tune_words

    control_file.POLL_S, control_file.LEAD_S, tune_words.WORD_S, tune_words.LEASE_S = 0.2, 1.0, 0.3, 10.0


def tuned_pairs(**job: Any) -> dict[str, Any]:
    _hasten()
    return pairs(**job)


def watched(*, iterations: int, silent_after: int = 0, **options: Any) -> dict[str, Any]:
    """Whose turn it was in every iteration, as this rank had it; from an iteration on rank 0 says nothing more."""
    import torch
    import torch.distributed as dist

    from paceenv import live
    from paceenv.live import tune_words

    _hasten()
    tune_words.LEASE_S = 1.0
    agent = live.attach(None, **options)
    control, tensor, turns = agent._loop.control, torch.ones(1 << 12), []
    apply_delay = control.apply_delay

    def noted(iteration: int) -> Any:
        turns.append([iteration, control.tune_plan.turn(iteration).arm])
        return apply_delay(iteration)

    control.apply_delay = noted
    for iteration in range(iterations):
        time.sleep(0.004)
        dist.all_reduce(tensor)
        if silent_after and iteration == silent_after and dist.get_rank() == 0:
            control.tuner.draft = lambda now, lead, lease: None  # type: ignore[union-attr,method-assign]
        agent.tick()
    words = [list(word) for word in control.tune_plan.words]
    found = {"turns": turns, "words": words, "state": agent.state, "tune": agent.summary()["tune"]}
    agent.detach()
    return found | {"reason": agent.reason}


@pytest.mark.slow
def test_all_ranks_are_of_one_mind_in_every_iteration_and_without_words_nobody_paces(tmp_path: Path) -> None:
    ranks = results(run_ranks(watched, 2, tmp_path, iterations=2200, silent_after=600, **TUNE))
    assert {rank["state"] for rank in ranks} == {"tune"}
    one, other = (dict(map(tuple, rank["turns"])) for rank in ranks)
    both = sorted(one.keys() & other.keys())
    assert len(both) > 1000
    assert {one[i] for i in both} == {None, 0, 1}
    assert [one[i] for i in both] == [other[i] for i in both]
    last = ranks[0]["words"][-1][2]
    assert 600 < last < 2100
    assert {one[i] for i in both if i >= last} == {None}


def test_a_candidate_that_cannot_be_had_is_a_reason_to_observe(tmp_path: Path) -> None:
    wrong = TUNE | {"candidates": "nothing-like-this"}
    for rank in results(run_ranks(watched, 2, tmp_path, iterations=40, **wrong)):
        assert rank["state"] == "observe"
        assert "no such file" in rank["reason"]


def test_a_job_of_one_rank_tunes_alone(tmp_path: Path) -> None:
    [rank] = results(run_ranks(watched, 1, tmp_path, iterations=400, **TUNE))
    assert {arm for _, arm in rank["turns"]} == {None, 0, 1}
    assert [one["name"] for one in rank["tune"]["candidates"]] == [GOOD, BAD]


@pytest.mark.alone
@pytest.mark.slow
def test_the_candidate_that_helps_is_found_on_real_sockets_and_deployed(tmp_path: Path) -> None:
    job = {"payload_bytes": 100_000, "buckets": 5, "compute_s": 0.004, "post_work_s": 0.032}
    with limited_link(200.0) as link:
        ranks = results(run_ranks(tuned_pairs, 8, tmp_path, namespace=link, iterations=1500, **job, **TUNE))
    leader = ranks[0]["summary"]["tune"]
    assert leader["winner"] == GOOD, leader
    assert leader["phase"] == "deployed"
    good, bad = leader["candidates"]
    assert good["gain"] > 0.05
    assert bad["dropped"]
    for rank in ranks[1:]:
        assert rank["summary"]["tune"] == {"phase": "deployed", "in": [GOOD]}
    for rank in ranks[2:]:
        assert rank["summary"]["pacing"]["taken"] > 0
