"""One job, iteration by iteration: compute, arrival, collective, post-collective work, barrier, and the next delays.

The only physics of the project. :func:`advance` is compiled (``paceenv.sim.engine.compiled``) and called on a slice of
a batch; scalar and vector environments, policies, calibration and benchmarks all run through it. Pacing enters in one
place: a rank's arrival is its delay plus its compute time.

Legend: E environments, R ranks, G groups of R / G consecutive ranks, K tenants, T iterations, M mechanisms,
S ranks with settings of their own (1: one setting for all, or R).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import signals, timing
from paceenv.sim.engine.coupling import interrupt, reset_coupling, run_ahead, slow_down, spend
from paceenv.sim.engine.draws import OBSERVER, uniform
from paceenv.sim.engine.fluid import reset_tenants, rewind, share_uplink, vary_transfers
from paceenv.sim.engine.incast import receive_all
from paceenv.sim.engine.layout import FIXED_POST_WORK_S, NO_INCAST, POST_WORK_NOW_S, POST_WORK_UNTIL
from paceenv.sim.engine.noise import draw_compute, reset_noise, start_post_work


def reset(
    which: NDArray[np.int64],
    jobs: Any,
    tenants_EK: Any,
    clocks: Any,
    noise_ENR: NDArray[np.float32],
    heat_EHN: NDArray[np.float32],
    start_ER: NDArray[np.float32],
    group_ENG: NDArray[np.float64],
    tenant_ENK: NDArray[np.float64],
    rank_EFR: NDArray[np.float32],
    tick_EK: NDArray[np.float64],
    normal: NDArray[np.float64],
) -> None:
    """Start an episode in the environments ``which``; ``clocks["key"]`` holds their episode keys."""
    for i in range(which.shape[0]):
        e = which[i]
        reset_noise(jobs[e], clocks[e], noise_ENR[e], group_ENG[e], normal)
        reset_coupling(jobs[e], clocks[e], heat_EHN[e], start_ER[e])
        reset_tenants(jobs[e], clocks[e], tenants_EK[e], tenant_ENK[e])
        timing.reset_tick(tick_EK[e])
        for r in range(rank_EFR.shape[2]):
            timing.reset_rank(rank_EFR[e], r)


def arrive(compute_R: NDArray[np.float64], rank: NDArray[np.float32], arrival_G: NDArray[np.float64]) -> None:
    """A group's collective starts when the last of its ranks arrives, seconds from the last step's end.

    Never before that end: of ranks that run ahead the last may have arrived earlier.

    Floats that are not negative are ordered as their bits, and a maximum of integers runs in vector registers. Here and
    in :func:`observe_and_decide` ranks are counted unsigned: for a signed index that does not start at 0 Numba would
    test every access for counting from the end.
    """
    groups, ranks = arrival_G.shape[0], compute_R.shape[0]
    per_group = ranks // groups
    delay_R = rank[timing.DELAY_S]
    for g in range(groups):
        latest = np.int64(0)
        for r in range(np.uint64(g * per_group), np.uint64((g + 1) * per_group)):
            at_s = np.float64(np.float64(delay_R[r]) + compute_R[r])
            latest = max(latest, at_s.view(np.int64))
        latest_bits = np.int64(latest)
        arrival_G[g] = latest_bits.view(np.float64)


def start_early(
    job: Any,
    compute_R: NDArray[np.float64],
    rank: NDArray[np.float32],
    arrival_G: NDArray[np.float64],
    complete_G: NDArray[np.float64],
) -> None:
    """Let collectives start when every rank has its first gradients; ``complete_G`` keeps when all have the last."""
    per_group, delay_R, before = compute_R.shape[0] // arrival_G.shape[0], rank[timing.DELAY_S], 1.0
    before -= job["overlap_share"]
    for g in range(arrival_G.shape[0]):
        complete_G[g], latest_s = arrival_G[g], 0.0
        for r in range(g * per_group, (g + 1) * per_group):
            latest_s = max(latest_s, np.float64(delay_R[r]) + before * compute_R[r])
        arrival_G[g] = latest_s


def sort_groups(arrival_G: NDArray[np.float64], order_G: NDArray[np.int64]) -> None:
    """Order the groups by arrival, ties by number; insertion sort where the groups are few."""
    if order_G.shape[0] > 32:
        order_G[:] = np.argsort(arrival_G, kind="mergesort")
        return
    for i in range(1, order_G.shape[0]):
        g, j = order_G[i], i - 1
        while j >= 0 and (
            arrival_G[order_G[j]] > arrival_G[g] or (arrival_G[order_G[j]] == arrival_G[g] and order_G[j] > g)
        ):
            order_G[j + 1] = order_G[j]
            j -= 1
        order_G[j + 1] = g


def finish_step(
    job: Any,
    iteration: int,
    group: NDArray[np.float64],
    complete_G: NDArray[np.float64],
    finish_G: NDArray[np.float64],
    ready_G: NDArray[np.float64],
) -> float:
    """Write when each group is ready for the end of the step; return when the step ends, the common clock tick.

    Where collectives overlap with compute, the last gradients are reduced after it, however early the first ones went.
    """
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


def observe_and_decide(
    job: Any,
    clock: Any,
    rank: NDArray[np.float32],
    tick: NDArray[np.float64],
    start_R: NDArray[np.float32],
    settings_SM2: NDArray[np.float64],
    compute_R: NDArray[np.float64],
    comm_R: NDArray[np.float32],
    wait_R: NDArray[np.float32],
    finish_G: NDArray[np.float64],
    ready_G: NDArray[np.float64],
    step_s: float,
    extra_s: float,
) -> None:
    """Every rank takes in its own timing and sets the delay of its next iteration.

    ``extra_s`` is what a checkpoint or a restart adds after the ``step_s``.
    """
    groups, ranks = finish_G.shape[0], compute_R.shape[0]
    per_group, delay_R = ranks // groups, rank[timing.DELAY_S]
    for g in range(groups):
        barrier_s = np.float32(step_s - job["barrier_s"] - ready_G[g])
        finish_s = finish_G[g]
        for r in range(np.uint64(g * per_group), np.uint64((g + 1) * per_group)):
            comm_R[r] = finish_s - (np.float64(delay_R[r]) + compute_R[r])
            wait_R[r] = barrier_s
    if job["staleness"] > 0:
        run_ahead(job, clock, start_R, delay_R, compute_R, comm_R, step_s)
    timing.observe_step(tick, step_s + extra_s)
    timing.observe_ranks(rank, tick, comm_R, wait_R, job["has_barrier"])
    if settings_SM2.shape[0] == 1:
        timing.decide(rank, tick, 0, ranks, settings_SM2[0], job["cap_s"], 0, per_group)
    else:
        for r in range(ranks):
            timing.decide(rank, tick, r, r + 1, settings_SM2[r], job["cap_s"], 0, per_group)


def total(value_R: Any, ranks: int) -> float:
    """Sum over ranks, in any order: only reported, never fed back, so it may be re-associated into vector registers."""
    result = 0.0
    for r in range(ranks):
        result += value_R[r]
    return result


def observer_rank(key: np.uint64, ranks: int) -> int:
    """The rank whose view a training environment shows: drawn once an episode, uniformly."""
    return int(uniform(key, OBSERVER, 0) * ranks)


def advance(
    which: NDArray[np.int64],
    iterations: int,
    jobs: Any,
    tenants_EK: Any,
    clocks: Any,
    noise_ENR: NDArray[np.float32],
    heat_EHN: NDArray[np.float32],
    start_ER: NDArray[np.float32],
    group_ENG: NDArray[np.float64],
    tenant_ENK: NDArray[np.float64],
    rank_EFR: NDArray[np.float32],
    tick_EK: NDArray[np.float64],
    normal: NDArray[np.float64],
    imbalance: NDArray[np.float64],
    settings_ESM2: NDArray[np.float64],
    step_ET: NDArray[np.float64],
    record: bool,
    start_ETR: NDArray[np.float64],
    entry_ETR: NDArray[np.float64],
    delay_ETR: NDArray[np.float64],
    finish_ETG: NDArray[np.float64],
    ready_ETG: NDArray[np.float64],
) -> None:
    """Run the environments ``which`` for ``iterations``; step times, and with ``record`` every stamp, come out.

    Stamps are seconds from the end of the step before: start, entry and delay per rank, exit of the collective and end
    of the post-collective work per group.
    """
    ranks, groups = noise_ENR.shape[2], group_ENG.shape[2]
    compute_R, scratch_R, bits_R = np.empty(ranks), np.empty(ranks), np.empty(ranks, np.uint32)
    comm_R, wait_R = np.empty(ranks, np.float32), np.empty(ranks, np.float32)
    order_G, arrival_G, complete_G = np.arange(groups), np.empty(groups), np.empty(groups)
    finish_G, ready_G = np.empty(groups), np.empty(groups)
    for i in range(which.shape[0]):
        e = which[i]
        advance_job(
            iterations,
            jobs[e],
            clocks[e],
            borrowed(tenants_EK)[e],
            borrowed(noise_ENR)[e],
            borrowed(heat_EHN)[e],
            borrowed(start_ER)[e],
            borrowed(group_ENG)[e],
            borrowed(tenant_ENK)[e],
            borrowed(rank_EFR)[e],
            borrowed(tick_EK)[e],
            borrowed(normal),
            borrowed(imbalance)[jobs[e]["imbalance_table"]],
            borrowed(settings_ESM2)[e],
            borrowed(step_ET)[e],
            record,
            borrowed(start_ETR)[e],
            borrowed(entry_ETR)[e],
            borrowed(delay_ETR)[e],
            borrowed(finish_ETG)[e],
            borrowed(ready_ETG)[e],
            borrowed(compute_R),
            borrowed(scratch_R),
            borrowed(bits_R),
            borrowed(comm_R),
            borrowed(wait_R),
            borrowed(order_G),
            borrowed(arrival_G),
            borrowed(complete_G),
            borrowed(finish_G),
            borrowed(ready_G),
        )


def borrowed(array: Any) -> Any:
    """The array itself; compiled, without the owner of its memory (see ``paceenv.sim.engine.compiled``)."""
    return array


def advance_job(
    iterations: int,
    job: Any,
    clock: Any,
    tenants: Any,
    noise: NDArray[np.float32],
    heat: NDArray[np.float32],
    start_R: NDArray[np.float32],
    group: NDArray[np.float64],
    tenant: NDArray[np.float64],
    rank: NDArray[np.float32],
    tick: NDArray[np.float64],
    normal: NDArray[np.float64],
    imbalance: NDArray[np.float64],
    settings_SM2: NDArray[np.float64],
    step_T: NDArray[np.float64],
    record: bool,
    start_TR: NDArray[np.float64],
    entry_TR: NDArray[np.float64],
    delay_TR: NDArray[np.float64],
    finish_TG: NDArray[np.float64],
    ready_TG: NDArray[np.float64],
    compute_R: NDArray[np.float64],
    scratch_R: NDArray[np.float64],
    bits_R: NDArray[np.uint32],
    comm_R: NDArray[np.float32],
    wait_R: NDArray[np.float32],
    order_G: NDArray[np.int64],
    arrival_G: NDArray[np.float64],
    complete_G: NDArray[np.float64],
    finish_G: NDArray[np.float64],
    ready_G: NDArray[np.float64],
) -> None:
    """:func:`advance` for one environment, in the scratch arrays given last."""
    ranks, groups = compute_R.shape[0], arrival_G.shape[0]
    delay_R, has_power = rank[timing.DELAY_S][:ranks], job["compute_w"] > 0.0
    can_stop = job["checkpoint_iterations"] > 0 or job["failure_rate"] > 0.0
    signals.start_interval(tick)
    clock["delay_s"] = 0.0
    for g in range(groups):
        order_G[g] = g
    for t in range(iterations):
        draw_compute(job, clock, noise, normal, imbalance, compute_R, scratch_R, bits_R)
        if heat.shape[1] > 0 or can_stop:
            slow_down(job, clock, heat, compute_R)
        compute_s = total(compute_R, ranks) if has_power else 0.0
        if job["staleness"] > 0:
            for r in range(ranks):
                compute_R[r] += start_R[r]
        clock["delay_s"] += total(delay_R, ranks) / (ranks * iterations)
        arrive(compute_R, rank, arrival_G)
        if job["incast_kind"] != NO_INCAST:
            receive_all(job, clock, delay_R, compute_R, finish_G)
        else:
            if job["overlap_share"] > 0.0:
                start_early(job, compute_R, rank, arrival_G, complete_G)
            if job["uplink_work_s"] > 0.0:
                sort_groups(arrival_G, order_G)
            share_uplink(job, clock, tenants, tenant, normal, order_G, arrival_G, finish_G)
        if job["transfer_cv"] > 0.0:
            vary_transfers(job, clock, tenants, normal, arrival_G, finish_G)
        if job["post_work_share"] > 0.0:
            start_post_work(job, clock, group)
        step_s = finish_step(job, clock["iteration"], group, complete_G, finish_G, ready_G)
        if has_power:
            spend(job, clock, heat, delay_R, compute_s, step_s)
        extra_s = interrupt(job, clock, heat, ranks) if can_stop else 0.0
        step_T[t] = step_s + extra_s
        clock["time_s"] += step_s + extra_s
        if record:
            for r in range(ranks):
                start_TR[t, r] = start_R[r] if job["staleness"] > 0 else 0.0
                delay_TR[t, r] = delay_R[r]
                entry_TR[t, r] = np.float64(delay_R[r]) + compute_R[r]
            for g in range(groups):
                finish_TG[t, g] = finish_G[g]
                ready_TG[t, g] = ready_G[g]
        observe_and_decide(
            job, clock, rank, tick, start_R, settings_SM2, compute_R, comm_R, wait_R, finish_G, ready_G, step_s, extra_s
        )
        rewind(clock, tenant, step_s + extra_s)
        clock["iteration"] += 1
    signals.close_step_interval(tick)


def observe(
    which: NDArray[np.int64],
    ranks: int,
    every_rank: bool,
    clocks: Any,
    rank_EFR: NDArray[np.float32],
    tick_EK: NDArray[np.float64],
    out_ESO: NDArray[np.float32],
) -> None:
    """Write the observations of the interval just run: of each environment's observer rank, or of every rank.

    ``rank_EFR`` may have more columns than the job has ``ranks``.
    """
    for i in range(which.shape[0]):
        e = which[i]
        if every_rank:
            for r in range(ranks):
                signals.write_signals(rank_EFR[e], r, tick_EK[e], out_ESO[e, r])
        else:
            r = observer_rank(clocks[e]["key"], ranks)
            signals.write_signals(rank_EFR[e], r, tick_EK[e], out_ESO[e, 0])
