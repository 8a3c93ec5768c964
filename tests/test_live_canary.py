"""The canary: block schedule, Student's t, and verdicts that err no more often than they say."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from paceenv.core.errors import InputError
from paceenv.core.student_t import student_t_quantile, student_t_tail
from paceenv.live.decide.canary import (
    ACTIVE_HOLDOUT_EVERY,
    ALPHA,
    CLIP_MEDIANS,
    NEGLIGIBLE_DELAY_SHARE,
    PairedComparison,
    Schedule,
    shared_seed,
)

STEP_S = 0.2
SMALL: dict[str, Any] = {"block_iterations": 12, "settle_iterations": 2}


@pytest.mark.parametrize("degrees", [1, 15])
@pytest.mark.parametrize("tail", [0.025, 1e-9])
def test_quantiles_of_student_are_those_of_scipy(degrees: int, tail: float) -> None:
    t = student_t_quantile(tail, degrees)
    assert t == pytest.approx(stats.t.isf(tail, degrees), rel=1e-9, abs=1e-9)
    assert student_t_tail(t, degrees) == pytest.approx(tail, rel=1e-9)


@pytest.mark.parametrize(("tail", "degrees"), [(0.0, 3), (0.1, float("nan"))])
def test_what_is_no_tail_is_refused(tail: float, degrees: float) -> None:
    with pytest.raises(InputError, match="allowed"):
        student_t_quantile(tail, degrees)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "WORLD_SIZE": "8"}


def test_ranks_of_a_job_share_a_seed_and_other_jobs_have_another() -> None:
    seed = shared_seed(TORCHRUN)
    for key, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("TORCHELASTIC_RESTART_COUNT", "2"), ("HOSTNAME", "b")):
        assert shared_seed(TORCHRUN | {key: value}) == seed
    others = [TORCHRUN | x for x in ({"MASTER_PORT": "1"}, {"MASTER_ADDR": "node9"}, {"TORCHELASTIC_RUN_ID": "a"})]
    assert len({seed, *map(shared_seed, others)}) == 4
    named = TORCHRUN | {"SLURM_JOB_ID": "7"}
    assert shared_seed(named) == shared_seed(named | {"MASTER_ADDR": "localhost"})  # as rank 0 may know itself
    assert 0 <= shared_seed({}) < 2**64


@given(seed=st.integers(0, 2**64 - 1), first=st.integers(0, 300), every=st.integers(2, 12), block=st.integers(6, 80))
def test_a_schedule_pairs_its_blocks(seed: int, first: int, every: int, block: int) -> None:
    schedule = Schedule(seed, block_iterations=block, first_iteration=first, holdout_every=every)
    quiet = [schedule.slot(i) for i in range(first)]
    assert not any(slot.on or slot.counted or slot.pair >= 0 for slot in quiet)
    cycle, warm = every * block, first + 2 * block
    assert sum(schedule.slot(i).on for i in range(first, warm)) == block
    assert not any(schedule.slot(i).counted for i in range(first, warm))
    starts_on = 0
    for pair in range(8):
        slots = [schedule.slot(i) for i in range(warm + pair * cycle, warm + (pair + 1) * cycle)]
        assert sum(not s.on for s in slots) == block
        assert {s.pair for s in slots[: 2 * block]} == {pair}
        assert {s.on for s in slots[:block]} != {s.on for s in slots[block : 2 * block]}
        for half in (slots[:block], slots[block : 2 * block]):
            assert len({s.on for s in half}) == 1
            assert [s.counted for s in half] == [i >= block // 3 for i in range(block)]
        assert all(s.on and s.pair == -1 and not s.counted for s in slots[2 * block :])
        starts_on += slots[0].on
    assert starts_on == 4  # two of every four


def _noise(seed: int, iterations: int, sd: float, memory: float) -> np.ndarray:
    """Logarithm of step time over its level: AR(1) with standard deviation ``sd``."""
    draws = np.random.default_rng(seed).normal(0.0, sd * math.sqrt(1.0 - memory**2), iterations)
    draws[0] = sd
    for i in range(1, iterations):
        draws[i] += memory * draws[i - 1]
    return draws


def _judge(
    seed: int, pairs: int, gain: float, *, sd: float = 0.05, memory: float = 0.5, delay_s: float = 0.002, **of: Any
) -> PairedComparison:
    """A comparison that has followed a job whose mean step falls by ``gain`` where it is paced."""
    schedule = Schedule(seed, **SMALL)
    comparison, iterations = PairedComparison(schedule, **of), (2 * pairs + 2) * 12
    for i, noise in enumerate(_noise(seed, iterations, sd, memory).tolist()):
        on = schedule.slot(i).on
        comparison.add(i, STEP_S * math.exp(noise) * (1.0 - gain * on), delay_s * on)
    return comparison


@pytest.mark.parametrize("memory", [0.9])
def test_false_alarms_are_no_more_frequent_than_alpha(memory: float) -> None:
    """Looks at 4, 8 and 16 pairs and at the end, noise with a memory shorter, alike and longer than a block."""
    jobs = 100
    kinds = []
    for seed in range(jobs):
        comparison = _judge(seed, 18, 0.0, memory=memory)
        kinds += [comparison.verdict.kind, comparison.final().kind]
    alarms = sum(kind in ("helps", "hurts") for kind in kinds) / 2 / jobs
    assert alarms <= ALPHA + 2.0 * math.sqrt(ALPHA / jobs)


def test_a_trend_is_no_gain() -> None:
    for seed in range(20):
        schedule = Schedule(seed, **SMALL)
        comparison = PairedComparison(schedule)
        for i in range(12 * 18 + 1):
            comparison.add(i, STEP_S * math.exp(0.001 * i), 0.01)
        assert comparison.verdict.pairs == 8
        assert comparison.verdict.kind == "insufficient evidence"
        assert comparison.verdict.gain is not None
        assert comparison.verdict.gain.value == pytest.approx(0.0, abs=1e-9)


def test_a_gain_is_found_and_bracketed() -> None:
    verdicts = [_judge(seed, 16, 0.08).final() for seed in range(60)]
    assert sum(v.kind == "helps" for v in verdicts) >= 57
    covered = [0.08 in v.gain for v in verdicts if v.gain is not None]
    assert len(covered) == 60
    assert sum(covered) >= 55


def test_a_rank_that_is_never_delayed_has_no_help_to_report() -> None:
    """Even where the noise would leave it open; but not where the job gains, which others may bring about."""
    assert _judge(3, 4, 0.0, sd=0.05).final().kind == "insufficient evidence"
    quiet = _judge(3, 4, 0.0, sd=0.05, delay_s=0.5 * NEGLIGIBLE_DELAY_SHARE * STEP_S).final()
    assert quiet.kind == "does not help"
    assert "almost no delay" in quiet.text
    assert _judge(3, 8, 0.2, sd=0.05, delay_s=0.0).final().kind == "helps"
    assert _judge(3, 8, -0.2, sd=0.05, delay_s=0.0).final().kind == "hurts"


def test_before_four_pairs_there_is_no_evidence() -> None:
    verdict = _judge(0, 3, 0.5, sd=0.001).final()
    assert (verdict.kind, verdict.gain) == ("insufficient evidence", None)
    assert verdict.text == "insufficient evidence: 3 of at least 4 pairs of blocks"


@pytest.mark.parametrize("ticks", [1, 3, 30])
def test_steps_of_several_iterations_are_compared_and_weigh_as_many(ticks: int) -> None:
    schedule = Schedule(7, first_iteration=50)
    comparison, irregular = PairedComparison(schedule), iter(range(10**6))
    for i in range(ticks - 1, schedule.after(8) + ticks, ticks):
        if next(irregular) % (10 * 60 // ticks):  # one step in ten blocks is irregular
            comparison.add(i, ticks * STEP_S * (1.0 + 0.3 * schedule.slot(i - ticks + 1).on), 0.03, ticks)
    assert comparison.pairs >= 7
    assert comparison.verdict.kind == "hurts"
    assert comparison.verdict.gain is not None
    assert comparison.verdict.gain.value == pytest.approx(-0.3)  # no step across two blocks counts


def test_a_block_with_too_few_iterations_drops_its_pair() -> None:
    schedule = Schedule(0, **SMALL)
    comparison = PairedComparison(schedule)
    for i in range(24 * 6):
        if schedule.slot(i).pair != 2 or i % 12 < 6:  # of the 10 counted iterations of pair 2, 4 are regular
            comparison.add(i, STEP_S)
    assert comparison.final().pairs == 4


@given(odd=st.sampled_from([float("nan"), float("inf"), 0.0, -1.0]), at=st.integers(0, 200))
def test_what_is_no_step_time_is_left_out(odd: float, at: int) -> None:
    comparison = PairedComparison(Schedule(0, **SMALL))
    for i in range(24 * 9):
        comparison.add(i, odd if i == at else STEP_S)
    gain = comparison.final().gain
    assert gain is not None
    assert gain.value == pytest.approx(0.0, abs=1e-12)


def test_one_stall_does_not_decide_a_comparison() -> None:
    """It counts as a few medians; without the limit this comparison could say nothing for days."""
    schedule, comparison = Schedule(0, **SMALL), PairedComparison(Schedule(0, **SMALL))
    noise = _noise(0, 24 * 34, 0.01, 0.5)
    for i in range(24 * 34):
        step_s = 30.0 if i == 24 * 5 + 8 else STEP_S * math.exp(noise[i]) * (1.0 - 0.1 * schedule.slot(i).on)
        comparison.add(i, step_s, 0.01)
    assert comparison.verdict.pairs == 32
    assert comparison.verdict.kind == "helps"
    assert CLIP_MEDIANS < 150.0


def test_a_comparison_that_forgets_finds_out_when_pacing_no_longer_pays() -> None:
    schedule = Schedule(5, holdout_every=ACTIVE_HOLDOUT_EVERY, **SMALL)
    comparison, kinds = PairedComparison(schedule, memory_pairs=8), []
    cycle, noise = 12 * ACTIVE_HOLDOUT_EVERY, _noise(5, 24 * 20 * ACTIVE_HOLDOUT_EVERY, 0.01, 0.5)
    for i in range(24 + 16 * cycle):
        gain = 0.1 if i < 24 + 8 * cycle else -0.1
        if comparison.add(i, STEP_S * math.exp(noise[i]) * (1.0 - gain * schedule.slot(i).on), 0.01):
            kinds.append(comparison.verdict.kind)
    assert kinds == ["helps", "helps", "hurts", "hurts"]
