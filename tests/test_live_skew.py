"""It measures right: a rank that is made late by a known time is what the other ranks' agents report, in real jobs."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from live_jobs import results, run_ranks
from live_skewed import skewed

pytestmark = pytest.mark.alone

JOBS = 3
SKEWS_S = (0.0, 0.001, 0.005, 0.02)


def _says_why(found: dict[str, Any]) -> bool:
    why = found["evidence"].partition(": ")[2]
    return found["verdict"] == "insufficient evidence" and bool(why)


def _check(arrivals: list[dict[str, Any]], skew_s: float, late: int) -> None:
    """What every rank says of itself, when rank ``late`` comes ``skew_s`` after the others."""
    tolerance_s = max(0.002, 0.2 * skew_s)
    for rank, found in enumerate(arrivals):
        if rank == late:
            assert found["early_s"] <= (tolerance_s if skew_s else 0.0), found
            assert found["verdict"] == "late" or skew_s <= tolerance_s, found
        else:
            assert abs(found["early_s"] - skew_s) <= tolerance_s, found
            assert found["late_s"] <= tolerance_s, found
            assert found["verdict"] == "early" or skew_s <= tolerance_s, found
            # noise may hide whether a rank is on time, and of ranks that share a core some really are a little early
            really = len(arrivals) > (os.cpu_count() or 1) and found["verdict"] == "early"
            assert found["verdict"] == "on time" or skew_s or _says_why(found) or really, found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_constant_skew_is_seen_by_ranks_side_by_side(ranks: int, tmp_path: Path) -> None:
    """Late from the first iteration on: only a comparison can tell, from the status files of all ranks."""
    late = ranks - 1
    job = {"kind": "all_reduce", "skews_s": SKEWS_S, "late": late, "iterations": 96}
    ended = run_ranks(skewed, ranks, tmp_path, out=str(tmp_path / "out"), **job)
    for k, skew_s in enumerate(SKEWS_S):
        arrivals = [found[k]["arrival"] for found in results(ended)]
        assert all("side by side" in arrival["evidence"] for arrival in arrivals)
        _check(arrivals, skew_s, late)


@pytest.mark.parametrize(("ranks", "kind"), [(2, "reducer"), (4, "all_reduce")])
def test_a_skew_that_begins_is_seen_side_by_side(ranks: int, kind: str, tmp_path: Path) -> None:
    """By how much is judged by the median of jobs: a neighbour on the same core may take away half of a rank's time."""
    skew_s, late = 0.05, 0
    job = {"kind": kind, "skews_s": [skew_s], "late": late, "iterations": 240, "from_iteration": 128}
    jobs = []
    for k in range(JOBS):
        ended = run_ranks(skewed, ranks, tmp_path / str(k), out=str(tmp_path / str(k) / "out"), **job)
        jobs.append([found[0]["arrival"] for found in results(ended)])
    for rank in range(ranks):
        right = "late" if rank == late else "early"
        verdicts = [arrivals[rank]["verdict"] for arrivals in jobs]
        assert set(verdicts) <= {right, "insufficient evidence"}, jobs  # of the noise, but never a wrong one
        assert verdicts.count(right) > JOBS / 2, jobs
        assert 0.5 * skew_s < median(arrivals[rank][f"{right}_s"] for arrivals in jobs) < 1.5 * skew_s, jobs


def test_a_rank_alone_claims_nothing(tmp_path: Path) -> None:
    """Without files of the other ranks a rank has only its own past, in which a late peer looks like a slow network."""
    job = {"kind": "all_reduce", "skews_s": [0.05], "late": 0, "iterations": 140, "from_iteration": 100}
    for found in results(run_ranks(skewed, 2, tmp_path, **job)):
        assert found[0]["arrival"]["verdict"] == "insufficient evidence"
