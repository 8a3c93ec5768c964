"""Other simulators of a barrier job, for ``benchmarks.speed.engine_speed``: NumPy, Python events, SimPy, SimGrid.

Each function makes a call that simulates the job once and returns the mean step in seconds.

Args (the same for all):
    ranks: how many compute, each for a normally distributed time, and then wait for the last.
    iterations: length of the job.
    after_s: time that all take together after the last has arrived, in seconds.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks._common import Elsewhere
from benchmarks.speed._simgrid import FLOW_BPS, ask

COMPUTE_S, JITTER_CV = 0.2, 0.05


def numpy_per_step(ranks: int, iterations: int, after_s: float) -> Callable[[], float]:
    """One NumPy call per step."""
    draw = np.random.default_rng(0)

    def run() -> float:
        step_T = np.empty(iterations)
        for t in range(iterations):
            step_T[t] = (COMPUTE_S * (1.0 + JITTER_CV * draw.standard_normal(ranks))).max() + after_s
        return float(step_T.mean())

    return run


def numpy_bulk(ranks: int, iterations: int, after_s: float) -> Callable[[], float]:
    """All steps in one NumPy call."""
    draw = np.random.default_rng(0)

    def run() -> float:
        compute_TR = COMPUTE_S * (1.0 + JITTER_CV * draw.standard_normal((iterations, ranks)))
        return float((compute_TR.max(axis=1) + after_s).mean())

    return run


def python_events(ranks: int, iterations: int, after_s: float) -> Callable[[], float]:
    """The same job as a discrete-event simulation in plain Python: a heap of events, one for every arrival."""
    draw = random.Random(0)

    def run() -> float:
        now_s, queue = 0.0, [(COMPUTE_S * (1.0 + JITTER_CV * draw.gauss(0.0, 1.0)), r) for r in range(ranks)]
        heapq.heapify(queue)
        for t in range(iterations):
            arrived = 0
            while arrived < ranks:
                now_s, _ = heapq.heappop(queue)
                arrived += 1
            now_s += after_s
            if t + 1 < iterations:
                for r in range(ranks):
                    heapq.heappush(queue, (now_s + COMPUTE_S * (1.0 + JITTER_CV * draw.gauss(0.0, 1.0)), r))
        return now_s / iterations

    return run


def simpy_processes(ranks: int, iterations: int, after_s: float) -> Callable[[], float]:
    """The same job in SimPy: one process a rank, and an event that ends the step for all of them."""
    import simpy  # not needed by the others

    draw = random.Random(0)

    def run() -> float:
        env = simpy.Environment()
        arrived, step_end = 0, env.event()

        def rank() -> Any:
            nonlocal arrived, step_end
            for _ in range(iterations):
                yield env.timeout(COMPUTE_S * (1.0 + JITTER_CV * draw.gauss(0.0, 1.0)))
                arrived += 1
                if arrived < ranks:
                    yield step_end
                else:
                    yield env.timeout(after_s)
                    arrived, ended, step_end = 0, step_end, env.event()
                    ended.succeed()

        for _ in range(ranks):
            env.process(rank())
        env.run()
        return float(env.now) / iterations

    return run


def simgrid_actors(ranks: int, iterations: int, after_s: float) -> Callable[[], Elsewhere]:
    """The same job in SimGrid: one actor a rank, one flow that takes ``after_s``.

    The first step, in which SimGrid makes its actors' stacks, is run beyond the ``iterations`` and not counted.
    """
    job = {
        "ranks": ranks,
        "groups": 1,
        "compute_s": {"mean_s": COMPUTE_S, "cv": JITTER_CV, "seed": 0, "iterations": iterations + 1},
        "flow": {"bytes": after_s * FLOW_BPS, "Bps": FLOW_BPS, "after_s": 0.0},
        "uplink_Bps": 0.0,
        "barrier_s": 0.0,
        "tenants": [],
    }

    def run() -> Elsewhere:
        step_T, cpu_s = ask(job)
        return Elsewhere(float(step_T.mean()), cpu_s)

    return run
