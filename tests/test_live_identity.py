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
def test_results_do_not_depend_on_an_agent_that_delays(way: str, tmp_path: Path) -> None:
    assert changed_by(EVERY_MODE if way == "ddp" else (WITHOUT, "active"), way, tmp_path) == set()


def changed_by(modes: tuple[str, ...], way: str, folder: Path) -> set[str]:
    """The modes in which a rank's losses or parameters differ from those without an agent; each did what it says."""
    ranks = results(run_ranks(train, WORLDS.get(way, 2), folder, way=way, modes=modes))
    assert [run["mode"] for run in ranks[0]] == list(modes)
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
    for k, mode in enumerate(modes[1:], start=1):
        paced = [rank[k]["summary"]["pacing"] for rank in ranks]
        assert (sum(p["asked"] for p in paced) > 0) == (mode in ("probe", "shadow", "canary", "active")), mode
        if mode == "probe":
            assert way != "slow" or sum(p["taken"] for p in paced) > 0
            continue
        assert (sum(p["taken"] for p in paced) > 0) == (mode in ("canary", "active")), mode
        assert paced[0]["taken"] == 0  # the first of its group
    if way == "ddp":
        assert len({rank[0]["digest"] for rank in ranks}) == 1  # the ranks of a job train one model
    return changed
