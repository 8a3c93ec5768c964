"""How transfers share links, from those that ran alone and those that met others in the same trace.

Transfers alone give the efficiency of each operation: its speed next to that of the fastest one. Those that met others
then choose between what a link can do: divide its rate between operations or flows, and let others use what an
operation leaves, or not. The first choice in the list that explains them as well as any other is taken.

Axes: T steps, K transfers of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.parameters import Parameter, identified
from paceenv.calibration.program.link_rates import MIN_ALONE, Durations, LinkRate, link_bytes, nodes_of, place_of
from paceenv.calibration.program.operation_speeds import ALIKE
from paceenv.calibration.program.program_stamps import ProgramStamps
from paceenv.sim.cluster.collectives import BYTES_PER_GBIT

BETTER: Final = 0.02
"""By so much, in logarithms of durations, a choice must be better than one before it."""
MEETS: Final = 0.5
"""Share of steps in which a transfer must meet others to count as one that does."""
CHOICES: Final = [
    {"sharing": sharing, "unused_rate": unused} for sharing in ("operations", "flows") for unused in ("free", "lost")
]

Array = NDArray[np.float64]


class Sharing(NamedTuple):
    """Keys of a fabric, the rates that go with them, and the evidence."""

    keys: dict[str, Any]
    rates: list[LinkRate]
    parameters: list[Parameter]
    said: str


def fit_sharing(
    stamps: ProgramStamps,
    found: Durations,
    rates: list[LinkRate],
    contended: Callable[[dict[str, Any]], Array],
    *,
    is_known: bool,
) -> Sharing:
    """How transfers between nodes share their links; the rates as they are where the trace does not show it.

    Args:
        stamps: of the job.
        found: durations.
        rates: of the links, fitted to all operations alike.
        contended: simulates the job with keys of its fabric; gives the mean seconds of each transfer.
        is_known: whether a known cluster says how links are shared, so that only efficiencies are fitted.
    """
    nothing = Sharing({}, rates, [], "")
    across = [rate for rate in rates if rate.place == "across" and rate.alone]
    if not across:
        return nothing
    efficiency, gbps, parameters = _efficiencies(stamps, found)
    keys: dict[str, Any] = {"fabric.efficiency": efficiency} if efficiency else {}
    if efficiency:
        rates = [replace(one, gbps=gbps, latency_us=None) if one.place == "across" else one for one in rates]
    meets = [k for k, one in enumerate(stamps.transfers) if one.payload_bytes > 0.0 and _meets(found, k)]
    meets = [k for k in meets if np.nanmean(found.seconds_TK[:, k]) > 0.0]
    if is_known or not meets:
        return Sharing(keys, rates, parameters, "")
    known = {rate.key: rate.gbps for rate in rates} | {rate.latency_key: rate.latency_us or 0.0 for rate in rates}
    wanted_K = np.log(np.nanmean(found.seconds_TK[:, meets], axis=0))
    errors = []
    for choice in CHOICES:
        seconds_K = contended({**known, **keys, **{f"fabric.{key}": value for key, value in choice.items()}})[meets]
        errors.append(float(np.sqrt(np.mean((np.log(np.maximum(seconds_K, 1e-12)) - wanted_K) ** 2))))
    taken = next(n for n, error in enumerate(errors) if error < min(errors) + BETTER)
    said = f"durations of {len(meets)} transfers that met others: {errors[taken]:.1%} off, by default {errors[0]:.1%}"
    if not taken:
        return Sharing(keys, rates, parameters, "")
    return Sharing(keys | {f"fabric.{k}": v for k, v in CHOICES[taken].items()}, rates, parameters, said)


def _meets(found: Durations, k: int) -> bool:
    """Whether a transfer meets others in most steps that have it."""
    seen_T = np.isfinite(found.seconds_TK[:, k])
    return bool(seen_T.any()) and float(found.alone_TK[seen_T, k].mean()) < MEETS


def _efficiencies(stamps: ProgramStamps, found: Durations) -> tuple[dict[str, float], float, list[Parameter]]:
    """Efficiencies below 1 of operations that ran alone, and the rate of the fastest one, Gb/s.

    Args:
        stamps: of the job.
        found: durations.
    """
    _, each = nodes_of(stamps)
    speed_of: dict[str, list[tuple[float, float, float]]] = {}
    for k, one in enumerate(stamps.transfers):
        seconds = found.seconds_TK[found.alone_TK[:, k], k]
        if one.payload_bytes > 0.0 and place_of(one, each) == "across" and len(seconds) >= MIN_ALONE:
            mean_s = float(np.median(seconds))
            if not mean_s > 0.0:
                continue
            speed = link_bytes(stamps, one) / mean_s
            speed_of.setdefault(one.op, []).append((speed, mean_s, float(seconds.std() / len(seconds) ** 0.5) / mean_s))
    if len(speed_of) < 2 or any(_spread(rows) > ALIKE for rows in speed_of.values()):
        return {}, 0.0, []  # speeds that depend on the size have latency in them
    speeds = {op: float(np.average([row[0] for row in rows], weights=[row[1] for row in rows])) for op, rows in
              speed_of.items()}  # fmt: skip
    fastest = max(speeds, key=lambda op: speeds[op])
    efficiency, parameters = dict[str, float](), list[Parameter]()
    for op, speed in speeds.items():
        ratio = speed / speeds[fastest]
        if ratio < 1.0 - ALIKE:
            efficiency[op] = float(f"{ratio:.4g}")
            se = ratio * max(float(np.hypot(speed_of[op][0][2], speed_of[fastest][0][2])), 0.01)
            said = f"its transfers alone beside those of {fastest}, the fastest"
            parameters.append(identified(f"fabric.efficiency.{op}", efficiency[op], se, said))
    return efficiency, speeds[fastest] / BYTES_PER_GBIT, parameters


def _spread(rows: Sequence[tuple[float, float, float]]) -> float:
    """The largest speed over the smallest, less 1."""
    speeds = [row[0] for row in rows]
    return max(speeds) / min(speeds) - 1.0
