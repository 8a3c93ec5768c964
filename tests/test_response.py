"""What a trace with probes tells of a job: known responses are found, as often as intervals say, and nulls too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from probed_jobs import levels, linear_job, simulated

from paceenv.calibration.response import NEGLIGIBLE, Effect, Response, measure_response
from paceenv.core.probing import HOLD_ITERATIONS, Plan
from paceenv.core.trace import Trace

Noise = Callable[[np.random.Generator, int], np.ndarray]
TRUTH = (1.0, -0.8, 0.0, -0.3)


def drifting(memory: float) -> Noise:
    """AR(1) of standard deviation 5 %."""

    def noise(random: np.random.Generator, number: int) -> np.ndarray:
        draws = random.normal(0.0, 0.05 * np.sqrt(1.0 - memory**2), number)
        draws[0] = random.normal(0.0, 0.05)
        for i in range(1, number):
            draws[i] += memory * draws[i - 1]
        return draws

    return noise


def within(effect: Effect, truth: float) -> bool:
    assert effect.lo is not None
    assert effect.hi is not None
    return effect.lo <= truth <= effect.hi


@pytest.mark.slow
def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    traces = 80
    found = [measure_response(linear_job(TRUTH, seed=s, iterations=600, noise=drifting(0.9))) for s in range(traces)]
    least = 0.95 - 2.5 * np.sqrt(0.05 * 0.95 / traces)
    for unit, truth in enumerate(TRUTH):
        told = [r.units[unit].step for r in found if r.units[unit].step.value is not None]
        assert len(told) > 0.9 * traces
        assert np.mean([within(effect, truth) for effect in told]) >= least
    assert np.mean([within(r.overall, sum(TRUTH)) for r in found]) >= least
    assert np.mean([within(r.after, 0.0) for r in found]) >= least


@pytest.mark.slow
def test_nothing_is_said_to_help_that_does_not() -> None:
    texts = [measure_response(linear_job((0.2, 0.0, 0.3, 0.0), seed=s, iterations=500)).text for s in range(80)]
    assert sum("shorten" in text for text in texts) <= 0.05 * 80 + 2.5 * np.sqrt(0.05 * 80)


def test_a_machine_that_oversleeps_when_it_is_slow_anyway_does_not_pass_for_a_cost() -> None:
    """The amounts go with the noise, the draws do not: without them the first response would be far too high."""
    traces = [linear_job((0.0, 0.0), seed=s, iterations=1500, noise=drifting(0.5), oversleep=8.0) for s in range(12)]
    biased = []
    for trace in traces:
        paced, rank0 = trace.isin("op", "pace"), trace.column("rank") == 0
        start_s, end_s, iteration = (trace.column(name) for name in ("start_s", "end_s", "iteration"))
        delay_s_T = np.zeros(1500)
        delay_s_T[iteration[paced & rank0]] = (end_s - start_s)[paced & rank0]
        barrier = trace.isin("op", "barrier") & rank0
        step_s_T = np.diff(end_s[barrier], prepend=0.0)
        biased.append(np.polyfit(delay_s_T[delay_s_T > 0.0], step_s_T[delay_s_T > 0.0], 1)[0])
    assert np.mean(biased) > 0.5
    found = [measure_response(trace).units[0].step.value or 0.0 for trace in traces]
    assert abs(np.mean(found)) < 3.0 * np.std(found) / np.sqrt(len(found))


def test_a_clear_response_is_said_in_a_sentence() -> None:
    quiet: Noise = lambda random, n: random.normal(0.0, 0.01, n)  # noqa: E731
    response = measure_response(linear_job((0.9, -0.8, 0.0), seed=2, iterations=1500, noise=quiet))
    assert response.text.startswith("delaying group 1 shortens the step: -0.8")
    assert [unit.step.verdict for unit in response.units] == ["lengthens", "shortens", "no effect"]
    assert [unit.ranks for unit in response.units] == [(0, 1), (2, 3), (4, 5)]
    assert response.units[0].mean_delay_s == pytest.approx(0.00625, rel=0.15)
    assert response.mean_step_s == pytest.approx(0.2, rel=0.02)
    costs = measure_response(linear_job((0.4, 0.4, 0.4), seed=3, iterations=1500, noise=quiet))
    assert costs.text.startswith("delays cost: +1.")
    assert costs.cost_share is not None
    assert 0.0 < costs.cost_share < 0.02
    nothing = measure_response(linear_job((0.0, 0.0), seed=4, iterations=3000, noise=quiet))
    assert nothing.text.startswith("no effect: ")
    assert nothing.overall.hi is not None
    assert nothing.overall.hi < NEGLIGIBLE


def test_what_comes_after_a_hold_is_told_apart() -> None:
    quiet: Noise = lambda random, n: random.normal(0.0, 0.01, n)  # noqa: E731
    found = [
        measure_response(linear_job((0.5, 0.5), seed=s, iterations=1000, noise=quiet, after=0.6)) for s in range(20)
    ]
    assert all(response.after.verdict == "lengthens" for response in found)
    assert sum(within(response.after, 0.6) for response in found) >= 17
    assert sum(within(response.overall, 1.0) for response in found) >= 17


def test_holds_in_which_one_goes_first_are_no_part_of_the_response() -> None:
    """In these, delays of a whole job do not add up; here every step of such a hold is thrice as long."""
    plan = Plan(4, 0.01, 50)
    head_start_T = np.array([plan.has_head_start(i, "group 1", 4) for i in range(800)])
    plain, longer = (
        measure_response(linear_job(TRUTH, plan=plan, noise=lambda r, n, by=by: r.normal(0.0, 0.01, n) + by))
        for by in (0.0, 2.0 * head_start_T)
    )
    assert 0.15 * 800 < head_start_T.sum() < 0.3 * 800
    for one, other in zip(longer.units, plain.units, strict=True):
        assert one.step.value == pytest.approx(other.step.value, rel=1e-6)
        assert one.step.se == pytest.approx(other.step.se, rel=1e-6)
    assert longer.holds == plain.holds < 0.85 * 750 / HOLD_ITERATIONS
    assert longer.iterations == plain.iterations > 700
    assert longer.cost_share is not None
    assert longer.cost_share == pytest.approx(2.0 * head_start_T[50:].mean(), abs=0.05)  # but of what it cost


def test_a_head_start_shortens_a_collective() -> None:
    response = measure_response(linear_job((0.0,) * 3, seed=5, collective=(-0.4, -0.2)))
    assert [one.ranks for one in response.collectives] == [(0, 1), (2, 3), (4, 5)]
    for one in response.collectives:
        assert one.own.value == pytest.approx(-0.4, abs=1e-6)
        assert one.others.value == pytest.approx(-0.2, abs=1e-6)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_simulator_s_contention_is_found(seed: int, tmp_path: Path) -> None:
    plan, iterations = Plan(seed, 0.01, 20), 1500

    def probes(ranks: int, per_group: int) -> np.ndarray:
        return plan.probe_s * levels(plan, iterations, ranks, per_group)

    trace, step_s_T = simulated("unequal-slack", probes, tmp_path / "a.parquet", seed=seed, plan=plan)
    response = measure_response(trace)
    assert response.mean_step_s == pytest.approx(step_s_T[50:].mean(), rel=0.01)
    critical = max(response.units, key=lambda unit: unit.step.value or 0.0)
    assert critical.step.verdict == "lengthens"
    assert sum(unit.step.verdict == "shortens" for unit in response.units) >= 2
    assert "shortens the step" in response.text
    assert len(response.collectives) == len(response.units)
    for one in response.collectives:
        assert one.others.verdict == "shortens"  # they share the uplink

    alike, _ = simulated("equal-slack", probes, tmp_path / "b.parquet", seed=seed, plan=plan)
    null = measure_response(alike)
    assert null.text.startswith("delays cost: ")
    assert not any(unit.step.verdict == "shortens" for unit in null.units)


def test_ranks_by_themselves_respond_as_without_chance(tmp_path: Path) -> None:
    """Where one group has all ranks each is probed alone; the truth is the same noise with and without one delay."""
    plan = Plan(9, 0.01, 20)

    def probes(ranks: int, per_group: int) -> np.ndarray:
        return plan.probe_s * levels(plan, 3000, ranks, per_group)

    def steps_s(rank: int, delay_s: float) -> np.ndarray:
        def alone(ranks: int, _: int) -> np.ndarray:
            return np.where(np.arange(ranks) == rank, delay_s, 0.0) * np.ones((3000, 1))

        return simulated("null-jitter", alone, tmp_path / "b.parquet", seed=1)[1]

    trace, _ = simulated("null-jitter", probes, tmp_path / "a.parquet", seed=1, plan=plan)
    response = measure_response(trace)
    assert len(response.units) == 8
    assert response.text.startswith("delays cost: ")
    without_s = steps_s(0, 0.0).mean()
    truth = [float(steps_s(rank, 0.00625).mean() - without_s) / 0.00625 for rank in range(8)]
    assert sum(within(unit.step, true) for unit, true in zip(response.units, truth, strict=True)) >= 7
    assert within(response.overall, sum(truth))


def _text(trace: Trace) -> str:
    response = measure_response(trace)
    assert response.overall.value is None
    assert {effect.verdict for effect in (response.overall, response.after)} == {"not identified"}
    return response.text


def _of_two_jobs(trace: Trace) -> Trace:
    columns = {name: trace.column(name) for name in trace.table.column_names}
    columns["job"] = np.where(trace.column("rank") < 4, "a", "b")
    return Trace.from_columns(columns, trace.metadata)


def test_what_a_trace_cannot_tell_it_says() -> None:
    assert "cannot be identified from this trace: it is not of a run in mode probe" in _text(
        linear_job(TRUTH, with_plan=False)
    )
    assert "no probe was taken" in _text(linear_job(TRUTH, plan=Plan(0, 0.01, 10**6)))
    assert "several jobs" in _text(_of_two_jobs(linear_job(TRUTH)))
    assert "at least 40 are needed" in _text(linear_job(TRUTH, iterations=200))
    one = linear_job((0.0, 0.0), iterations=400)
    noisy = measure_response(linear_job((0.0, 0.0), iterations=400, noise=lambda r, n: 0.3 * r.normal(size=n)))
    assert "cannot be identified from this trace: " in noisy.text
    assert "iterations instead of" in noisy.text
    many = measure_response(linear_job((0.0,) * 30, iterations=400))
    assert all("at least 4 for each" in unit.step.text for unit in many.units)
    assert many.overall.value is not None
    assert measure_response(one).overall.value is not None


def test_checkpoints_are_left_out() -> None:
    trace = linear_job((0.0, 0.0), iterations=800)
    op, iteration = trace.column("op"), trace.column("iteration")
    op[(op == "compute") & (iteration % 10 == 0)] = "checkpoint"
    columns = {name: trace.column(name) for name in trace.table.column_names} | {"op": op}
    without = measure_response(Trace.from_columns(columns, trace.metadata))
    assert without.iterations == pytest.approx(0.9 * measure_response(trace).iterations, rel=0.02)


def test_a_response_is_plain_data() -> None:
    response: Response = measure_response(linear_job((0.5, 0.0), iterations=600))
    plain = json.loads(json.dumps(response.to_json(), allow_nan=False))
    assert plain["units"][0]["step"]["value"] == response.units[0].step.value
    assert plain["text"] == response.text
    nothing = json.dumps(measure_response(linear_job(TRUTH, with_plan=False)).to_json(), allow_nan=False)
    assert json.loads(nothing)["overall"]["value"] is None


def test_a_job_without_a_payload_has_no_collectives_to_tell_of() -> None:
    trace = linear_job((0.5, 0.5), iterations=600, per_group=1)
    op = trace.column("op")
    op[op == "all_reduce"] = "send"
    columns = {name: trace.column(name) for name in trace.table.column_names} | {"op": op}
    response = measure_response(Trace.from_columns(columns, trace.metadata))
    assert response.collectives == ()
    assert [unit.unit for unit in response.units] == ["rank 0", "rank 1"]
