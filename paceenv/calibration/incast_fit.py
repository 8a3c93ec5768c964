"""Incast from a trace: the time of a message at a port, and the losses: timeout, share of steps, buffer.

A payload that collapses ends a retransmission timeout later than the others, so durations have two modes that far
apart. The lower mode gives the time of a message, the distance the timeout. The engine's incast, replayed under the
trace's own arrivals, must show the same share of collapsed steps: that gives the buffer, in opening windows.

Axes: T iterations, R ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from paceenv.calibration.cluster_builder import AMPLE, ClusterBuilder
from paceenv.calibration.job_stamps import JobStamps
from paceenv.calibration.link_replay import receive
from paceenv.calibration.parameters import bounded, identified, not_identifiable
from paceenv.core.intervals import Interval
from paceenv.sim.cluster.fabric import BURST_KB

MIN_TIMEOUT_S: Final = 0.1
"""Modes closer than this are no timeout: TCP's shortest is 200 ms in Linux."""
MIN_COLLAPSED: Final = 3
"""With fewer collapsed steps a timeout looks like a stall."""
_SEEDS = 16
_FINEST = 1e-3

Array = NDArray[np.float64]


@dataclass(frozen=True)
class IncastFit:
    """The time of a message, collapsed steps, timeout and buffer; times are seconds, ``_se`` standard errors.

    ``share`` is that of collapsed steps. ``timeout_s`` is None where no step collapsed. ``fit`` is how many opening
    windows the buffer holds, None where all steps or none collapse; ``fit_interval`` is its 95 % interval, unbounded
    where none did.
    """

    message_s: float
    message_se: float
    share: Interval
    timeout_s: float | None
    timeout_se: float
    fit: float | None
    fit_interval: tuple[float, float]


def fit_incast(stamps: JobStamps, latency_s: float, *, known_message_s: float | None = None) -> IncastFit | None:
    """Fit message, timeout and buffer of a gather or an all-to-all; None where payloads take no longer than latency.

    Args:
        known_message_s: time of a message, if known, seconds. Where every step collapses, durations have one mode, and
            only this separates incast from a slow link.
    """
    finish_TG = stamps.finish_TG - latency_s
    lasts_T = (finish_TG - stamps.arrival_TG).max(axis=1)
    collapsed_T = _upper_mode(lasts_T)
    if known_message_s is not None:
        late_T = (finish_TG - _replayed(stamps, known_message_s)).max(axis=1) > MIN_TIMEOUT_S
        if late_T.sum() >= MIN_COLLAPSED:  # fewer are stalls of a machine
            collapsed_T |= late_T
    message_s, message_se = known_message_s or 0.0, math.inf
    if not collapsed_T.all():
        found = _message(stamps, finish_TG, ~collapsed_T)
        if found is None:
            return None
        message_s, message_se = found
    excess_T = (finish_TG - _replayed(stamps, message_s)).max(axis=1)
    n, k = len(lasts_T), int(collapsed_T.sum())
    share = _binomial_interval(k, n)
    timeout_s, timeout_se = float(excess_T[collapsed_T].mean()) if k else None, 0.0
    fit, interval = _buffer(stamps, message_s, share, timeout_s or 0.2)
    if timeout_s is not None:
        hidden_s, spread_s = _hidden_s(stamps, message_s, _FINEST if fit is None else fit, timeout_s)
        # a few steps may all hide nothing where others do: replays know how much that differs from step to step
        timeout_se = max(float(excess_T[collapsed_T].std(ddof=1)), spread_s) / math.sqrt(k)
        timeout_s += hidden_s
    return IncastFit(message_s, message_se, share, timeout_s, timeout_se, fit if 0 < k < n else None, interval)


def _replayed(stamps: JobStamps, message_s: float, **loss: float) -> Array:
    seed = int(loss.pop("seed", 0))
    exchange = stamps.collective == "all_to_all"
    return receive(stamps.entry_TR, stamps.groups, exchange=exchange, message_s=message_s, seed=seed, **loss)


def _excess(stamps: JobStamps, message_s: float, fit: float, timeout_s: float) -> Array:
    """How much longer steps take in replays with losses than without, seconds ``(seeds, T)``."""
    lossless_TG = _replayed(stamps, message_s)
    lossy = [_replayed(stamps, message_s, fit=fit, timeout_s=timeout_s, seed=seed) for seed in range(_SEEDS)]
    return np.array([(finish_TG - lossless_TG).max(axis=1) for finish_TG in lossy])


def _upper_mode(lasts_T: Array) -> NDArray[np.bool_]:
    """Which payloads took a timeout longer than the others; none where the durations have one mode."""
    centre = np.array([lasts_T.min(), lasts_T.max()])
    for _ in range(50):
        upper_T = lasts_T > centre.mean()
        if upper_T.all() or not upper_T.any():
            break
        centre = np.array([lasts_T[~upper_T].mean(), lasts_T[upper_T].mean()])
    spread = lasts_T[~upper_T].std() if not upper_T.all() else np.inf
    apart = centre[1] - centre[0] >= MIN_TIMEOUT_S and centre[1] - centre[0] > 3.0 * spread
    return upper_T if apart and upper_T.sum() >= MIN_COLLAPSED else np.zeros(len(lasts_T), np.bool_)


def _message(stamps: JobStamps, finish_TG: Array, use_T: NDArray[np.bool_]) -> tuple[float, float] | None:
    """The message time at which payloads that did not collapse take as long as replayed; None if any is too long."""
    highest_s = float((finish_TG - stamps.arrival_TG)[use_T].max()) or 1e-9

    def excess_N(message_s: float) -> Array:
        excess: Array = (finish_TG - _replayed(stamps, message_s))[use_T].ravel()
        return excess

    if excess_N(0.0).mean() <= 0.0:
        return None
    found = optimize.brentq(lambda m: float(excess_N(m).mean()), 0.0, highest_s, xtol=1e-6 * highest_s)
    step = 0.01 * found
    slope = float((excess_N(found - step) - excess_N(found + step)).mean()) / (2.0 * step)
    spread = float(excess_N(found).std()) / np.sqrt(use_T.sum())
    return float(found), spread / max(slope, 1e-12)


def _buffer(
    stamps: JobStamps, message_s: float, share: Interval, timeout_s: float
) -> tuple[float, tuple[float, float]]:
    """How many windows fit into the buffer if ``share`` of the steps collapse, and for the ends of its interval."""
    senders = stamps.ranks // stamps.groups - 1

    def collapses(fit: float) -> float:
        return float((_excess(stamps, message_s, fit, timeout_s) > 0.5 * timeout_s).mean())

    def solve(wanted: float) -> float:
        if wanted >= collapses(_FINEST):
            return 0.0
        if wanted <= 0.0:
            return float(np.inf)
        return float(optimize.brentq(lambda fit: collapses(fit) - wanted, _FINEST, float(senders), xtol=1e-3))

    return solve(share.value), (solve(share.high) if share.high < 1.0 else 0.0, solve(share.low))


def _hidden_s(stamps: JobStamps, message_s: float, fit: float, timeout_s: float) -> tuple[float, float]:
    """How much of a timeout collapsed steps do not show: a sender that lost may have been through before the last.

    Mean and standard deviation over collapsed steps of as many replays as tell the share.
    """
    excess = _excess(stamps, message_s, fit, timeout_s)
    hidden = timeout_s - excess[excess > 0.5 * timeout_s]
    return (float(hidden.mean()), float(hidden.std())) if hidden.size else (0.0, 0.0)


def _binomial_interval(k: int, n: int) -> Interval:
    """Exact (Clopper-Pearson) 95 % interval of a share."""
    low = float(stats.beta.ppf(0.025, k, n - k + 1)) if k else 0.0
    high = float(stats.beta.ppf(0.975, k + 1, n - k)) if k < n else 1.0
    return Interval(k / n, low, high)


def add_incast(builder: ClusterBuilder[JobStamps]) -> None:
    """The rate of a port, its buffer and the timeout, with their evidence."""
    stamps, latency_s = builder.stamps, builder.seconds("latency_s")
    unit_s = builder.seconds("incast_flow_s", nic_gbps=1.0, uplink_gbps=1e9)
    known = builder.known("fabric", "nic_gbps")
    found = None
    if stamps.duration_TG.max() > latency_s:
        found = fit_incast(stamps, latency_s, known_message_s=None if known is None else unit_s / known)
    if found is None:
        builder.ample()
        return
    nic_gbps = unit_s / found.message_s
    if found.share.value < 1.0:
        said = "messages through a port, one after the other, in steps that do not collapse"
        builder.put(identified("fabric.nic_gbps", nic_gbps, nic_gbps * found.message_se / found.message_s, said))
    else:
        builder.put(not_identifiable("fabric.nic_gbps", nic_gbps, "every step collapses", "from base"))
    uplink_gbps = builder.known("fabric", "uplink_gbps") or AMPLE * stamps.ranks * nic_gbps
    source = builder.source("fabric", "uplink_gbps")
    builder.put(not_identifiable("fabric.uplink_gbps", uplink_gbps, "incast hides it", source))
    why = "a tenant and incast are not modelled together"
    builder.add(not_identifiable("tenants", 0.0, why, "none assumed"))
    _put_buffer(builder, found)


def _put_buffer(builder: ClusterBuilder[JobStamps], found: IncastFit) -> None:
    low, high = (edge * BURST_KB for edge in found.fit_interval)
    share = f"{found.share.value:.1%} of steps collapse [{found.share.low:.1%}, {found.share.high:.1%}]"
    known = builder.known("fabric", "buffer_kb")
    if found.timeout_s is None:
        why = f"no step took a timeout longer than the others: either none collapses, or all do; {share}"
        known = known if known is not None and known >= low else None
        source = "from base" if known is not None else "assumed lossless"
        builder.put(not_identifiable("fabric.buffer_kb", known, why, source, lo=low))
        timeout = float(builder.data["fabric"].get("timeout_ms", 200.0))
        builder.add(not_identifiable("fabric.timeout_ms", timeout, "no step collapses", "from base or the usual 200"))
        return
    said = f"what collapsed steps take longer than replayed without loss; {share}"
    builder.put(identified("fabric.timeout_ms", found.timeout_s * 1e3, found.timeout_se * 1e3, said))
    if found.fit is None:
        known = known if known is not None and known <= high else high
        builder.put(not_identifiable("fabric.buffer_kb", known, share, "from base or the upper bound", hi=high))
        return
    said = f"opening windows of {BURST_KB:g} kB that fit if {share}, under the trace's own arrivals"
    builder.put(bounded("fabric.buffer_kb", Interval(found.fit * BURST_KB, low, high), said))
