"""What the host of a device did between the launches of its collectives: time by the range that it was in.

A thread is in the innermost range (operation, annotation, Python function, runtime call) that has begun and not ended.
Names that differ between ranks, such as hashes of compiled graphs, are shortened to what they share.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from paceenv.importers.profiler.device_steps import STEP, Device, is_runtime
from paceenv.importers.profiler.event_columns import Array, EventTable, Integers
from paceenv.importers.profiler.rank_activity import OUTSIDE
from paceenv.importers.timelines import union

_HOST: Final = frozenset(("cpu_op", "user_annotation", "python_function"))
_HASH: Final = re.compile(r"\b(?=\w*\d)[0-9a-z]{16,}\b|0x[0-9a-f]{6,}|[#\s]+\Z|\A[#\s]+")
_LOADER: Final = re.compile(r"enumerate\(DataLoader\)|dataloader_next|DataLoaderIter\.__next__|_next_data\b")
_LONGEST: Final = 80
_MOST_DEPTH: Final = 200
_MIN_S: Final = 20e-6
"""Less than this in a window is left out."""


def readable(name: str) -> str:
    """A range's name without what differs between ranks, shortened."""
    return _HASH.sub("", name).strip()[:_LONGEST] or "unnamed"


def time_by_range(table: EventTable, device: Device, windows_us: Array) -> list[dict[str, float]]:
    """Time of the launching threads by range in each window between rising moments, s: one mapping fewer than these.

    The outermost range is named as well where it is another one.

    Args:
        table: events of one profile.
        device: whose launching threads.
        windows_us: moments that part the windows, microseconds.
    """
    windows_us = np.maximum.accumulate(windows_us)
    found: list[dict[str, float]] = [{} for _ in range(len(windows_us) - 1)]
    if not found or not np.isfinite(windows_us).all():
        return found
    is_host = table.in_categories(lambda category: category in _HOST or is_runtime(category))
    is_host &= ~table.named(lambda name: STEP.match(name) is not None)
    is_host &= (table.end_us_E > windows_us[0]) & (table.start_us_E < windows_us[-1])
    names = [readable(name) for name in table.names]
    code_of = {name: k for k, name in enumerate(dict.fromkeys(names))}
    codes, texts = np.array([code_of[name] for name in names], np.int64), list(code_of)
    covered: list[tuple[Array, Array]] = []
    for thread in np.unique(table.thread_E[device.launch_D[device.launch_D >= 0]]).tolist():
        events = np.flatnonzero(is_host & (table.thread_E == thread))
        if not len(events):
            continue
        events = events[np.lexsort((-table.dur_us_E[events], table.start_us_E[events]))]
        outer, inner, begin_us, end_us = _innermost(table, events, windows_us)
        covered.append((begin_us, end_us))
        window = np.searchsorted(windows_us, begin_us, side="right") - 1
        inside = (window >= 0) & (window < len(found))
        label = codes[table.name_E[outer]] * len(texts) + codes[table.name_E[inner]]
        key, place = np.unique(window[inside] * len(texts) ** 2 + label[inside], return_inverse=True)
        total_us = np.bincount(place, (end_us - begin_us)[inside])
        for one, took_us in zip(key.tolist(), total_us.tolist(), strict=True):
            if took_us * 1e-6 >= _MIN_S:
                at, pair = divmod(one, len(texts) ** 2)
                first, last = divmod(pair, len(texts))
                text = texts[last] if first == last else f"{texts[first]} > {texts[last]}"
                found[at][text] = found[at].get(text, 0.0) + took_us * 1e-6
    inside_any = union(
        np.concatenate([np.empty(0), *(begin_us for begin_us, _ in covered)]),
        np.concatenate([np.empty(0), *(end_us for _, end_us in covered)]),
    )
    outside_us = np.diff(windows_us) - np.diff(covered_until(inside_any, windows_us))
    for at, took_us in enumerate(outside_us.tolist()):
        if took_us * 1e-6 >= _MIN_S:
            found[at][OUTSIDE] = took_us * 1e-6
    return found


def loader_spans(table: EventTable) -> tuple[Array, Array]:
    """When the host was in a data loader's ``__next__``, us."""
    is_loader = table.in_categories(lambda category: category in _HOST) & table.named(
        lambda name: _LOADER.search(name) is not None
    )
    return union(table.start_us_E[is_loader], table.end_us_E[is_loader])


def covered_until(spans: tuple[Array, Array], moments: Array) -> Array:
    """How much of disjoint spans, in order, lies before each moment.

    Args:
        spans: begins and ends.
        moments: in rising order, in the unit of the spans.
    """
    begins, ends = spans
    if not len(begins):
        return np.zeros(len(moments))
    edges = np.stack([begins, ends], axis=1).ravel()
    total = np.concatenate([[0.0], np.cumsum(ends - begins)])
    return np.asarray(np.interp(moments, edges, np.stack([total[:-1], total[1:]], axis=1).ravel()))


def _innermost(table: EventTable, events: Integers, windows_us: Array) -> tuple[Integers, Integers, Array, Array]:
    """Segments of a thread's time inside ranges: outermost and innermost range, begin and end, us; cut at windows.

    Ranges of a thread lie within each other. One that only overlaps another is taken to end with it.
    """
    start_us = table.start_us_E[events]
    depth, parent, end_us = _nested(start_us, table.end_us_E[events])
    outermost = np.arange(len(events))
    for level in range(1, int(depth.max()) + 1):
        at = depth == level
        outermost[at] = outermost[parent[at]]
    order = np.concatenate([np.arange(len(events)), parent, np.full(len(windows_us), -2)])
    edges_us = np.concatenate([start_us, end_us, windows_us])
    # Where ranges end and begin at one moment, ends come first, the inner one before the outer one.
    rank = np.concatenate([depth + 1, -1 - depth, np.full(len(windows_us), 1 << 20)])
    sequence = np.lexsort((rank, edges_us))
    current = order[sequence]
    known = np.maximum.accumulate(np.where(current == -2, -1, np.arange(len(current))))
    current = np.where(known >= 0, current[known], -1)
    edges_us = edges_us[sequence]
    kept = np.flatnonzero((current[:-1] >= 0) & (edges_us[1:] > edges_us[:-1]))
    inner = current[kept]
    return events[outermost[inner]], events[inner], edges_us[kept], edges_us[kept + 1]


def _nested(start_us: Array, end_us: Array) -> tuple[Integers, Integers, Array]:
    """Depth and parent (-1 none) of ranges in the order of their begin, longer ones first; and ends within parents."""
    count = len(start_us)
    depth, parent = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    end_us = end_us.copy()
    left = np.arange(count)
    for level in range(_MOST_DEPTH):
        # Of what is left, a range that begins after all before it have ended has nothing around it.
        reach = np.maximum.accumulate(end_us[left])
        is_top = np.concatenate([[True], start_us[left[1:]] >= reach[:-1]])
        tops = left[is_top]
        depth[tops] = level
        inside = left[~is_top]
        if not len(inside):
            break
        around = tops[np.searchsorted(tops, inside) - 1]
        parent[inside] = around
        end_us[inside] = np.minimum(end_us[inside], end_us[around])
        depth[inside] = level + 1
        left = inside
    return depth, parent, end_us
