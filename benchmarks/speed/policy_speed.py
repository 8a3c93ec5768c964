"""A live rank: what a decision of the learned policy costs in numpy, and what every iteration costs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks._common import Report, Table, Target, command, measure, repeated
from paceenv.core import pacing, signals, timing
from paceenv.live.decide.pacer import RankPacer
from paceenv.policies.learned import Learned

HIDDEN, INTERVAL_ITERATIONS = 64, 20
CALLS = 200
TARGET_US = 100.0

ACTION, ACT, TORCH = "network in numpy", "network and decoding (Learned.act)", "the same network in torch"
ESTIMATE, PACER = "estimator and rules", "a whole iteration of a live rank"


def layers() -> list[tuple[Any, Any]]:
    random, sizes = np.random.default_rng(0), (signals.SIGNALS, HIDDEN, HIDDEN, 2)
    return [(random.normal(0.0, 0.3, (b, a)).astype(np.float32), np.zeros(b, np.float32)) for a, b in pairwise(sizes)]


def in_torch() -> torch.nn.Module:
    """The network of :func:`layers`."""
    modules: list[torch.nn.Module] = []
    for weight, bias in layers():
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
        linear.weight.data, linear.bias.data = torch.from_numpy(weight), torch.from_numpy(bias)
        modules += [linear, torch.nn.Tanh()]
    return torch.nn.Sequential(*modules[:-1])


def estimator() -> Callable[[], None]:
    """A call that takes in one iteration of one rank and decides its next delay, in plain Python."""
    (rank, tick), comm_R, wait_R = timing.new_state(), np.full(1, 0.05, np.float32), np.zeros(1, np.float32)
    settings_M2 = pacing.one_mechanism("slack", 0.02, 0.1)

    def run() -> None:
        comm_R[0] = 0.05
        timing.observe_step(tick, 0.25)
        timing.observe_ranks(rank, tick, comm_R, wait_R, False)
        timing.decide(rank, tick, 0, 1, settings_M2, 0.1)

    return run


def run() -> Report:
    """Microseconds of a decision and of an iteration on one live rank, in plain numpy."""
    torch.set_num_threads(1)
    policy, module = Learned(layers(), ("slack",)), in_torch()
    view = np.random.default_rng(1).uniform(-1.0, 1.0, (1, signals.SIGNALS)).astype(np.float32)
    tensor = torch.from_numpy(view)
    pacer = RankPacer(policy, cap_s=0.1, has_barrier=False, interval_iterations=INTERVAL_ITERATIONS)

    def forward() -> None:
        with torch.inference_mode():
            module(tensor)

    forward()
    if not np.allclose(policy.action(view), module(tensor).detach().numpy(), atol=1e-5):
        raise RuntimeError("the networks in numpy and in torch disagree")
    contestants: dict[str, Callable[[], object]] = {
        ACTION: lambda: policy.action(view),
        ACT: lambda: policy.act(view),
        TORCH: forward,
        ESTIMATE: estimator(),
        PACER: lambda: pacer.iteration(0.05, 0.0, 0.25),
    }
    times = measure({n: repeated(c, CALLS) for n, c in contestants.items()}, dict.fromkeys(contestants, CALLS), turns=9)
    us = {name: 1e6 * times.median_s(name) for name in contestants}
    data = {
        "us_per_decision": us[ACT],
        "us_per_decision_network_only": us[ACTION],
        "us_per_decision_torch": us[TORCH],
        "us_per_iteration_estimator": us[ESTIMATE],
        "us_per_iteration_live_rank": us[PACER],
    }
    per = {ESTIMATE: "every iteration", PACER: "every iteration, its share of a decision included"}
    rows = [
        (name, f"{value:.1f}", per.get(name, f"every {INTERVAL_ITERATIONS} iterations")) for name, value in us.items()
    ]
    target = Target(
        "a whole iteration of a live rank", f"below {TARGET_US:g} us", f"{us[PACER]:.0f} us", us[PACER] < TARGET_US
    )
    text = (
        f"One rank, one row, a network of {HIDDEN}x{HIDDEN}. A whole iteration of a live rank takes "
        f"{us[PACER] / 0.2e6:.3%} of a step of 0.2 s, on the processor and not on the accelerator."
    )
    table = Table("CPU microseconds on one rank", ("", "us", "how often"), rows)
    return Report("A live rank", text, data, (table,), (target,))


if __name__ == "__main__":
    command(run)
