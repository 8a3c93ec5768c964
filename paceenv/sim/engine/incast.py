"""Incast: many senders, one receiver's port, a buffer that holds the opening windows of only some of them.

Scalar loops that the kernel compiles. Senders share the port equally. The m-th sender at once finds the buffer
overflowing by a share ``x = 1 - fit / m`` and loses any given segment with that probability. TCP repairs a loss at once
when three later segments get through, and otherwise waits for its retransmission timer. A sender that loses the last
three segments of its window, with probability ``x ** 3``, therefore ends a timeout later. A lossless fabric has an
infinite ``fit``.

The receiver of a gather leaves when all messages are through. A sender leaves earlier: when its own is, or what is left
of it fits into the send buffer of its socket, from which the kernel goes on sending. Members of an all-to-all receive
as well, so all of them leave together.

Source of the effect: Vasudevan et al., "Safe and effective fine-grained TCP retransmissions" (2009).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.engine.draws import INCAST, key_of, uniform
from paceenv.sim.engine.fluid import sort
from paceenv.sim.engine.layout import ALL_TO_ALL, Scratch

SURELY = 1.0 + 1e-9
"""Beyond rounding."""


def receive_all(job: Any, clock: Any, delay_R: NDArray[np.float32], scratch: Scratch) -> None:
    """Write when the gather or all-to-all of each group is through, and when the senders of a gather are.

    A message starts when both its ends have arrived. In a gather a group's first member receives, in an all-to-all
    every member does, each on a port of its own.
    """
    compute_R, finish_G = scratch.compute_R, scratch.finish_G
    arrival_J, order_J, start_J, sender_J = scratch.arrival_J, scratch.order_J, scratch.start_J, scratch.sender_J
    groups, per_group = finish_G.shape[0], compute_R.shape[0] // finish_G.shape[0]
    key = key_of(clock["key"], INCAST, clock["iteration"])
    for g in range(groups):
        first, finish_s = g * per_group, 0.0
        for i in range(per_group):
            arrival_J[i], order_J[i] = np.float64(delay_R[first + i]) + compute_R[first + i], i
        sort(arrival_J[:per_group], order_J[:per_group])
        for place in range(per_group - 1, -1, -1):
            receiver = order_J[place]
            if job["incast_kind"] == ALL_TO_ALL:
                if latest_end_s(job, per_group, place, scratch) * SURELY < finish_s:
                    continue
            elif receiver > 0:
                continue
            receiver_s, senders = arrival_J[receiver], 0
            for i in range(per_group):  # who was there before starts now, in the order of ranks
                if i != receiver and arrival_J[i] <= receiver_s:
                    start_J[senders], sender_J[senders] = receiver_s, first + i
                    senders += 1
            for later in range(senders, per_group):
                i = order_J[later]
                if i != receiver and arrival_J[i] > receiver_s:
                    start_J[senders], sender_J[senders] = arrival_J[i], first + i
                    senders += 1
            finish_s = max(finish_s, receiver_s, _receive(job, key, first + receiver, senders, scratch))
        finish_G[g] = finish_s


def latest_end_s(job: Any, members: int, place: int, scratch: Scratch) -> float:
    """An upper bound of when the port of the member at ``place`` of the order is through, seconds.

    From the last arrival on the port has all that is left, and it was busy before for as long as the first messages
    take. An all-to-all ends with the latest port, mostly that of the last member, so few ports must be looked at.
    """
    arrival_J, order_J, flow_s = scratch.arrival_J, scratch.order_J, job["incast_flow_s"]
    latest_s, since_s = arrival_J[order_J[members - 1]], arrival_J[order_J[max(place, min(members - 1, 1))]]
    busy_s = min(latest_s - since_s, max(place, 1) * flow_s)
    timeout_s = job["incast_timeout_s"] if job["incast_fit"] < members - 1 else 0.0
    return float(latest_s + (members - 1) * flow_s - busy_s + timeout_s)


def _receive(job: Any, key: np.uint64, receiver: int, senders: int, scratch: Scratch) -> float:
    """When the last of ``senders`` messages is through a port; ``start_J`` ascending, ``sender_J`` whose each is."""
    start_J, sender_J, target_J, timeout_J = scratch.start_J, scratch.sender_J, scratch.target_J, scratch.timeout_J
    sent_R, buffered_s, gathers = scratch.sent_R, job["incast_buffered_s"], job["incast_kind"] != ALL_TO_ALL
    now_s, served_s, done_s = 0.0, 0.0, 0.0
    head, tail, handed = 0, 0, 0
    while head < senders:
        until_s = math.inf
        if tail < senders:
            until_s = max(start_J[tail] - now_s, 0.0)
        if head < tail:
            until_s = min(until_s, max(target_J[head] - served_s, 0.0) * (tail - head))
            if gathers and handed < tail:
                until_s = min(until_s, max(target_J[handed] - buffered_s - served_s, 0.0) * (tail - head))
            served_s += until_s / (tail - head)
        now_s += until_s
        while gathers and handed < tail and target_J[handed] - buffered_s <= served_s * (1.0 + 1e-13):
            sent_R[sender_J[handed]] = now_s + timeout_J[handed]
            handed += 1
        while head < tail and target_J[head] <= served_s * (1.0 + 1e-13):
            done_s = max(done_s, now_s + timeout_J[head])
            head += 1
        while tail < senders and start_J[tail] <= now_s:
            target_J[tail] = served_s + job["incast_flow_s"]
            overflow = max(1.0 - job["incast_fit"] / (tail - head + 1), 0.0)
            lost = overflow > 0.0 and uniform(key, receiver, sender_J[tail]) < overflow * overflow * overflow
            timeout_J[tail] = job["incast_timeout_s"] if lost else 0.0
            tail += 1
            if gathers and buffered_s >= job["incast_flow_s"]:  # at once: a lost window is the kernel's business
                sent_R[sender_J[handed]] = now_s
                handed += 1
    return done_s
