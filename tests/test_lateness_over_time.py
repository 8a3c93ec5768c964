"""When ranks of a trace turned late: known truth in made traces, and what recorded ones show."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from traced_jobs import SOCKET_RUNS_DIR, job_of, needs_socket_runs

from paceenv.core.lateness import watch
from paceenv.core.operation_matrix import read_matrix
from paceenv.core.plain import plain
from paceenv.core.trace import Trace, TraceMetadata, read_trace
from paceenv.diagnosis.lateness_over_time import find_lateness


def trace(own_TR: np.ndarray, stage_R: list[int] | None = None) -> Trace:
    """Steps of compute and an all_reduce of 10 ms; four ranks a host."""
    made = job_of(own_TR, 0.01)
    stages = stage_R or [0] * own_TR.shape[1]
    ranks = tuple({"rank": k, "dp_rank": k, "stage": stages[k], "host": f"node{k // 4}"} for k in range(len(stages)))
    return Trace(made.table, TraceMetadata(made.metadata.job, ranks, "test"))


def work(steps: int = 200, ranks: int = 8, cv: float = 0.03) -> np.ndarray:
    return 0.2 * (1.0 + cv * np.random.default_rng(3).normal(size=(steps, ranks)))


def test_a_rank_that_turned_late_is_told_with_step_amount_and_delay() -> None:
    own_TR = work()
    own_TR[120:, 5] += 0.06
    matrix = read_matrix(trace(own_TR))
    found = find_lateness(matrix)
    [team] = found.late
    assert (team.ranks, team.kind, found.pattern) == ((5,), watch.SINCE, watch.SINCE)
    assert abs(team.since - 120) <= 1
    assert team.until is None
    assert team.late_s == pytest.approx(0.06, abs=0.005)
    [line] = found.text
    assert re.match(rf"rank 5 is late by (5[5-9]|6\d)[.\d]* ms since iteration {team.since}, 2\d% of the step", line)
    said = re.search(r"named after (\d+) steps", line)
    assert said is not None
    assert 4 <= int(said[1]) <= 12
    json.dumps(plain(found), allow_nan=False)


def test_no_line_contradicts_a_rank_that_always_arrives_last() -> None:
    matrix = read_matrix(trace(work(steps=16, ranks=2, cv=0.3)))
    assert any("no rank is late for long" in line for line in find_lateness(matrix).text)
    assert find_lateness(matrix, named=1).text == (
        "rank 1 arrives last in nearly every step; since when is not settled",
    )


def test_stages_are_compared_with_their_like() -> None:
    own_TR = work(ranks=5)
    own_TR[:, 2:4] *= 1.8
    own_TR[:, 4] *= 3.0
    found = find_lateness(read_matrix(trace(own_TR, [0, 0, 1, 1, 2])))
    assert found.late == ()
    assert found.alone == (4,)
    assert "rank 4: no other rank has the same stage" in found.text[-1]


@pytest.mark.parametrize(
    ("own_TR", "stage_R", "why"),
    [
        (work(5), None, "5 steps; at least 8 are needed"),
        (work(20, 1), None, "one rank, without a peer"),
        (work(20, 2), [0, 1], "each rank is the only one of its pipeline stage"),
        (0.0 * work(20, 2), None, "the trace has no work besides communication"),
    ],
)
def test_what_cannot_be_determined_says_why(own_TR: np.ndarray, stage_R: list[int] | None, why: str) -> None:
    found = find_lateness(read_matrix(trace(own_TR, stage_R)))
    assert why in found.why_not
    assert found.text == (f"when ranks turned late cannot be determined: {found.why_not}",)


@needs_socket_runs
@pytest.mark.parametrize(
    ("name", "ranks"), [("my-slack-static", {2, 3}), ("incast-shallow-learned", set()), ("two-jobs-learned", set())]
)
def test_recorded_socket_jobs(name: str, ranks: set[int]) -> None:
    """Two hosts of the first job have 100 ms more work; the others have none that differ."""
    found = find_lateness(read_matrix(read_trace(SOCKET_RUNS_DIR / f"{name}.parquet")))
    assert {rank for team in found.late for rank in team.ranks} == ranks
    assert all(team.kind == watch.CHRONIC for team in found.late)
    assert found.late == () or found.late[0].late_s == pytest.approx(0.1, rel=0.03)
