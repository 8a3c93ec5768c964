"""A diagnosis names a cause only where its replay is the job; otherwise it says what was seen, and why no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from traced_jobs import DATA, SOCKET_RUNS_DIR, job_of, matrix_in, needs_socket_runs, needs_traces, trace_of

from paceenv.core.errors import InputError
from paceenv.core.operation_matrix import read_matrix
from paceenv.core.plain import plain
from paceenv.core.trace import SCHEMA, Trace, TraceMetadata
from paceenv.diagnosis import causes as names
from paceenv.diagnosis.arrivals import measure_arrivals
from paceenv.diagnosis.dependency_graph import build_graph
from paceenv.diagnosis.diagnose import UNDETERMINED, Diagnosis, diagnose, diagnose_matrix
from paceenv.diagnosis.verdict import INSUFFICIENT
from paceenv.importers.inputs import read_inputs

Rng = np.random.Generator
Columns = dict[str, Any]
LATE_JOB = job_of(1.0 + 0.01 * np.random.default_rng(1).standard_normal((40, 4)) + 0.5 * (np.arange(4) == 2))
"""Four ranks, of which one takes half as long again; 1 % of noise."""
LATE: Columns = {name: LATE_JOB.column(name) for name in SCHEMA.names}


def _trace(columns: Columns, **job: Any) -> Trace:
    return Trace.from_columns(columns, TraceMetadata({"name": "job", **job}, (), "test"))


def _of(c: Columns, kept: Any) -> Columns:
    return {key: column[kept] for key, column in c.items()}


def _refused(found: Diagnosis, why: str) -> None:
    assert found.verdict.startswith(UNDETERMINED)
    assert why in found.verdict
    assert not found.causes
    assert found.slowdown is None
    assert found.ideal_step_time_s is None
    assert plain(found)["causes"] == []


def test_who_arrives_last_is_seen_without_a_model() -> None:
    matrix = read_matrix(LATE_JOB)
    arrivals = measure_arrivals(matrix, build_graph(matrix))
    (late,) = arrivals.late
    assert (late.rank, len(late.iterations), late.op) == (2, 40, "all_reduce")
    assert late.mean_late_s == pytest.approx(0.49, abs=0.02)
    assert arrivals.waiting_s == pytest.approx(0.75 * 0.5, abs=0.02)
    assert arrivals.transfer_s == pytest.approx(0.5)
    assert "rank 2 arrives last in 40 of 40 steps, by 4" in arrivals.text


def test_a_rank_without_a_trace_may_be_the_one_that_all_wait_for() -> None:
    def without(rank: int, **job: Any) -> Diagnosis:
        return diagnose(_trace(_of(LATE, LATE["rank"] != rank), **job))

    assert without(3).causes
    for rank, job in ((0, {}), (2, {}), (3, {"world_size": 4})):
        _refused(without(rank, **job), f"rank {rank} is missing")


@pytest.mark.parametrize(("last", "is_refused"), [(30, False), (8, True)])
def test_steps_that_one_rank_lacks_are_counted(last: int, is_refused: bool) -> None:
    found = diagnose(_trace(_of(LATE, (LATE["rank"] != 1) | (LATE["iteration"] < last))))
    lacks = 40 - last
    assert found.notes == (f"{lacks} of 40 steps left out, as not all ranks have them: rank 1 lacks {lacks}",)
    assert bool(found.refused) == is_refused
    assert ("32 of 40 steps are not of all ranks" in found.refused) == is_refused


def test_time_that_no_operation_explains_has_no_cause() -> None:
    later = {key: LATE[key] + 0.4 * LATE["iteration"] for key in ("start_s", "end_s")}
    found = diagnose(_trace(LATE | later))
    assert "does not reproduce" in found.refused
    assert not found.causes
    assert found.verdict.startswith("rank 2 arrives last in 40 of 40 steps, by "), "who is late needs no replay"
    assert "what that costs is not known (cannot be determined: the replay" in found.verdict
    assert found.replay_error == pytest.approx(-0.4 / 2.4, abs=0.01)


def test_a_rank_that_begins_its_step_before_the_others_is_told() -> None:
    """The last piece of each step is longer on the rank whose first one is shorter in the next."""
    rows = list[tuple[Any, ...]]()
    for t in range(20):
        for r in range(2):
            begin_s, end_s = 1.4 * t + 0.3 * ((r + t) % 2), 1.4 * (t + 1) + 0.3 * ((r + t + 1) % 2)
            rows += [(r, t, 0, "compute", -1, begin_s, 1.4 * t + 1.2), (r, t, 2, "compute", -1, 1.4 * t + 1.3, end_s)]
            rows += [(r, t, 1, "all_reduce", 0, 1.4 * t + 1.2, 1.4 * t + 1.3)]
    assert "some rank begins the mean step 285 ms before another has ended" in diagnose(trace_of(rows)).verdict


def test_of_kinds_of_steps_that_take_turns_the_one_that_loses_most_is_diagnosed() -> None:
    """A second collective in every other step; rank 1 is late to it alone, by 0.3 s."""
    rows, at_s = list[tuple[Any, ...]](), 0.0
    for t in range(40):
        for r in range(3):
            rows += [(r, t, 0, "compute", -1, at_s, at_s + 1.0), (r, t, 1, "all_reduce", 0, at_s + 1.0, at_s + 1.5)]
            if t % 2:
                late_s = at_s + (2.0 if r == 1 else 1.7)
                rows += [(r, t, 2, "compute", -1, at_s + 1.5, late_s), (r, t, 3, "all_reduce", 0, late_s, at_s + 2.1)]
        at_s += 2.1 if t % 2 else 1.5
    found = diagnose(trace_of(rows))
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


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda c: {"group": np.full_like(c["group"], -1)}, "is seen on two ranks"),
        (lambda c: {"group": np.where(c["rank"] == 3, -1, c["group"])}, "whose other members are not known"),
        (
            lambda c: {"op": np.where((c["op"] == "compute") & (c["rank"] == 3), "strange", c["op"])},
            "operations of unknown kind (strange)",
        ),
        (lambda c: _of(c, (c["op"] != "all_reduce") | (c["iteration"] % 9 > 0)), "not recorded"),
        (lambda c: {"op": np.where(c["op"] == "compute", c["op"], "barrier")}, "somebody who is not in the trace"),
    ],
)
def test_a_trace_that_lacks_something_says_what(damage: Any, why: str) -> None:
    found = diagnose(_trace(LATE | damage(LATE)))
    assert why in found.verdict
    assert not found.causes


def test_a_barrier_that_is_slow_by_itself_is_not_taken_for_a_missing_rank_where_agents_counted_the_ranks() -> None:
    """As on NCCL with several ranks on one card, whose barrier takes 13 ms: all ranks are there, and one is late."""
    last, later_s = LATE["op"] == "all_reduce", 0.25 * LATE["iteration"]  # the barrier takes a quarter of a second more
    columns = LATE | {"op": np.where(last, "barrier", LATE["op"]), "start_s": LATE["start_s"] + later_s}
    columns |= {"end_s": LATE["end_s"] + later_s + 0.25 * last}
    _refused(diagnose(_trace(columns, ranks=4)), "somebody who is not in the trace")
    found = diagnose(_trace(columns, ranks=4, attempt="20261126T100837-24f0dc"))
    assert found.causes[0].cause == names.SLOW_RANK
    _refused(diagnose(_trace(columns, ranks=5, attempt="20261126T100837-24f0dc")), "rank 4 is missing")


TRUE_CAUSES = {
    "bytedance-straggler/trace-AR.parquet": (names.SLOW_RANK, names.STAGE),
    "bytedance-straggler/trace-SE.parquet": (names.DATA,),
    "socket-runs/my-slack-static.parquet": (names.SLOW_RANK, names.CONTENTION),
    "socket-runs/incast-shallow-learned.parquet": (names.INCAST,),
    "socket-runs/two-jobs-learned.parquet": (names.TENANT, names.CONTENTION),
}
"""The causes that may come first. AR's slow workers are all stages of one replica or, of what is left of the trace, a
stage; a pair of my-slack has more work than the others, whose traffic contends with it; of a few steps
of two-jobs nobody can say whether the other traffic has a memory."""


def steps_cut(rng: Rng, c: Columns) -> Columns:
    """A stretch of the trace, whose last step ends in the middle."""
    low, high = int(c["iteration"].min()), int(c["iteration"].max())
    first = int(rng.integers(low, max(high - 2, low + 1)))
    last = int(rng.integers(first, high + 1))
    kept = (c["iteration"] >= first) & (c["iteration"] <= last)
    in_last = kept & (c["iteration"] == last)
    if in_last.any():
        kept &= ~(in_last & (c["start_s"] > rng.uniform(c["start_s"][in_last].min(), c["end_s"][in_last].max())))
    return _of(c, kept)


def steps_lost(rng: Rng, c: Columns) -> Columns:
    """Some steps are not there."""
    steps = np.unique(c["iteration"])
    return _of(c, np.isin(c["iteration"], rng.choice(steps, max(int(len(steps) * rng.uniform(0.2, 0.9)), 1), False)))


def ranks_dropped(rng: Rng, c: Columns) -> Columns:
    """Files of some ranks are missing."""
    ranks = np.unique(c["rank"])
    return _of(c, ~np.isin(c["rank"], rng.choice(ranks, int(rng.integers(1, len(ranks))), False)))


def rows_lost(rng: Rng, c: Columns) -> Columns:
    """Operations here and there were not recorded."""
    return _of(c, rng.random(len(c["rank"])) > rng.uniform(0.005, 0.3))


def groups_removed(rng: Rng, c: Columns) -> Columns:
    """Which collective belongs to which process group is not known, of all or of some operations."""
    lost = np.isin(c["op"], rng.permutation(np.unique(c["op"]))[: int(rng.integers(1, 9))])
    return c | {"group": np.where(lost, -1, c["group"])}


def micro_batches_removed(rng: Rng, c: Columns) -> Columns:
    """Micro-batches and chunks are not known."""
    return c | {"micro_batch": np.full_like(c["micro_batch"], -1), "chunk": np.full_like(c["chunk"], -1)}


def names_lost(rng: Rng, c: Columns) -> Columns:
    """Collectives have one name, as kernels without metadata do, or one kind of operation has none."""
    op = c["op"].astype(object)
    if rng.random() < 0.5:
        op[c["group"] >= 0] = "collective"
    else:
        op[op == rng.choice(np.unique(c["op"]))] = "unknown"
    return c | {"op": op.astype(str)}


def clocks_skewed(rng: Rng, c: Columns) -> Columns:
    """Clocks of some ranks are off by up to a second."""
    ranks = np.unique(c["rank"])
    skew_R = rng.uniform(-1.0, 1.0, len(ranks)) * (rng.random(len(ranks)) < rng.uniform(0.05, 1.0))
    skew_s = skew_R[np.searchsorted(ranks, c["rank"])]
    return c | {"start_s": c["start_s"] + skew_s, "end_s": c["end_s"] + skew_s}


def streams_merged(rng: Rng, c: Columns) -> Columns:
    """Two ranks are taken for one."""
    one, other = rng.choice(np.unique(c["rank"]), 2, False) if len(np.unique(c["rank"])) > 1 else (0, 0)
    rank = np.where(c["rank"] == one, other, c["rank"])
    order = np.lexsort((c["start_s"], c["iteration"], rank))
    first = np.ones(len(rank), np.bool_)
    first[1:] = (np.diff(rank[order]) != 0) | (np.diff(c["iteration"][order]) != 0)
    row, seq = np.arange(len(rank)), np.empty(len(rank), np.int64)
    seq[order] = row - np.maximum.accumulate(np.where(first, row, 0))
    return c | {"rank": rank, "seq": seq}


def stamps_coarse(rng: Rng, c: Columns) -> Columns:
    """Times are rounded."""
    unit_s = 10.0 ** rng.uniform(-4.0, -1.5)
    return c | {key: np.round(c[key] / unit_s) * unit_s for key in ("start_s", "end_s")}


DAMAGE = (
    steps_cut, steps_lost, ranks_dropped, rows_lost, groups_removed, micro_batches_removed, names_lost, clocks_skewed,
    streams_merged, stamps_coarse,
)  # fmt: skip


@pytest.mark.slow
@needs_traces
def test_no_damaged_trace_gets_a_wrong_answer() -> None:
    """Recordings with known causes, damaged in one to three ways: another first cause than a true one is never named
    with the trace as evidence."""
    traces, right = [(name, read_inputs([DATA / name]).require_trace()) for name in TRUE_CAUSES], 0
    for i in range(15):
        rng, (source, trace) = np.random.default_rng([12, i]), traces[i % len(traces)]
        chosen = [DAMAGE[k] for k in rng.choice(len(DAMAGE), int(rng.integers(1, 4)), replace=False)]
        columns: Columns = {name: trace.column(name) for name in SCHEMA.names}
        for damage in chosen:
            if len(columns["rank"]):
                columns = damage(rng, columns)
        ranks = trace.metadata.ranks if rng.random() < 0.5 else ()
        try:
            found = diagnose(Trace.from_columns(columns, TraceMetadata({"name": source}, ranks, trace.metadata.source)))
        except InputError:
            continue
        if not found.verdict.startswith((UNDETERMINED, INSUFFICIENT)):
            assert (found.causes[0].cause if found.causes else "healthy") in TRUE_CAUSES[source], (i, found.verdict)
            right += 1
    assert right >= 2
