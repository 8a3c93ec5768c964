"""One job, iteration by iteration: compute, arrival, collective, post-collective work, barrier, and the next delays.

The physics of the project; ``paceenv.sim.reference`` tells it again, to check it. :func:`advance` is compiled
(``paceenv.sim.engine.compiled``) and called on a slice of a batch. Scalar and vector environments, policies,
calibration and benchmarks all run through it. Pacing enters in one place: the arrival of a rank is its delay plus its
compute time.

Legend: E environments, R ranks, G groups of R / G consecutive ranks, K tenants, T iterations, M mechanisms, S ranks
with settings of their own (1: one setting for all, or R).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, signals, timing
from paceenv.sim.engine.coupling import interrupt, reset_coupling, run_ahead, slow_down, spend
from paceenv.sim.engine.draws import OBSERVER, uniform
from paceenv.sim.engine.fluid import reset_tenants, rewind, share_uplink, sort, vary_transfers
from paceenv.sim.engine.incast import receive_all
from paceenv.sim.engine.layout import (
    FIXED_POST_WORK_S,
    GATHER,
    NO_INCAST,
    POST_WORK_NOW_S,
    POST_WORK_UNTIL,
    Recording,
    Scratch,
    State,
    Tables,
    View,
)
from paceenv.sim.engine.measuring import delay_imperfectly, keep_missing, take_in, total
from paceenv.sim.engine.noise import draw_compute, reset_noise, start_post_work
from paceenv.sim.engine.program import keep_program_stamps, run_program
from paceenv.sim.engine.program_layout import Program


def reset(which: NDArray[np.int64], tables: Tables, state: State) -> None:
    """Start an episode in the environments ``which``; ``state.clocks["key"]`` holds their episode keys."""
    for i in range(which.shape[0]):
        e = which[i]
        job, clock = tables.jobs[e], state.clocks[e]
        reset_noise(job, clock, state.noise_ENR[e], state.group_ENG[e], tables.normal)
        reset_coupling(clock, state.heat_EHN[e], state.start_ER[e])
        reset_tenants(clock, tables.tenants_EK[e], state.tenant_ENK[e])
        timing.reset_tick(state.tick_EK[e])
        rank = state.rank_EFR[e]
        for r in range(rank.shape[1]):
            timing.reset_rank(rank, r)


def arrive(view: View, scratch: Scratch, per_group: int) -> None:
    """Write when the last rank of each group arrives, which is when its collective starts.

    That is never before the end of the last step, even if all ranks run ahead and arrived earlier.

    Floats that are not negative are ordered as their bits, and a maximum of integers runs in vector registers. Here and
    in :func:`measure` ranks are counted unsigned: for a signed index that does not start at 0 Numba would
    test every access for counting from the end.
    """
    compute_R, arrival_G = scratch.compute_R, scratch.arrival_G
    delay_R = view.rank[timing.DELAY_S]
    for g in range(arrival_G.shape[0]):
        latest = np.int64(0)
        for r in range(np.uint64(g * per_group), np.uint64((g + 1) * per_group)):
            at_s = np.float64(np.float64(delay_R[r]) + compute_R[r])
            latest = max(latest, at_s.view(np.int64))
        latest_bits = np.int64(latest)
        arrival_G[g] = latest_bits.view(np.float64)


def start_early(view: View, scratch: Scratch) -> None:
    """Let collectives start when every rank has its first gradients; ``complete_G`` keeps when all have the last."""
    compute_R, arrival_G, complete_G = scratch.compute_R, scratch.arrival_G, scratch.complete_G
    per_group, delay_R = compute_R.shape[0] // arrival_G.shape[0], view.rank[timing.DELAY_S]
    before = 1.0 - view.job["overlap_share"]
    for g in range(arrival_G.shape[0]):
        complete_G[g], latest_s = arrival_G[g], 0.0
        for r in range(g * per_group, (g + 1) * per_group):
            latest_s = max(latest_s, np.float64(delay_R[r]) + before * compute_R[r])
        arrival_G[g] = latest_s


def finish_step(job: Any, iteration: int, group: NDArray[np.float64], scratch: Scratch) -> float:
    """Write when each group is ready for the end of the step.

    Where collectives overlap with compute, the last gradients are reduced after it, however early the first ones went.

    Args:
        scratch: ``finish_G`` (latency is added) and ``complete_G`` are read, ``ready_G`` is written.

    Returns:
        When the step ends, the common clock tick, in seconds from the end of the step before.
    """
    complete_G, finish_G, ready_G = scratch.complete_G, scratch.finish_G, scratch.ready_G
    end_s = 0.0
    for g in range(finish_G.shape[0]):
        finish_G[g] += job["latency_s"]
        if job["overlap_share"] > 0.0:
            finish_G[g] = max(finish_G[g], complete_G[g] + job["tail_s"])
        post_work_s = group[FIXED_POST_WORK_S, g]
        if group[POST_WORK_UNTIL, g] > iteration:
            post_work_s += group[POST_WORK_NOW_S, g]
        ready_G[g] = finish_G[g] + post_work_s
        end_s = max(end_s, ready_G[g])
    return end_s + job["barrier_s"]


def exit_s(job: Any, scratch: Scratch, g: int, r: int) -> float:
    """When rank ``r`` of group ``g`` leaves its collective: with its group, a sender of a gather perhaps earlier.

    A message that was lost or is not buffered as a whole is through when its receiver says so, one hop later.
    """
    per_group = scratch.compute_R.shape[0] // scratch.finish_G.shape[0]
    if job["incast_kind"] != GATHER or r == g * per_group:
        return float(scratch.finish_G[g])
    latency_s = job["latency_s"] if job["incast_buffered_s"] == 0.0 else 0.0
    return float(min(scratch.sent_R[r] + latency_s, scratch.finish_G[g]))


def measure(view: View, scratch: Scratch, step_s: float, per_group: int) -> None:
    """Write what every rank measures of its collective and of the barrier, seconds."""
    job, rank = view.job, view.rank
    compute_R, comm_R, wait_R = scratch.compute_R, scratch.comm_R, scratch.wait_R
    finish_G, ready_G = scratch.finish_G, scratch.ready_G
    groups, delay_R = finish_G.shape[0], rank[timing.DELAY_S]
    for g in range(groups):
        barrier_s = np.float32(step_s - job["barrier_s"] - ready_G[g])
        finish_s = finish_G[g]
        for r in range(np.uint64(g * per_group), np.uint64((g + 1) * per_group)):
            comm_R[r] = finish_s - (np.float64(delay_R[r]) + compute_R[r])
            wait_R[r] = barrier_s
    if job["incast_kind"] == GATHER:
        for g in range(groups):
            for r in range(g * per_group + 1, (g + 1) * per_group):
                early_s = exit_s(job, scratch, g, r) - finish_G[g]  # what is left of the gather is waited for later
                comm_R[r] += early_s
                wait_R[r] -= early_s
    if job["staleness"] > 0:
        run_ahead(view, scratch, step_s)


def reduce_once(view: View, scratch: Scratch, per_group: int) -> float:
    """Arrival, the one collective of each group, and what follows it; returns how long the step takes, seconds."""
    job, clock, tenant = view.job, view.clock, view.tenant
    compute_R, arrival_G, finish_G, order_G = scratch.compute_R, scratch.arrival_G, scratch.finish_G, scratch.order_G
    if job["staleness"] > 0:
        for r in range(compute_R.shape[0]):
            compute_R[r] += view.start_R[r]
    arrive(view, scratch, per_group)
    if job["incast_kind"] != NO_INCAST:
        receive_all(job, clock, view.rank[timing.DELAY_S], scratch)
    else:
        if job["overlap_share"] > 0.0:
            start_early(view, scratch)
        if job["uplink_work_s"] > 0.0:
            sort(arrival_G, order_G)
        share_uplink(job, clock, view.tenants, tenant, view.normal, order_G, arrival_G, finish_G)
    if job["transfer_cv"] > 0.0:
        vary_transfers(view, scratch)
    if job["post_work_share"] > 0.0:
        start_post_work(view)
    return finish_step(job, clock["iteration"], view.group, scratch)


def advance(*arguments: Any) -> None:
    """:func:`run`, which is inlined here: compiled by itself a job with tenants took a tenth longer."""
    run(*arguments)


def run(
    which: NDArray[np.int64],
    iterations: int,
    tables: Tables,
    state: State,
    settings_ESM2: NDArray[np.float64],
    recording: Recording,
    scratch: Scratch,
    simple: Scratch | None,
    program: Program | None,
    room: Any,
) -> None:
    """Run the environments ``which`` for ``iterations``, all with one collective a step or all with the program.

    Numba compiles both kinds apart, as it drops branches that need something which is None. So neither pays for the
    other: with a program's tables in its loop an iteration of 8 ranks took 1.7 times as long.

    Args:
        which: numbers of the environments, ``(n,)``; the rows of the others stay as they are.
        settings_ESM2: (threshold, window) of each mechanism, for all ranks of a job (S = 1) or for each (S = R).
        simple: ``scratch`` again where a step has one collective; None with a program.
        room: what a program works in; None without one.
    """
    for i in range(which.shape[0]):
        e = which[i]
        view = View(  # not made by a function: Numba would return copies of the records
            tables.jobs[e],
            state.clocks[e],
            tables.tenants_EK[e],
            tables.normal,
            tables.imbalance[tables.jobs[e]["imbalance_table"]],
            state.noise_ENR[e],
            state.heat_EHN[e],
            state.start_ER[e],
            state.group_ENG[e],
            state.tenant_ENK[e],
            state.rank_EFR[e],
            state.tick_EK[e],
        )
        job, clock, tick, tenant = view.job, view.clock, view.tick, view.tenant
        compute_R, comm_R, wait_R, order_G = scratch.compute_R, scratch.comm_R, scratch.wait_R, scratch.order_G
        ranks, groups, step_T = compute_R.shape[0], order_G.shape[0], recording.step_ET[e]
        per_group = ranks // groups  # here, as a division takes as long as a rank's share of an iteration
        pacing.by_rank(settings_ESM2[e], scratch.settings_M2R, scratch.on_M)
        delay_R, has_power = view.rank[timing.DELAY_S][:ranks], job["compute_w"] > 0.0
        is_imperfect = job["late_wake_s"] > 0.0 or job["missing_share"] > 0.0
        can_stop = job["checkpoint_iterations"] > 0 or job["failure_per_s"] > 0.0
        signals.start_interval(tick)
        clock["delay_s"] = 0.0
        for g in range(groups):
            order_G[g] = g
        for t in range(iterations):
            draw_compute(view, scratch, program is not None)
            if has_power or can_stop:
                slow_down(view, scratch)
            compute_s = total(compute_R, ranks) if has_power else 0.0
            if is_imperfect:
                delay_imperfectly(job, clock["key"], clock["iteration"], delay_R)
                keep_missing(job, clock["key"], clock["iteration"], view.rank, scratch.aside_FR)
            clock["delay_s"] += total(delay_R, ranks) / (ranks * iterations)
            step_s = 0.0
            if simple is not None:
                step_s = reduce_once(view, simple, per_group)
            if program is not None:
                step_s = run_program(view, program, room, compute_R, scratch.spare_R) + job["barrier_s"]
                compute_s = total(room.computed_R, ranks)
            if has_power:
                spend(view, compute_s, step_s)
            extra_s = interrupt(view, step_s) if can_stop else 0.0
            step_T[t] = step_s + extra_s
            clock["time_s"] += step_s + extra_s
            if simple is not None:
                if recording.ready_ETG.shape[1] > 0:
                    keep_stamps(recording, e, t, view, simple)
                measure(view, simple, step_s, per_group)
            if program is not None:
                if recording.ready_ETG.shape[1] > 0:
                    keep_program_stamps(recording, e, t, view, room)
                for r in range(ranks):
                    comm_R[r], wait_R[r] = room.paid_R[r], step_s - job["barrier_s"] - room.at_R[r]
            take_in(view, scratch, tables.limits, step_s, extra_s, per_group)
            if is_imperfect:
                keep_missing(job, clock["key"], clock["iteration"], scratch.aside_FR, view.rank)
            rewind(clock, tenant, step_s + extra_s)
            clock["iteration"] += 1


def keep_stamps(recording: Recording, e: int, t: int, view: View, scratch: Scratch) -> None:
    """Write the stamps of an iteration, before the ranks set their next delays."""
    delay_R, start_R, compute_R = view.rank[timing.DELAY_S], view.start_R, scratch.compute_R
    for r in range(compute_R.shape[0]):
        recording.start_ETR[e, t, r] = start_R[r] if view.job["staleness"] > 0 else 0.0
        recording.delay_ETR[e, t, r] = delay_R[r]
        recording.entry_ETR[e, t, r] = np.float64(delay_R[r]) + compute_R[r]
        group = r // (compute_R.shape[0] // scratch.finish_G.shape[0])
        recording.exit_ETR[e, t, r] = exit_s(view.job, scratch, group, r)
    for g in range(scratch.finish_G.shape[0]):
        recording.finish_ETG[e, t, g] = scratch.finish_G[g]
        recording.ready_ETG[e, t, g] = scratch.ready_G[g]


def observe(which: NDArray[np.int64], ranks: int, every_rank: bool, state: State, out_ESO: NDArray[np.float32]) -> None:
    """Write the observations of the interval just run: of every rank, or of one that is drawn once an episode."""
    for i in range(which.shape[0]):
        e = which[i]
        if every_rank:
            for r in range(ranks):
                signals.write_signals(state.rank_EFR[e], r, state.tick_EK[e], out_ESO[e, r])
        else:
            r = int(uniform(state.clocks[e]["key"], OBSERVER, 0) * ranks)
            signals.write_signals(state.rank_EFR[e], r, state.tick_EK[e], out_ESO[e, 0])
