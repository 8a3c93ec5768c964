"""Diagnosis: the replay against independent simulations and closed forms, published traces, causes that are there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import signal
from traced_jobs import STRAGGLER_DIR, job_of, matrix_in, needs_traces, phases_of

from benchmarks.evidence import simulated_causes as benchmark
from benchmarks.evidence._pipeline_jobs import PipelineJob
from paceenv.core.errors import InputError
from paceenv.core.operation_matrix import read_matrix
from paceenv.core.trace import Trace, TraceMetadata, write_trace
from paceenv.diagnosis import causes as names
from paceenv.diagnosis.dependency_graph import build_graph
from paceenv.diagnosis.diagnose import diagnose, diagnose_matrix, with_agent
from paceenv.diagnosis.replay import own_durations, replay
from paceenv.diagnosis.verdict import HEALTHY, INSUFFICIENT
from paceenv.importers.inputs import read_inputs


def test_a_slow_rank_of_a_barrier_job_in_closed_form() -> None:
    found = diagnose(job_of(np.tile([1.0, 1.0, 1.0, 2.0], (20, 1))))
    assert found.step_time_s == pytest.approx(2.5)
    assert found.ideal_step_time_s == pytest.approx(1.25 + 0.5)
    assert found.slowdown == pytest.approx(2.5 / 1.75)
    (cause,) = found.causes
    assert (cause.cause, cause.share) == (names.SLOW_RANK, pytest.approx(1.0))
    assert cause.lost_s == pytest.approx(1.0), "its peers take one second"
    assert "find out why rank 3 took longer" in cause.advice
    assert "ranks are slower" not in diagnose(job_of(np.tile([1.02, 1.0, 1.0, 2.0], (20, 1)))).causes[0].evidence
    assert "(ranks 0, 3)" in diagnose(job_of(np.tile([1.2, 1.0, 1.0, 2.0], (20, 1)))).causes[0].evidence
    assert "no cause that delays act on; whether pacing gains anything was not tried" in found.verdict
    ended = with_agent(found, {"agent": {"text": "rank 1 raised X", "ended": True}}).verdict
    assert ended.startswith("rank 1 raised X; in the steps before, persistent slow rank 40% of the step; ")


def test_work_that_only_some_ranks_have_is_no_jitter_of_all() -> None:
    """50 ms (5 %), a reduction, 0.1 s on ranks 2 and 3 only, a barrier: their other compute is like their peers'."""
    rng, steps, ranks = np.random.default_rng(4), 60, 6
    first_TR = 0.05 * (1.0 + 0.05 * rng.standard_normal((steps, ranks)))
    after_TR = 0.0002 * rng.gamma(2.0, 0.5, (steps, ranks))
    after_TR[:, 2:4] += 0.1
    found = diagnose(phases_of((first_TR, "all_reduce", 0, 0.02), (after_TR, "barrier", 1, 0.002)))
    assert [cause.cause for cause in found.causes][:1] == [names.SLOW_RANK]
    assert found.causes[0].lost_s == pytest.approx(0.1, rel=0.05)
    assert "what comes between all_reduce and barrier takes ranks 2-3 100 ms a step" in found.causes[0].evidence
    assert "equal work" in found.causes[0].advice
    for jitter in (cause for cause in found.causes if cause.cause == names.AMPLIFICATION):
        assert jitter.lost_s < 0.1 * found.step_time_s
        assert "compute varies by 4" in jitter.evidence or "compute varies by 5" in jitter.evidence


def test_stalls_of_one_rank_name_it() -> None:
    compute_TR = 0.02 * (1.0 + 0.03 * np.random.default_rng(5).standard_normal((300, 3)))
    compute_TR[49::50, 1] += 3.0
    cause = diagnose(job_of(compute_TR, 0.005)).causes[0]
    assert (cause.cause, cause.ranks) == (names.STALLS, (1,))
    assert "longer than their like (at most 3 s), nearly all on rank 1" in cause.evidence
    compute_TR[24::50, 2] += 3.0
    assert "on any rank" in diagnose(job_of(compute_TR, 0.005)).causes[0].evidence


def test_collectives_that_ranks_begin_in_different_orders_are_a_circle_that_is_cut() -> None:
    """Rank 1 begins the second collective first, as a backend with several threads may."""
    plain = job_of(np.tile([1.0, 1.0, 2.0], (20, 1)))
    columns = {key: plain.column(key) for key in ("job", "rank", "iteration", "seq", "op", "group", "start_s", "end_s")}
    is_first = columns["op"] == "all_reduce"
    second = {key: column[is_first] for key, column in columns.items()} | {"op": ["broadcast"] * is_first.sum()}
    second["seq"] = np.full(is_first.sum(), 2)
    columns["seq"] = np.where(is_first & (columns["rank"] == 1), 3, columns["seq"])
    both = {key: np.concatenate([columns[key], second[key]]) for key in columns}
    trace = Trace.from_columns(both, TraceMetadata({"name": "plain"}, (), "test"))
    cells = read_matrix(trace)
    graph = build_graph(cells)
    assert sorted(graph.member_N.tolist()) == list(range(len(cells.op_N)))
    assert np.isfinite(replay(graph, own_durations(cells, graph))).all()
    assert "rank 2" in diagnose(trace).causes[0].advice


@given(
    seed=st.integers(0, 1 << 20),
    stages=st.integers(1, 4),
    replicas=st.integers(1, 3),
    micro_batches=st.integers(1, 6),
    causes=st.sampled_from([{}, {"jitter": 0.2}, {"data": 0.3, "slow": 1.5}, {"stage": 1.4, "stall": 0.3}]),
)
def test_the_replay_is_the_job(
    seed: int, stages: int, replicas: int, micro_batches: int, causes: dict[str, float]
) -> None:
    """Operation by operation, what another implementation of 1F1B does with the same durations."""
    job = PipelineJob(
        seed, steps=4, stages=stages, replicas=replicas, micro_batches=micro_batches, stall_rate=0.1, causes=causes
    )
    cells = read_matrix(job.trace())
    graph = build_graph(cells)
    own_NT = own_durations(cells, graph)
    # an order that holds by less than a thousandth of a step may be taken for a dependency
    np.testing.assert_allclose(replay(graph, own_NT), cells.step_s_T, rtol=3e-3)
    assert cells.step_s_T.mean() == pytest.approx(job.step_s(causes))


@pytest.mark.parametrize("cause", list(benchmark.ENGINE))
def test_the_engine_s_causes_are_named(cause: str) -> None:
    verdict, found = benchmark.judge(
        benchmark._sick(partial(benchmark.engine_case, np.random.default_rng(3), (cause,)))
    )
    assert verdict.named == verdict.truth == cause
    assert verdict.error <= benchmark.WITHIN
    may_help = cause in (names.CONTENTION, names.TENANT, names.INCAST)
    assert ("pacing may help" in found.verdict) == may_help
    assert ("no cause that delays act on; whether pacing gains anything was not tried" in found.verdict) == (
        not may_help
    )


@pytest.mark.parametrize("cause", list(benchmark.PIPELINE))
def test_a_pipeline_s_causes_are_named(cause: str) -> None:
    make = partial(benchmark.pipeline_case, np.random.default_rng(5), (cause,), flat=cause == names.LOCALITY)
    verdict, _ = benchmark.judge(benchmark._sick(make))
    assert verdict.named == cause
    assert verdict.error <= benchmark.WITHIN


def test_healthy_jobs_raise_no_alarm() -> None:
    for case in benchmark.healthy(6, 9):
        found = benchmark.judge(case)[1]
        assert not found.causes
        assert found.verdict.startswith(HEALTHY)


def test_too_little_evidence_is_said() -> None:
    few = diagnose(job_of(np.tile([1.0, 2.0], (4, 1))))
    assert few.verdict.startswith(INSUFFICIENT)
    assert not few.causes
    assert few.slowdown == pytest.approx(2.5 / 2.0), "what is arithmetic needs no evidence"
    silent = diagnose(job_of(np.tile([1.0, 2.0], (20, 1)), op=np.repeat(["load", "save"], 40), group=-1))
    assert silent.verdict.startswith(INSUFFICIENT)


def test_a_checkpoint_in_place_of_compute_is_told_apart_from_it() -> None:
    """A live trace names all that a rank does in a step with a checkpoint after it, compute included."""
    compute_TR = 1.0 + 0.001 * np.random.default_rng(2).standard_normal((60, 4))
    compute_TR[9::10, 0] += 3.0
    plain = job_of(compute_TR, 0.1)
    op = plain.column("op").astype(object)
    op[plain.isin("op", "compute") & (plain.column("rank") == 0) & (plain.column("iteration") % 10 == 9)] = "checkpoint"
    found = diagnose(job_of(compute_TR, 0.1, op=op.astype(str)))
    assert [c.cause for c in found.causes] == [names.CHECKPOINT]
    assert found.causes[0].lost_s == pytest.approx(0.3, rel=0.02)


def test_busy_hosts_are_no_tenant() -> None:
    """Small transfers that vary with some memory, as among hosts with other work, are no other job's."""
    rng = np.random.default_rng(3)
    course_T = signal.lfilter([1.0], [1.0, -0.4], rng.standard_normal(200))
    transfer_T1 = 0.015 * np.exp(0.3 * course_T)[:, None]
    found = diagnose(job_of(0.1 + 0.0002 * rng.standard_normal((200, 4)), transfer_T1))
    assert names.TENANT not in {c.cause for c in found.causes}


def test_a_tenant_of_another_period_is_one() -> None:
    """It comes by every seven steps or so: not alike at any distance, yet predicted by the last few steps."""
    rng = np.random.default_rng(3)
    phase_T = 2.0 * np.pi * np.cumsum(1.0 / 7.0 + 0.07 * rng.standard_normal(200))
    met_T = np.clip(0.5 + 0.5 * np.cos(phase_T) + 0.15 * rng.standard_normal(200), 0.0, 1.0)
    transfer_T1 = 0.2 * (1.0 + 0.6 * met_T)[:, None]
    away_T = np.log(transfer_T1[:, 0]) - np.log(transfer_T1).mean()
    assert max(away_T[lag:] @ away_T[:-lag] for lag in range(1, 64)) < 0.5 * (away_T @ away_T)
    found = diagnose(job_of(0.25 + 0.002 * rng.standard_normal((200, 4)), transfer_T1))
    assert found.causes[0].cause == names.TENANT
    assert found.causes[0].lost_s == pytest.approx(float(transfer_T1.mean() - transfer_T1.min()), rel=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"iteration": np.arange(80)}, "0 steps that all ranks have"),
        ({"job": np.repeat(["a", "b"], 40)}, r"job = None; allowed: one of \['a', 'b'\]"),
    ],
)
def test_what_is_no_job_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        diagnose(job_of(np.tile([1.0, 2.0], (20, 1)), **change))


def test_of_a_long_trace_only_blocks_are_read(tmp_path: Path) -> None:
    path = tmp_path / "long.parquet"
    job = PipelineJob(2, stages=1, micro_batches=1, replicas=8, steps=600, causes={"jitter": 0.01, "slow": 1.5})
    write_trace(job.trace(), path)
    found = read_inputs([path], max_rows=6000)
    whole, part = read_matrix(job.trace()), read_matrix(found.require_trace())
    assert whole.steps == 600
    assert part.steps * 8 * 3 <= 6000
    assert "blocks" in found.notes[0]
    blocks = np.split(part.iteration_T, np.flatnonzero(np.diff(part.iteration_T) > 1) + 1)
    assert (len(blocks), blocks[0][0], blocks[-1][-1]) == (4, 0, 599)
    assert part.step_s_T.mean() == pytest.approx(whole.step_s_T.mean(), rel=0.01)


@needs_traces
@pytest.mark.parametrize(("name", "slowdown"), [("AR", 1.973), ("SE", 1.537)])
def test_published_slowdowns(name: str, slowdown: float) -> None:
    found = diagnose_matrix(matrix_in(STRAGGLER_DIR / f"trace-{name}.parquet"))
    assert abs(found.replay_error) < 0.01
    assert found.slowdown == pytest.approx(slowdown, rel=1e-3)
    first = found.causes[0]
    if name == "AR":
        assert (first.cause, first.share > 0.95) == (names.SLOW_RANK, True)
        assert "find out why rank 0 took longer" in first.advice
    else:
        assert first.cause == names.DATA
        assert "sequence lengths" in first.advice


def test_what_a_rank_computes_before_one_bucket_is_not_what_it_does_before_another() -> None:
    """A second before the first all-reduce and ten milliseconds before the second, the same on every rank: with all
    compute as one kind, whoever has its own durations seems to hold everybody up."""
    first_TR = 1.0 + np.random.default_rng(0).normal(0.0, 0.001, (40, 4))
    phases = (first_TR, "all_reduce", 0, 0.5), (np.full((40, 4), 0.01), "all_reduce", 0, 0.05)
    cells = read_matrix(phases_of(*phases))
    found = diagnose_matrix(cells)
    assert len(np.unique(cells.kind_N)) == 4
    assert found.slowdown == pytest.approx(1.0, abs=0.003)
    assert not found.causes


@pytest.mark.parametrize(("last_s", "expected"), [((0.1, 0.05), False), ((0.1, 0.14), True)])
def test_a_worse_way_to_the_network_shows_in_every_bucket(last_s: tuple[float, float], expected: bool) -> None:
    """Two pairs reduce two buckets. On one GPU in turns each pair waited longer for one of them, and neither for both:
    that was taken for a bad cable."""
    rng, pair_R = np.random.default_rng(2), np.arange(4) // 2
    work_TR = 0.3 * (1.0 + 0.02 * rng.standard_normal((60, 4)))
    noise_TR = (1.0 + 0.02 * rng.standard_normal((60, 2)))[:, pair_R]
    first_TR, second_TR = (np.array([[0.05, 0.1], last_s])[pair_R, k] * noise_TR for k in (0, 1))
    buckets = (work_TR, "all_reduce", pair_R, first_TR), (None, "all_reduce", pair_R, second_TR)
    found = diagnose(phases_of(*buckets, (None, "barrier", 2, 0.0)))
    assert (names.LOCALITY in {cause.cause for cause in found.causes}) is expected, found.causes
