"""How long simulating takes: by ranks, by kind of step, by rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from benchmarks._common import NOISE, figure, measure
from paceenv.core import pacing
from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.envs.registration import register_envs
from paceenv.report.section import Section, print_sections
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.cluster.derive import start
from paceenv.ui import config_files

RANKS, SHIPPED = (8, 64, 512, 4096), ("null-jitter", "two-jobs", "when-scaling-fails")
CALL_UPDATES = 400_000
PROGRAM_RANKS, LAYERS = (8, 64, 256), 8
_DATA = {"all_reduce": {"bytes": 5e8, "communicator": "data", "background": True, "can_wait": True}}
_COMPUTE: dict[str, Any] = {"compute": {"seconds": 0.1}}
PROGRAMS: dict[str, list[dict[str, Any]]] = {
    "one communicator": [_COMPUTE, _DATA],
    "two that meet on every NIC": [_COMPUTE, _DATA, {"all_gather": {"bytes": 6e8, "communicator": "experts"}}],
    "tensor-parallel pairs": [
        _COMPUTE,
        {"all_reduce": {"bytes": 1e8, "communicator": "tensor"}},
        _COMPUTE,
        _DATA,
    ],
}
ROWS, STEPS, INTERVAL_ITERATIONS = (64, 256, 1024), 64, 20
PLAIN: dict[str, Any] = {"cluster": "null-jitter", "mechanisms": "slack", "reward": "raw"}


def job(ranks: int) -> Cluster:
    """One job under one leaf switch with every noise: compute, then one all-reduce."""
    data = {
        "name": "benchmark",
        "job": {"nodes": ranks, "compute_s": 0.2, "gradient_bytes": 256e6},
        "fabric": {"nic_gbps": 200, "nodes_per_leaf": ranks, "uplink_gbps": 1600},
        "noise": NOISE.model_dump(),
    }
    return config_files.parse(Cluster, data, "benchmark")


def program(ranks: int, kind: str) -> Cluster:
    """A program of layers, a key of :data:`PROGRAMS`, on ranks of a node each."""
    data = {
        "name": "benchmark",
        "job": {"nodes": ranks},
        "program": {
            "communicators": {"data": {}, "experts": {}, "tensor": {"size": 2}},
            "step": [{"repeat": LAYERS, "step": PROGRAMS[kind]}],
        },
        "fabric": {"nic_gbps": 100, "nodes_per_leaf": 8, "uplink_gbps": 12.5 * ranks},
        "noise": {"jitter_cv": 0.02},
    }
    return config_files.parse(Cluster, data, "benchmark")


def _rates(clusters: dict[str, Cluster], mechanism: str, threshold: float, window: float) -> dict[str, float]:
    """Updates per CPU second, of a rank's iterations or of a program's phases."""
    settings = pacing.settings({mechanism: (threshold, window)})[None, None]
    calls, units = dict[str, Callable[[], object]](), dict[str, int]()
    for name, cluster in clusters.items():
        one = start(cluster, [0])
        updates = cluster.ranks if one.batch.program is None else len(one.batch.program.kind_I)
        iterations = max(CALL_UPDATES // updates, 2)
        calls[name], units[name] = partial(one.run, settings, iterations), updates * iterations
    return measure(calls, units, turns=7)


def engine() -> Section:
    """Rank-iterations of jobs with one collective a step."""
    clusters = {f"every noise, {ranks} ranks": job(ranks) for ranks in RANKS}
    clusters |= {f"`{name}`, {one.ranks} ranks": one for name in SHIPPED for one in [load_cluster(name)]}
    rates = _rates(clusters, "slack", 0.02, 0.1)
    rows = [(name, figure(rate)) for name, rate in rates.items()]
    return Section("Simulation: rank-iterations per CPU second", (), ("job", "rate"), rows)


def programs() -> Section:
    """Rank-phases of steps that are programs, with rule ``defer``."""
    rates = _rates({f"{kind}, {n}": program(n, kind) for kind in PROGRAMS for n in PROGRAM_RANKS}, "defer", 0.0, 0.02)
    rows = [(kind, *(figure(rates[f"{kind}, {n}"]) for n in PROGRAM_RANKS)) for kind in PROGRAMS]
    text = "A phase is an instruction of a rank: it computes, hands a transfer over, or waits for one."
    columns = ("program of 8 layers", *(f"{n} ranks" for n in PROGRAM_RANKS))
    return Section("Simulation: rank-phases per CPU second", (text,), columns, rows)


def _stepping(env: Any, actions: Any) -> Callable[[], None]:
    env.reset()

    def run() -> None:
        for _ in range(STEPS):
            if np.asarray(env.step(actions)[3]).all() and actions.ndim == 1:  # a scalar environment is over
                env.reset()

    return run


def decisions() -> Section:
    """Decisions per CPU second, a decision being one row's step of 20 iterations on 8 ranks."""
    calls = {"1": _stepping(gymnasium.make("paceenv/Pacing-v0", **PLAIN), np.zeros(2, np.float32))}
    for rows in ROWS:
        env = PacingVectorEnv(rows, autoreset_mode=AutoresetMode.SAME_STEP, **PLAIN)
        calls[str(rows)] = _stepping(env, np.zeros((rows, 2), np.float32))
    found = measure(calls, {rows: STEPS * int(rows) for rows in calls})
    updates = load_cluster("null-jitter").ranks * INTERVAL_ITERATIONS
    rates = [(name, figure(rate), figure(rate * updates)) for name, rate in found.items()]
    text = "The environment is `paceenv/Pacing-v0` on `null-jitter`, 8 ranks, 20 iterations a control interval."
    columns = ("rows", "decisions per CPU s", "rank-iterations per CPU s")
    return Section("Simulation: whole episodes", (text,), columns, rates)


def run() -> list[Section]:
    """Rates of the engine and of the environment."""
    register_envs()
    return [engine(), programs(), decisions()]


if __name__ == "__main__":
    print_sections(run())
