"""A job with the agent ends as it does without it, whatever else is wrong: one of the faults of a dozen kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults.live_faults import UNHARMED, Run, measure

pytestmark = pytest.mark.slow

RUNS = (
    Run("address space is short", "later_0", 0),
    Run("no descriptor left", "before", 0),
    Run("no new threads", "RuntimeError", 0),
    Run("full disk", "size=4k", 0),
    Run("perf_counter is odd", "jumps", 0),
    Run("bad policy", "raises", 0),
    Run("bad policy", "huge", 0),
    Run("options that cannot be followed", "port taken", 0),
    Run("a rank ends early", "killed", 0),
    Run("stopped and continued", "once", 0),
    Run("broken logging", "factory", 0),
    Run("a handler that raises at random moments", "SIGALRM", 0),
    Run("odd backward passes", "raises", 0),
    Run("others replace the same functions", "out_of_order", 0),
)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_job_with_a_fault_is_not_harmed(run: Run, tmp_path: Path) -> None:
    found = measure(run, tmp_path)
    assert found["verdict"] == UNHARMED, found["why"]
