"""The shared uplink as a fluid: our groups' collectives and the tenants' transfers divide it by weighted max-min.

Scalar loops that the kernel compiles. Each group is one flow. All have a common volume and a common rate cap (from the
group's own links). Flows therefore finish in the order in which they started, and attained service is one number for
all of them. Tenants have their own volume, cap and weight. Rates are in shares of the uplink, work in seconds of the
whole uplink.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.engine.draws import PER_TENANT, TRANSFER, bits32, key_of, quantile, uniform, uniform_bits
from paceenv.sim.engine.draws import TENANT as TENANT_STREAM
from paceenv.sim.engine.layout import CYCLES, LEFT_S, NEXT_S, WEIGHT, Scratch, View

NO_WORK = 1e-12
"""Share of the uplink below which a group's traffic meets nobody; of smaller ones rounding would leave nothing."""
_START = 1 << 62
"""Counter of draws made once, at the start of an episode: out of the way of the cycles' counters."""


def sort(arrival_N: NDArray[np.float64], order_N: NDArray[np.int64]) -> None:
    """Order groups or ranks by arrival, ties by number: Shell's sort, of few of them by insertion.

    NumPy's own would be a sixth of what there is to compile.
    """
    gap = order_N.shape[0] // 2 if order_N.shape[0] > 32 else 1
    while gap > 0:
        for i in range(gap, order_N.shape[0]):
            g, j = order_N[i], i - gap
            while j >= 0 and (
                arrival_N[order_N[j]] > arrival_N[g] or (arrival_N[order_N[j]] == arrival_N[g] and order_N[j] > g)
            ):
                order_N[j + gap] = order_N[j]
                j -= gap
            order_N[j + gap] = g
        gap //= 2


def fair_level(own_flows: int, own_cap: float, tenants: Any, tenant: NDArray[np.float64]) -> float:
    """Water level of weighted max-min: a flow of weight w and cap c gets ``min(c, w * level)`` of the uplink.

    Args:
        own_cap: highest rate of one of them, a share of the uplink.
        tenant: their state, ``(TENANT_FIELDS, K)``; a tenant takes part while it has work left.

    Returns:
        The level; infinite if every flow is held by its own cap.
    """
    level = 0.0
    for _ in range(tenants.shape[0] + 2):
        left, weight = 1.0, 0.0
        if own_flows > 0:
            if own_cap <= level:
                left -= own_flows * own_cap
            else:
                weight += own_flows
        for k in range(tenants.shape[0]):
            if tenant[LEFT_S, k] > 0.0:
                if tenants[k]["rate_cap"] <= level * tenant[WEIGHT, k]:
                    left -= tenants[k]["rate_cap"]
                else:
                    weight += tenant[WEIGHT, k]
        if weight == 0.0:
            return math.inf
        higher = left / weight
        if higher <= level * (1.0 + 1e-12):
            return level
        level = higher
    return level


def reset_tenants(clock: Any, tenants: Any, tenant: NDArray[np.float64]) -> None:
    """Start every tenant at a uniformly drawn point of its own uncontended period, or of a pause that it may be in."""
    for k in range(tenants.shape[0]):
        alone_s = tenants[k]["uplink_work_s"] / max(tenants[k]["rate_cap"], 1e-12)
        at_s = uniform(clock["key"], TENANT_STREAM, _START + PER_TENANT * k) * (tenants[k]["compute_s"] + alone_s)
        in_compute = at_s < tenants[k]["compute_s"]
        tenant[CYCLES, k] = 0.0
        tenant[WEIGHT, k] = tenants[k]["weight"]
        tenant[NEXT_S, k] = tenants[k]["compute_s"] - at_s if in_compute else 0.0
        tenant[LEFT_S, k] = 0.0
        if tenants[k]["weight"] <= 0.0:
            tenant[NEXT_S, k] = math.inf
        elif not in_compute:
            tenant[LEFT_S, k] = tenants[k]["uplink_work_s"] * (1.0 - (at_s - tenants[k]["compute_s"]) / alone_s)
        if tenants[k]["weight"] > 0.0 and tenants[k]["pause_periods"] > 1.0:
            away_s = _starts_away_s(clock, tenants, k)
            if away_s > 0.0:
                tenant[NEXT_S, k], tenant[LEFT_S, k] = away_s, 0.0


def _starts_away_s(clock: Any, tenants: Any, k: int) -> float:
    """When a tenant that is in a pause as the episode starts transfers again, seconds; 0 if it is not in a pause.

    As in a stationary process: a tenant that pauses more is in a pause more often, and the rest of a uniform pause that
    is under way is denser near zero.
    """
    paused = 0.5 * tenants[k]["pause_rate"] * tenants[k]["pause_periods"]
    u = uniform(clock["key"], TENANT_STREAM, _START + PER_TENANT * k + 1) * (1.0 + paused)
    if u >= paused:
        return 0.0
    period_s = tenants[k]["compute_s"] + tenants[k]["uplink_work_s"] / tenants[k]["rate_cap"]
    rest = tenants[k]["pause_periods"] * (1.0 - math.sqrt(1.0 - u / paused))
    return float(rest * period_s + tenants[k]["compute_s"])


def next_compute_s(clock: Any, tenants: Any, tenant: NDArray[np.float64], k: int, normal: Any) -> float:
    """How long tenant ``k`` computes before its next transfer, seconds."""
    tenant[CYCLES, k] += 1.0
    key = key_of(clock["key"], TENANT_STREAM, int(tenant[CYCLES, k]))
    u = uniform(key, TENANT_STREAM, PER_TENANT * k)
    if tenants[k]["bursty"]:
        return float(-tenants[k]["compute_s"] * math.log(u))
    # the largest of n uniforms is u ** (1/n): the slowest of the tenant's own ranks, in one draw
    slowest = quantile(normal, uniform_bits(u ** (1.0 / tenants[k]["ranks"])))
    compute_s = tenants[k]["compute_s"] * max(1.0 + tenants[k]["jitter_cv"] * slowest, 0.0)
    if tenants[k]["pause_rate"] > 0.0:
        v = uniform(key, TENANT_STREAM, PER_TENANT * k + 2) / tenants[k]["pause_rate"]
        if v < 1.0:  # then v is uniform itself
            period_s = tenants[k]["compute_s"] + tenants[k]["uplink_work_s"] / tenants[k]["rate_cap"]
            compute_s += v * tenants[k]["pause_periods"] * period_s
    return float(compute_s)


def transfer_work_s(clock: Any, tenants: Any, tenant: NDArray[np.float64], k: int) -> float:
    """How much tenant ``k`` transfers now, seconds of the whole uplink; exponential for a bursty one."""
    work_s = tenants[k]["uplink_work_s"]
    if tenants[k]["bursty"]:
        key = key_of(clock["key"], TENANT_STREAM, int(tenant[CYCLES, k]))
        work_s *= -math.log(uniform(key, TENANT_STREAM, PER_TENANT * k + 1))
    return float(work_s)


def share_uplink(
    job: Any,
    clock: Any,
    tenants: Any,
    tenant: NDArray[np.float64],
    normal: NDArray[np.float64],
    order_G: NDArray[np.int64],
    arrival_G: NDArray[np.float64],
    finish_G: NDArray[np.float64],
) -> None:
    """Run the uplink until all our groups are through, and write when each finishes.

    Tenants keep their state, so the uplink goes on from where it stood (``clock["link_s"]``). Where nothing of a group
    occupies the uplink, each finishes by its own links.
    """
    groups, K = arrival_G.shape[0], tenants.shape[0]
    work_s, alone_s = job["uplink_work_s"], job["transfer_alone_s"]
    if work_s <= NO_WORK * alone_s:
        for g in range(groups):
            finish_G[g] = arrival_G[g] + alone_s
        return
    own_cap = min(1.0, work_s / max(alone_s, work_s))
    now_s, served = clock["link_s"], 0.0
    head, tail = 0, 0
    target_G = finish_G  # until a flow is through, its entry holds the service level at which it will be
    while head < groups:
        level = fair_level(tail - head, own_cap, tenants, tenant)
        own_rate = min(own_cap, level)
        # the next thing to happen
        until_s = math.inf
        if tail < groups:
            until_s = max(arrival_G[order_G[tail]] - now_s, 0.0)
        if head < tail:
            until_s = min(until_s, max(target_G[order_G[head]] - served, 0.0) / own_rate)
        for k in range(K):
            if tenant[LEFT_S, k] > 0.0:
                until_s = min(until_s, tenant[LEFT_S, k] / min(tenants[k]["rate_cap"], level * tenant[WEIGHT, k]))
            else:
                until_s = min(until_s, max(tenant[NEXT_S, k] - now_s, 0.0))
        now_s += until_s
        if head < tail:
            served += own_rate * until_s
        for k in range(K):
            rate = min(tenants[k]["rate_cap"], level * tenant[WEIGHT, k])
            if tenant_goes_on(clock, tenants, tenant, normal, k, now_s, rate * until_s):
                comes_late = head < tail
                tenant[WEIGHT, k] = tenants[k]["weight"] * (tenants[k]["late_share"] if comes_late else 1.0)
        while head < tail and target_G[order_G[head]] <= served * (1.0 + 1e-13):
            finish_G[order_G[head]] = now_s
            head += 1
        while tail < groups and arrival_G[order_G[tail]] <= now_s:
            for k in range(K):
                if head == tail and tenant[LEFT_S, k] > 0.0:  # we come late
                    tenant[WEIGHT, k] = tenants[k]["weight"] / tenants[k]["late_share"]
            target_G[order_G[tail]] = served + work_s
            tail += 1
    clock["link_s"] = now_s


def tenant_goes_on(
    clock: Any,
    tenants: Any,
    tenant: NDArray[np.float64],
    normal: NDArray[np.float64],
    k: int,
    now_s: float,
    moved_s: float,
) -> bool:
    """Tenant ``k`` has come to an event: it has moved some of its work, or its next transfer may start.

    Args:
        moved_s: what it moved since the event before if it transfers, seconds of the whole uplink.

    Returns:
        Whether its next transfer begins.
    """
    if tenant[LEFT_S, k] > 0.0:
        left = tenant[LEFT_S, k] - moved_s
        if left <= 1e-12 * tenants[k]["uplink_work_s"]:
            left = 0.0
            tenant[NEXT_S, k] = now_s + next_compute_s(clock, tenants, tenant, k, normal)
        tenant[LEFT_S, k] = left
    elif tenant[NEXT_S, k] <= now_s:
        tenant[LEFT_S, k] = transfer_work_s(clock, tenants, tenant, k)
        return True
    return False


def vary_transfers(view: View, scratch: Scratch) -> None:
    """Stretch the collective of each group, from its last arrival on, by a factor of its own: no link shares evenly.

    The factor is lognormal with mean 1. It applies to all of the collective's time, including the latency that is added
    later.
    """
    job, clock, arrival_G, finish_G = view.job, view.clock, scratch.arrival_G, scratch.finish_G
    key, variance = key_of(clock["key"], TRANSFER, clock["iteration"]), math.log1p(job["transfer_cv"] ** 2)
    for g in range(finish_G.shape[0]):
        lasts_s = finish_G[g] + job["latency_s"] - arrival_G[g]
        factor = math.exp(math.sqrt(variance) * quantile(view.normal, bits32(key, g)) - 0.5 * variance)
        finish_G[g] += lasts_s * (factor - 1.0)
    if view.tenants.shape[0] == 0:  # then the uplink is free once our last group is through
        last_s = finish_G[0]
        for g in range(1, finish_G.shape[0]):
            last_s = max(last_s, finish_G[g])
        clock["link_s"] = min(clock["link_s"], last_s)


def rewind(clock: Any, tenant: NDArray[np.float64], step_s: float) -> None:
    """Move the origin of time to the end of the step."""
    clock["link_s"] -= step_s
    for k in range(tenant.shape[1]):
        tenant[NEXT_S, k] -= step_s
