"""Who is late is named, or the page says why not, in shapes of jobs in which once nobody or a victim was named."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.jobs.live_shapes import INEXACT, RIGHT, UNSAID, Run, measure

pytestmark = pytest.mark.alone

SHAPES = (
    Run("ddp_buffers", 4, 1, "load"),
    Run("reentrant", 2, 1, "backward"),
    Run("experts", 4, 1, "load"),
    Run("tensor_and_data", 4, 1, "load"),
    Run("hybrid_sharded", 4, 1, "load"),
    Run("small_first", 2, 1, "backward"),
)


@pytest.mark.parametrize("run", SHAPES, ids=lambda run: run.name)
def test_the_slow_rank_is_named_or_the_reason_why_not(run: Run, tmp_path: Path) -> None:
    found = measure(run, tmp_path, compare=False)
    assert found["verdict"] in {RIGHT, INEXACT, UNSAID}, found
