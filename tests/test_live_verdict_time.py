"""How long until a verdict: what is promised before the run, and what a comparison that is not done needs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from paceenv.live.decide.canary import ALPHA, PairedComparison, Schedule
from paceenv.live.decide.verdict_time import EFFECTS, MOST_PAIRS, forecast, pairs_for

STEP_S, BLOCK, SETTLE = 0.2, 12, 2


def compared(seed: int, pairs: int, gain: float, sd: float) -> tuple[Schedule, PairedComparison]:
    schedule = Schedule(seed, block_iterations=BLOCK, settle_iterations=SETTLE)
    comparison, random = PairedComparison(schedule), np.random.default_rng(seed)
    for i in range(schedule.after(pairs) + 1):
        step_s = STEP_S * math.exp(random.normal(0.0, sd)) * (1.0 - gain * schedule.slot(i).on)
        comparison.add(i, step_s, 0.01 * schedule.slot(i).on)
    return schedule, comparison


@pytest.mark.parametrize("noise", [0.001, 0.05])
def test_the_pairs_are_those_whose_interval_is_as_narrow(noise: float) -> None:
    found = pairs_for(0.02, noise)
    assert found is not None

    def half(pairs: int) -> float:
        share = ALPHA / 2.0 ** (math.log2(pairs) - 1.0)
        return float(stats.t.isf(0.5 * share, pairs - 1) * noise / math.sqrt(pairs))

    assert half(found) <= 0.02
    assert found == 4 or half(found // 2) > 0.02
    assert pairs_for(0.02, noise, after=found) == 2 * found


def test_what_nobody_waits_for_is_not_promised() -> None:
    assert pairs_for(1e-6, 1.0) is None
    assert (pairs_for(0.0101, 0.0) or 0) == 4
    assert (pairs_for(0.01, 0.1) or 0) <= MOST_PAIRS


def test_before_the_first_pair_the_noise_is_that_of_the_quiet_start() -> None:
    schedule = Schedule(0, block_iterations=BLOCK, settle_iterations=SETTLE, first_iteration=100)
    comparison, steps_s = PairedComparison(schedule), np.random.default_rng(0).normal(STEP_S, 0.01, 100).tolist()
    found = forecast(schedule, comparison, steps_s)
    assert found is not None
    assert not found.measured
    assert found.pair_noise == pytest.approx(0.05 * math.sqrt(2.0 / 10), rel=0.2)
    text = found.text(STEP_S)
    assert "1 %: 64 pairs, 1,560 iterations, about 5 min" in text
    assert "estimated from steps without pacing" in text
    assert found.more_text(STEP_S).startswith(
        "0 pairs so far, needs about 64 more pairs, 1,660 iterations, about 6 min"
    )
    assert forecast(schedule, comparison, []) is None
    several = forecast(schedule, comparison, steps_s, ticks=4)  # a block holds a quarter of the steps
    assert several is not None
    assert several.pair_noise == pytest.approx(2.0 * found.pair_noise)


@pytest.mark.parametrize("effect", [0.02, 0.05])
def test_the_promise_is_kept(effect: float) -> None:
    """Of jobs with that effect and noise most have their verdict after that many pairs, and few after a quarter."""
    schedule, comparison = compared(0, 8, 0.0, 0.03)
    found = forecast(schedule, comparison, [])
    assert found is not None
    assert found.measured
    pairs = found.pairs[EFFECTS.index(effect)]
    assert pairs is not None
    verdicts = [compared(seed, pairs, effect, 0.03)[1].verdict.kind for seed in range(20)]
    assert verdicts.count("helps") >= 10
    assert found.iterations[EFFECTS.index(effect)] == 2 * BLOCK * (1 + pairs)


def test_insufficient_evidence_says_how_much_is_missing() -> None:
    schedule, comparison = compared(3, 4, 0.03, 0.05)
    assert comparison.verdict.kind == "insufficient evidence"
    found = forecast(schedule, comparison, [])
    assert found is not None
    assert found.more_pairs is not None
    assert found.more_pairs + 4 in (8, 16, 32, 64, 128, 256)
    assert found.more_iterations == (found.more_pairs * 2 + 2) * BLOCK  # from iteration 0: with the warm-up
    assert found.more_text(STEP_S).startswith(f"4 pairs so far, needs about {found.more_pairs} more pairs, ")
    least, _, most = found.pairs
    assert least is None or least >= (most or 0)
