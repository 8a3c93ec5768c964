"""The engine: rank-iterations per CPU second on one core, by number of ranks, beside what else does that job."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks._common import Report, Table, Target, Times, command, figure, measure
from paceenv import pacing
from paceenv.cluster import Cluster, load_cluster
from paceenv.cluster.derive import derive
from paceenv.cluster.model import Fabric, Job, Noise
from paceenv.engine.simulator import Simulator, episode_keys

RANKS = (8, 64, 512, 4096, 100_000)
ITERATIONS = (100, 1000, 10_000)
CALL_RANK_ITERATIONS = 400_000
TARGET = 50e6

EVERYTHING, BARE = "everything on", "jitter only, pacing off"
PER_STEP, BULK, EVENTS = "NumPy, one call per step", "NumPy bulk, no state", "Python events"
COMPUTE_S, JITTER_CV = 0.2, 0.05

NOISE = Noise(
    jitter_cv=JITTER_CV,
    common_cv=0.01,
    persistent_cv=0.02,
    imbalance_cv=0.03,
    fail_slow_share=0.01,
    fail_slow_factor=1.5,
    drift_cv=0.02,
    stall_rate=1e-4,
    stall_mean_s=0.1,
)
"""Every kind of noise at once; ``imbalance_skew`` stays 1, a gamma."""


def cluster(ranks: int, noise: Noise) -> Cluster:
    """One job of ``ranks`` under one leaf switch: compute, then one all-reduce."""
    return Cluster(
        name="benchmark",
        job=Job(nodes=ranks, compute_s=COMPUTE_S, gradient_bytes=256e6),
        fabric=Fabric(nic_gbps=200, nodes_per_leaf=ranks, uplink_gbps=1600),
        noise=noise,
    )


def simulator(config: Cluster, environments: int = 1) -> Simulator:
    keys = episode_keys(list(range(environments)))
    return Simulator(derive(config, keys), keys)


def paceenv_job(ranks: int, noise: Noise, iterations: int, *, paced: bool) -> Callable[[], float]:
    """A call that runs the engine for ``iterations``; estimator always on, ``paced`` says whether the slack rule is."""
    one = simulator(cluster(ranks, noise))
    settings = pacing.one_mechanism("slack", 0.02, 0.1)[None, None] if paced else one.off()
    return lambda: float(one.run(settings, iterations).mean())


def numpy_per_step(ranks: int, iterations: int, after_s: float) -> Callable[[], float]:
    draw = np.random.default_rng(0)

    def run() -> float:
        step_T = np.empty(iterations)
        for t in range(iterations):
            step_T[t] = (COMPUTE_S * (1.0 + JITTER_CV * draw.standard_normal(ranks))).max() + after_s
        return float(step_T.mean())

    return run


def numpy_bulk(ranks: int, iterations: int, after_s: float) -> Callable[[], float]:
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


def race(ranks: int) -> Times:
    """CPU seconds per rank-iteration of every contestant, which take turns."""
    iterations, few = max(10, CALL_RANK_ITERATIONS // ranks), max(1, 20_000 // ranks)
    jobs = simulator(cluster(ranks, Noise())).batch.jobs
    after_s = float(jobs["ideal_step_s"][0] - jobs["compute_s"][0])
    contestants = {
        EVERYTHING: paceenv_job(ranks, NOISE, iterations, paced=True),
        BARE: paceenv_job(ranks, Noise(jitter_cv=JITTER_CV), iterations, paced=False),
        PER_STEP: numpy_per_step(ranks, iterations, after_s),
        BULK: numpy_bulk(ranks, iterations, after_s),
        EVENTS: python_events(ranks, few, after_s),
    }
    expected_s = contestants[BULK]()
    for name in (BARE, PER_STEP, EVENTS):
        mean_s = contestants[name]()
        if abs(mean_s / expected_s - 1.0) > 0.01:
            raise RuntimeError(f"{ranks} ranks: {name} has a mean step of {mean_s:.4f} s, {BULK} of {expected_s:.4f} s")
    return measure(
        contestants, {name: ranks * (few if name == EVENTS else iterations) for name in contestants}, turns=7
    )


def by_ranks() -> tuple[dict[str, dict[str, float]], dict[str, float], Table]:
    """Rates by contestant and number of ranks, and how many times faster than bulk NumPy the bare engine is."""
    names = (EVERYTHING, BARE, PER_STEP, BULK, EVENTS)
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    against_bulk, rows = {}, []
    for ranks in RANKS:
        times = race(ranks)
        for name in names:
            found[name][str(ranks)] = times.rate(name)
        against_bulk[str(ranks)] = times.speed_ratio(BARE, BULK)
        ratios = (figure(times.speed_ratio(BARE, other)) for other in (PER_STEP, BULK, EVENTS))
        rows.append((f"{ranks:,}", *(figure(times.rate(name)) for name in names), *ratios))
    columns = ("ranks", *names, "engine / per step", "engine / bulk", "engine / events")
    return found, against_bulk, Table("rank-iterations per CPU second", columns, rows)


def linearity() -> tuple[dict[str, Any], Table]:
    """CPU time per rank-iteration as ranks and as iterations grow, everything on, and the exponents that fit."""
    sizes = {f"{r:,} ranks": (r, max(10, 1_000_000 // r)) for r in RANKS if r >= 512}
    sizes |= {f"512 ranks, {t:,} iterations": (512, t) for t in ITERATIONS}
    calls = {name: paceenv_job(r, NOISE, t, paced=True) for name, (r, t) in sizes.items()}
    times = measure(calls, {name: r * t for name, (r, t) in sizes.items()}, turns=7)
    ns = {name: 1e9 * times.median_s(name) for name in sizes}
    in_ranks = {str(r): ns[name] for name, (r, _) in sizes.items() if "iterations" not in name}
    in_iterations = {str(t): ns[name] for name, (_, t) in sizes.items() if "iterations" in name}
    data = {
        "ns_per_rank_iteration_by_ranks": in_ranks,
        "ns_per_rank_iteration_by_iterations": in_iterations,
        "exponent_in_ranks": _exponent(in_ranks),
        "exponent_in_iterations": _exponent(in_iterations),
    }
    rows = [(name, f"{value:.1f}") for name, value in ns.items()]
    return data, Table("CPU nanoseconds per rank-iteration, everything on", ("job", "ns"), rows)


def _exponent(ns: dict[str, float]) -> float:
    """Slope of log(CPU time) over log(size), from the time per unit of size."""
    size = np.array([float(s) for s in ns])
    return float(np.polyfit(np.log(size), np.log(size * np.array(list(ns.values()))), 1)[0])


def shipped() -> tuple[dict[str, float], Table]:
    """CPU microseconds per iteration of configs that ship, with what they share with others."""
    calls, sizes = {}, {}
    for name in ("null-jitter", "two-jobs", "when-scaling-fails"):
        one, config = simulator(load_cluster(name)), load_cluster(name)
        settings = pacing.one_mechanism("slack", 0.02, 0.1)[None, None]
        calls[name] = partial(one.run, settings, 1000)
        sizes[name] = f"{config.job.ranks} ranks, groups: {config.job.groups}, tenants: {len(config.tenants)}"
    times = measure(calls)
    data = {name: 1e6 * times.median_s(name) / 1000 for name in calls}
    rows = [(name, sizes[name], f"{us:.2f}") for name, us in data.items()]
    return data, Table("CPU microseconds per iteration of configs that ship", ("cluster", "size", "us"), rows)


def run() -> Report:
    """Rank-iterations per CPU second of the engine on one core, by number of ranks."""
    found, against_bulk, rates_table = by_ranks()
    growth, growth_table = linearity()
    configs_us, configs_table = shipped()
    at_512 = found[EVERYTHING]["512"]
    in_ranks, in_iterations = growth["exponent_in_ranks"], growth["exponent_in_iterations"]
    data = {
        "rank_iterations_per_cpu_s": found[EVERYTHING],
        "others_rank_iterations_per_cpu_s": {name: found[name] for name in (BARE, PER_STEP, BULK, EVENTS)},
        "engine_over_numpy_bulk": against_bulk,
        "us_per_iteration": configs_us,
        **growth,
    }
    many = found[EVERYTHING]["100000"]
    targets = (
        Target(
            "512 ranks, everything on",
            f"at least {figure(TARGET)}/s",
            f"{figure(at_512)}/s",
            at_512 >= TARGET,
            "Absolute, so a busy neighbour on a shared core counts; the ratios to NumPy hardly feel it.",
        ),
        Target("100,000 ranks", "they run", f"{figure(many)}/s", many > 0.0),
        Target(
            "linear in iterations and in ranks",
            "exponents of at most 1.15",
            f"{in_iterations:.2f} in iterations, {in_ranks:.2f} in ranks",
            max(in_ranks, in_iterations) <= 1.15,
            "A rank's state is some twenty numbers, so thousands of ranks leave the caches one level after the other.",
        ),
    )
    text = (
        "One job: normal compute times (5 %), a barrier and one all-reduce. *Everything on* adds common, persistent, "
        "imbalance (gamma), fail-slow, drift and stall noise and the slack rule. *Jitter only* is the job that the "
        "others do, too, and is checked to give the same mean step; it keeps the estimator, which they lack: they "
        "compute step times and nothing else."
    )
    return Report("Engine", text, data, (rates_table, growth_table, configs_table), targets)


if __name__ == "__main__":
    command(run)
