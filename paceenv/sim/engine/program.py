"""A job whose step is a program: ranks compute, start transfers and wait for them; transfers share links as a fluid.

Scalar loops that the kernel compiles. A rank runs its instructions in order. ``COMPUTE`` takes time, ``START`` hands an
operation to a communicator and goes on, ``WAIT`` blocks until an operation is through. An operation starts when every
member of its process group has started it and the one before it on the same communicator is through. Running
operations divide the links they use by weighted max-min. One that meets no other on any link just takes its time.

Ranks run ahead until they block, and only then does the fluid move to its next event. That is exact: whatever a blocked
rank will start, it starts after the event that it waits for. Cost is linear in instructions and ranks; an event
costs the logarithm of how many are to come.

A transfer that can wait may be held back (rule ``defer``): its rank hands it over that much later. It does so at once
when it waits for the transfer, when it hands another one to the same communicator, or when another transfer for which
it was blocked is through. The order on each communicator is untouched.

The legend is that of ``paceenv.sim.engine.program_layout``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, timing
from paceenv.sim.engine.coupling import note_computed
from paceenv.sim.engine.draws import LENGTH, TRANSFER, bits32, key_of, quantile
from paceenv.sim.engine.fluid import tenant_goes_on
from paceenv.sim.engine.layout import LEFT_S, NEXT_S, Recording, View
from paceenv.sim.engine.link_fluid import clear, first_s, join_links, leave_links, put, share_links, take_first
from paceenv.sim.engine.program_layout import COMPUTE, START, Program, ProgramScratch

_NONE = -1
_DONE = 1e-12


def keep_program_stamps(recording: Recording, e: int, t: int, view: View, room: ProgramScratch) -> None:
    """Write the stamps of an iteration: of every instruction and operation, and a summary of each rank.

    In the summary all that a rank waited for is one collective at the end of its step.
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


def run_program(view: View, program: Program, s: ProgramScratch, compute_R: Any, stall_R: Any) -> float:
    """Run one step of all ranks.

    Args:
        s: written to; ``end_I``, ``start_O``, ``finish_O``, ``at_R``, ``waited_R``, ``paid_R`` and ``computed_R``
            are results.
        compute_R: compute time of each rank in this step, seconds; a share of it belongs to each ``COMPUTE``.
        stall_R: what a rank stands still at the start of its step, seconds: a data loader, a garbage collection.

    Returns:
        When the last rank is through, seconds from the end of the step before.
    """
    clock, tenants, tenant = view.clock, view.tenants, view.tenant
    delay_R, ranks = view.rank[timing.DELAY_S], compute_R.shape[0]
    for o in range(s.count_O.shape[0]):
        s.count_O[o] = 0
        s.ready_O[o] = s.start_O[o] = s.finish_O[o] = math.inf
    for r in range(ranks):
        s.at_R[r] = np.float64(delay_R[r]) + stall_R[r]
        s.next_R[r], s.blocked_R[r], s.waited_R[r], s.stack_R[r] = program.first_R[r], _NONE, 0.0, r
        s.computed_R[r] = s.paid_R[r] = 0.0
    for n in range(s.flow.head_L.shape[0]):
        s.flow.head_L[n] = _NONE
    clear(s.queue)
    now_s, runnable, changed = clock["link_s"], ranks, 0
    while True:
        while runnable > 0:
            runnable = go_on(view, program, s, compute_R, s.stack_R[runnable - 1], runnable - 1)
        if s.queue.queued_1[0] == 0 and changed == 0:
            break
        if changed > 0 or tenants.shape[0] > 0:
            share_links(program.uses, s.flow, s.queue, changed, now_s, tenants, tenant[LEFT_S])
        before_s = now_s
        now_s = max(min(first_s(s.queue), tenants_next_s(s.flow.rate_K, now_s, tenant)), now_s)
        for k in range(tenants.shape[0]):
            tenant_goes_on(clock, tenants, tenant, view.normal, k, now_s, s.flow.rate_K[k] * (now_s - before_s))
        changed, runnable = happen(view, program, s, now_s)
    clock["link_s"], end_s = now_s, 0.0
    for r in range(ranks):
        end_s = max(end_s, s.at_R[r])
    if view.job["compute_w"] > 0.0:
        note_computed(view, s.computed_R)
    return float(end_s)


def happen(view: View, program: Program, s: ProgramScratch, now_s: float) -> tuple[int, int]:
    """Let all operations end and then start whose time it is.

    Returns:
        How many operations have a rate to be found, and how many ranks can run.
    """
    changed, runnable, due = 0, 0, 0
    while s.queue.queued_1[0] > 0 and first_s(s.queue) - now_s <= _DONE * (program.alone_O[s.queue.heap_O[0]] + now_s):
        o = take_first(s.queue)
        if s.start_O[o] == math.inf:
            s.due_O[due] = o
            due += 1
        else:
            changed = leave_links(program.uses, s.flow, o, changed)
            runnable = leave(view, program, s, o, now_s, runnable)
            if not program.last_O[o]:
                runnable = schedule(view, program, s, o + 1, runnable)
    for i in range(due):
        o = s.due_O[i]
        s.start_O[o], s.flow.since_O[o], s.flow.left_O[o] = now_s, now_s, work_s(view, program, o)
        changed = join_links(program.uses, s.flow, o, changed)
    return changed, runnable


def tenants_next_s(rate_K: NDArray[np.float64], now_s: float, tenant: NDArray[np.float64]) -> float:
    """When a tenant's transfer ends or starts next, seconds as ``now_s``; infinite without tenants."""
    next_s = math.inf
    for k in range(tenant.shape[1]):
        if tenant[LEFT_S, k] > 0.0:
            next_s = min(next_s, now_s + tenant[LEFT_S, k] / rate_K[k])
        else:
            next_s = min(next_s, tenant[NEXT_S, k])
    return next_s


def go_on(view: View, program: Program, s: ProgramScratch, compute_R: Any, r: int, runnable: int) -> int:
    """Run rank ``r`` until it blocks or its step is over; returns how many ranks can run."""
    job = view.job
    i, at_s, hold_s = s.next_R[r], s.at_R[r], np.float64(view.rank[timing.DEFER_S, r])
    end = program.first_R[r + 1]
    while i < end:
        kind = program.kind_I[i]
        if kind == COMPUTE:
            lasts_s = program.share_I[i] * compute_R[r]
            if program.micro_I[i] >= 0 and job["length_cv"] > 0.0:
                lasts_s *= length_factor(view, r, program.micro_I[i])
            at_s += lasts_s
            s.computed_R[r] += lasts_s
        else:
            o = program.operation_I[i]
            if kind == START:
                if hold_s > 0.0:
                    hand_over(program, s, o - 1, program.group_O[o], program.place_I[i], at_s)
                handed_s = at_s + hold_s if program.can_wait_O[o] else at_s
                s.handed_X[program.first_handed_O[o] + program.place_I[i]] = handed_s
                s.count_O[o] += 1
                s.at_R[r] = at_s
                runnable = schedule(view, program, s, o, runnable)
            elif s.finish_O[o] < math.inf:
                waited_s = s.finish_O[o] - at_s
                if waited_s > 0.0:
                    at_s += waited_s
                    s.waited_R[r] += waited_s
                    if program.pays_I[i]:
                        s.paid_R[r] += waited_s
                    if hold_s > 0.0 and pacing.releases(waited_s, hold_s):
                        release(program, s, r, i, at_s - waited_s - hold_s, at_s)
            else:
                if hold_s > 0.0:
                    hand_over(program, s, o, program.group_O[o], program.place_I[i], at_s)
                s.next_R[r], s.at_R[r], s.blocked_R[r] = i, at_s, o
                return runnable
        s.end_I[i] = at_s
        i += 1
    s.next_R[r], s.at_R[r] = i, at_s
    return runnable


def release(program: Program, s: ProgramScratch, r: int, i: int, since_s: float, at_s: float) -> None:
    """Rank ``r`` hands over all that it holds back, because what it waited for is through."""
    j = i - 1
    while j >= program.first_R[r] and s.end_I[j] >= since_s:
        o = program.operation_I[j]
        if program.kind_I[j] == START and program.can_wait_O[o] and s.start_O[o] == math.inf:
            hand_over(program, s, o, program.group_O[o], program.place_I[j], at_s)
        j -= 1


def length_factor(view: View, r: int, micro: int) -> float:
    """How much longer a micro-batch of rank ``r`` takes than the mean one: its sequences are longer, a ratio."""
    key = key_of(view.clock["key"], LENGTH, view.clock["iteration"] * 4096 + micro)
    return float(max(1.0 + view.job["length_cv"] * quantile(view.normal, bits32(key, r)), 0.0))


def work_s(view: View, program: Program, o: int) -> float:
    """How long operation ``o`` takes in this iteration with all links free, seconds; latency not included."""
    job, clock = view.job, view.clock
    every = program.every_O[o]
    if every > 1 and (clock["iteration"] + 1) % every != 0:
        return 0.0
    alone_s = program.alone_O[o]
    if job["transfer_cv"] > 0.0:
        variance = math.log1p(job["transfer_cv"] ** 2)
        z = quantile(view.normal, bits32(key_of(clock["key"], TRANSFER, clock["iteration"]), o))
        alone_s *= math.exp(math.sqrt(variance) * z - 0.5 * variance)
    return float(alone_s)


def hand_over(program: Program, s: ProgramScratch, last: int, group: int, place: int, at_s: float) -> None:
    """A member hands over at ``at_s`` what it still holds of a group's operations up to ``last``."""
    o = last
    while o >= 0 and program.group_O[o] == group and s.start_O[o] == math.inf:
        x = program.first_handed_O[o] + place
        if s.handed_X[x] > at_s:
            was_s, s.handed_X[x] = s.handed_X[x], at_s
            if s.ready_O[o] < math.inf and was_s >= s.ready_O[o]:  # it was the last to hand over
                s.ready_O[o] = ready_s(program, s, o)
                put(s.queue, o, s.ready_O[o])
        o -= 1


def ready_s(program: Program, s: ProgramScratch, o: int) -> float:
    """When operation ``o`` can start: all members have handed it over and the one before it is through; seconds."""
    latest_s = 0.0
    for x in range(program.first_handed_O[o], program.first_handed_O[o + 1]):
        latest_s = max(latest_s, s.handed_X[x])
    if o > 0 and program.group_O[o - 1] == program.group_O[o]:
        latest_s = max(latest_s, s.finish_O[o - 1])
    return latest_s


def schedule(view: View, program: Program, s: ProgramScratch, o: int, runnable: int) -> int:
    """Let operation ``o`` start at a known time if nothing is missing; returns how many ranks can run.

    One that meets no other on any link and cannot be held back is through at once, and then perhaps the next one.
    """
    group = program.group_O[o]
    members = program.first_handed_O[o + 1] - program.first_handed_O[o]
    while s.count_O[o] == members and s.ready_O[o] == math.inf:
        if o > 0 and program.group_O[o - 1] == group and s.finish_O[o - 1] == math.inf:
            break
        s.ready_O[o] = ready_s(program, s, o)
        if not program.is_private_O[o] or program.can_wait_O[o]:
            put(s.queue, o, s.ready_O[o])
            break
        s.start_O[o] = s.ready_O[o]
        runnable = leave(view, program, s, o, s.ready_O[o] + work_s(view, program, o), runnable)
        if program.last_O[o]:
            break
        o += 1
    return runnable


def leave(view: View, program: Program, s: ProgramScratch, o: int, at_s: float, runnable: int) -> int:
    """Operation ``o`` has moved its bytes at ``at_s``; ranks that wait for it go on. Returns how many ranks can run."""
    every, group = program.every_O[o], program.group_O[o]
    happens = every <= 1 or (view.clock["iteration"] + 1) % every == 0
    s.finish_O[o] = at_s + (program.latency_O[o] if happens else 0.0)
    for m in range(program.first_member_N[group], program.first_member_N[group + 1]):
        r = program.rank_M[m]
        if s.blocked_R[r] == o:
            s.blocked_R[r] = _NONE
            s.stack_R[runnable] = r
            runnable += 1
    return runnable
