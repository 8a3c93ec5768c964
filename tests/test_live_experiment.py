"""The experiment of a live job: verdicts that err no more often than they say, of one or more candidates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats
from test_live_control import STEP_S as JOB_STEP_S
from test_live_control import Job

from paceenv.core.student_t import student_t_quantile, student_t_tail
from paceenv.live.decide.blocks import ACTIVE, CANARY, BlockPlan, Plan
from paceenv.live.decide.experiment import ALPHA, NEGLIGIBLE_DELAY_SHARE, Comparison, Experiment
from paceenv.live.decide.live_policy import needed_policy

STEP_S, BLOCK = 0.2, 12
SMALL = BlockPlan(BLOCK, 2, 12)


@pytest.mark.parametrize("degrees", [1, 15])
@pytest.mark.parametrize("tail", [0.025, 1e-9])
def test_quantiles_of_student_are_those_of_scipy(degrees: int, tail: float) -> None:
    t = student_t_quantile(tail, degrees)
    assert t == pytest.approx(stats.t.isf(tail, degrees), rel=1e-9, abs=1e-9)
    assert student_t_tail(t, degrees) == pytest.approx(tail, rel=1e-9)


def _noise(seed: int, iterations: int, sd: float, memory: float) -> np.ndarray:
    """Logarithm of step time over its level: AR(1) with standard deviation ``sd``."""
    draws = np.random.default_rng(seed).normal(0.0, sd * math.sqrt(1.0 - memory**2), iterations)
    draws[0] = sd
    for i in range(1, iterations):
        draws[i] += memory * draws[i - 1]
    return draws


def _of(seed: int, every: int = CANARY) -> Experiment:
    return Experiment(["one"], Plan(seed, [SMALL], every=every))


def _compared(
    seed: int, pairs: int, gain: float, *, sd: float = 0.05, memory: float = 0.5, delay_s: float = 0.002, begin: int = 0
) -> Experiment:
    """An experiment that has followed a job whose mean step falls by ``gain`` where it is paced."""
    experiment = Experiment(["one"], Plan(seed, [SMALL], begin=begin))
    iterations = experiment.plan.after(pairs) + 1
    for i, noise in enumerate(_noise(seed, iterations, sd, memory).tolist()):
        on = experiment.plan.turn(i).arm is not None
        experiment.add(i, STEP_S * math.exp(noise) * (1.0 - gain * on), delay_s * on)
    return experiment


def _final(*given: Any, **more: Any) -> Any:
    experiment = _compared(*given, **more)
    experiment.final()
    return experiment.leading.verdict


def test_false_alarms_are_no_more_frequent_than_alpha() -> None:
    """Looks at 4, 8 and 16 pairs and at the end, noise with a memory of about a block."""
    jobs, kinds = 100, list[str]()
    for seed in range(jobs):
        experiment = _compared(seed, 18, 0.0, memory=0.9)
        kinds.append(experiment.leading.verdict.verdict)
        experiment.final()
        kinds.append(experiment.leading.verdict.verdict)
    alarms = sum(kind in ("helps", "hurts") for kind in kinds) / 2 / jobs
    assert alarms <= ALPHA + 2.0 * math.sqrt(ALPHA / jobs)


def test_a_gain_is_found_and_bracketed() -> None:
    verdicts = [_final(seed, 16, 0.08) for seed in range(60)]
    assert sum(v.verdict == "helps" for v in verdicts) >= 57
    covered = [v.low <= 0.08 <= v.high for v in verdicts if v.gain is not None]
    assert len(covered) == 60
    assert sum(covered) >= 55


def test_a_rank_that_is_never_delayed_has_no_help_to_report() -> None:
    """Even where the noise would leave it open; but not where the job gains, which others may bring about."""
    assert _final(3, 4, 0.0).verdict == "insufficient evidence"
    quiet = _final(3, 4, 0.0, delay_s=0.5 * NEGLIGIBLE_DELAY_SHARE * STEP_S)
    assert quiet.verdict == "does not help"
    assert "almost no delay" in quiet.text
    assert _final(3, 8, 0.2, delay_s=0.0).verdict == "helps"
    assert _final(3, 8, -0.2, delay_s=0.0).verdict == "hurts"


@pytest.mark.parametrize("ticks", [1, 3, 30])
def test_steps_of_several_iterations_are_compared_and_weigh_as_many(ticks: int) -> None:
    plan, irregular = Plan(7, [BlockPlan(60, 20, 60)], begin=50), iter(range(10**6))
    experiment = Experiment(["one"], plan)
    for i in range(ticks - 1, plan.after(8) + ticks, ticks):
        if next(irregular) % (10 * 60 // ticks):  # one step in ten blocks is irregular
            on = plan.turn(i - ticks + 1).arm is not None
            experiment.add(i, ticks * STEP_S * (1.0 + 0.3 * on), 0.03, ticks)
    assert experiment.candidates[0].pairs >= 7
    assert experiment.leading.verdict.verdict == "hurts"
    assert experiment.leading.verdict.gain == pytest.approx(-0.3)  # no step across two blocks counts


def test_a_block_with_too_few_iterations_drops_its_pair() -> None:
    experiment = _of(0)
    for i in range(experiment.plan.after(5)):
        pair = experiment.plan.turn(i).pair
        if pair is None or pair[0] != 2 or i % BLOCK < 6:  # of the 10 counted iterations of pair 2, 4 are regular
            experiment.add(i, STEP_S)
    experiment.final()
    assert experiment.leading.verdict.pairs == 4


def test_one_stall_does_not_decide_a_comparison() -> None:
    """It counts as a few medians; without the limit this comparison could say nothing for days."""
    experiment, noise = _of(0), _noise(0, 24 * 33, 0.01, 0.5)
    for i in range(24 * 33):
        on = experiment.plan.turn(i).arm is not None
        experiment.add(i, 30.0 if i == 24 * 5 + 8 else STEP_S * math.exp(noise[i]) * (1.0 - 0.1 * on), 0.01)
    assert experiment.leading.verdict.pairs == 32
    assert experiment.leading.verdict.verdict == "helps"


def test_a_snapshot_has_one_number_of_pairs() -> None:
    canary = _compared(3, 6, 0.08).as_dict()["canary"]
    assert canary["pairs"] == canary["candidates"][0]["pairs"] == 4, "of the evaluation, whose text has it too"


def test_a_comparison_that_forgets_finds_out_when_pacing_no_longer_pays() -> None:
    experiment, kinds = _of(5, ACTIVE), []
    experiment.candidates[0] = Comparison("one", memory_pairs=8)
    noise = _noise(5, experiment.plan.after(17), 0.01, 0.5)
    for i in range(experiment.plan.after(16)):
        gain = 0.1 if i < experiment.plan.after(8) else -0.1
        on = experiment.plan.turn(i).arm is not None
        evaluations = experiment.candidates[0].evaluations
        experiment.add(i, STEP_S * math.exp(noise[i]) * (1.0 - gain * on), 0.01)
        if experiment.candidates[0].evaluations != evaluations:
            kinds.append(experiment.leading.verdict.verdict)
    assert kinds == ["helps", "helps", "hurts", "hurts"]


# ------------------------------------------------------------------------------------------------ several candidates


def test_a_candidate_that_hurts_stops_and_the_others_go_on() -> None:
    random = np.random.default_rng(3)

    def step_s(delay_s: float) -> float:
        arm = found.plan.turn(len(job.delays_s) - 1).arm
        effect = (2.0, -1.0)[arm] if arm is not None else 0.0
        return JOB_STEP_S * (1.0 + random.normal(0.0, 0.005)) + effect * delay_s

    job = Job(needed_policy("canary", None, "static:stagger=0/0.4;static:stagger=0/0.3"), "canary", step_s, seed=1)
    found: Any = job.control.chosen
    job.run(found.plan.after(9))
    assert job.control.mode == "canary"
    assert found.out.keys() == {0}
    assert "hurts" in found.out[0]
    assert found.candidates[1].verdict.verdict == "helps"
    paced = [found.plan.turn(i).arm for i, delay_s in enumerate(job.delays_s) if delay_s and i > found.plan.after(6)]
    assert set(paced) == {1}
    assert job.control.snapshot()["canary"]["text"].startswith("static:stagger=0/0.3: helps")
