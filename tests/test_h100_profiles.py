"""Profiles of a real job on eight H100: steps of the device, clocks and arrivals, against what is known of them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from traced_jobs import H100_DIR, answer_of, needs_h100

from paceenv.cli import application
from paceenv.importers.merge_ranks import Merged, merge_ranks
from paceenv.importers.profiler.kineto import import_kineto

pytestmark = needs_h100
RANKS = 8


@pytest.fixture(scope="module")
def merged() -> Merged:
    return merge_ranks([import_kineto(path) for path in sorted(H100_DIR.glob("rank*.json.gz"))], "h100")


def test_steps_of_the_device(merged: Merged) -> None:
    """Two kinds of steps take turns; all ranks have the same operations in the same order."""
    trace = merged.trace
    rank, iteration, op = (trace.column(name) for name in ("rank", "iteration", "op"))
    begins = []
    for step, collectives in ((10, 8), (11, 20), (12, 8), (13, 20)):
        ops = [op[(rank == r) & (iteration == step)].tolist() for r in range(RANKS)]
        assert all(of_rank == ops[0] for of_rank in ops)
        assert sum(name != "compute" for name in ops[0]) == collectives
        of_rank = [trace.column("start_s")[(rank == r) & (iteration == step)].min() for r in range(RANKS)]
        begins.append(np.median(of_rank))
    assert set(iteration.tolist()) == {10, 11, 12, 13}
    np.testing.assert_allclose(np.diff(begins), [0.0361, 0.0476, 0.0427], atol=2e-4)


def test_clocks_agree(merged: Merged) -> None:
    assert merged.trace.metadata.job["clock_error_s"] < 100e-6
    assert not merged.notes


def test_who_arrives_last_and_why(merged: Merged) -> None:
    """The GPUs of both idle until their hosts have launched the small kernels of the optimizer."""
    late = {one.rank: one for one in answer_of(merged).late_hosts}
    assert {rank: one.iterations for rank, one in late.items()} == {0: (10,), 1: (11, 12, 13)}
    np.testing.assert_allclose(late[0].late_s, [0.0043], atol=1e-4)
    np.testing.assert_allclose(late[1].late_s, [0.0093, 0.0105, 0.0076], atol=1e-4)
    for one in late.values():
        assert one.reason == "host"
        assert one.extra_s["host"] > 0.9 * np.mean(one.late_s)
        assert abs(one.extra_s["compute"]) < 0.1 * np.mean(one.late_s)
        assert next(iter(one.ranges)) == "Optimizer.step#NorMuon.step"
    assert "waiting for its host" in late[1].text


def test_where_time_goes(merged: Merged) -> None:
    for one in merged.activity:
        assert one.compute_s == pytest.approx(0.0294, abs=1e-3), "all ranks and steps compute as much"


def test_a_page_says_once_how_late_a_rank_is(tmp_path: Path) -> None:
    """The same rank had 9.28, 9.13 and 8.36 ms on one page, each by another definition."""
    out = tmp_path / "page.html"
    assert application.run(["report", str(H100_DIR), "-o", str(out)]) == 0
    text = re.sub(r"<svg.*?</svg>|<details.*?</details>", "", out.read_text(), flags=re.DOTALL)
    assert text.count("rank 1 arrives last in 3 of 4 steps, by") == 1
    assert "Rank 1, why it arrives last: " in text
    assert "Most is waited for rank 1." in text
    assert "1 complete iterations of its usual kind" in text
