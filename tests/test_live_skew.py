"""It measures right: a rank that is made late by a known time is what the other ranks' agents report, in real jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_jobs import results, run_ranks
from live_skewed import skewed

SKEWS_S = (0.0, 0.005, 0.02)


@pytest.mark.alone
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
