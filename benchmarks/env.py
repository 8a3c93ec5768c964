"""The environment: what it costs on top of the engine's physics, and decisions per second by batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from benchmarks._common import Report, Table, Target, command, figure, measure
from paceenv import pacing
from paceenv.cluster import load_cluster
from paceenv.cluster.derive import derive
from paceenv.engine.simulator import Simulator, episode_keys
from paceenv.env import PacingVectorEnv
from paceenv.registration import register_envs

CLUSTER, INTERVAL_ITERATIONS, EPISODE_INTERVALS = "null-jitter", 20, 64
OVERHEAD_ROWS, SYNC_ROWS = 256, 64
ROWS = (64, 256, 1024)
TARGET = 0.20

PHYSICS, STEADY = "the engine alone", "steps without an episode's end"
TOGETHER, STAGGERED = "a whole episode, all rows ending together", "a whole episode, rows ending in turn"


def stepper(rows: int, *, intervals: int, ends: bool, stagger: bool = False) -> Callable[[], Any]:
    """A call that takes ``intervals`` steps of a vector environment, with or without episodes that end."""
    env = PacingVectorEnv(rows, CLUSTER, episode_intervals=EPISODE_INTERVALS if ends else 10**9)
    env.reset(seed=0)
    if stagger:
        env.stagger()
    actions = np.zeros((rows, 2), np.float32)

    def run() -> None:
        for _ in range(intervals):
            env.step(actions)

    return run


def physics(rows: int, intervals: int) -> Callable[[], Any]:
    """A call that runs the iterations of :func:`stepper`, under the same settings, in the engine alone."""
    keys = episode_keys(list(range(rows)))
    simulator = Simulator(derive(load_cluster(CLUSTER), keys), keys)
    settings = pacing.decode_action(np.zeros((rows, 2)), ("slack",))[:, None]

    def run() -> None:
        for _ in range(intervals):
            simulator.run(settings, INTERVAL_ITERATIONS)

    return run


def overhead() -> tuple[dict[str, Any], Table, Target]:
    """Time of the environment beyond the engine's, as a share of the engine's.

    An episode's first observation needs an interval of its own, so a whole episode is held against 65 intervals.
    """
    steps = EPISODE_INTERVALS
    times = measure(
        {
            PHYSICS: physics(OVERHEAD_ROWS, steps),
            STEADY: stepper(OVERHEAD_ROWS, intervals=steps, ends=False),
            TOGETHER: stepper(OVERHEAD_ROWS, intervals=steps, ends=True),
            STAGGERED: stepper(OVERHEAD_ROWS, intervals=steps, ends=True, stagger=True),
        },
        {PHYSICS: steps, STEADY: steps, TOGETHER: steps + 1, STAGGERED: steps + 1},
        turns=9,
    )
    share = {name: times.speed_ratio(PHYSICS, name) - 1.0 for name in (STEADY, TOGETHER, STAGGERED)}
    rows = [(PHYSICS, f"{1e6 * times.median_s(PHYSICS):.0f}", "")]
    rows += [(name, f"{1e6 * times.median_s(name):.0f}", f"{value:+.1%}") for name, value in share.items()]
    worst = max(share.values())
    target = Target(
        f"environment beyond physics, {OVERHEAD_ROWS} rows",
        f"below {TARGET:.0%} of physics",
        f"{share[STEADY]:.1%} without ends, {share[TOGETHER]:.1%} with, {share[STAGGERED]:.1%} in turn",
        worst < TARGET,
        "What every step costs whatever its size: settings, observations, rewards, info; at an end, drawing a cluster.",
    )
    table = Table(f"{OVERHEAD_ROWS} rows, one control interval", ("", "CPU us per interval", "beyond physics"), rows)
    data = {"without_ends": share[STEADY], "ends_together": share[TOGETHER], "ends_in_turn": share[STAGGERED]}
    return {"rows": OVERHEAD_ROWS, "overhead_share_of_physics": data}, table, target


def decisions() -> tuple[dict[str, Any], Table]:
    """Decisions per CPU second, a decision being one row's step of 20 iterations on 8 ranks."""
    scalar = gymnasium.make("paceenv/Pacing-v0", cluster=CLUSTER)
    scalar.reset(seed=0)
    action = np.zeros(2, np.float32)
    sync = gymnasium.make_vec("paceenv/Pacing-v0", SYNC_ROWS, vectorization_mode="sync", cluster=CLUSTER)
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
        contestants[f"{rows} rows"] = stepper(rows, intervals=steps, ends=True)
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
        "intervals an episode. *In turn* is what training does: some rows end in every step, so that drawing new "
        "clusters is paid in every step, too."
    )
    return Report("Environment", text, overhead_data | decisions_data, (overhead_table, decisions_table), (target,))


if __name__ == "__main__":
    command(run)
