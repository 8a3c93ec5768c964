"""The engine's links under a trace's own arrivals: when every group's payload would end, whatever made the ranks late.

Compiles the engine's functions (``paceenv.engine.fabric``, ``incast``) into loops over recorded iterations, so that
calibration asks the physics that simulates. Axes: T iterations, R ranks, G groups.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from paceenv.engine import compiled, fabric, incast, kernel, layout
from paceenv.engine.draws import normal_table
from paceenv.engine.simulator import episode_keys

Array = NDArray[np.float64]


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
        fabric.share_uplink(jobs[0], clocks[0], tenants_EK[0], tenant, normal, order_G, arrival_TG[t], finish_TG[t])


def _receive(jobs: Any, clocks: Any, delay_R: NDArray[np.float32], entry_TR: Array, finish_TG: Array) -> None:
    for t in range(entry_TR.shape[0]):
        clocks[0]["iteration"] = t
        incast.receive_all(jobs[0], clocks[0], delay_R, entry_TR[t], finish_TG[t])


with compiled._numba_cache(compiled.cache_directory()) as _writable:
    _share_compiled, _receive_compiled = (
        numba.njit(nogil=True, cache=_writable, error_model="numpy")(f) for f in (_share, _receive)
    )


def share_uplink(arrival_TG: Array, alone_s: float, work_s: float) -> Array:
    """When each group's payload ends on an uplink that only they share, ``(T, G)``, in the seconds of ``arrival_TG``.

    ``alone_s`` is what a group takes by itself, ``work_s`` (at most that) what it occupies of the whole uplink.
    """
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
    """When each group's gather, or ``exchange`` (all-to-all), ends, ``(T, G)``; losses are drawn anew for every seed.

    ``message_s`` is one sender's message at its receiver's port, ``fit`` how many opening windows the buffer holds.
    """
    jobs, finish_TG = layout.default_job(1), np.empty((len(entry_TR), groups))
    jobs["incast_kind"] = layout.ALL_TO_ALL if exchange else layout.GATHER
    jobs["incast_flow_s"], jobs["incast_fit"], jobs["incast_timeout_s"] = message_s, fit, timeout_s
    clocks = np.zeros(1, layout.CLOCK)
    clocks["key"] = episode_keys([seed])
    delay_R = np.zeros(entry_TR.shape[1], np.float32)
    _receive_compiled(jobs, clocks, delay_R, np.ascontiguousarray(entry_TR), finish_TG)
    return finish_TG
