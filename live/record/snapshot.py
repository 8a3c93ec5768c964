"""The snapshot: what an agent tells about itself, as plain JSON data; and safe ways to read one that came from a file.

Times are in seconds, what is unknown is null. Every reader takes a missing or ill-typed entry as unknown. Fields:

========== =========================================================================================================
field      holds
========== =========================================================================================================
schema     :data:`SCHEMA`
job        name; ``rank``, ``world_size``, ``attempt`` (start of the job's processes), ``host``, ``pid``
unix_time_s when it was made; ``final``: whether the agent has ended
mode       asked for; ``state``: in force; ``reason``: why they differ, or ""
iterations seen; ``regular`` of them estimated from, ``irregular`` only recorded
step       ``mean_s``, ``cv``, ``p50_s``, ``p99_s``, ``baseline_s``
parts      where a regular step went, means that add up to it: ``compute_s``, ``collective_s``, ``barrier_s``,
           ``pacing_s``
own        the step outside collectives and barrier: ``mean_s`` and its standard error ``error_s``
wait       for others, in the step's last collective: ``mean_s``, ``p50_s``, ``p95_s``, ``baseline_s``
arrival    ``verdict`` (one of :data:`ARRIVALS`), ``early_s``, ``late_s``, ``share``, ``evidence``
pacing     delays ``asked`` for and ``taken``, of which ``ineffective``; ``mean_s``, ``max_s``, ``total_s``;
           ``cut``: how often which limit shortened or forbade one
group      whose ranks wait for each other at the end of a step: ``number``, ``members``
stamps     CUDA events ``dropped``
canary     null, or ``verdict`` (one of :data:`VERDICTS`), ``text``, ``gain``, ``low``, ``high``, ``pairs``
probe      null, or in mode probe ``unit`` (what moves together with this rank), ``bound_s`` (longest probe),
           ``cost_share`` (by which the mean step is longer; null before the first look)
overhead   the agent's own time on the host per iteration: ``mean_s``, ``p99_s``
policy     ``name``, ``source``, ``sha256``
locality   :func:`paceenv.live.observe.locality.describe`
trace      ``rows`` and ``segments`` written, iterations ``dropped``
events     what the agent said: ``unix_time_s``, ``text`` each
========== =========================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

SCHEMA: Final = "paceenv.live/1"
STATES: Final = ("off", "observe", "probe", "shadow", "canary", "active")
PARTS: Final = ("compute", "collective", "barrier", "pacing")
EARLY, LATE, ON_TIME, UNKNOWN = "early", "late", "on time", "insufficient evidence"
ARRIVALS: Final = (EARLY, LATE, ON_TIME, UNKNOWN)
VERDICTS: Final = ("helps", "does not help", "insufficient evidence", "hurts")

Snapshot = dict[str, Any]


def entry(snapshot: Mapping[str, Any], *path: str) -> Any:
    """What lies at a path of keys, None where there is no such thing."""
    value: Any = snapshot
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def number(snapshot: Mapping[str, Any], *path: str) -> float | None:
    """The finite number at a path of keys, else None."""
    value = entry(snapshot, *path)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def text(snapshot: Mapping[str, Any], *path: str) -> str:
    """The text at a path of keys in one line of printable characters, "" where there is none."""
    value = entry(snapshot, *path)
    line = " ".join(value.split()) if isinstance(value, str) else ""
    return "".join(c if c.isprintable() else "?" for c in line)


def finite(value: Any) -> Any:
    """``value`` as plain JSON data: numbers that are not finite, and what JSON does not know, become null."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, bool)) else None
