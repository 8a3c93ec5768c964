"""What the live agent's control costs on the host: a guarded decision, and an iteration's share of canary and guard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, pairwise
from typing import Any

import numpy as np

from benchmarks._common import Report, Table, Target, command, measure, repeated
from paceenv.core import pacing, signals
from paceenv.core.limits import Limits
from paceenv.core.student_t import student_t_quantile
from paceenv.live.decide.canary import PairedComparison, Schedule
from paceenv.live.decide.guard import Guard, GuardedPolicy
from paceenv.policies.learned import Learned

HIDDEN, CALLS = 64, 200
TARGET_US = 20.0
ONE, EVERY = ("slack",), pacing.MECHANISMS
DECIDE_ONE, DECIDE_EVERY = "a decision, one mechanism", f"a decision, all {len(EVERY)} mechanisms"
GUARDED, LIMITED = "a guarded decision, one mechanism", "the limits on a delay (Guard.allowed_s)"
COMPARED, LOOK = "canary: schedule and comparison", "canary: a look (Student's t)"
PER = {
    DECIDE_ONE: "every 20 iterations",
    DECIDE_EVERY: "every 20 iterations",
    GUARDED: "every 20 iterations",
    LIMITED: "every iteration",
    COMPARED: "every iteration",
    LOOK: "after 4, 8, 16, ... pairs of blocks",
}


def learned(mechanisms: Sequence[str]) -> Learned:
    """A network of the usual size with drawn weights."""
    random, sizes = np.random.default_rng(0), (signals.SIGNALS, HIDDEN, HIDDEN, 2 * len(mechanisms))
    layers: list[tuple[Any, Any]] = [
        (random.normal(0.0, 0.3, (b, a)).astype(np.float32), np.zeros(b, np.float32)) for a, b in pairwise(sizes)
    ]
    return Learned(layers, mechanisms)


def contestants() -> dict[str, Callable[[], object]]:
    view = np.random.default_rng(1).uniform(-1.0, 1.0, (1, signals.SIGNALS)).astype(np.float32)
    one, every = learned(ONE), learned(EVERY)
    guarded = GuardedPolicy(one, calibrated_range=dict.fromkeys(signals.NAMES, (-1.0, 1.0)))
    guard, comparison, iteration = Guard(Limits()), PairedComparison(Schedule(0)), count()
    return {
        DECIDE_ONE: lambda: one.act(view),
        DECIDE_EVERY: lambda: every.act(view),
        GUARDED: lambda: guarded.act(view),
        LIMITED: lambda: guard.allowed_s(0.01, iteration=1000, now_s=0.0, step_s=0.2, slack_s=0.02),
        COMPARED: lambda: comparison.add(next(iteration), 0.2, 0.01),
        LOOK: lambda: student_t_quantile(0.00625, 7.0),
    }


def run() -> Report:
    """Microseconds of a policy's decision, with and without its guard, and of canary and limits at every iteration."""
    timed = contestants()
    times = measure({n: repeated(f, CALLS) for n, f in timed.items()}, dict.fromkeys(timed, CALLS), turns=9)
    us = {name: 1e6 * times.median_s(name) for name in timed}
    data = {
        "us_per_decision_one_mechanism": us[DECIDE_ONE],
        "us_per_decision_every_mechanism": us[DECIDE_EVERY],
        "us_per_guarded_decision": us[GUARDED],
        "us_per_limit": us[LIMITED],
        "us_per_comparison": us[COMPARED],
        "us_per_look": us[LOOK],
    }
    targets = [
        Target(name, f"at most {TARGET_US:g} us", f"{us[name]:.1f} us", us[name] <= TARGET_US)
        for name in (DECIDE_ONE, DECIDE_EVERY)
    ]
    text = (
        f"One rank, one row, a network of {HIDDEN}x{HIDDEN}. A decision is the network and the decoding of its action. "
        "The guard checks the view against the calibrated range, the policy's answer, and the time it took."
    )
    rows = [(name, f"{value:.1f}", PER[name]) for name, value in us.items()]
    table = Table("CPU microseconds on one rank", ("", "us", "how often"), rows)
    return Report("Control of a live rank", text, data, (table,), targets)


if __name__ == "__main__":
    command(run)
