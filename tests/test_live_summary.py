"""The one page about a run: what it says, and that no snapshot can break it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from live_samples import snapshot
from test_live_findings import JSON
from toy_jobs import SHAPES, run

from paceenv.live.record.run_folder import SUMMARY, write_status
from paceenv.live.record.summary import WIDTH, summarise, write_summary

FIELDS = sorted(set(snapshot()) - {"rank", "attempt"})


def test_the_page_says_where_the_step_went_and_what_pacing_did() -> None:
    slow = {"compute_s": 0.09, "collective_s": 0.0, "barrier_s": 0.008, "pacing_s": 0.002}
    page = summarise([snapshot(0), snapshot(1, parts=slow)])
    heading = "job job, attempt 20261123T053000-3f2a91, 4 ranks; this page is from 2 of them on 1 host"
    assert heading in " ".join(page.split())
    assert "mean 100 ms, median 99 ms, 99th percentile 140 ms, at best 95 ms; CV 4.0 %" in page
    assert "compute and everything else     80 ms   80.0 %   from 70 ms (rank 0) to 90 ms (rank 1)" in page
    assert "left out of these times: steps of over 50 times the median (1; the longest took 60 s and" in page
    assert "in the barrier                   8 ms    8.0 %\n" in page
    assert "1,180 delays taken of 1,200 asked for, 2.4 s in all, longest 10 ms" in page
    assert "blocks with and without, 16 pairs: helps by 8.1 % [7.2, 9.0]" in page
    assert "the agent itself took 20 µs of host time per iteration, 0.02 % of the step" in page
    assert "mode canary; policy rule" in page
    assert "policy rule" not in summarise([snapshot(0, mode="observe", state="observe")]), "it decides no more"


def test_a_page_stays_a_page_with_many_ranks() -> None:
    toy = run(SHAPES["ddp"](200), 200, slow_s=[0.01 * (rank % 7 == 0) for rank in range(200)], iterations=32)
    ranks = [
        toy[rank]
        | snapshot(rank, world_size=200, events=[{"unix_time_s": 1.7e9 + rank, "text": f"number {rank} of many " * 10}])
        | {"host": f"node{rank // 8}"}
        for rank in range(200)
    ]
    lines = summarise(ranks).splitlines()
    assert len(lines) < 80
    assert max(map(len, lines)) <= WIDTH


def test_the_page_is_written_with_what_the_others_wrote(tmp_path: Path) -> None:
    for rank in range(1, 4):
        write_status(tmp_path, snapshot(rank))
    page, _ = write_summary(tmp_path, snapshot(0))
    assert "this page is from 4 of them on 2 hosts" in " ".join(page.split())
    assert (tmp_path / SUMMARY).read_text() == page
    assert (tmp_path / str(snapshot(0)["attempt"]) / SUMMARY).read_text() == page


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6))
def test_no_snapshot_breaks_the_page(changed: dict[str, Any]) -> None:
    page = summarise([snapshot(0, **changed), snapshot(1)])
    assert "Where the step went" in page
    assert "\x1b" not in page
