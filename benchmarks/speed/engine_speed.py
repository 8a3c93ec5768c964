"""The engine: rank-iterations per CPU second by number of ranks and environments, and what a second thread is worth."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks._common import NOISE, Report, Table, Target, command, figure, measure
from paceenv.core import pacing
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.environment import Job, Noise, Tenant
from paceenv.sim.cluster.fabric import Fabric
from paceenv.sim.engine.simulator import Simulator, episode_keys

SIZES = ((1, 8), (256, 8), (1, 64), (256, 64), (1, 512), (1, 4096), (1, 100_000))
"""Environments and ranks."""
CALL_RANK_ITERATIONS = 400_000
JITTER_CV = 0.05
SHARED_RANKS, SHARED = 512, "8 groups, 4 tenants"
TARGET, SHARED_TARGET, THREADS_TARGET, STATE_TARGET_BYTES = 100e6, 20e6, 1.8, 64


def cluster(ranks: int, noise: Noise) -> Cluster:
    """One job of ``ranks`` under one leaf switch: compute, then one all-reduce."""
    return Cluster(
        name="benchmark",
        job=Job(nodes=ranks, compute_s=0.2, gradient_bytes=256e6),
        fabric=Fabric(nic_gbps=200, nodes_per_leaf=ranks, uplink_gbps=1600),
        noise=noise,
    )


def shared_cluster(ranks: int, groups: int, tenants: int) -> Cluster:
    """One job in groups whose collectives share an uplink with other jobs' transfers, every noise on."""
    return Cluster(
        name="benchmark",
        job=Job(nodes=ranks, nodes_per_group=ranks // groups, barrier=True, compute_s=0.2, gradient_bytes=256e6),
        fabric=Fabric(nic_gbps=200, nodes_per_leaf=8, uplink_gbps=1600),
        noise=NOISE,
        tenants=[Tenant(period_ratio=0.6 + 0.3 * k, comm_share=0.3, rate_share=0.5, ranks=8) for k in range(tenants)],
    )


def simulator(config: Cluster, environments: int = 1, threads: int = 1) -> Simulator:
    """A simulator of a cluster, seeds from 0."""
    keys = episode_keys(list(range(environments)))
    return Simulator(derive(config, keys), keys, threads)


def paceenv_job(
    ranks: int, noise: Noise, iterations: int, *, paced: bool, environments: int = 1
) -> Callable[[], object]:
    """A call that runs the engine, with the estimator on."""
    one = simulator(cluster(ranks, noise), environments)
    settings = np.broadcast_to(pacing.one_mechanism("slack", 0.02, 0.1), one.off().shape) if paced else one.off()
    return lambda: one.run(settings, iterations)


def by_size() -> tuple[dict[str, dict[str, float]], Table]:
    """CPU nanoseconds per rank-iteration, every noise and the slack rule on, and with jitter only."""
    kinds = {"everything on": (NOISE, True), "jitter only": (Noise(jitter_cv=JITTER_CV), False)}
    calls, units = {}, {}
    for E, R in SIZES:
        iterations = max(10, CALL_RANK_ITERATIONS // (E * R))
        for kind, (noise, paced) in kinds.items():
            calls[f"{kind}, {E} x {R}"] = paceenv_job(R, noise, iterations, paced=paced, environments=E)
            units[f"{kind}, {E} x {R}"] = E * R * iterations
    times = measure(calls, units, turns=7)
    ns = {kind: {f"{E} x {R}": 1e9 * times.median_s(f"{kind}, {E} x {R}") for E, R in SIZES} for kind in kinds}
    rows = [(f"{E:,}", f"{R:,}", *(f"{ns[kind][f'{E} x {R}']:.1f}" for kind in kinds)) for E, R in SIZES]
    return ns, Table("CPU nanoseconds per rank-iteration", ("environments", "ranks", *kinds), rows)


def shared() -> tuple[dict[str, float], Table]:
    """Rates at 512 ranks in groups on an uplink with tenants, and of configs that ship."""
    sizes, calls, units = ((1, 0), (8, 0), (8, 4), (32, 4)), {}, {}
    configs = {f"{g} groups, {t} tenants": shared_cluster(SHARED_RANKS, g, t) for g, t in sizes}
    configs |= {name: load_cluster(name) for name in ("null-jitter", "two-jobs", "when-scaling-fails")}
    for name, config in configs.items():
        iterations = CALL_RANK_ITERATIONS // config.job.ranks
        one = simulator(config)
        calls[name] = partial(one.run, pacing.one_mechanism("slack", 0.02, 0.1)[None, None], iterations)
        units[name] = config.job.ranks * iterations
    times = measure(calls, units, turns=7)
    rates = {name: times.rate(name) for name in calls}
    rows = [(name, str(configs[name].job.ranks), figure(rate)) for name, rate in rates.items()]
    return rates, Table("shared uplinks, and clusters that ship", ("", "ranks", "rank-iterations/CPU s"), rows)


def two_threads() -> float:
    """How many times faster two threads are than one on 256 environments of 512 ranks, in wall-clock time."""
    settings = np.broadcast_to(pacing.one_mechanism("slack", 0.02, 0.1), (256, 1, *pacing.off().shape))
    calls = {
        str(threads): partial(simulator(cluster(512, NOISE), 256, threads).run, settings, 200) for threads in (1, 2)
    }
    return measure(calls, turns=15, least_s=0.1, clock=time.perf_counter).speed_ratio("2", "1")


def run() -> Report:
    """Time of a rank-iteration on one core by ranks and environments; threads; bytes of state."""
    ns, size_table = by_size()
    rates, shared_table = shared()
    state_bytes = sum(array.nbytes for array in simulator(cluster(4096, NOISE), 256).state) / (256 * 4096)
    data: dict[str, Any] = {
        "ns_per_rank_iteration": ns,
        "rank_iterations_per_cpu_s": rates,
        "two_threads_over_one": two_threads(),
        "state_bytes_per_rank": state_bytes,
    }
    text = (
        f"One job: normal compute times ({JITTER_CV:.0%}), a barrier and one all-reduce. *Everything on* adds common, "
        "persistent, imbalance (gamma), fail-slow, drift and stall noise and the slack rule."
    )
    return Report("Engine", text, data, (size_table, shared_table), _targets(data))


def _targets(data: dict[str, Any]) -> tuple[Target, ...]:
    rate = 1e9 / data["ns_per_rank_iteration"]["everything on"]["1 x 512"]
    shared_rate = data["rank_iterations_per_cpu_s"][SHARED]
    threads, state = data["two_threads_over_one"], data["state_bytes_per_rank"]
    busy = "Absolute, so a busy neighbour on a shared core counts."
    least, shared_least = f"at least {figure(TARGET)}/s", f"at least {figure(SHARED_TARGET)}/s"
    return (
        Target("512 ranks, everything on", least, f"{figure(rate)}/s", rate >= TARGET, busy),
        Target(
            f"{SHARED_RANKS} ranks, {SHARED}",
            shared_least,
            f"{figure(shared_rate)}/s",
            shared_rate >= SHARED_TARGET,
            busy,
        ),
        Target(
            "two threads over one, wall-clock",
            f"at least {THREADS_TARGET:g} times",
            f"{threads:.2f} times",
            threads >= THREADS_TARGET,
            "Not CPU time: other work counts.",
        ),
        Target(
            "state of a rank in an environment",
            f"at most {STATE_TARGET_BYTES} bytes",
            f"{state:.1f} bytes",
            state <= STATE_TARGET_BYTES,
        ),
    )


if __name__ == "__main__":
    command(run)
