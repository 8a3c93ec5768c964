"""Splits each step of a profile into what the device did and what it waited for; see :class:`RankActivity`."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Final

import numpy as np

from paceenv.importers.profiler.collective_events import device_collectives
from paceenv.importers.profiler.device_steps import STEP, Device, is_runtime
from paceenv.importers.profiler.event_columns import Array, EventTable, Integers
from paceenv.importers.timelines import OUTSIDE, Collective, RankActivity, inside_of, union, without

_US: Final = 1e-6


def device_activity(table: EventTable, device: Device, rank: int) -> list[RankActivity]:
    """The steps of a rank's device; times in s on the profile's clock."""
    start_us, end_us = table.start_us_E[device.event_D], table.end_us_E[device.event_D]
    is_kernel = table.in_categories(lambda category: category == "kernel")[device.event_D] & ~device.is_collective_D
    is_to_device = table.named(lambda name: "HtoD" in name or "HostToDevice" in name)[device.event_D]
    is_copy = ~is_kernel & ~device.is_collective_D
    kernels = union(start_us[is_kernel], end_us[is_kernel])
    work = union(start_us[~device.is_collective_D], end_us[~device.is_collective_D])
    to_device = without(union(start_us[is_copy & is_to_device], end_us[is_copy & is_to_device]), kernels)
    network = union(start_us[device.is_collective_D], end_us[device.is_collective_D])
    waited_us = np.concatenate([[0.0], np.cumsum(_host_waits(table, device))])
    collectives = device_collectives(table, device)
    if collectives:
        _tell_work_between(table, device, collectives, kernels, work, waited_us)
    steps = np.flatnonzero(np.isfinite(device.begin_us_T))
    edges_us = np.stack([device.begin_us_T, device.end_us_T], axis=1)[steps]

    def inside_s(spans: tuple[Array, Array], edges_us: Array = edges_us) -> Array:
        """How much of the spans lies in each step."""
        return np.diff(covered_until(spans, edges_us.ravel()).reshape(-1, 2), axis=1)[:, 0] * _US

    compute_s, device_s, work_s = inside_s(kernels), inside_s(to_device), inside_s(work)
    busy_s, step_s = inside_s(union(start_us, end_us)), np.diff(edges_us, axis=1)[:, 0] * _US
    host_wait_s = np.diff(waited_us[np.searchsorted(start_us, edges_us)], axis=1)[:, 0] * _US
    host_wait_s = np.clip(host_wait_s, 0.0, np.maximum(step_s - busy_s, 0.0))
    is_known = np.isin(steps, device.step_D[device.launch_D >= 0])
    parts = {
        "start_s": edges_us[:, 0] * _US,
        "end_s": edges_us[:, 1] * _US,
        "compute_s": compute_s,
        "to_device_s": device_s,
        "other_copies_s": np.maximum(work_s - compute_s - device_s, 0.0),
        "exposed_s": busy_s - work_s,
        "hidden_s": np.maximum(inside_s(network) - busy_s + work_s, 0.0),
        "host_wait_s": np.where(is_known, host_wait_s, np.nan),
        "idle_s": np.maximum(step_s - busy_s - host_wait_s, 0.0),
        "loader_s": inside_s(loader_spans(table), _host_windows(table, device)[steps]),
    }
    collectives_of: dict[int, list[Collective]] = defaultdict(list)
    for i, collective in zip(device.step_D[device.is_collective_D].tolist(), collectives, strict=True):
        collectives_of[i].append(collective)
    activity = []
    for k, i in enumerate(steps.tolist()):
        begins_us, ends_us = inside_of(work, *edges_us[k].tolist())
        activity.append(
            RankActivity(
                rank=rank,
                iteration=int(device.number_T[i]),
                collectives=collectives_of[i],
                busy_start_s=begins_us * _US,
                busy_end_s=ends_us * _US,
                **{name: float(part_s[k]) for name, part_s in parts.items()},
            )
        )
    return activity


def _tell_work_between(
    table: EventTable,
    device: Device,
    collectives: list[Collective],
    kernels: tuple[Array, Array],
    work: tuple[Array, Array],
    waited_us: Array,
) -> None:
    """Tell each collective what was done since the one before."""
    places = np.flatnonzero(device.is_collective_D)
    all_start_us, launch = table.start_us_E[device.event_D], device.launch_D[places]
    launched_us = np.where(launch >= 0, table.start_us_E[launch], np.nan)
    since_us = np.concatenate([all_start_us[:1], all_start_us[places]])
    compute_us, work_us = np.diff(covered_until(kernels, since_us)), np.diff(covered_until(work, since_us))
    wait_us = np.diff(waited_us[np.searchsorted(all_start_us, since_us, side="right")])
    for k, c in enumerate(collectives):
        c.launched_s, c.compute_s = float(launched_us[k]) * _US, float(compute_us[k]) * _US
        c.copy_s = max(float(work_us[k] - compute_us[k]), 0.0) * _US
        c.host_wait_s = float(wait_us[k]) * _US
    known = np.flatnonzero(launch >= 0)
    if len(known) > 1:
        order = known[np.argsort(launched_us[known], kind="stable")]
        for k, host_s in zip(order[1:].tolist(), time_by_range(table, device, launched_us[order]), strict=True):
            collectives[k].host_s = host_s


def _host_waits(table: EventTable, device: Device) -> Array:
    """How long the device waited for its host before each of its operations, us, in the order of their begin.

    An operation could begin when all work before it had ended, and every collective that had ended when it began; if it
    was launched later than that, the device waited for the launch.
    """
    start_us, end_us = table.start_us_E[device.event_D], table.end_us_E[device.event_D]
    network = device.is_collective_D
    work_done = np.maximum.accumulate(np.where(network, -np.inf, end_us))
    work_done = np.concatenate([[-np.inf], work_done[:-1]])
    ready_us = np.maximum(work_done, _last_until(end_us[network], start_us, inclusive=True))
    ready_us = np.maximum(ready_us, _last_until(start_us[network], start_us, inclusive=False))
    launched_us = np.where(device.launch_D >= 0, table.start_us_E[device.launch_D], -np.inf)
    late = (launched_us > ready_us) & np.isfinite(ready_us)
    return np.where(late, np.maximum(start_us - np.where(late, ready_us, 0.0), 0.0), 0.0)


def _last_until(moments: Array, limits: Array, *, inclusive: bool) -> Array:
    """The latest of some moments before each limit, minus infinity without one."""
    ordered = np.concatenate([[-np.inf], np.sort(moments)])
    return ordered[np.searchsorted(ordered[1:], limits, side="right" if inclusive else "left")]


def _host_windows(table: EventTable, device: Device) -> Array:
    """When the host was busy with each step, us, ``(T, 2)``: from the step's first launch back to the one before it."""
    launches, steps = device.launch_D, device.step_D
    known: Integers = np.flatnonzero((launches >= 0) & (steps >= 0))
    last_us_T = np.full(len(device.number_T), -np.inf)
    first_us_T = np.full(len(device.number_T), np.inf)
    at_us = table.start_us_E[launches[known]]
    np.maximum.at(last_us_T, steps[known], at_us)
    np.minimum.at(first_us_T, steps[known], at_us)
    before_us_T = np.concatenate([[-np.inf], np.maximum.accumulate(last_us_T)[:-1]])
    begin_us_T = np.where(np.isfinite(before_us_T), before_us_T, first_us_T)
    none = ~np.isfinite(last_us_T) | ~np.isfinite(begin_us_T)
    return np.stack([np.where(none, 0.0, begin_us_T), np.where(none, 0.0, last_us_T)], axis=1)


_RANGES: Final = frozenset(("cpu_op", "user_annotation"))
"""Not ``python_function``: the outermost of these is the whole program."""
_HASH: Final = re.compile(r"\b(?=\w*\d)[0-9a-z]{16,}\b|0x[0-9a-f]{6,}|[#\s]+\Z|\A[#\s]+")
_LOADER: Final = re.compile(r"enumerate\(DataLoader\)|dataloader_next|DataLoaderIter\.__next__|_next_data\b")
_LONGEST: Final = 80
_MIN_S: Final = 20e-6
"""Less than this in a window is left out."""


def readable(name: str) -> str:
    """A range's name without what differs between ranks, shortened."""
    return _HASH.sub("", name).strip()[:_LONGEST] or "unnamed"


def time_by_range(table: EventTable, device: Device, windows_us: Array) -> list[dict[str, float]]:
    """Time of the launching threads by outermost range in each window between rising moments, s: one mapping each.

    Ranges of a thread lie within each other. One that only overlaps another is taken to end with it.
    """
    windows_us = np.maximum.accumulate(windows_us)
    spent_s: list[dict[str, float]] = [{} for _ in range(len(windows_us) - 1)]
    if not spent_s or not np.isfinite(windows_us).all():
        return spent_s
    is_host = table.in_categories(lambda category: category in _RANGES or is_runtime(category))
    is_host &= ~table.named(lambda name: STEP.match(name) is not None)
    is_host &= (table.end_us_E > windows_us[0]) & (table.start_us_E < windows_us[-1])
    names, codes = np.unique([readable(name) for name in table.names], return_inverse=True)
    ranges = np.empty(0, np.int64)
    for thread in np.unique(table.thread_E[device.launch_D[device.launch_D >= 0]]).tolist():
        events = np.flatnonzero(is_host & (table.thread_E == thread))
        events = events[np.lexsort((-table.dur_us_E[events], table.start_us_E[events]))]
        reach_us = np.maximum.accumulate(np.concatenate([[-np.inf], table.end_us_E[events]]))
        outermost = events[table.start_us_E[events] >= reach_us[:-1]]
        ranges = np.concatenate([ranges, outermost])
        code_N = codes[table.name_E[outermost]]
        for code in np.unique(code_N).tolist():
            of, name = outermost[code_N == code], str(names[code])
            took_s = np.diff(covered_until((table.start_us_E[of], table.end_us_E[of]), windows_us)) * _US
            for at in np.flatnonzero(took_s >= _MIN_S).tolist():
                spent_s[at][name] = spent_s[at].get(name, 0.0) + float(took_s[at])
    inside_any = union(table.start_us_E[ranges], table.end_us_E[ranges])
    outside_s = (np.diff(windows_us) - np.diff(covered_until(inside_any, windows_us))) * _US
    for at in np.flatnonzero(outside_s >= _MIN_S).tolist():
        spent_s[at][OUTSIDE] = float(outside_s[at])
    return spent_s


def loader_spans(table: EventTable) -> tuple[Array, Array]:
    """When the host was in a data loader's ``__next__``, us."""
    is_loader = table.named(lambda name: _LOADER.search(name) is not None)
    is_loader &= table.in_categories(lambda category: category in {*_RANGES, "python_function"})
    return union(table.start_us_E[is_loader], table.end_us_E[is_loader])


def covered_until(spans: tuple[Array, Array], moments: Array) -> Array:
    """How much of disjoint spans, in order, lies before each moment."""
    begins, ends = spans
    if not len(begins):
        return np.zeros(len(moments))
    edges = np.stack([begins, ends], axis=1).ravel()
    total = np.concatenate([[0.0], np.cumsum(ends - begins)])
    return np.asarray(np.interp(moments, edges, np.stack([total[:-1], total[1:]], axis=1).ravel()))
