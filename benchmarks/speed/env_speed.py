"""The environment: what it costs on top of the engine's physics, and decisions per second by batch size."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from benchmarks._common import Report, Table, Target, command, figure, measure
from paceenv.core import pacing
from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.envs.registration import register_envs
from paceenv.sim.cluster import load_cluster

CLUSTER, INTERVAL_ITERATIONS, EPISODE_INTERVALS = "null-jitter", 20, 64
PLAIN: dict[str, Any] = {"cluster": CLUSTER, "mechanisms": "slack", "reward": "raw", "warn_null": False}
"""One simulation for each row; a paired reward takes two."""
OVERHEAD_ROWS, SYNC_ROWS = 256, 64
ROWS = (64, 256, 1024)
TARGET = 0.20

STEADY = "steps without an episode's end"
TOGETHER, STAGGERED = "a whole episode, all rows ending together", "a whole episode, rows ending in turn"


def batch(rows: int, *, ends: bool, stagger: bool = False) -> PacingVectorEnv:
    """A vector environment that has just been reset."""
    length = EPISODE_INTERVALS if ends else 10**9
    env = PacingVectorEnv(rows, episode_intervals=length, autoreset_mode=AutoresetMode.SAME_STEP, **PLAIN)
    env.reset(seed=0)
    if stagger:
        env.desync_episodes()
    return env


def stepping(env: PacingVectorEnv) -> Callable[[], None]:
    """A call that takes as many steps as an episode has."""
    actions = np.zeros((env.num_envs, 2), np.float32)

    def run() -> None:
        for _ in range(EPISODE_INTERVALS):
            env.step(actions)

    return run


def beside_physics(env: PacingVectorEnv, turns: int = 9) -> tuple[float, float, float]:
    """CPU seconds of a step, of the same interval in the engine alone, and the median of their ratio over the turns.

    On the same arrays and under the same settings, a step and an interval in turn: this is a small difference of large
    numbers. An episode is a turn.
    """
    simulator, actions = env._batch.simulator, np.zeros((env.num_envs, 2), np.float32)
    if simulator is None:
        raise RuntimeError("reset the environment first")
    settings = pacing.decode_action(actions, ("slack",))[:, None]
    spent_s = np.zeros((turns, 2))
    for turn in range(turns):
        for _ in range(EPISODE_INTERVALS):
            start_s = time.process_time()
            env.step(actions)
            middle_s = time.process_time()
            simulator.run(settings, INTERVAL_ITERATIONS)
            spent_s[turn] += middle_s - start_s, time.process_time() - middle_s
    step_s, physics_s = np.median(spent_s, axis=0) / EPISODE_INTERVALS
    return float(step_s), float(physics_s), float(np.median(spent_s[:, 0] / spent_s[:, 1]))


def overhead() -> tuple[dict[str, Any], Table, Target]:
    """Time of the environment beyond the engine's, as a share of the engine's.

    An episode's first observation needs an interval of its own, so its 64 steps are held against 65 intervals.
    """
    envs = {
        STEADY: batch(OVERHEAD_ROWS, ends=False),
        TOGETHER: batch(OVERHEAD_ROWS, ends=True),
        STAGGERED: batch(OVERHEAD_ROWS, ends=True, stagger=True),
    }
    share, rows = {}, []
    for name, env in envs.items():
        step_s, physics_s, ratio = beside_physics(env)
        intervals = 1.0 + (name != STEADY) / EPISODE_INTERVALS
        share[name] = ratio / intervals - 1.0
        rows.append((name, f"{1e6 * step_s:.0f}", f"{1e6 * physics_s * intervals:.0f}", f"{share[name]:+.1%}"))
    target = Target(
        f"environment beyond physics, {OVERHEAD_ROWS} rows",
        f"below {TARGET:.0%} of physics",
        f"{share[STEADY]:.1%} without ends, {share[TOGETHER]:.1%} with, {share[STAGGERED]:.1%} in turn",
        max(share.values()) < TARGET,
        "What every step costs whatever its size: settings, observations, rewards, info; at an end, drawing a cluster.",
    )
    columns = ("", "CPU us per step", "the engine alone", "beyond physics")
    data = {"without_ends": share[STEADY], "ends_together": share[TOGETHER], "ends_in_turn": share[STAGGERED]}
    table = Table(f"{OVERHEAD_ROWS} rows, one control interval", columns, rows)
    return {"rows": OVERHEAD_ROWS, "overhead_share_of_physics": data}, table, target


def decisions() -> tuple[dict[str, Any], Table]:
    """Decisions per CPU second, a decision being one row's step of 20 iterations on 8 ranks."""
    scalar = gymnasium.make("paceenv/Pacing-v0", **PLAIN)
    scalar.reset(seed=0)
    action = np.zeros(2, np.float32)
    sync = gymnasium.make_vec("paceenv/Pacing-v0", SYNC_ROWS, vectorization_mode="sync", **PLAIN)
    sync.reset(seed=0)
    actions = np.zeros((SYNC_ROWS, 2), np.float32)

    def one_episode() -> None:
        truncated = False
        while not truncated:
            *_, truncated, _ = scalar.step(action)
        scalar.reset()

    steps, sync_name = EPISODE_INTERVALS, f"{SYNC_ROWS} rows, SyncVectorEnv of scalar ones"
    contestants: dict[str, Callable[[], Any]] = {
        "1 row, scalar": one_episode,
        sync_name: lambda: [sync.step(actions) for _ in range(steps)],
    }
    units = {"1 row, scalar": steps, sync_name: steps * SYNC_ROWS}
    for rows in ROWS:
        contestants[f"{rows} rows"] = stepping(batch(rows, ends=True))
        units[f"{rows} rows"] = steps * rows
    times = measure(contestants, units)
    ranks = load_cluster(CLUSTER).job.ranks * INTERVAL_ITERATIONS
    table_rows = [
        (name, figure(times.rate(name)), figure(times.rate(name) * ranks), figure(times.speed_ratio(name, sync_name)))
        for name in contestants
    ]
    columns = ("", "decisions per CPU s", "rank-iterations per CPU s", "over SyncVectorEnv")
    data = {
        "decisions_per_cpu_s": {name: times.rate(name) for name in contestants},
        "native_over_sync": times.speed_ratio(f"{SYNC_ROWS} rows", sync_name),
    }
    return data, Table("decisions, whole episodes", columns, table_rows)


def run() -> Report:
    """The environment's own cost on top of physics, and decisions per second by batch size."""
    register_envs()
    overhead_data, overhead_table, target = overhead()
    decisions_data, decisions_table = decisions()
    text = (
        f"Cluster `{CLUSTER}`: 8 ranks, {INTERVAL_ITERATIONS} iterations a control interval, {EPISODE_INTERVALS} "
        "intervals an episode. *In turn* is the case of training: some rows end in every step. Drawing new clusters "
        "then costs time in every step."
    )
    return Report("Environment", text, overhead_data | decisions_data, (overhead_table, decisions_table), (target,))


if __name__ == "__main__":
    command(run)
