"""What a rank's own times say about early and late, and what the ranks' times say side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceenv.live.record.history import History, compare_ranks

STEP_S, TRANSFER_S, RANKS = 0.05, 0.004, 4

GROUP = {"number": 0, "members": RANKS}


def _job(late_s: np.ndarray[Any, Any], jitter_s: float = 0.5e-3, iterations: int = 400) -> list[History]:
    """Four ranks whose work takes alike but for jitter; rank 2 is ``late_s`` later, in each iteration."""
    random = np.random.default_rng(1)
    work = STEP_S + random.normal(0.0, jitter_s, (iterations, RANKS))
    work[:, 2] += late_s
    ends = work.max(axis=1) + TRANSFER_S
    histories = [History() for _ in range(RANKS)]
    for rank, history in enumerate(histories):
        comm = ends - work[:, rank]
        for step_s, comm_s in zip(ends, comm, strict=True):
            history.add(step_s, comm_s, 0.0, 0.0, comm_s - comm.min())
    return histories


def _sometimes(late_s: float, iterations: int = 400) -> np.ndarray[Any, Any]:
    return late_s * (np.random.default_rng(2).random(iterations) < 0.5)


def test_no_skew_is_no_claim() -> None:
    assert [h.arrival(RANKS)["verdict"] for h in _job(np.zeros(400))] == ["on time"] * RANKS


@pytest.mark.parametrize("late_s", [0.005, 0.02])
def test_a_rank_that_is_late_now_and_then_is_found_by_all(late_s: float) -> None:
    found = [h.arrival(RANKS) for h in _job(_sometimes(late_s))]
    assert [f["verdict"] for f in found] == ["early", "early", "late", "early"]
    for early in (found[0], found[1], found[3]):
        assert early["early_s"] == pytest.approx(late_s, abs=0.002)
        assert early["share"] == pytest.approx(0.5, abs=0.06)
    assert found[2]["late_s"] == pytest.approx(late_s, abs=0.002)


def test_too_few_iterations_are_insufficient_evidence() -> None:
    assert _job(np.zeros(20), iterations=20)[0].arrival(RANKS)["verdict"] == "insufficient evidence"


def _snapshots(histories: list[History]) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "world_size": RANKS,
            "step": h.step(),
            "own": h.own(),
            "group": GROUP,
            "arrival": h.arrival(RANKS),
        }
        for rank, h in enumerate(histories)
    ]


def test_a_constant_skew_shows_only_side_by_side() -> None:
    alone = _snapshots(_job(np.full(400, 0.01)))
    assert [s["arrival"]["verdict"] for s in alone] == ["on time"] * RANKS
    together = compare_ranks(alone)
    assert [s["arrival"]["verdict"] for s in together] == ["early", "early", "late", "early"]
    assert together[0]["arrival"]["early_s"] == pytest.approx(0.01, abs=0.001)
    assert together[2]["arrival"]["late_s"] == pytest.approx(0.01, abs=0.001)


def test_without_skew_nobody_is_late_side_by_side() -> None:
    together = compare_ranks(_snapshots(_job(np.zeros(400))))
    assert {s["arrival"]["verdict"] for s in together} == {"on time"}


def test_a_missing_rank_leaves_what_each_says_alone() -> None:
    alone = _snapshots(_job(np.full(400, 0.01)))[:3]
    assert compare_ranks(alone) == alone


def test_stages_with_other_payloads_are_not_compared() -> None:
    job = _snapshots(_job(np.zeros(400)))
    stages = [s | {"group": {"number": 1 + i // 2, "members": 2}} for i, s in enumerate(job)]
    for stage in stages[2:]:  # the second stage has more to compute
        stage["own"] = stage["own"] | {"mean_s": stage["own"]["mean_s"] + 0.02}
    assert {s["arrival"]["verdict"] for s in compare_ranks(stages)} == {"on time"}


def test_alone_nobody_is_late() -> None:
    assert _job(_sometimes(0.02))[2].arrival(1)["verdict"] == "insufficient evidence"


def test_parts_add_up_to_the_step() -> None:
    history = History()
    for _ in range(5):
        history.add(0.1, 0.03, 0.02, 0.01, 0.02)
    parts = history.parts()
    assert parts == pytest.approx({"compute_s": 0.04, "collective_s": 0.03, "barrier_s": 0.02, "pacing_s": 0.01})
    assert sum(value for value in parts.values() if value is not None) == pytest.approx(history.step()["mean_s"])
