"""Nothing breaks: losses and final parameters are the same, bit for bit, without an agent and in every mode of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from live_bodies import ITERATIONS, WAYS, train
from live_jobs import run_ranks

WITHOUT = ""
EVERY_MODE = (WITHOUT, "off", "observe", "probe", "shadow", "canary", "active")
TOGETHER = {
    ("ddp", "fp16 hook", "two optimizers", "gradient scaler"): 2,
    ("slow", "PowerSGD hook", "compiled", "fsdp"): 2,
    ("accumulation", "plain"): 4,
}
"""Ways of training in one job, one after the other, and its ranks."""


def train_in_turn(ways: Sequence[str]) -> dict[str, Any]:
    return {way: train(way=way, modes=EVERY_MODE if way == "ddp" else (WITHOUT, "active")) for way in ways}


@pytest.mark.parametrize(
    "ways", [ways if "ddp" in ways else pytest.param(ways, marks=pytest.mark.slow) for ways in TOGETHER]
)
def test_results_do_not_depend_on_an_agent_that_delays(ways: tuple[str, ...], tmp_path: Path) -> None:
    ranks = run_ranks(train_in_turn, TOGETHER[ways], tmp_path, ways=ways)
    for way in ways:
        assert changed_by([rank[way] for rank in ranks]) == set(), way


def test_every_way_is_tried() -> None:
    assert {way for ways in TOGETHER for way in ways} == set(WAYS)


def changed_by(ranks: list[list[dict[str, Any]]]) -> set[str]:
    """The modes in which a rank's losses or parameters differ from those without an agent; each did what it says."""
    changed = set()
    for alone, *runs in ranks:
        assert alone["mode"] == WITHOUT
        for run in runs:
            if (run["losses"], run["digest"]) != (alone["losses"], alone["digest"]):
                changed.add(run["mode"])
            summary = run["summary"]
            assert (summary["state"], summary["reason"]) == (run["mode"], "")
            assert (summary["regular"] > ITERATIONS / 2) == (run["mode"] != "off")
    # and the agent did what its mode says, or the test would show nothing
    for k, run in enumerate(ranks[0][1:], start=1):
        mode, paced = run["mode"], [rank[k]["summary"]["pacing"] for rank in ranks]
        assert (sum(p["asked"] for p in paced) > 0) == (mode in ("probe", "shadow", "canary", "active")), mode
        if mode != "probe":  # whose delays are too short to be taken here
            assert (sum(p["taken"] for p in paced) > 0) == (mode in ("canary", "active")), mode
            assert paced[0]["taken"] == 0  # the first of its group
    return changed
