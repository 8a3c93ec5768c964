"""What couples the steps of a job beyond its noise: power and heat, checkpoints, failures and restarts.

Scalar loops that the kernel compiles. A waiting rank spins and draws power, which warms its node, which slows the rank
that the others wait for; a failure throws the job back to its last checkpoint and lets it start cold. All of it is off
unless a parameter says so, and all of it depends on pacing only through when ranks compute, wait and stand still.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.engine.draws import FAILURE, uniform
from paceenv.sim.engine.layout import COMPUTED_S, HEAT


def reset_coupling(clock: Any, heat: NDArray[np.float32], start_R: NDArray[np.float32]) -> None:
    """Start cold, in step, and with nothing spent."""
    clock["energy_j"] = clock["time_s"] = 0.0
    clock["failures"] = clock["kept"] = clock["saved"] = clock["warm_at"] = 0
    clock["hazard_left"] = -math.log(uniform(clock["key"], FAILURE, 0))
    for i in range(clock["steps_s"].shape[0]):
        clock["steps_s"][i] = 0.0
    for n in range(heat.shape[1]):
        heat[HEAT, n] = heat[COMPUTED_S, n] = 0.0
    for r in range(start_R.shape[0]):
        start_R[r] = 0.0


def warm_nodes(job: Any, heat: NDArray[np.float32], ranks: int) -> int:
    """How many nodes warm up: none for a job without heat, though its batch may have room for it."""
    return min(heat.shape[1], ranks // job["ranks_per_node"]) if job["compute_w"] > 0.0 else 0


def slow_down(job: Any, clock: Any, heat: NDArray[np.float32], compute_R: NDArray[np.float64]) -> None:
    """Stretch compute times by what heat and a cold start cost."""
    if clock["iteration"] < clock["warm_at"]:
        for r in range(compute_R.shape[0]):
            compute_R[r] *= job["warmup_factor"]
    per_node = job["ranks_per_node"]
    for n in range(warm_nodes(job, heat, compute_R.shape[0])):
        stretch, sum_s = 1.0 + job["heat_slowdown"] * np.float64(heat[HEAT, n]), 0.0
        for r in range(n * per_node, (n + 1) * per_node):
            compute_R[r] *= stretch
            sum_s += compute_R[r]
        heat[COMPUTED_S, n] = sum_s


def spend(
    job: Any, clock: Any, heat: NDArray[np.float32], delay_R: NDArray[np.float32], compute_s: float, step_s: float
) -> None:
    """Account for a step's energy and warm the nodes; ``compute_s`` is the sum over ranks.

    Energy is computed from the ranks' times: what is neither compute nor delay is waiting or communicating, in which a
    rank spins; so does work after a collective count.
    """
    ranks, delay_s = delay_R.shape[0], 0.0
    for r in range(ranks):
        delay_s += np.float64(delay_R[r])
    waited_s = ranks * step_s - compute_s - delay_s
    clock["energy_j"] += job["compute_w"] * compute_s + job["wait_w"] * waited_s + job["delay_w"] * delay_s
    per_node = job["ranks_per_node"]
    for n in range(warm_nodes(job, heat, ranks)):
        delayed_s = 0.0
        for r in range(n * per_node, (n + 1) * per_node):
            delayed_s += np.float64(delay_R[r])
        computed_s = np.float64(heat[COMPUTED_S, n])
        spun_s = per_node * step_s - computed_s - delayed_s
        joules = job["compute_w"] * computed_s + job["wait_w"] * spun_s + job["delay_w"] * delayed_s
        power = joules / (job["compute_w"] * per_node * step_s)
        heat[HEAT, n] += (power - np.float64(heat[HEAT, n])) / job["heat_iterations"]


def interrupt(job: Any, clock: Any, heat: NDArray[np.float32], ranks: int) -> float:
    """Checkpoint and fail where it is time to; returns what that adds to the step, seconds.

    Failures follow an accumulated hazard with exponential thresholds, so that the same episode fails at nearly the same
    moments whatever the policy, earlier where it runs hot.
    """
    clock["kept"] += 1
    extra_s = 0.0
    if job["checkpoint_iterations"] > 0 and (clock["iteration"] + 1) % job["checkpoint_iterations"] == 0:
        extra_s += job["checkpoint_s"]
        clock["saved"] = clock["kept"]
    if job["failure_rate"] > 0.0:
        mean_heat, nodes = 0.0, warm_nodes(job, heat, ranks)
        for n in range(nodes):
            mean_heat += np.float64(heat[HEAT, n]) / nodes
        clock["hazard_left"] -= job["failure_rate"] * (1.0 + job["failure_heat"] * mean_heat)
        if clock["hazard_left"] <= 0.0:
            clock["failures"] += 1
            clock["hazard_left"] -= math.log(uniform(clock["key"], FAILURE, clock["failures"]))
            clock["kept"] = clock["saved"]
            clock["warm_at"] = clock["iteration"] + 1 + job["warmup_iterations"]
            for n in range(heat.shape[1]):
                heat[HEAT, n] = 0.0
            extra_s += job["restart_s"]
    clock["energy_j"] += extra_s * ranks * job["delay_w"]
    return extra_s


def run_ahead(
    job: Any,
    clock: Any,
    start_R: NDArray[np.float32],
    delay_R: NDArray[np.float32],
    compute_R: NDArray[np.float64],
    comm_R: NDArray[np.float32],
    step_s: float,
) -> None:
    """Where each rank starts its next step under bounded staleness, seconds from the end of the collective.

    A rank goes on at once unless it is ``staleness`` steps ahead of the last complete collective; ``comm_R`` becomes
    what it was blocked for. ``compute_R`` counts from the end of the collective before.
    """
    lead_s, newest = 0.0, clock["iteration"] % job["staleness"]
    clock["steps_s"][newest] = step_s
    for i in range(job["staleness"]):
        lead_s += clock["steps_s"][i]
    for r in range(start_R.shape[0]):
        free_s = np.float64(delay_R[r]) + compute_R[r] - step_s
        start_s = max(free_s, -lead_s) if free_s < 0.0 else 0.0
        comm_R[r] = max(start_s - free_s, 0.0)
        start_R[r] = start_s
