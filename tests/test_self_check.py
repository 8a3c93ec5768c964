"""A diagnosis names a cause only where its replay is the job; otherwise it says what was seen, and why no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from damaged_traces import RIGHT, WRONG, answers
from traced_jobs import SOCKET_RUNS_DIR, STRAGGLER_DIR, job_of, matrix_in, needs_socket_runs, needs_traces

from paceenv.core.plain import plain
from paceenv.core.trace import Trace, TraceMetadata
from paceenv.diagnosis import causes as names
from paceenv.diagnosis.arrivals import measure_arrivals
from paceenv.diagnosis.dependency_graph import build_graph
from paceenv.diagnosis.diagnose import UNDETERMINED, Diagnosis, diagnose, diagnose_matrix
from paceenv.diagnosis.operation_matrix import read_matrix

COLUMNS = ("job", "rank", "iteration", "seq", "op", "group", "start_s", "end_s")


def _columns(trace: Trace) -> dict[str, Any]:
    return {key: trace.column(key).copy() for key in COLUMNS}


def _trace(columns: dict[str, Any], **job: Any) -> Trace:
    return Trace.from_columns(columns, TraceMetadata({"name": "job", **job}, (), "test"))


def _refused(found: Diagnosis, why: str) -> None:
    assert found.verdict.startswith(UNDETERMINED)
    assert why in found.verdict
    assert not found.causes
    assert found.slowdown is None
    assert found.ideal_step_time_s is None
    assert plain(found)["causes"] == []


def _late(late_rank: int = 2, steps: int = 40) -> Trace:
    """Four ranks, of which one takes half as long again; 1 % of noise."""
    compute_TR = 1.0 + 0.01 * np.random.default_rng(1).standard_normal((steps, 4))
    compute_TR[:, late_rank] += 0.5
    return job_of(compute_TR)


def test_who_arrives_last_is_seen_without_a_model() -> None:
    matrix = read_matrix(_late())
    arrivals = measure_arrivals(matrix, build_graph(matrix))
    (late,) = arrivals.late
    assert (late.rank, len(late.iterations), late.op) == (2, 40, "all_reduce")
    assert late.mean_late_s == pytest.approx(0.49, abs=0.02)
    assert arrivals.waiting_s == pytest.approx(0.75 * 0.5, abs=0.02)
    assert arrivals.transfer_s == pytest.approx(0.5)
    assert "rank 2 arrives last in 40 of 40 steps, by 4" in arrivals.text


def test_a_rank_without_a_trace_may_be_the_one_that_all_wait_for() -> None:
    columns = _columns(_late())

    def without(rank: int, **job: Any) -> Diagnosis:
        return diagnose(_trace({key: column[columns["rank"] != rank] for key, column in columns.items()}, **job))

    assert without(3).causes
    for rank, job in ((0, {}), (2, {}), (3, {"world_size": 4})):
        _refused(without(rank, **job), f"rank {rank} is missing")


@pytest.mark.parametrize(("last", "is_refused"), [(30, False), (8, True)])
def test_steps_that_one_rank_lacks_are_counted(last: int, is_refused: bool) -> None:
    columns = _columns(_late())
    kept = (columns["rank"] != 1) | (columns["iteration"] < last)
    found = diagnose(_trace({key: column[kept] for key, column in columns.items()}))
    lacks = 40 - last
    assert found.notes == (f"{lacks} of 40 steps left out, as not all ranks have them: rank 1 lacks {lacks}",)
    assert bool(found.refused) == is_refused
    assert ("32 of 40 steps are not of all ranks" in found.refused) == is_refused


def test_time_that_no_operation_explains_has_no_cause() -> None:
    columns = _columns(_late())
    later_s = 0.4 * columns["iteration"]
    found = diagnose(_trace(columns | {key: columns[key] + later_s for key in ("start_s", "end_s")}))
    assert "does not reproduce" in found.refused
    assert not found.causes
    assert found.verdict.startswith("rank 2 arrives last in 40 of 40 steps, by "), "who is late needs no replay"
    assert "what that costs is not known (cannot be determined: the replay" in found.verdict
    assert found.replay_error == pytest.approx(-0.4 / 2.4, abs=0.01)


def _in_turn(steps: int = 40) -> Trace:
    """A second collective in every other step; rank 1 is late to it alone, by 0.3 s."""
    columns = _columns(job_of(np.tile([1.0, 1.0, 1.0], (steps, 1))))
    end_T = np.array([columns["end_s"][columns["iteration"] == t].max() for t in range(steps)])
    odd = columns["iteration"] % 2 == 1
    second = {key: column[odd].copy() for key, column in columns.items()}
    compute = second["op"] == "compute"
    late_s = np.where(second["rank"] == 1, 0.5, 0.2)
    begin_s = end_T[second["iteration"]]
    second["start_s"] = np.where(compute, begin_s, begin_s + late_s)
    second["end_s"] = np.where(compute, begin_s + late_s, begin_s + 0.6)
    second["seq"] = second["seq"] + 2
    both = {key: np.concatenate([columns[key], second[key]]) for key in columns}
    before_s = 0.6 * (both["iteration"] // 2)
    return _trace(both | {"start_s": both["start_s"] + before_s, "end_s": both["end_s"] + before_s})


def test_of_kinds_of_steps_that_take_turns_the_one_that_loses_most_is_diagnosed() -> None:
    found = diagnose(_in_turn())
    said = "causes are those of the steps of 2.1 s"
    assert found.notes == (f"2 kinds of steps take turns: 20 of 1.5 s, 20 of 2.1 s; {said}",)
    assert found.step_time_s == pytest.approx(2.1)
    assert found.replay_error == pytest.approx(0.0, abs=1e-9)
    assert found.slowdown == pytest.approx(2.1 / (2.1 - 0.2))  # all equal: 0.3 s on each rank
    assert found.causes[0].cause == names.SLOW_RANK
    assert sum(cause.lost_s for cause in found.causes) == pytest.approx(0.3)
    assert "find out what rank 1 does between" in found.verdict, "it is slow at one place only, so it is no slow device"
    assert "rank 1 arrives last in 20 of 40 steps, by 300 ms" in found.arrivals.text


@needs_socket_runs
def test_real_jobs_are_replayed_also_where_delays_come_and_go() -> None:
    for path in sorted(SOCKET_RUNS_DIR.glob("*.parquet")):
        found = diagnose_matrix(matrix_in(path))
        assert abs(found.replay_error) < 0.02, path.name
        assert (found.slowdown or 0.0) > 1.05, path.name
        if path.name.startswith("incast"):
            assert found.causes[0].cause == names.INCAST
        else:
            assert found.causes[0].cause in (names.SLOW_RANK, names.TENANT), path.name


def _of_rank(columns: dict[str, Any], rank: int) -> Any:
    return (columns["op"] == "compute") & (columns["rank"] == rank)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda c: c | {"group": np.full_like(c["group"], -1)}, "is seen on two ranks"),
        (lambda c: c | {"group": np.where(c["rank"] == 3, -1, c["group"])}, "whose other members are not known"),
        (lambda c: c | {"op": np.where(_of_rank(c, 3), "strange", c["op"])}, "operations of unknown kind (strange)"),
        (lambda c: {k: v[(c["op"] != "all_reduce") | (c["iteration"] % 9 > 0)] for k, v in c.items()}, "not recorded"),
        (lambda c: c | {"op": np.where(c["op"] == "compute", c["op"], "barrier")}, "somebody who is not in the trace"),
    ],
)
def test_a_trace_that_lacks_something_says_what(damage: Any, why: str) -> None:
    found = diagnose(_trace(damage(_columns(_late()))))
    assert why in found.verdict
    assert not found.causes


@pytest.mark.slow
@needs_traces
def test_no_damaged_trace_gets_a_wrong_answer() -> None:
    found = answers(STRAGGLER_DIR.parent, 15, seed=12)
    assert [said for kind, said in found if kind == WRONG] == []
    assert sum(kind == RIGHT for kind, _ in found) >= 2


def test_a_barrier_that_is_slow_by_itself_is_not_taken_for_a_missing_rank_where_agents_counted_the_ranks() -> None:
    """As on NCCL with several ranks on one card, whose barrier takes 13 ms: all ranks are there, and one is late."""
    columns = _columns(_late())
    last = columns["op"] == "all_reduce"
    columns["op"] = np.where(last, "barrier", columns["op"])
    shift_s = 0.25 * columns["iteration"]  # the barrier takes a quarter of a second more
    for key in ("start_s", "end_s"):
        columns[key] = columns[key] + shift_s + (0.25 * last if key == "end_s" else 0.0)
    _refused(diagnose(_trace(columns, ranks=4)), "somebody who is not in the trace")
    found = diagnose(_trace(columns, ranks=4, attempt="20261126T100837-24f0dc"))
    assert found.causes[0].cause == names.SLOW_RANK
    _refused(diagnose(_trace(columns, ranks=5, attempt="20261126T100837-24f0dc")), "rank 4 is missing")
