"""Nothing breaks: losses and final parameters are the same, bit for bit, without an agent and in every mode of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_bodies import ITERATIONS, WAYS, train
from live_jobs import results, run_ranks

WITHOUT = ""
EVERY_MODE = (WITHOUT, "off", "observe", "probe", "shadow", "canary", "active")
WORLDS = {"ddp": 4, "accumulation": 3, "plain": 4}
"""Ranks of the job; two where not told otherwise."""


@pytest.mark.parametrize("way", WAYS)
def test_results_do_not_depend_on_the_agent(way: str, tmp_path: Path) -> None:
    ended = run_ranks(train, WORLDS.get(way, 2), tmp_path, way=way, modes=EVERY_MODE)
    ranks = results(ended)
    for alone, *runs in ranks:
        assert alone["mode"] == WITHOUT
        for run in runs:
            assert run["losses"] == alone["losses"], run["mode"]
            assert run["digest"] == alone["digest"], run["mode"]
            summary = run["summary"]
            assert (summary["state"], summary["reason"]) == (run["mode"], "")
            assert (summary["regular"] > ITERATIONS / 2) == (run["mode"] != "off")
    # and the agent did what its mode says, or the test would show nothing
    for k, mode in enumerate(EVERY_MODE[1:], start=1):
        paced = [rank[k]["summary"]["pacing"] for rank in ranks]
        assert (sum(p["asked"] for p in paced) > 0) == (mode in ("probe", "shadow", "canary", "active")), mode
        if mode == "probe":
            assert way != "slow" or sum(p["taken"] for p in paced) > 0
            continue
        assert (sum(p["taken"] for p in paced) > 0) == (mode in ("canary", "active")), mode
        assert paced[0]["taken"] == 0  # the first of its group


def test_ranks_of_one_job_train_one_model(tmp_path: Path) -> None:
    ended = run_ranks(train, 2, tmp_path, way="ddp", modes=["active"])
    first, second = (rank[0]["digest"] for rank in results(ended))
    assert first == second
