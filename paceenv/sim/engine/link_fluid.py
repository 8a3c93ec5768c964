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

from paceenv.sim.engine.program_layout import UPLINK, Program, ProgramScratch

_NONE, _ALONE, _ABSENT = -1, -1, -1
_UNKNOWN, _FULL, _SLOWEST = -1.0, -1.0, 1e-9
_ROUNDING, _SAME = 1e-12, 1e-9


def join_links(program: Program, s: ProgramScratch, o: int, changed: int) -> int:
    """Operation ``o`` runs from now on; returns how many operations have a rate to be found."""
    s.rate_O[o] = 0.0
    for u in range(program.first_use_O[o], program.first_use_O[o + 1]):
        link = program.link_U[u]
        after = s.head_L[link]
        s.before_U[u], s.after_U[u], s.owner_U[u] = _NONE, after, o
        if after != _NONE:
            s.before_U[after] = u
        s.head_L[link] = u
    return look_again(s, o, changed)


def leave_links(program: Program, s: ProgramScratch, o: int, changed: int) -> int:
    """Operation ``o`` runs no longer; returns how many operations have a rate to be found."""
    if s.is_changed_O[o]:
        s.is_changed_O[o] = False
        i = 0
        while s.changed_O[i] != o:
            i += 1
        changed -= 1
        s.changed_O[i] = s.changed_O[changed]
    for u in range(program.first_use_O[o], program.first_use_O[o + 1]):
        link, before, after = program.link_U[u], s.before_U[u], s.after_U[u]
        if before == _NONE:
            s.head_L[link] = after
        else:
            s.after_U[before] = after
        if after != _NONE:
            s.before_U[after] = before
        other = s.head_L[link]
        while other != _NONE:
            if s.bottleneck_O[s.owner_U[other]] == link:
                changed = look_again(s, s.owner_U[other], changed)
            other = s.after_U[other]
    return changed


def look_again(s: ProgramScratch, o: int, changed: int) -> int:
    """The rate of operation ``o`` is to be found; returns of how many operations it is."""
    if s.is_changed_O[o]:
        return changed
    s.is_changed_O[o] = True
    s.changed_O[changed] = o
    return changed + 1


def _mark_all_on(s: ProgramScratch, link: int, changed: int) -> int:
    u = s.head_L[link]
    while u != _NONE:
        changed = look_again(s, s.owner_U[u], changed)
        u = s.after_U[u]
    return changed


def share_links(
    program: Program, s: ProgramScratch, changed: int, now_s: float, tenants: Any, left_K: NDArray[np.float64]
) -> None:
    """Find the rates of all operations that a change touches, and when they end; of tenants too where they are on.

    Args:
        s: ``rate_O``, ``left_O``, ``since_O``, ``rate_K`` and the queue of events are written.
        changed: how many operations of ``changed_O`` have a rate to be found.
        tenants: ``(K,)`` of ``TENANT``; all on the uplink are filled with them.
    """
    if tenants.shape[0] > 0:
        changed = _mark_all_on(s, UPLINK, changed)
    while True:
        if changed == 1 and tenants.shape[0] == 0:
            _fill_one(program, s, s.changed_O[0])
        else:
            _fill(program, s, changed, tenants, left_K)
        count = _disturbed(program, s, changed)
        if count == changed:
            break
        changed = count
    for i in range(changed):
        o = s.changed_O[i]
        s.is_changed_O[o] = False
        s.left_O[o] -= s.rate_O[o] * (now_s - s.since_O[o])
        s.rate_O[o], s.since_O[o] = s.new_O[o], now_s
        put(s, o, now_s + max(s.left_O[o], 0.0) / s.rate_O[o])


def _disturbed(program: Program, s: ProgramScratch, changed: int) -> int:
    """Add those whose bottleneck is none any more; returns how many operations have a rate to be found."""
    count = changed
    for i in range(changed):
        o = s.changed_O[i]
        for u in range(program.first_use_O[o], program.first_use_O[o + 1]):
            link = program.link_U[u]
            load, highest, held = 0.0, 0.0, math.inf
            other = s.head_L[link]
            while other != _NONE:
                p = s.owner_U[other]
                load += (s.new_O[p] if s.is_changed_O[p] else s.rate_O[p]) * program.share_U[other]
                highest = max(highest, s.level_O[p])
                if s.is_changed_O[p] and s.bottleneck_O[p] == link:
                    held = min(held, s.level_O[p])
                other = s.after_U[other]
            is_full = load >= 1.0 - _SAME
            other = s.head_L[link]
            while other != _NONE:
                p = s.owner_U[other]
                if not s.is_changed_O[p]:
                    is_beaten = not is_full or highest > s.level_O[p] * (1.0 + _SAME)
                    if (s.bottleneck_O[p] == link and is_beaten) or s.level_O[p] > held * (1.0 + _SAME):
                        count = look_again(s, p, count)
                other = s.after_U[other]
    return count


def _fill_one(program: Program, s: ProgramScratch, o: int) -> None:
    """Set the rate of the only changed operation as :func:`_fill` does, where no tenant counts."""
    per_level = program.weight_O[o] / program.top_O[o]
    level, bottleneck = program.top_O[o] / program.weight_O[o], _ALONE
    for u in range(program.first_use_O[o], program.first_use_O[o + 1]):
        taken = per_level * program.share_U[u]
        if taken > 0.0:
            full_at = _free(program, s, program.link_U[u]) / taken
            if full_at <= level * (1.0 + _ROUNDING):
                level, bottleneck = min(level, full_at), program.link_U[u]
    rate = level * program.weight_O[o] / program.top_O[o]
    s.new_O[o], s.level_O[o] = max(min(rate, 1.0), _SLOWEST), level
    s.bottleneck_O[o] = bottleneck


def _fill(program: Program, s: ProgramScratch, changed: int, tenants: Any, left_K: NDArray[np.float64]) -> None:
    """Set the rates of changed operations and of tenants, with all others as they are.

    The water level rises for all alike: at a level, one of weight w has ``w * level`` of its busiest link. It stops
    rising where it runs as fast as alone, or where one of its links is full.
    """
    _begin_to_rise(program, s, changed, tenants, left_K)
    for _ in range(changed + tenants.shape[0]):
        level = _rising_to(program, s, changed, tenants)
        if level == math.inf:
            return
        full_at = level * (1.0 + _ROUNDING)
        for i in range(changed):  # before anything is taken off a link
            o = s.changed_O[i]
            for u in range(program.first_use_O[o], program.first_use_O[o + 1]):
                link = program.link_U[u]
                if s.weight_L[link] > 0.0 and s.left_L[link] <= full_at * s.weight_L[link]:
                    s.weight_L[link] = _FULL
        if tenants.shape[0] > 0 and s.weight_L[UPLINK] > 0.0 and s.left_L[UPLINK] <= full_at * s.weight_L[UPLINK]:
            s.weight_L[UPLINK] = _FULL
        for i in range(changed):
            _freeze(program, s, s.changed_O[i], level)
        for k in range(tenants.shape[0]):
            cap, rate = tenants[k]["rate_cap"], level * tenants[k]["weight"]
            if s.rate_K[k] == _UNKNOWN and (rate * (1.0 + _ROUNDING) >= cap or s.weight_L[UPLINK] == _FULL):
                s.rate_K[k] = max(min(rate, cap), _SLOWEST)
                s.left_L[UPLINK] -= s.rate_K[k]


def _begin_to_rise(
    program: Program, s: ProgramScratch, changed: int, tenants: Any, left_K: NDArray[np.float64]
) -> None:
    """Rates of changed operations and of tenants are unknown, and links have what the others leave of them."""
    for i in range(changed):
        o = s.changed_O[i]
        s.new_O[o] = _UNKNOWN
        for u in range(program.first_use_O[o], program.first_use_O[o + 1]):
            s.left_L[program.link_U[u]] = _UNKNOWN
    for i in range(changed):
        o = s.changed_O[i]
        for u in range(program.first_use_O[o], program.first_use_O[o + 1]):
            link = program.link_U[u]
            if s.left_L[link] == _UNKNOWN:
                s.left_L[link] = _free(program, s, link)
    if tenants.shape[0] > 0:
        s.left_L[UPLINK] = 1.0
    for k in range(tenants.shape[0]):
        s.rate_K[k] = _UNKNOWN if left_K[k] > 0.0 else 0.0


def _free(program: Program, s: ProgramScratch, link: int) -> float:
    """What operations that stay as they are leave of a link, a share."""
    left, u = 1.0, s.head_L[link]
    while u != _NONE:
        if not s.is_changed_O[s.owner_U[u]]:
            left -= s.rate_O[s.owner_U[u]] * program.share_U[u]
        u = s.after_U[u]
    return max(left, 0.0)


def _rising_to(program: Program, s: ProgramScratch, changed: int, tenants: Any) -> float:
    """The level at which the next operation or tenant stops rising; infinite if none is left. Fills ``weight_L``."""
    level = math.inf
    for i in range(changed):
        o = s.changed_O[i]
        for u in range(program.first_use_O[o], program.first_use_O[o + 1]):
            s.weight_L[program.link_U[u]] = 0.0
    if tenants.shape[0] > 0:
        s.weight_L[UPLINK] = 0.0
    for k in range(tenants.shape[0]):
        if s.rate_K[k] == _UNKNOWN:
            level = min(level, tenants[k]["rate_cap"] / tenants[k]["weight"])
            s.weight_L[UPLINK] += tenants[k]["weight"]
    for i in range(changed):
        o = s.changed_O[i]
        if s.new_O[o] == _UNKNOWN:
            level = min(level, program.top_O[o] / program.weight_O[o])
            per_level = program.weight_O[o] / program.top_O[o]
            for u in range(program.first_use_O[o], program.first_use_O[o + 1]):
                s.weight_L[program.link_U[u]] += per_level * program.share_U[u]
    if level == math.inf:
        return level
    if tenants.shape[0] > 0 and s.weight_L[UPLINK] > 0.0:
        level = min(level, s.left_L[UPLINK] / s.weight_L[UPLINK])
    for i in range(changed):
        o = s.changed_O[i]
        for u in range(program.first_use_O[o], program.first_use_O[o + 1]):
            link = program.link_U[u]
            if s.weight_L[link] > 0.0:
                level = min(level, s.left_L[link] / s.weight_L[link])
    return max(level, 0.0)


def _freeze(program: Program, s: ProgramScratch, o: int, level: float) -> None:
    """Fix the rate of operation ``o`` if it cannot rise further, and take what it uses off its links."""
    if s.new_O[o] != _UNKNOWN:
        return
    rate = level * program.weight_O[o] / program.top_O[o]
    held = rate * (1.0 + _ROUNDING) >= 1.0
    s.bottleneck_O[o] = _ALONE
    for u in range(program.first_use_O[o], program.first_use_O[o + 1]):
        if s.weight_L[program.link_U[u]] == _FULL:
            held = True
            s.bottleneck_O[o] = program.link_U[u]
    if held:
        s.new_O[o], s.level_O[o] = max(min(rate, 1.0), _SLOWEST), level
        for u in range(program.first_use_O[o], program.first_use_O[o + 1]):
            s.left_L[program.link_U[u]] -= s.new_O[o] * program.share_U[u]


def clear(s: ProgramScratch) -> None:
    """Start a step: no operation is in the queue."""
    s.queued_1[0] = 0
    for o in range(s.place_O.shape[0]):
        s.place_O[o] = _ABSENT


def first_s(s: ProgramScratch) -> float:
    """When the first event is, seconds as ``event_O``; infinite without one."""
    return s.event_O[s.queue_O[0]] if s.queued_1[0] > 0 else math.inf


def put(s: ProgramScratch, o: int, at_s: float) -> None:
    """The next event of operation ``o`` is at ``at_s``, whether it is in the queue or not."""
    s.event_O[o] = at_s
    if s.place_O[o] == _ABSENT:
        s.place_O[o] = s.queued_1[0]
        s.queue_O[s.queued_1[0]] = o
        s.queued_1[0] += 1
    _settle(s, o)


def take_first(s: ProgramScratch) -> int:
    """Take the operation with the first event out of the queue, which must not be empty."""
    o, s.queued_1[0] = s.queue_O[0], s.queued_1[0] - 1
    s.place_O[o] = _ABSENT
    if s.queued_1[0] > 0:
        last = s.queue_O[s.queued_1[0]]
        s.place_O[last], s.queue_O[0] = 0, last
        _settle(s, last)
    return int(o)


def _settle(s: ProgramScratch, o: int) -> None:
    """Move operation ``o`` up or down until its event is after its parent's and before its children's."""
    at_s, here = s.event_O[o], s.place_O[o]
    while here > 0:
        up = (here - 1) // 2
        other = s.queue_O[up]
        if s.event_O[other] <= at_s:
            break
        s.queue_O[here], s.place_O[other] = other, here
        here = up
    while True:
        down = 2 * here + 1
        if down >= s.queued_1[0]:
            break
        if down + 1 < s.queued_1[0] and s.event_O[s.queue_O[down + 1]] < s.event_O[s.queue_O[down]]:
            down += 1
        other = s.queue_O[down]
        if s.event_O[other] >= at_s:
            break
        s.queue_O[here], s.place_O[other] = other, here
        here = down
    s.queue_O[here], s.place_O[o] = o, here
