"""The engine: rank-iterations per CPU second by number of ranks, beside what else does that job; memory and threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks._common import NOISE, Elsewhere, Report, Table, Target, Times, command, figure, measure
from benchmarks.speed import _simgrid, contestants
from benchmarks.speed.contestants import COMPUTE_S, JITTER_CV
from paceenv.core import pacing
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.environment import Noise, Tenant
from paceenv.sim.cluster.fabric import Fabric
from paceenv.sim.cluster.job import Job
from paceenv.sim.engine.simulator import Simulator, episode_keys

RANKS = (8, 64, 512, 4096, 100_000)
ITERATIONS = (100, 1000, 10_000)
CALL_RANK_ITERATIONS = 400_000
EVENT_RANK_ITERATIONS = {"Python events": 20_000, "SimPy": 20_000, "SimGrid": 100_000}
"""How much of the job a call of what is slow does."""
TARGET, SHARED_TARGET, THREADS_TARGET, STATE_TARGET_BYTES = 100e6, 20e6, 1.8, 64

EVERYTHING, BARE = "everything on", "jitter only, pacing off"
PER_STEP, BULK = "NumPy, one call per step", "NumPy bulk, no state"
EVENTS, SIMPY, SIMGRID = EVENT_RANK_ITERATIONS
MAX_RANKS = {"SimGrid": 4096}
"""Beyond that a contestant takes too long."""
SHARED_RANKS, SHARED = 512, "8 groups, 4 tenants"


def cluster(ranks: int, noise: Noise) -> Cluster:
    """One job of ``ranks`` under one leaf switch: compute, then one all-reduce."""
    return Cluster(
        name="benchmark",
        job=Job(nodes=ranks, compute_s=COMPUTE_S, gradient_bytes=256e6),
        fabric=Fabric(nic_gbps=200, nodes_per_leaf=ranks, uplink_gbps=1600),
        noise=noise,
    )


def shared_cluster(ranks: int, groups: int, tenants: int) -> Cluster:
    """One job in groups whose collectives share an uplink with other jobs' transfers, every noise on.

    Args:
        ranks: of the job.
        groups: of equal size.
        tenants: number of other jobs.
    """
    return Cluster(
        name="benchmark",
        job=Job(nodes=ranks, nodes_per_group=ranks // groups, barrier=True, compute_s=COMPUTE_S, gradient_bytes=256e6),
        fabric=Fabric(nic_gbps=200, nodes_per_leaf=8, uplink_gbps=1600),
        noise=NOISE,
        tenants=[Tenant(period_ratio=0.6 + 0.3 * k, comm_share=0.3, rate_share=0.5, ranks=8) for k in range(tenants)],
    )


def simulator(config: Cluster, environments: int = 1, threads: int = 1) -> Simulator:
    """A simulator of a cluster, seeds from 0.

    Args:
        config: the cluster.
        environments: number of seeds.
        threads: most threads that share the batch.
    """
    keys = episode_keys(list(range(environments)))
    return Simulator(derive(config, keys), keys, threads)


def paceenv_job(ranks: int, noise: Noise, iterations: int, *, paced: bool) -> Callable[[], float]:
    """A call that runs the engine, with the estimator on.

    Args:
        ranks: of the job.
        noise: of the job.
        iterations: steps in a call.
        paced: whether the slack rule is on.
    """
    one = simulator(cluster(ranks, noise))
    settings = pacing.one_mechanism("slack", 0.02, 0.1)[None, None] if paced else one.off()
    return lambda: float(one.run(settings, iterations).mean())


def result(returned: float | Elsewhere) -> float:
    """What a contestant found, wherever it worked."""
    return returned.result if isinstance(returned, Elsewhere) else returned


def absent() -> dict[str, str]:
    """Which of the other simulators cannot take part, and why, in one line each."""
    simpy_why = "" if find_spec("simpy") else "SimPy is not installed; `make bench-setup` installs it"
    return {name: why for name, why in ((SIMPY, simpy_why), (SIMGRID, _simgrid.missing())) if why}


def race(ranks: int, names: Sequence[str]) -> Times:
    """CPU seconds per rank-iteration of the contestants ``names``, which take turns."""
    iterations = {name: max(10, CALL_RANK_ITERATIONS // ranks) for name in names}
    iterations |= {name: max(2, n // ranks) for name, n in EVENT_RANK_ITERATIONS.items()}
    jobs = simulator(cluster(ranks, Noise())).batch.jobs
    after_s = float(jobs["ideal_step_s"][0] - jobs["compute_s"][0])
    make: dict[str, Callable[[int], Callable[[], float | Elsewhere]]] = {
        EVERYTHING: lambda t: paceenv_job(ranks, NOISE, t, paced=True),
        BARE: lambda t: paceenv_job(ranks, Noise(jitter_cv=JITTER_CV), t, paced=False),
        PER_STEP: lambda t: contestants.numpy_per_step(ranks, t, after_s),
        BULK: lambda t: contestants.numpy_bulk(ranks, t, after_s),
        EVENTS: lambda t: contestants.python_events(ranks, t, after_s),
        SIMPY: lambda t: contestants.simpy_processes(ranks, t, after_s),
        SIMGRID: lambda t: contestants.simgrid_actors(ranks, t, after_s),
    }
    racers = {name: make[name](iterations[name]) for name in names}
    expected_s = result(racers[BULK]())
    for name in names:
        mean_s = result(racers[name]())
        if name != EVERYTHING and abs(mean_s / expected_s - 1.0) > 0.01:
            raise RuntimeError(f"{ranks} ranks: {name} has a mean step of {mean_s:.4f} s, {BULK} of {expected_s:.4f} s")
    return measure(racers, {name: ranks * iterations[name] for name in names}, turns=7)


def by_ranks() -> tuple[dict[str, dict[str, float]], dict[str, float], tuple[Table, ...], str]:
    """Rates by contestant and number of ranks, how many times faster than bulk NumPy the engine is, who is absent."""
    why = absent()
    names = [n for n in (EVERYTHING, BARE, PER_STEP, BULK, EVENTS, SIMPY, SIMGRID) if n not in why]
    others = [n for n in names if n not in (EVERYTHING, BARE)]
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    against_bulk, rows, ratio_rows = {}, [], []
    for ranks in RANKS:
        here = [n for n in names if ranks <= MAX_RANKS.get(n, ranks)]
        times = race(ranks, here)
        for name in here:
            found[name][str(ranks)] = times.rate(name)
        against_bulk[str(ranks)] = times.speed_ratio(BARE, BULK)
        rows.append((f"{ranks:,}", *(figure(times.rate(n)) if n in here else "" for n in names)))
        ratio_rows.append((f"{ranks:,}", *(figure(times.speed_ratio(BARE, n)) if n in here else "" for n in others)))
    tables = (
        Table("rank-iterations per CPU second", ("ranks", *names), rows),
        Table("how many times faster the engine is, jitter only", ("ranks", *others), ratio_rows),
    )
    remark = "".join(f" {name} is not in the table: {line}." for name, line in why.items())
    return found, against_bulk, tables, remark


def shared() -> tuple[dict[str, float], Table]:
    """Rates at 512 ranks in groups on an uplink with tenants."""
    sizes = ((1, 0), (8, 0), (8, 4), (32, 4))
    iterations, calls = CALL_RANK_ITERATIONS // SHARED_RANKS, {}
    for groups, tenants in sizes:
        one = simulator(shared_cluster(SHARED_RANKS, groups, tenants))
        settings = pacing.one_mechanism("slack", 0.02, 0.1)[None, None]
        calls[f"{groups} groups, {tenants} tenants"] = partial(one.run, settings, iterations)
    times = measure(calls, dict.fromkeys(calls, SHARED_RANKS * iterations), turns=7)
    rates = {name: times.rate(name) for name in calls}
    rows = [(name, figure(rate)) for name, rate in rates.items()]
    return rates, Table(f"{SHARED_RANKS} ranks on a shared uplink, everything on", ("", "rank-iterations/s"), rows)


def two_threads() -> dict[str, float]:
    """How many times faster two threads are than one, in wall-clock time: a batch of many environments, and hashing.

    Hashing a buffer, which shares nothing, says what a second core is worth here and now.
    """
    settings = np.broadcast_to(pacing.one_mechanism("slack", 0.02, 0.1), (256, 1, *pacing.off().shape))
    one, two = (simulator(cluster(512, NOISE), 256, threads) for threads in (1, 2))
    buffers = [bytes(16 << 20)] * 2
    with ThreadPoolExecutor(2) as pool:
        calls: dict[str, Callable[[], object]] = {
            "one": lambda: one.run(settings, 200),
            "two": lambda: two.run(settings, 200),
            "one, hashing": lambda: [sha256(buffer).digest() for buffer in buffers],
            "two, hashing": lambda: [digest.digest() for digest in pool.map(sha256, buffers)],
        }
        times = measure(calls, turns=15, least_s=0.1, clock=time.perf_counter)
    return {
        "two_threads_over_one": times.speed_ratio("two", "one"),
        "two_threads_over_one_hashing": times.speed_ratio("two, hashing", "one, hashing"),
    }


def state_bytes(environments: int, ranks: int) -> int:
    """Bytes of the arrays that a simulator remembers from one iteration to the next."""
    state = simulator(cluster(ranks, NOISE), environments).state
    return int(sum(array.nbytes for array in state))


def memory() -> tuple[dict[str, float], Table]:
    """Bytes of state for each rank of each environment as both numbers grow, and how the state grows with E x R."""
    sizes = ((1, 512), (1, 4096), (1, 100_000), (16, 512), (256, 512), (256, 4096))
    found = {(E, R): state_bytes(E, R) / (E * R) for E, R in sizes}
    table = Table(
        "bytes of state per rank and environment",
        ("environments", "ranks", "bytes"),
        [(f"{E:,}", f"{R:,}", f"{value:.1f}") for (E, R), value in found.items()],
    )
    data = {
        "state_bytes_per_rank": found[1, 100_000],
        "state_bytes_per_rank_batch": found[256, 4096],
        "state_exponent": _exponent({str(E * R): value for (E, R), value in found.items()}),
    }
    return data, table


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
    """Rank-iterations per CPU second of the engine on one core, by number of ranks; memory and threads."""
    found, against_bulk, rates_tables, remark = by_ranks()
    growth, growth_table = linearity()
    configs_us, configs_table = shipped()
    shared_rates, shared_table = shared()
    state, state_table = memory()
    data = {
        "rank_iterations_per_cpu_s": found[EVERYTHING],
        "others_rank_iterations_per_cpu_s": {name: rates for name, rates in found.items() if name != EVERYTHING},
        "engine_over_numpy_bulk": against_bulk,
        "us_per_iteration": configs_us,
        "shared_rank_iterations_per_cpu_s": shared_rates,
        **two_threads(),
        **state,
        **growth,
    }
    text = (
        "One job: normal compute times (5 %), a barrier and one all-reduce. *Everything on* adds common, persistent, "
        "imbalance (gamma), fail-slow, drift and stall noise and the slack rule. *Jitter only* is the job that the "
        "others do, too, and is checked to give the same mean step; it keeps the estimator, which they lack: they "
        "compute step times and nothing else. SimPy has one process a rank, SimGrid one actor a rank, in C++ and in "
        "another process; its first step is not counted, as warm-up is not with the others." + remark
    )
    tables = (*rates_tables, growth_table, configs_table, shared_table, state_table)
    return Report("Engine", text, data, tables, _targets(data))


def _targets(data: dict[str, Any]) -> tuple[Target, ...]:
    rates, shared_rate = data["rank_iterations_per_cpu_s"], data["shared_rank_iterations_per_cpu_s"][SHARED]
    in_ranks, in_iterations = data["exponent_in_ranks"], data["exponent_in_iterations"]
    one_bytes, batch_bytes = data["state_bytes_per_rank"], data["state_bytes_per_rank_batch"]
    threads, hashing = data["two_threads_over_one"], data["two_threads_over_one_hashing"]
    exponent = data["state_exponent"]
    busy = "Absolute, so a busy neighbour on a shared core counts; the ratios to NumPy hardly feel it."
    return (
        Target(
            "512 ranks, everything on",
            f"at least {figure(TARGET)}/s",
            f"{figure(rates['512'])}/s",
            rates["512"] >= TARGET,
            busy,
        ),
        Target(
            f"{SHARED_RANKS} ranks, everything on, {SHARED}",
            f"at least {figure(SHARED_TARGET)}/s",
            f"{figure(shared_rate)}/s",
            shared_rate >= SHARED_TARGET,
        ),
        Target("100,000 ranks", "they run", f"{figure(rates['100000'])}/s", rates["100000"] > 0.0),
        Target(
            "linear in iterations and in ranks",
            "exponents of at most 1.15",
            f"{in_iterations:.2f} in iterations, {in_ranks:.2f} in ranks",
            max(in_ranks, in_iterations) <= 1.15,
            "A rank's state is nineteen numbers, so thousands of ranks leave the caches one level after the other.",
        ),
        Target(
            "two threads over one, wall-clock",
            f"at least {THREADS_TARGET:g} times",
            f"{threads:.2f} times",
            threads >= THREADS_TARGET,
            f"Not CPU time: other work counts. In these turns a second thread speeds up hashing {hashing:.2f} times.",
        ),
        Target(
            "state of a rank in an environment",
            f"at most {STATE_TARGET_BYTES} bytes, linear",
            f"{one_bytes:.1f} bytes alone, {batch_bytes:.1f} in a batch; exponent {exponent:.3f}",
            max(one_bytes, batch_bytes) <= STATE_TARGET_BYTES and exponent <= 1.01,
            "What lasts from one iteration to the next, of a job with every noise, without heat and staleness.",
        ),
    )


if __name__ == "__main__":
    command(run)
