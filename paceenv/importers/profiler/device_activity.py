"""Splits each step of a profile into what the device did and what it waited for; see :class:`RankActivity`."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Final

import numpy as np

from paceenv.importers.profiler.device_steps import STEP, Device, is_runtime
from paceenv.importers.profiler.event_columns import Array, EventTable, Integers
from paceenv.importers.timelines import OUTSIDE, Collective, CollectiveActivity, RankActivity, inside_of, union, without

_US: Final = 1e-6


def device_activity(
    table: EventTable, device: Device, collectives: dict[int, Collective], rank: int
) -> tuple[RankActivity, ...]:
    """The steps of a rank's device; times in s on the profile's clock."""
    start_us, end_us = table.start_us_E[device.event_D], table.end_us_E[device.event_D]
    is_kernel = table.in_categories(lambda category: category == "kernel")[device.event_D] & ~device.is_collective_D
    is_to_device = table.named(lambda name: "HtoD" in name or "HostToDevice" in name)[device.event_D]
    is_copy = ~is_kernel & ~device.is_collective_D
    kernels = union(start_us[is_kernel], end_us[is_kernel])
    work = union(start_us[~device.is_collective_D], end_us[~device.is_collective_D])
    to_device = without(union(start_us[is_copy & is_to_device], end_us[is_copy & is_to_device]), kernels)
    network = union(start_us[device.is_collective_D], end_us[device.is_collective_D])
    any_work = union(start_us, end_us)
    waits_us = _host_waits(table, device)
    loader = loader_spans(table)
    host_us_T = _host_windows(table, device)
    places = sorted(collectives, key=lambda place: (start_us[place], end_us[place]))
    of_collective = _collectives(table, device, collectives, places, kernels, work, waits_us)
    steps = np.flatnonzero(np.isfinite(device.begin_us_T))
    edges_us = np.stack([device.begin_us_T, device.end_us_T], axis=1)[steps]

    def inside_s(spans: tuple[Array, Array], edges_us: Array) -> Array:
        """How much of the spans lies in each step."""
        return np.diff(covered_until(spans, edges_us.ravel()).reshape(-1, 2), axis=1)[:, 0] * _US

    compute_s, device_s, work_s, network_s, busy_s = (
        inside_s(spans, edges_us) for spans in (kernels, to_device, work, network, any_work)
    )
    loader_s = inside_s(loader, host_us_T[steps])
    waited_us = np.concatenate([[0.0], np.cumsum(waits_us)])[np.searchsorted(start_us, edges_us)]
    step_s = np.diff(edges_us, axis=1)[:, 0] * _US
    host_wait_s = np.clip(np.diff(waited_us, axis=1)[:, 0] * _US, 0.0, np.maximum(step_s - busy_s, 0.0))
    is_known = np.isin(steps, device.step_D[device.launch_D >= 0])
    places_of: dict[int, list[int]] = defaultdict(list)
    for place in places:
        places_of[int(device.step_D[place])].append(place)
    busy = [inside_of(work, *edges) for edges in edges_us.tolist()]
    activity = []
    for k, i in enumerate(steps.tolist()):
        activity.append(
            RankActivity(
                rank=rank,
                iteration=int(device.number_T[i]),
                start_s=float(edges_us[k, 0]) * _US,
                end_s=float(edges_us[k, 1]) * _US,
                busy_start_s=busy[k][0] * _US,
                busy_end_s=busy[k][1] * _US,
                compute_s=float(compute_s[k]),
                to_device_s=float(device_s[k]),
                other_copies_s=max(float(work_s[k] - compute_s[k] - device_s[k]), 0.0),
                exposed_s=float(busy_s[k] - work_s[k]),
                hidden_s=max(float(network_s[k] - busy_s[k] + work_s[k]), 0.0),
                host_wait_s=float(host_wait_s[k]) if is_known[k] else np.nan,
                idle_s=max(float(step_s[k] - busy_s[k] - host_wait_s[k]), 0.0),
                loader_s=float(loader_s[k]),
                collectives=tuple(of_collective[place] for place in places_of[i]),
            )
        )
    return tuple(activity)


def _collectives(
    table: EventTable,
    device: Device,
    collectives: dict[int, Collective],
    places: list[int],
    kernels: tuple[Array, Array],
    work: tuple[Array, Array],
    waits_us: Array,
) -> dict[int, CollectiveActivity]:
    """Each collective with what was done since the one before."""
    if not places:
        return {}
    events = device.event_D[places]
    start_us, launch = table.start_us_E[events], device.launch_D[places]
    launched_us = np.where(launch >= 0, table.start_us_E[launch], np.nan)
    all_start_us = table.start_us_E[device.event_D]
    since_us = np.concatenate([all_start_us[:1], start_us])
    compute_us, work_us = np.diff(covered_until(kernels, since_us)), np.diff(covered_until(work, since_us))
    waited = np.concatenate([[0.0], np.cumsum(waits_us)])
    wait_us = np.diff(waited[np.searchsorted(all_start_us, since_us, side="right")])
    known = np.flatnonzero(launch >= 0)
    by_range: dict[int, dict[str, float]] = {}
    if len(known) > 1:
        order = known[np.argsort(launched_us[known], kind="stable")]
        by_range = dict(zip(order[1:].tolist(), time_by_range(table, device, launched_us[order]), strict=True))
    activities = {}
    for k, place in enumerate(places):
        c = collectives[place]
        activities[place] = CollectiveActivity(
            **vars(c),
            launched_s=float(launched_us[k]) * _US,
            compute_s=float(compute_us[k]) * _US,
            copy_s=max(float(work_us[k] - compute_us[k]), 0.0) * _US,
            host_wait_s=float(wait_us[k]) * _US,
            host_s=by_range.get(k, {}),
        )
    return activities


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
    names = [readable(name) for name in table.names]
    code_of = {name: k for k, name in enumerate(dict.fromkeys(names))}
    codes = np.array([code_of[name] for name in names], np.int64)
    outermost = [np.empty(0, np.int64)]
    for thread in np.unique(table.thread_E[device.launch_D[device.launch_D >= 0]]).tolist():
        events = np.flatnonzero(is_host & (table.thread_E == thread))
        events = events[np.lexsort((-table.dur_us_E[events], table.start_us_E[events]))]
        reach_us = np.maximum.accumulate(np.concatenate([[-np.inf], table.end_us_E[events]]))
        outermost.append(events[table.start_us_E[events] >= reach_us[:-1]])
    ranges = np.concatenate(outermost)
    by_name = [(name, ranges[codes[table.name_E[ranges]] == code]) for name, code in code_of.items()]
    for name, events in by_name:
        per_thread = (events[table.thread_E[events] == thread] for thread in np.unique(table.thread_E[events]))
        for spans in ((table.start_us_E[of], table.end_us_E[of]) for of in per_thread):
            took_s = np.diff(covered_until(spans, windows_us)) * _US
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
