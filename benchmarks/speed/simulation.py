"""How long simulating and training take: by ranks, by kind of step, by rows of a batch, and frames of PPO.

A phase of a program is an instruction of a rank: it computes, hands a transfer over, or waits for one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks._common import NOISE, Report, Table, Target, command, figure, measure
from paceenv.core import pacing
from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.envs.registration import register_envs
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.cluster.derive import start
from paceenv.trainers.training.training_envs import NativeVecEnv
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
ROWS, INTERVAL_ITERATIONS, SCALARS = (1, 64, 256, 1024), 20, 8
PLAIN: dict[str, Any] = {"cluster": "null-jitter", "mechanisms": "slack", "reward": "raw"}
RANK_TARGET, PHASE_TARGET, TRAINING_TARGET = 100e6, 10e6, 10.0


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
    settings = pacing.one_mechanism(mechanism, threshold, window)[None, None]
    calls, units = dict[str, Callable[[], object]](), dict[str, int]()
    for name, cluster in clusters.items():
        one = start(cluster, [0])
        updates = len(one.batch.program.kind_I) or cluster.ranks
        iterations = max(CALL_UPDATES // updates, 2)
        calls[name], units[name] = partial(one.run, settings, iterations), updates * iterations
    times = measure(calls, units, turns=7)
    return {name: times.rate(name) for name in calls}


def engine() -> tuple[dict[str, float], Table, Target]:
    """Rank-iterations of jobs with one collective a step."""
    clusters = {f"every noise, {ranks} ranks": job(ranks) for ranks in RANKS}
    clusters |= {f"`{name}`, {one.ranks} ranks": one for name in SHIPPED for one in [load_cluster(name)]}
    rates = _rates(clusters, "slack", 0.02, 0.1)
    rate = rates["every noise, 512 ranks"]
    because = "Absolute, so a busy neighbour on a shared core counts."
    target = Target(
        "512 ranks, every noise", f"{figure(RANK_TARGET)}/s", f"{figure(rate)}/s", rate >= RANK_TARGET, because
    )
    return (
        rates,
        Table("rank-iterations per CPU second", ("job", "rate"), [(n, figure(r)) for n, r in rates.items()]),
        target,
    )


def programs() -> tuple[dict[str, float], Table, Target]:
    """Rank-phases of steps that are programs, with rule ``defer``."""
    rates = _rates({f"{kind}, {n}": program(n, kind) for kind in PROGRAMS for n in PROGRAM_RANKS}, "defer", 0.0, 0.02)
    rows = [(kind, *(figure(rates[f"{kind}, {n}"]) for n in PROGRAM_RANKS)) for kind in PROGRAMS]
    slowest = min(rates[f"{kind}, 64"] for kind in PROGRAMS)
    table = Table("rank-phases per CPU second", ("program of 8 layers", *(f"{n} ranks" for n in PROGRAM_RANKS)), rows)
    wanted = f"{figure(PHASE_TARGET)}/s"
    return rates, table, Target("programs at 64 ranks", wanted, f"{figure(slowest)}/s", slowest >= PHASE_TARGET)


def _stepping(env: Any, actions: Any, steps: int) -> Callable[[], None]:
    env.reset()

    def run() -> None:
        for _ in range(steps):
            if np.asarray(env.step(actions)[3]).all() and actions.ndim == 1:  # a scalar environment is over
                env.reset()

    return run


def decisions() -> tuple[dict[str, float], Table]:
    """Decisions per CPU second, a decision being one row's step of 20 iterations on 8 ranks."""
    calls, units = dict[str, Callable[[], object]](), dict[str, int]()
    for rows in ROWS:
        calls[str(rows)] = (
            _stepping(gymnasium.make("paceenv/Pacing-v0", **PLAIN), np.zeros(2, np.float32), 64)
            if rows == 1
            else _stepping(
                PacingVectorEnv(rows, autoreset_mode=AutoresetMode.SAME_STEP, **PLAIN),
                np.zeros((rows, 2), np.float32),
                64,
            )
        )
        units[str(rows)] = 64 * rows
    times = measure(calls, units)
    rates = {name: times.rate(name) for name in calls}
    updates = load_cluster("null-jitter").ranks * INTERVAL_ITERATIONS
    rows_ = [(name, figure(rate), figure(rate * updates)) for name, rate in rates.items()]
    return rates, Table("whole episodes", ("rows", "decisions per CPU s", "rank-iterations per CPU s"), rows_)


def training() -> tuple[dict[str, float], Table, Target]:
    """Frames per CPU second of the same network on our batch of 256 and on scalar environments, as SB3 comes."""
    torch.set_num_threads(1)
    mode = AutoresetMode.SAME_STEP
    native = NativeVecEnv([PacingVectorEnv(256, autoreset_mode=mode, **PLAIN)])
    scalars = DummyVecEnv([lambda: gymnasium.make("paceenv/Pacing-v0", **PLAIN)] * SCALARS)
    models = {
        "native batch of 256, paceenv's settings": PPO(
            "MlpPolicy", native, n_steps=32, batch_size=2048, n_epochs=4, seed=0, device="cpu"
        ),
        f"DummyVecEnv of {SCALARS}, SB3's default settings": PPO("MlpPolicy", scalars, seed=0, device="cpu"),
    }
    frames = {name: model.n_steps * model.n_envs for name, model in models.items()}
    calls = {name: partial(model.learn, frames[name]) for name, model in models.items()}
    times = measure(calls, frames, turns=3, least_s=0)
    ours, usual = models
    ratio = times.speed_ratio(ours, usual)
    rows = [(name, figure(times.rate(name))) for name in models]
    target = Target(
        "training, native over DummyVecEnv",
        f"at least {TRAINING_TARGET:g} times",
        f"{ratio:.1f} times",
        ratio >= TRAINING_TARGET,
        "SB3's defaults use every frame ten times in small batches, these settings 4 times in large ones.",
    )
    return {"native_over_dummy": ratio}, Table("frames of PPO per CPU second", ("", "rate"), rows), target


def run() -> Report:
    """Rates of the engine, of the environment and of training."""
    register_envs()
    rates, rank_table, rank_target = engine()
    phases, phase_table, phase_target = programs()
    rows, row_table = decisions()
    learned, learn_table, learn_target = training()
    text = (
        "The environment is `paceenv/Pacing-v0` on `null-jitter`, 8 ranks, 20 iterations a control interval. A phase "
        "is an instruction of a rank: it computes, hands a transfer over, or waits for one. Frames per second do not "
        "show how many frames a score takes."
    )
    data = {"rank_iterations": rates, "rank_phases": phases, "decisions": rows, "training": learned}
    tables = (rank_table, phase_table, row_table, learn_table)
    return Report("Simulation and training", text, data, tables, (rank_target, phase_target, learn_target))


if __name__ == "__main__":
    command(run)
