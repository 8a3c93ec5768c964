"""The engine's links under a trace's own arrivals: when every group's payload would end.

Compiles the engine's functions (``paceenv.sim.engine.fluid``, ``incast``) into loops over recorded iterations, so that
calibration and simulation share their physics. Axes: T iterations, R ranks, G groups.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from paceenv.sim.engine import compiled, fluid, incast, kernel, layout
from paceenv.sim.engine.code_cache import numba_cache
from paceenv.sim.engine.draws import normal_table
from paceenv.sim.engine.simulator import JobBatch, episode_keys

Array = NDArray[np.float64]

OUTLIERS: Final = 0.02
"""Share of durations that the tenant need not explain."""
JUMPS: Final = 0.005
"""Chance in an iteration that the tenant is somewhere else altogether, as after a pause."""


def _share(
    jobs: Any,
    clocks: Any,
    tenants_EK: Any,
    tenant: Array,
    normal: Array,
    arrival_TG: Array,
    finish_TG: Array,
) -> None:
    order_G = np.arange(arrival_TG.shape[1])
    for t in range(arrival_TG.shape[0]):
        clocks[0]["link_s"] = 0.0
        kernel.sort_groups(arrival_TG[t], order_G)
        fluid.share_uplink(jobs[0], clocks[0], tenants_EK[0], tenant, normal, order_G, arrival_TG[t], finish_TG[t])


def _receive(jobs: Any, clocks: Any, delay_R: NDArray[np.float32], entry_TR: Array, finish_TG: Array) -> None:
    sent_R = np.empty(entry_TR.shape[1])
    for t in range(entry_TR.shape[0]):
        clocks[0]["iteration"] = t
        incast.receive_all(jobs[0], clocks[0], delay_R, entry_TR[t], finish_TG[t], sent_R)


def _filter(
    jobs: Any,
    clocks: Any,
    tenants_EK: Any,
    tenant_NFK: Array,
    normal: Array,
    arrival_TG: Array,
    lasts_T: Array,
    advance_T: Array,
    uniform_TN: Array,
    spread_s: float,
    outlier: float,
    jumps: float,
    expected_T: Array,
) -> float:
    particles, groups = tenant_NFK.shape[0], arrival_TG.shape[1]
    order_G, finish_G, weight_N = np.arange(groups), np.empty(groups), np.empty(particles)
    before_NFK, total = np.empty_like(tenant_NFK), 0.0
    for i in range(particles):
        fluid.reset_tenants(clocks[i], tenants_EK[0], tenant_NFK[i])
    for t in range(arrival_TG.shape[0]):
        kernel.sort_groups(arrival_TG[t], order_G)
        mean, expected = 0.0, 0.0
        for i in range(particles):
            fluid.share_uplink(
                jobs[0], clocks[i], tenants_EK[0], tenant_NFK[i], normal, order_G, arrival_TG[t], finish_G
            )
            lasts_s = 0.0
            for g in range(groups):
                lasts_s += (finish_G[g] - arrival_TG[t, g]) / groups
            away = (lasts_s - lasts_T[t]) / spread_s
            weight_N[i] = (1.0 - outlier) * np.exp(-0.5 * away * away) + 0.05 * outlier
            mean += weight_N[i] / particles
            expected += lasts_s / particles
        total += np.log(mean)
        expected_T[t] = expected
        before_NFK[:] = tenant_NFK
        lost = 0.5 if mean < 0.1 * outlier else jumps  # no particle near: the tenant itself stood still, or jumped
        at, reached = 0, weight_N[0] / particles / mean
        for i in range(particles):  # systematic resampling
            while reached < (i + uniform_TN[t, 0]) / particles and at < particles - 1:
                at += 1
                reached += weight_N[at] / particles / mean
            tenant_NFK[i] = before_NFK[at]
            fluid.rewind(clocks[i], tenant_NFK[i], advance_T[t])
            if uniform_TN[t, 1 + i] < lost:
                clocks[i]["key"] += np.uint64(particles)
                fluid.reset_tenants(clocks[i], tenants_EK[0], tenant_NFK[i])
    return total


with numba_cache(compiled.cache_directory()) as _writable:
    _share_compiled, _receive_compiled, _filter_compiled = (
        numba.njit(nogil=True, cache=_writable, error_model="numpy")(f) for f in (_share, _receive, _filter)
    )


def share_uplink(arrival_TG: Array, alone_s: float, work_s: float) -> Array:
    """When each group's payload ends on an uplink that only these groups share and each fills for ``work_s``, s."""
    jobs, finish_TG = layout.default_job(1), np.empty_like(arrival_TG)
    jobs["transfer_alone_s"], jobs["uplink_work_s"] = alone_s, work_s
    nobody = np.zeros((1, 0), layout.TENANT), np.zeros((layout.TENANT_FIELDS, 0))
    clocks = np.zeros(1, layout.CLOCK)
    _share_compiled(jobs, clocks, *nobody, normal_table(), np.ascontiguousarray(arrival_TG), finish_TG)
    return finish_TG


def receive(
    entry_TR: Array,
    groups: int,
    *,
    exchange: bool,
    message_s: float,
    fit: float = np.inf,
    timeout_s: float = 0.0,
    seed: int = 0,
) -> Array:
    """When each group's gather or all-to-all ends, ``(T, G)``, seconds; every seed draws new losses."""
    jobs, finish_TG = layout.default_job(1), np.empty((len(entry_TR), groups))
    jobs["incast_kind"] = layout.ALL_TO_ALL if exchange else layout.GATHER
    jobs["incast_flow_s"], jobs["incast_fit"], jobs["incast_timeout_s"] = message_s, fit, timeout_s
    clocks = np.zeros(1, layout.CLOCK)
    clocks["key"] = episode_keys([seed])
    delay_R = np.zeros(entry_TR.shape[1], np.float32)
    _receive_compiled(jobs, clocks, delay_R, np.ascontiguousarray(entry_TR), finish_TG)
    return finish_TG


class Filtered(NamedTuple):
    """A tenant followed through a trace: log-likelihood, and durations expected one iteration ahead ``(T,)``."""

    log_likelihood: float
    expected_T: Array


def filter_tenant(
    batch: JobBatch,
    arrival_TG: Array,
    lasts_T: Array,
    advance_T: Array,
    *,
    spread_s: float,
    particles: int,
    seed: int,
    jumps: float = JUMPS,
) -> Filtered:
    """Follow the one tenant of ``batch`` through recorded arrivals by a bootstrap particle filter.

    Each particle is a tenant as the engine draws it, from a random phase. Its weight is how well our payload's mean
    duration under the recorded arrivals agrees with the measured one: normal, with a share of outliers.
    Source: Gordon, Salmond and Smith, IEE Proceedings F 1993.
    """
    clocks = np.zeros(particles, layout.CLOCK)
    clocks["key"] = episode_keys(list(range(seed, seed + particles)))
    tenant_NFK, expected_T = np.zeros((particles, layout.TENANT_FIELDS, 1)), np.empty(len(lasts_T))
    uniform_TN = np.random.default_rng(seed).uniform(size=(len(lasts_T), 1 + particles))
    parameters = (batch.jobs, clocks, batch.tenants_EK, tenant_NFK, normal_table())
    stamps = (np.ascontiguousarray(arrival_TG), lasts_T, advance_T, uniform_TN)
    total = _filter_compiled(*parameters, *stamps, spread_s, OUTLIERS, jumps, expected_T)
    assert total is not None
    return Filtered(float(total), expected_T)
