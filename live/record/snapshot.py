"""The snapshot: an agent's report about itself as plain JSON data; and safe ways to read one from a file.

Times are in seconds; null means unknown. Every reader takes a missing or ill-typed entry as unknown. Fields:

=========== ========================================================================================================
field       holds
=========== ========================================================================================================
schema      :data:`SCHEMA`
job         name; ``rank``, ``world_size``, ``attempt`` (start of the job's processes, a text that all ranks share),
            ``host``
unix_time_s when it was made; ``final``: whether the agent has ended; ``ended``: the exception that ended the process,
            with its place in the script, or :data:`ASKED`, or ""; ``at``: where the script was then, or stands, or ""
mode        requested; ``state``: in force; ``reason``: why they differ, or ""; ``off``: iterations in mode off
iterations  seen; ``regular``: steps measured; ``irregular``: unlike the usual; ``unmeasured``: why none could
            be measured, or ""; ``step_iterations``: ticks in one step (more than 1 where the ranks meet less often)
still_s     since an iteration was over, or a collective was started, as far as snapshots showed
stopped     steps of over 20 times the median, which are left out: ``count``, ``total_s``, of which ``own_s`` in no
            operation, ``longest_s``, its end as ``unix_time_s``
step        ``mean_s``, ``cv``, ``p50_s``, ``p99_s``, ``baseline_s``; ``newest_s``, the mean of the newest steps; and
            ``longest_s``, of all steps, also those that are left out of the others
parts       where a regular step went, means that add up to it: ``compute_s``, ``collective_s``, ``barrier_s``,
            ``pacing_s``
own         the step outside all blocking operations and delays, in ``blocks``: ``iterations`` of a block
            (a power of 2; block k is those from ``k * iterations`` on), and for each of at most 64 blocks its means
            per step, or null: ``own_s``, ``step_s``; and its number of ``steps``
collectives at most 64, the longest first, further ones summed as op "other" of group -1: ``op``, ``group`` (a number),
            ``per_step``, ``blocked_s`` (mean blocked time per step), ``blocks_s`` (the same in each block)
groups      by number: ``name``, ``ranks`` (``0-3,8``; null if unknown), ``member`` (this rank's place), ``size``,
            ``started`` (collectives since the first tick, or until then, by its own count; null if members may not
            count alike)
unseen      collectives that a group counted and the agent could not see: ``group``, ``per_step``
side        ``seconds`` per step in collectives for which other threads wait, and the step may not; and ``streams_s``,
            in those on other CUDA streams than the compute
wait        ``mean_s`` in the barrier, and blocked elsewhere beyond the least
arrival     ``verdict`` (one of :data:`ARRIVALS`), ``early_s``, ``late_s``; where it is not known why, ``evidence``. A
            rank alone claims nothing, verdicts come from :mod:`paceenv.live.record.findings`
agents      ranks with an agent: ``count``, ``complete``, ``reason``
pacing      delays ``asked`` for and ``taken`` by now, ``max_s``, ``total_s``; of the present mode ``mean_s``; ``cut``:
            how often each limit shortened or forbade one; ``holds``: iterations in which rule ``defer`` held
            back (in mode shadow: would have), ``held`` transfers, ``held_s`` seconds later, ``held_max_s`` the longest
shadow      null, or in mode shadow the delays that it would have taken within all limits, on the job as it is without
            them: ``count`` in so many regular ``steps``, ``share`` of their time, ``mean_s``, ``max_s``, ``total_s``
stamps      CUDA events ``dropped``
canary      null, or ``verdict`` (one of :data:`VERDICTS`), ``text``, ``gain``, ``low``, ``high`` and ``pairs``; of
            several candidates these are the best one's.
            ``candidates`` are all of them: ``name``, ``verdict``, ``text``, ``gain``, ``low``, ``high``, ``pairs``,
            ``stopped`` (why it paces no more, or "").
probe       null, or in mode probe ``unit`` (the ranks that move together with this one), ``bound_s`` (longest probe)
overhead    the agent's own time on the host per iteration: ``mean_s``
policy      ``name``, ``source``, ``sha256``
locality    :func:`paceenv.live.observe.locality.describe`
trace       ``rows`` and ``segments`` written, iterations ``dropped``
events      the agent's messages: ``unix_time_s``, ``text`` each
=========== ========================================================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

SCHEMA: Final = "paceenv.live/2"
EARLY, LATE, ON_TIME, UNKNOWN = "early", "late", "on time", "insufficient evidence"
ARRIVALS: Final = (EARLY, LATE, ON_TIME, UNKNOWN)
ASKED: Final = "SIGTERM"
VERDICTS: Final = ("helps", "does not help", "insufficient evidence", "hurts")

Snapshot = dict[str, Any]


def entry(snapshot: Any, *path: str) -> Any:
    """The value at a path of keys; None if it is missing."""
    value: Any = snapshot
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def number(snapshot: Any, *path: str) -> float | None:
    """The finite number at a path of keys; None for anything else."""
    value = entry(snapshot, *path)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def total(snapshots: Iterable[Any], *path: str) -> float:
    """The sum of a number over the ranks that know it."""
    return sum(number(snapshot, *path) or 0.0 for snapshot in snapshots)


def text(snapshot: Any, *path: str) -> str:
    """The text at a path of keys in one line of printable characters; "" if it is missing."""
    value = entry(snapshot, *path)
    line = " ".join(value.split()) if isinstance(value, str) else ""
    return "".join(c if c.isprintable() else "?" for c in line)
