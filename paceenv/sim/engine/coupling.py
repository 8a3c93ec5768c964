"""What couples the steps of a job beyond its noise: power and heat, checkpoints, failures and restarts.

Scalar loops that the kernel compiles. A waiting rank spins and draws power. That warms its node, which slows the rank
that the others wait for. A failure takes the job back to its last checkpoint and lets it start cold. All of it is off
unless a parameter switches it on. Pacing affects it only through the times at which ranks compute, wait and stand
still.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core.timing import DELAY_S
from paceenv.sim.engine.draws import FAILURE, uniform
from paceenv.sim.engine.layout import COMPUTED_S, HEAT, Scratch, View


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


def warm_nodes(job: Any, ranks: int) -> int:
    """How many nodes warm up: 0 where heat changes nothing."""
    is_felt = job["heat_slowdown"] > 0.0 or job["failure_heat"] > 0.0
    return ranks // job["ranks_per_node"] if is_felt and job["compute_w"] > 0.0 else 0


def slow_down(view: View, scratch: Scratch) -> None:
    """Stretch the compute times by the cost of heat and of a cold start."""
    job, clock, heat, compute_R = view.job, view.clock, view.heat, scratch.compute_R
    if clock["iteration"] < clock["warm_at"]:
        for r in range(compute_R.shape[0]):
            compute_R[r] *= job["warmup_factor"]
    per_node = job["ranks_per_node"]
    for n in range(warm_nodes(job, compute_R.shape[0])):
        stretch = 1.0 + job["heat_slowdown"] * np.float64(heat[HEAT, n])
        for r in range(n * per_node, (n + 1) * per_node):
            compute_R[r] *= stretch
    note_computed(view, compute_R)


def note_computed(view: View, computed_R: NDArray[np.float64]) -> None:
    """Note what each node computes in a step; :func:`spend` turns it into heat."""
    heat, per_node = view.heat, view.job["ranks_per_node"]
    for n in range(warm_nodes(view.job, computed_R.shape[0])):
        sum_s = 0.0
        for r in range(n * per_node, (n + 1) * per_node):
            sum_s += computed_R[r]
        heat[COMPUTED_S, n] = sum_s


def spend(view: View, compute_s: float, step_s: float) -> None:
    """Account for the energy of a step and warm the nodes.

    A rank spins in all time that is neither compute nor delay: waiting, communication, post-collective work.
    """
    job, clock, heat, ranks, delay_s = view.job, view.clock, view.heat, view.noise.shape[1], 0.0
    delay_R = view.rank[DELAY_S]
    for r in range(ranks):
        delay_s += np.float64(delay_R[r])
    waited_s = ranks * step_s - compute_s - delay_s
    clock["energy_j"] += job["compute_w"] * compute_s + job["wait_w"] * waited_s + job["delay_w"] * delay_s
    per_node = job["ranks_per_node"]
    for n in range(warm_nodes(job, ranks)):
        delayed_s = 0.0
        for r in range(n * per_node, (n + 1) * per_node):
            delayed_s += np.float64(delay_R[r])
        computed_s = np.float64(heat[COMPUTED_S, n])
        spun_s = per_node * step_s - computed_s - delayed_s
        joules = job["compute_w"] * computed_s + job["wait_w"] * spun_s + job["delay_w"] * delayed_s
        power = joules / (job["compute_w"] * per_node * step_s)
        heat[HEAT, n] += (power - np.float64(heat[HEAT, n])) / job["heat_iterations"]


def interrupt(view: View, step_s: float) -> float:
    """Checkpoint and fail where it is time to; returns the seconds that this adds to the step.

    Failures follow a hazard accumulated over seconds of running, with exponential thresholds. The same episode
    therefore fails at nearly the same times under every policy, and earlier where it runs hot. Shorter steps get
    further between two failures; longer ones do not put them off.
    """
    job, clock, heat, ranks = view.job, view.clock, view.heat, view.noise.shape[1]
    clock["kept"] += 1
    extra_s = 0.0
    if job["checkpoint_iterations"] > 0 and (clock["iteration"] + 1) % job["checkpoint_iterations"] == 0:
        extra_s += job["checkpoint_s"]
        clock["saved"] = clock["kept"]
    if job["failure_per_s"] > 0.0:
        mean_heat, nodes = 0.0, warm_nodes(job, ranks)
        for n in range(nodes):
            mean_heat += np.float64(heat[HEAT, n]) / nodes
        rate_per_s = job["failure_per_s"] * (1.0 + job["failure_heat"] * mean_heat)
        clock["hazard_left"] -= rate_per_s * (step_s + extra_s)
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


def run_ahead(view: View, scratch: Scratch, step_s: float) -> None:
    """Write when each rank starts its next step under bounded staleness, in seconds from the end of the collective.

    A rank goes on at once unless it is ``staleness`` steps ahead of the last complete collective.

    Args:
        view: the job; ``start_R`` is written.
        scratch: ``compute_R`` counts from the end of the collective before; ``comm_R`` becomes how long each rank was
            blocked.
    """
    job, clock, start_R, delay_R = view.job, view.clock, view.start_R, view.rank[DELAY_S]
    compute_R, comm_R = scratch.compute_R, scratch.comm_R
    lead_s, newest = 0.0, clock["iteration"] % job["staleness"]
    clock["steps_s"][newest] = step_s
    for i in range(job["staleness"]):
        lead_s += clock["steps_s"][i]
    for r in range(start_R.shape[0]):
        free_s = np.float64(delay_R[r]) + compute_R[r] - step_s
        start_s = max(free_s, -lead_s) if free_s < 0.0 else 0.0
        comm_R[r] = max(start_s - free_s, 0.0)
        start_R[r] = start_s
