"""The one page about a run: what it says, and that no snapshot can break it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_samples import snapshot

from paceenv.core.errors import InputError
from paceenv.live.record.run_folder import SUMMARY, write_status
from paceenv.live.record.summary import WIDTH, count, duration, percent, summarise, write_summary

JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=True) | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
FIELDS = sorted(set(snapshot()) - {"rank", "attempt"})


def arriving(verdict: str, *, early_s: float = 0.0, late_s: float = 0.0) -> dict[str, Any]:
    return {"verdict": verdict, "early_s": early_s, "late_s": late_s, "share": 0.9, "evidence": "own timing"}


def test_the_page_says_who_waits_for_whom() -> None:
    ranks = [
        snapshot(0, arrival=arriving("early", early_s=0.0152), wait={"mean_s": 0.0155}),
        snapshot(1, arrival=arriving("early", early_s=0.02), wait={"mean_s": 0.0157}),
        snapshot(2, arrival=arriving("late", late_s=0.0149), wait={"mean_s": 0.0003}),
        snapshot(3, arrival=arriving("insufficient evidence"), wait={"mean_s": 0.0151}),
    ]
    lines = summarise(ranks).splitlines()
    start = lines.index("Which rank waits for which")
    assert lines[start + 1 : start + 6] == [
        "  rank 2 (node1) is late: the others wait for it, 14.9 ms in 90.0 % of iterations",
        "  rank 1 (node0) is early: it waits, 20 ms in 90.0 % of iterations",
        "  rank 0 (node0) is early: it waits, 15.2 ms in 90.0 % of iterations",
        "  insufficient evidence: rank 3; own timing",
        "  mean waits: least 300 µs (rank 2), median of the others 15.5 ms, most 15.7 ms (rank 1)",
    ]


def test_without_skew_nobody_is_named() -> None:
    page = summarise([snapshot(rank) for rank in range(4)])
    assert "all ranks arrive on time" in page
    assert "late" not in page.split("Which rank waits")[1].split("What pacing")[0]


def test_the_page_says_where_the_step_went_and_what_pacing_did() -> None:
    slow = {"compute_s": 0.09, "collective_s": 0.0, "barrier_s": 0.008, "pacing_s": 0.002}
    page = summarise([snapshot(0), snapshot(1, parts=slow)])
    assert "job job, attempt 0, 4 ranks; this page is from 2 of them on 1 host" in page
    assert "mean 100 ms, median 99 ms, 99th percentile 140 ms, at best 95 ms; CV 4.0 %" in page
    assert "compute and everything else     80 ms   80.0 %   from 70 ms (rank 0) to 90 ms (rank 1)" in page
    assert "in the barrier                   8 ms    8.0 %\n" in page
    assert "1,180 delays taken of 1,200 asked for, 2.4 s in all, longest 10 ms" in page
    assert "blocks with and without, 16 pairs: helps by 8.1 % [7.2, 9.0]" in page
    assert "the agent itself took 20 µs of host time per iteration, 0.02 % of the step" in page


def test_the_page_says_why_a_mode_is_not_in_force() -> None:
    page = summarise([snapshot(0, state="observe", reason="policy file: no such file", pacing={}, canary=None)])
    assert "mode canary, in force: observe (policy file: no such file); policy slack (abababababab)" in page
    assert "nothing: no delay was asked for" in page


def test_what_several_ranks_said_alike_is_one_line() -> None:
    page = summarise([snapshot(rank) for rank in range(4)])
    assert page.count("canary from now on") == 1
    assert "ranks 0-3: canary from now on" in page


def test_a_page_stays_a_page_with_a_thousand_ranks() -> None:
    ranks = [
        snapshot(
            rank,
            world_size=1000,
            arrival=arriving(("early", "late", "on time", "?")[rank % 4], early_s=0.01, late_s=0.01),
            events=[{"unix_time_s": 1.7e9 + rank, "text": f"number {rank} of many " * 10}],
        )
        for rank in range(1000)
    ]
    lines = summarise(ranks).splitlines()
    assert len(lines) < 80
    assert max(map(len, lines)) <= WIDTH


def test_the_page_is_written_with_what_the_others_wrote(tmp_path: Path) -> None:
    for rank in range(1, 4):
        write_status(tmp_path, snapshot(rank))
    page = write_summary(tmp_path, snapshot(0))
    assert "this page is from 4 of them on 2 hosts" in page
    assert (tmp_path / SUMMARY).read_text() == page


def test_the_first_to_write_finds_nobody(tmp_path: Path) -> None:
    assert "this page is from 1 of them" in write_summary(tmp_path / "new", snapshot(0))


def test_a_page_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_summary(tmp_path / "run", snapshot(0))


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6))
def test_no_snapshot_breaks_the_page(changed: dict[str, Any]) -> None:
    page = summarise([snapshot(0, **changed), snapshot(1)])
    assert "Where the step went" in page
    assert "\x1b" not in page


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (None, "-"),
        (0.0, "0 µs"),
        (21e-6, "21 µs"),
        (0.0009996, "1000 µs"),
        (0.0123, "12.3 ms"),
        (0.1234, "123 ms"),
        (-0.002, "-2 ms"),
        (1.5, "1.5 s"),
        (250.0, "250 s"),
        (1800.0, "30 min"),
        (36000.0, "10.0 h"),
    ],
)
def test_durations_have_a_fitting_unit(seconds: float | None, expected: str) -> None:
    assert duration(seconds) == expected


def test_shares_and_counts() -> None:
    assert (percent(0.0812), percent(None), count(12345.0), count(None)) == ("8.1 %", "-", "12,345", "-")
