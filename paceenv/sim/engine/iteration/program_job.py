"""One job whose step is a program, iteration by iteration: what ``kernel.advance_job`` is to one collective a step.

It stands apart so that a job with one collective pays nothing for it: with a program's tables in its loop an iteration
of 8 ranks took 1.7 times as long. Compiled with the kernel.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceenv.core import signals, timing
from paceenv.sim.engine.coupling import interrupt, note_computed, slow_down, spend
from paceenv.sim.engine.fluid import rewind
from paceenv.sim.engine.imperfections import delay_imperfectly, keep_missing
from paceenv.sim.engine.iteration.deciding import take_in, total
from paceenv.sim.engine.layout import Recording, Scratch, View
from paceenv.sim.engine.noise import draw_compute
from paceenv.sim.engine.program import run_program
from paceenv.sim.engine.program_layout import Program, ProgramScratch


def advance_program(
    e: int,
    iterations: int,
    view: View,
    scratch: Scratch,
    settings_SM2: NDArray[np.float64],
    limits_4: NDArray[np.float64],
    recording: Recording,
    program: Program,
    room: ProgramScratch,
) -> None:
    """Run one environment.

    Args:
        e: its number, which is its row of ``recording``.
        iterations: steps, T.
        view: the job and where it stands; updated.
        scratch: room to work in.
        settings_SM2: (threshold, window) of each mechanism, for all ranks (S = 1) or for each (S = R); ratios.
        limits_4: of every delay, as ``paceenv.core.limits.Limits.numbers``.
        recording: written to: step times always, stamps where it has room for them.
        program: the step.
        room: for one step of it.
    """
    job, clock, tick, heat, tenant = view.job, view.clock, view.tick, view.heat, view.tenant
    compute_R, comm_R, wait_R = scratch.compute_R, scratch.comm_R, scratch.wait_R
    ranks, step_T = compute_R.shape[0], recording.step_ET[e]
    delay_R, has_power = view.rank[timing.DELAY_S][:ranks], job["compute_w"] > 0.0
    is_imperfect = job["late_wake_s"] > 0.0 or job["missing_share"] > 0.0
    can_stop = job["checkpoint_iterations"] > 0 or job["failure_per_s"] > 0.0
    signals.start_interval(tick)
    clock["delay_s"] = 0.0
    for t in range(iterations):
        draw_compute(view, scratch)
        if heat.shape[1] > 0 or can_stop:
            slow_down(view, scratch)
        if is_imperfect:
            delay_imperfectly(job, clock["key"], clock["iteration"], delay_R)
            keep_missing(job, clock["key"], clock["iteration"], view.rank, scratch.aside_FR)
        clock["delay_s"] += total(delay_R, ranks) / (ranks * iterations)
        step_s = run_program(view, program, room, compute_R, scratch.spare_R) + job["barrier_s"]
        if has_power:
            note_computed(view, room.computed_R)
            spend(view, total(room.computed_R, ranks), step_s)
        extra_s = interrupt(view, step_s) if can_stop else 0.0
        step_T[t] = step_s + extra_s
        clock["time_s"] += step_s + extra_s
        if recording.ready_ETG.shape[1] > 0:
            keep_program_stamps(recording, e, t, view, room)
        for r in range(ranks):
            comm_R[r], wait_R[r] = room.paid_R[r], step_s - job["barrier_s"] - room.at_R[r]
        take_in(view, scratch, settings_SM2, limits_4, step_s, extra_s)
        if is_imperfect:
            keep_missing(job, clock["key"], clock["iteration"], scratch.aside_FR, view.rank)
        rewind(clock, tenant, step_s + extra_s)
        clock["iteration"] += 1


def keep_program_stamps(recording: Recording, e: int, t: int, view: View, room: ProgramScratch) -> None:
    """Write the stamps of an iteration: of every instruction and operation, and a summary of each rank.

    In the summary all that a rank waited for is one collective at the end of its step.

    Args:
        recording: written to.
        e: number of the environment.
        t: number of the iteration in this run.
        view: the job, before the ranks set their next delays.
        room: the step.
    """
    delay_R, end_s = view.rank[timing.DELAY_S], 0.0
    for r in range(room.at_R.shape[0]):
        end_s = max(end_s, room.at_R[r])
        recording.start_ETR[e, t, r] = 0.0
        recording.delay_ETR[e, t, r] = delay_R[r]
        recording.entry_ETR[e, t, r] = room.at_R[r] - room.waited_R[r]
        recording.exit_ETR[e, t, r] = room.at_R[r]
    for g in range(recording.finish_ETG.shape[2]):
        recording.finish_ETG[e, t, g] = recording.ready_ETG[e, t, g] = end_s
    for i in range(room.end_I.shape[0]):
        recording.end_ETI[e, t, i] = room.end_I[i]
    for o in range(room.start_O.shape[0]):
        recording.start_ETO[e, t, o], recording.through_ETO[e, t, o] = room.start_O[o], room.finish_O[o]
