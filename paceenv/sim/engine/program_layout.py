"""What the engine is given of a step as a program, and the room that one step works in.

``paceenv.sim.cluster`` makes a :class:`Program`; ``paceenv.sim.engine.program`` runs it. Legend: R ranks, N process
groups of all communicators, O operations, I instructions, L links, M members of all process groups, U uses of links, X
members of all operations, K tenants.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.engine.layout import zeros

COMPUTE, START, WAIT = 0, 1, 2
"""Kinds of instructions."""
OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send")
"""Names of operations, which ``op_O`` counts in."""
UPLINK = 0
"""The link that tenants share."""


class Uses(NamedTuple):
    """What the operations of a program use of links; read only."""

    weight_O: NDArray[np.float64]
    """``(O,)``: its share in a tie."""
    top_O: NDArray[np.float64]
    """``(O,)``: the largest share that it takes of a link when it runs alone."""
    first_use_O: NDArray[np.int64]
    """``(O + 1,)``: the first of its uses of links."""
    link_U: NDArray[np.int64]
    """``(U,)``: the link."""
    share_U: NDArray[np.float64]
    """``(U,)``: the share of that link that the operation takes when it runs alone, at most 1."""


class Program(NamedTuple):
    """The steps of the ranks of a job; read only."""

    first_R: NDArray[np.int64]
    """``(R + 1,)``: the first instruction of each rank."""
    kind_I: NDArray[np.int64]
    """``(I,)``: ``COMPUTE``, ``START`` or ``WAIT``."""
    share_I: NDArray[np.float64]
    """``(I,)``: of ``COMPUTE``: part of the job's ``compute_s``."""
    operation_I: NDArray[np.int64]
    """``(I,)``: of ``START`` and ``WAIT``: the operation."""
    micro_I: NDArray[np.int64]
    """``(I,)``: the micro-batch whose length an instruction's time follows; -1: none."""
    pays_I: NDArray[np.bool_]
    """``(I,)``: of ``WAIT``: whether the rank counts it as time in its payload collectives."""
    group_O: NDArray[np.int64]
    """``(O,)``: the process group of each operation; those of a group are numbered in their order."""
    op_O: NDArray[np.int64]
    """``(O,)``: its name, a place in ``OPS``; for who reads a recording."""
    bytes_O: NDArray[np.float64]
    """``(O,)``: its payload, bytes; for who reads a recording."""
    last_O: NDArray[np.bool_]
    """``(O,)``: whether it is the last of its group."""
    every_O: NDArray[np.int64]
    """``(O,)``: it happens in one of so many iterations."""
    can_wait_O: NDArray[np.bool_]
    """``(O,)``: whether it may be held back."""
    alone_O: NDArray[np.float64]
    """``(O,)``: seconds that it takes with all links free, latency not included."""
    latency_O: NDArray[np.float64]
    """``(O,)``: seconds of latency, in which it uses no link."""
    is_private_O: NDArray[np.bool_]
    """``(O,)``: whether it meets no other operation on any link."""
    first_member_N: NDArray[np.int64]
    """``(N + 1,)``: the first member of each process group."""
    rank_M: NDArray[np.int64]
    """``(M,)``: the member's rank."""
    place_I: NDArray[np.int64]
    """``(I,)``: of ``START`` and ``WAIT``: the place of the rank among the members."""
    first_handed_O: NDArray[np.int64]
    """``(O + 1,)``: where its row of ``ProgramScratch.handed_X`` begins."""
    uses: Uses
    links: int
    """How many links there are."""


class Flow(NamedTuple):
    """How running operations share links in a step.

    Apart, as functions that get all of :class:`ProgramScratch` take ten times as long to compile.
    """

    left_O: NDArray[np.float64]
    """How much of it was left at ``since_O``, seconds of running alone."""
    since_O: NDArray[np.float64]
    """When its rate was found."""
    rate_O: NDArray[np.float64]
    """How fast it runs now, relative to alone."""
    new_O: NDArray[np.float64]
    """Its next rate, while rates are being found."""
    level_O: NDArray[np.float64]
    """The water level at which its rate was found."""
    bottleneck_O: NDArray[np.int64]
    """The full link that limits its rate; -1: none, it runs as fast as alone."""
    changed_O: NDArray[np.int64]
    """Operations whose rate is to be found."""
    is_changed_O: NDArray[np.bool_]
    """Whether it is one of them."""
    left_L: NDArray[np.float64]
    """What no operation at its final rate takes of each link, a share."""
    weight_L: NDArray[np.float64]
    """What a unit of the water level takes of each link; -1 where the link is full."""
    head_L: NDArray[np.int64]
    """The first use of each link by a running operation; -1: none. ``before_U`` and ``after_U`` chain the others."""
    before_U: NDArray[np.int64]
    after_U: NDArray[np.int64]
    owner_U: NDArray[np.int64]
    """The operation of each use that is in a chain."""
    rate_K: NDArray[np.float64]
    """The share of the uplink that each tenant has now."""


class Queue(NamedTuple):
    """Operations with an event to come, a binary heap. Seconds from the end of the step before."""

    event_O: NDArray[np.float64]
    """When it starts or has moved its bytes, whichever is next."""
    heap_O: NDArray[np.int64]
    """A heap of operations with an event to come, in the order of ``event_O``; the first ``queued_1[0]`` count."""
    place_O: NDArray[np.int64]
    """Its place in the heap; -1: it is in none."""
    queued_1: NDArray[np.int64]
    """How many operations are in the heap."""


class ProgramScratch(NamedTuple):
    """What one step of one job works in. Seconds from the end of the step before, except where noted."""

    flow: Flow
    queue: Queue

    at_R: NDArray[np.float64]
    """How far each rank has come."""
    next_R: NDArray[np.int64]
    """Its next instruction."""
    blocked_R: NDArray[np.int64]
    """The operation that it waits for; -1: none."""
    waited_R: NDArray[np.float64]
    """How long it was blocked in all, seconds."""
    paid_R: NDArray[np.float64]
    """How long in its payload collectives, seconds."""
    computed_R: NDArray[np.float64]
    """How long it computed in all, seconds."""
    stack_R: NDArray[np.int64]
    """Ranks that can go on."""
    count_O: NDArray[np.int64]
    """How many members have handed the operation over."""
    ready_O: NDArray[np.float64]
    """When it can start; infinite while that is unknown."""
    start_O: NDArray[np.float64]
    """When it started; infinite before."""
    finish_O: NDArray[np.float64]
    """When it was through; infinite before."""
    due_O: NDArray[np.int64]
    """Operations that start at the present event."""
    handed_X: NDArray[np.float64]
    """When each member hands over each operation."""
    end_I: NDArray[np.float64]
    """When each instruction was over."""


def program_room(program: Program, tenants: int) -> ProgramScratch:
    """Room for one step of a job that runs ``program`` beside so many tenants."""
    ranks, operations, instructions = len(program.first_R) - 1, len(program.group_O), len(program.kind_I)
    sizes = {"R": ranks, "O": operations, "I": instructions, "L": program.links, "U": len(program.uses.link_U)}
    sizes |= {"X": int(program.first_handed_O[-1]), "K": tenants, "1": 1}
    room: ProgramScratch = zeros(ProgramScratch, sizes)
    return room._replace(flow=zeros(Flow, sizes), queue=zeros(Queue, sizes))
