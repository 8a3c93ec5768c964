"""How running operations of a program divide the links: weighted max-min, solved again only where something changed.

A division is max-min when every operation either runs as fast as alone or has a full link on which none has a higher
level: its bottleneck. When an operation comes or goes, only those whose bottleneck it touches can change. They are
filled again with all others as they are; whoever is disturbed by that is filled again with them, until nobody is. The
result is the one of filling all (Bertsekas and Gallager, Data Networks, 1992, 6.5.2), at the cost of what changed.

When operations start or have moved their bytes is kept in a binary heap, in which each can be moved.

Scalar loops that the kernel compiles. The legend is that of ``paceenv.sim.engine.program_layout``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.engine.program_layout import UPLINK, Flow, Queue, Uses

_NONE, _ALONE, _ABSENT = -1, -1, -1
_UNKNOWN, _FULL, _SLOWEST = -1.0, -1.0, 1e-9
_ROUNDING, _SAME = 1e-12, 1e-9


def join_links(uses: Uses, flow: Flow, o: int, changed: int) -> int:
    """Operation ``o`` runs from now on; returns how many operations have a rate to be found."""
    flow.rate_O[o] = 0.0
    for u in range(uses.first_use_O[o], uses.first_use_O[o + 1]):
        link = uses.link_U[u]
        after = flow.head_L[link]
        flow.before_U[u], flow.after_U[u], flow.owner_U[u] = _NONE, after, o
        if after != _NONE:
            flow.before_U[after] = u
        flow.head_L[link] = u
    return look_again(flow, o, changed)


def leave_links(uses: Uses, flow: Flow, o: int, changed: int) -> int:
    """Operation ``o`` runs no longer; returns how many operations have a rate to be found."""
    if flow.is_changed_O[o]:
        flow.is_changed_O[o] = False
        i = 0
        while flow.changed_O[i] != o:
            i += 1
        changed -= 1
        flow.changed_O[i] = flow.changed_O[changed]
    for u in range(uses.first_use_O[o], uses.first_use_O[o + 1]):
        link, before, after = uses.link_U[u], flow.before_U[u], flow.after_U[u]
        if before == _NONE:
            flow.head_L[link] = after
        else:
            flow.after_U[before] = after
        if after != _NONE:
            flow.before_U[after] = before
        other = flow.head_L[link]
        while other != _NONE:
            if flow.bottleneck_O[flow.owner_U[other]] == link:
                changed = look_again(flow, flow.owner_U[other], changed)
            other = flow.after_U[other]
    return changed


def look_again(flow: Flow, o: int, changed: int) -> int:
    """The rate of operation ``o`` is to be found; returns of how many operations it is."""
    if flow.is_changed_O[o]:
        return changed
    flow.is_changed_O[o] = True
    flow.changed_O[changed] = o
    return changed + 1


def _mark_all_on(flow: Flow, link: int, changed: int) -> int:
    u = flow.head_L[link]
    while u != _NONE:
        changed = look_again(flow, flow.owner_U[u], changed)
        u = flow.after_U[u]
    return changed


def share_links(
    uses: Uses, flow: Flow, queue: Queue, changed: int, now_s: float, tenants: Any, left_K: NDArray[np.float64]
) -> None:
    """Find the rates of all operations that a change touches, and when they end; of tenants too where they are on.

    Args:
        flow: ``rate_O``, ``left_O``, ``since_O`` and ``rate_K`` are written.
        queue: when the operations end is written.
        changed: how many operations of ``changed_O`` have a rate to be found.
        tenants: ``(K,)`` of ``TENANT``; all on the uplink are filled with them.
    """
    if tenants.shape[0] > 0:
        changed = _mark_all_on(flow, UPLINK, changed)
    while True:
        if changed == 1 and tenants.shape[0] == 0:
            _fill_one(uses, flow, flow.changed_O[0])
        else:
            _fill(uses, flow, changed, tenants, left_K)
        count = _disturbed(uses, flow, changed)
        if count == changed:
            break
        changed = count
    for i in range(changed):
        o = flow.changed_O[i]
        flow.is_changed_O[o] = False
        flow.left_O[o] -= flow.rate_O[o] * (now_s - flow.since_O[o])
        flow.rate_O[o], flow.since_O[o] = flow.new_O[o], now_s
        put(queue, o, now_s + max(flow.left_O[o], 0.0) / flow.rate_O[o])


def _disturbed(uses: Uses, flow: Flow, changed: int) -> int:
    """Add those whose bottleneck is none any more; returns how many operations have a rate to be found."""
    count = changed
    for i in range(changed):
        o = flow.changed_O[i]
        for u in range(uses.first_use_O[o], uses.first_use_O[o + 1]):
            link = uses.link_U[u]
            load, highest, held = 0.0, 0.0, math.inf
            other = flow.head_L[link]
            while other != _NONE:
                p = flow.owner_U[other]
                load += (flow.new_O[p] if flow.is_changed_O[p] else flow.rate_O[p]) * uses.share_U[other]
                highest = max(highest, flow.level_O[p])
                if flow.is_changed_O[p] and flow.bottleneck_O[p] == link:
                    held = min(held, flow.level_O[p])
                other = flow.after_U[other]
            is_full = load >= 1.0 - _SAME
            other = flow.head_L[link]
            while other != _NONE:
                p = flow.owner_U[other]
                if not flow.is_changed_O[p]:
                    is_beaten = not is_full or highest > flow.level_O[p] * (1.0 + _SAME)
                    if (flow.bottleneck_O[p] == link and is_beaten) or flow.level_O[p] > held * (1.0 + _SAME):
                        count = look_again(flow, p, count)
                other = flow.after_U[other]
    return count


def _fill_one(uses: Uses, flow: Flow, o: int) -> None:
    """Set the rate of the only changed operation as :func:`_fill` does, where no tenant counts."""
    per_level = uses.weight_O[o] / uses.top_O[o]
    level, bottleneck = uses.top_O[o] / uses.weight_O[o], _ALONE
    for u in range(uses.first_use_O[o], uses.first_use_O[o + 1]):
        taken = per_level * uses.share_U[u]
        if taken > 0.0:
            full_at = _free(uses, flow, uses.link_U[u]) / taken
            if full_at <= level * (1.0 + _ROUNDING):
                level, bottleneck = min(level, full_at), uses.link_U[u]
    rate = level * uses.weight_O[o] / uses.top_O[o]
    flow.new_O[o], flow.level_O[o] = max(min(rate, 1.0), _SLOWEST), level
    flow.bottleneck_O[o] = bottleneck


def _fill(uses: Uses, flow: Flow, changed: int, tenants: Any, left_K: NDArray[np.float64]) -> None:
    """Set the rates of changed operations and of tenants, with all others as they are.

    The water level rises for all alike: at a level, one of weight w has ``w * level`` of its busiest link. It stops
    rising where it runs as fast as alone, or where one of its links is full.
    """
    _begin_to_rise(uses, flow, changed, tenants, left_K)
    for _ in range(changed + tenants.shape[0]):
        level = _rising_to(uses, flow, changed, tenants)
        if level == math.inf:
            return
        full_at = level * (1.0 + _ROUNDING)
        for i in range(changed):  # before anything is taken off a link
            o = flow.changed_O[i]
            for u in range(uses.first_use_O[o], uses.first_use_O[o + 1]):
                link = uses.link_U[u]
                if flow.weight_L[link] > 0.0 and flow.left_L[link] <= full_at * flow.weight_L[link]:
                    flow.weight_L[link] = _FULL
        weight = flow.weight_L[UPLINK] if tenants.shape[0] > 0 else 0.0
        if weight > 0.0 and flow.left_L[UPLINK] <= full_at * weight:
            flow.weight_L[UPLINK] = _FULL
        for i in range(changed):
            _freeze(uses, flow, flow.changed_O[i], level)
        for k in range(tenants.shape[0]):
            cap, rate = tenants[k]["rate_cap"], level * tenants[k]["weight"]
            if flow.rate_K[k] == _UNKNOWN and (rate * (1.0 + _ROUNDING) >= cap or flow.weight_L[UPLINK] == _FULL):
                flow.rate_K[k] = max(min(rate, cap), _SLOWEST)
                flow.left_L[UPLINK] -= flow.rate_K[k]


def _begin_to_rise(uses: Uses, flow: Flow, changed: int, tenants: Any, left_K: NDArray[np.float64]) -> None:
    """Rates of changed operations and of tenants are unknown, and links have what the others leave of them."""
    for i in range(changed):
        o = flow.changed_O[i]
        flow.new_O[o] = _UNKNOWN
        for u in range(uses.first_use_O[o], uses.first_use_O[o + 1]):
            flow.left_L[uses.link_U[u]] = _UNKNOWN
    for i in range(changed):
        o = flow.changed_O[i]
        for u in range(uses.first_use_O[o], uses.first_use_O[o + 1]):
            link = uses.link_U[u]
            if flow.left_L[link] == _UNKNOWN:
                flow.left_L[link] = _free(uses, flow, link)
    if tenants.shape[0] > 0:
        flow.left_L[UPLINK] = 1.0
    for k in range(tenants.shape[0]):
        flow.rate_K[k] = _UNKNOWN if left_K[k] > 0.0 else 0.0


def _free(uses: Uses, flow: Flow, link: int) -> float:
    """What operations that stay as they are leave of a link, a share."""
    left, u = 1.0, flow.head_L[link]
    while u != _NONE:
        if not flow.is_changed_O[flow.owner_U[u]]:
            left -= flow.rate_O[flow.owner_U[u]] * uses.share_U[u]
        u = flow.after_U[u]
    return max(left, 0.0)


def _rising_to(uses: Uses, flow: Flow, changed: int, tenants: Any) -> float:
    """The level at which the next operation or tenant stops rising; infinite if none is left. Fills ``weight_L``."""
    level = math.inf
    for i in range(changed):
        o = flow.changed_O[i]
        for u in range(uses.first_use_O[o], uses.first_use_O[o + 1]):
            flow.weight_L[uses.link_U[u]] = 0.0
    if tenants.shape[0] > 0:
        flow.weight_L[UPLINK] = 0.0
    for k in range(tenants.shape[0]):
        if flow.rate_K[k] == _UNKNOWN:
            level = min(level, tenants[k]["rate_cap"] / tenants[k]["weight"])
            flow.weight_L[UPLINK] += tenants[k]["weight"]
    for i in range(changed):
        o = flow.changed_O[i]
        if flow.new_O[o] == _UNKNOWN:
            level = min(level, uses.top_O[o] / uses.weight_O[o])
            per_level = uses.weight_O[o] / uses.top_O[o]
            for u in range(uses.first_use_O[o], uses.first_use_O[o + 1]):
                flow.weight_L[uses.link_U[u]] += per_level * uses.share_U[u]
    if level == math.inf:
        return level
    if tenants.shape[0] > 0 and flow.weight_L[UPLINK] > 0.0:
        level = min(level, flow.left_L[UPLINK] / flow.weight_L[UPLINK])
    for i in range(changed):
        o = flow.changed_O[i]
        for u in range(uses.first_use_O[o], uses.first_use_O[o + 1]):
            link = uses.link_U[u]
            if flow.weight_L[link] > 0.0:
                level = min(level, flow.left_L[link] / flow.weight_L[link])
    return max(level, 0.0)


def _freeze(uses: Uses, flow: Flow, o: int, level: float) -> None:
    """Fix the rate of operation ``o`` if it cannot rise further, and take what it uses off its links."""
    if flow.new_O[o] != _UNKNOWN:
        return
    rate = level * uses.weight_O[o] / uses.top_O[o]
    held = rate * (1.0 + _ROUNDING) >= 1.0
    flow.bottleneck_O[o] = _ALONE
    for u in range(uses.first_use_O[o], uses.first_use_O[o + 1]):
        if flow.weight_L[uses.link_U[u]] == _FULL:
            held = True
            flow.bottleneck_O[o] = uses.link_U[u]
    if held:
        flow.new_O[o], flow.level_O[o] = max(min(rate, 1.0), _SLOWEST), level
        for u in range(uses.first_use_O[o], uses.first_use_O[o + 1]):
            flow.left_L[uses.link_U[u]] -= flow.new_O[o] * uses.share_U[u]


def clear(queue: Queue) -> None:
    """Start a step: no operation is in the queue."""
    queue.queued_1[0] = 0
    for o in range(queue.place_O.shape[0]):
        queue.place_O[o] = _ABSENT


def first_s(queue: Queue) -> float:
    """When the first event is, seconds as ``event_O``; infinite without one."""
    return queue.event_O[queue.heap_O[0]] if queue.queued_1[0] > 0 else math.inf


def put(queue: Queue, o: int, at_s: float) -> None:
    """The next event of operation ``o`` is at ``at_s``, whether it is in the queue or not."""
    queue.event_O[o] = at_s
    if queue.place_O[o] == _ABSENT:
        queue.place_O[o] = queue.queued_1[0]
        queue.heap_O[queue.queued_1[0]] = o
        queue.queued_1[0] += 1
    _settle(queue, o)


def take_first(queue: Queue) -> int:
    """Take the operation with the first event out of the queue, which must not be empty."""
    o, queue.queued_1[0] = queue.heap_O[0], queue.queued_1[0] - 1
    queue.place_O[o] = _ABSENT
    if queue.queued_1[0] > 0:
        last = queue.heap_O[queue.queued_1[0]]
        queue.place_O[last], queue.heap_O[0] = 0, last
        _settle(queue, last)
    return int(o)


def _settle(queue: Queue, o: int) -> None:
    """Move operation ``o`` up or down until its event is after its parent's and before its children's."""
    at_s, here = queue.event_O[o], queue.place_O[o]
    while here > 0:
        up = (here - 1) // 2
        other = queue.heap_O[up]
        if queue.event_O[other] <= at_s:
            break
        queue.heap_O[here], queue.place_O[other] = other, here
        here = up
    while True:
        down = 2 * here + 1
        if down >= queue.queued_1[0]:
            break
        if down + 1 < queue.queued_1[0] and queue.event_O[queue.heap_O[down + 1]] < queue.event_O[queue.heap_O[down]]:
            down += 1
        other = queue.heap_O[down]
        if queue.event_O[other] >= at_s:
            break
        queue.heap_O[here], queue.place_O[other] = other, here
        here = down
    queue.heap_O[here], queue.place_O[o] = o, here
