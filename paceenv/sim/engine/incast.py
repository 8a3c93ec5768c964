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
from paceenv.sim.engine.layout import ALL_TO_ALL


def receive_all(
    job: Any,
    clock: Any,
    delay_R: NDArray[np.float32],
    compute_R: NDArray[np.float64],
    finish_G: NDArray[np.float64],
    sent_R: NDArray[np.float64],
) -> None:
    """Write when the gather or all-to-all of each group is through, and when the senders of a gather are.

    A message starts when both its ends have arrived. In a gather a group's first member receives, in an all-to-all
    every member does, each on a port of its own.
    """
    groups, per_group = finish_G.shape[0], compute_R.shape[0] // finish_G.shape[0]
    key = key_of(clock["key"], INCAST, clock["iteration"])
    start_S, order_S, target_S, timeout_S = (
        np.empty(per_group),
        np.empty(per_group, np.int64),
        np.empty(per_group),
        np.empty(per_group),
    )
    receivers = per_group if job["incast_kind"] == ALL_TO_ALL else 1
    for g in range(groups):
        first, finish_s = g * per_group, 0.0
        for receiver in range(first, first + receivers):
            receiver_s = np.float64(delay_R[receiver]) + compute_R[receiver]
            senders = 0
            for r in range(first, first + per_group):
                if r != receiver:
                    start_s, i = max(np.float64(delay_R[r]) + compute_R[r], receiver_s), senders
                    while i > 0 and start_S[i - 1] > start_s:
                        start_S[i], order_S[i] = start_S[i - 1], order_S[i - 1]
                        i -= 1
                    start_S[i], order_S[i] = start_s, r
                    senders += 1
            done_s = _receive(job, key, receiver, senders, start_S, order_S, target_S, timeout_S, sent_R)
            finish_s = max(finish_s, receiver_s, done_s)
        finish_G[g] = finish_s


def _receive(
    job: Any,
    key: np.uint64,
    receiver: int,
    senders: int,
    start_S: NDArray[np.float64],
    order_S: NDArray[np.int64],
    target_S: NDArray[np.float64],
    timeout_S: NDArray[np.float64],
    sent_R: NDArray[np.float64],
) -> float:
    """When the last of ``senders`` messages is through a port; ``start_S`` ascending, ``order_S`` whose each is."""
    now_s, served_s, done_s = 0.0, 0.0, 0.0
    head, tail, handed = 0, 0, 0
    buffered_s = job["incast_buffered_s"]
    while head < senders:
        until_s = math.inf
        if tail < senders:
            until_s = max(start_S[tail] - now_s, 0.0)
        if head < tail:
            until_s = min(until_s, max(target_S[head] - served_s, 0.0) * (tail - head))
            if handed < tail:
                until_s = min(until_s, max(target_S[handed] - buffered_s - served_s, 0.0) * (tail - head))
            served_s += until_s / (tail - head)
        now_s += until_s
        while handed < tail and target_S[handed] - buffered_s <= served_s * (1.0 + 1e-13):
            sent_R[order_S[handed]] = now_s + timeout_S[handed]
            handed += 1
        while head < tail and target_S[head] <= served_s * (1.0 + 1e-13):
            done_s = max(done_s, now_s + timeout_S[head])
            head += 1
        while tail < senders and start_S[tail] <= now_s:
            target_S[tail] = served_s + job["incast_flow_s"]
            overflow = max(1.0 - job["incast_fit"] / (tail - head + 1), 0.0)
            lost = uniform(key, receiver, order_S[tail]) < overflow * overflow * overflow
            timeout_S[tail] = job["incast_timeout_s"] if lost else 0.0
            tail += 1
            if buffered_s >= job["incast_flow_s"]:  # all of it at once: a lost window is the kernel's business
                sent_R[order_S[handed]] = now_s
                handed += 1
    return done_s
