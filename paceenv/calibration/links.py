"""The links of a job, from how long its payload takes: rates of NICs and uplink, and the losses of incast.

Those of a program's transfers are in ``program_links``, the fit of a shared uplink in ``link_replay``.

Incast: a payload that collapses ends a retransmission timeout later than the others, so durations have two modes that
far apart. The lower mode gives the time of a message, the distance the timeout. The engine's incast, replayed under the
trace's own arrivals, must show the same share of collapsed steps: that gives the buffer, in opening windows.

Axes: T iterations, R ranks, G process groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from paceenv.calibration.cluster_builder import AMPLE, ClusterBuilder
from paceenv.calibration.job_stamps import JobStamps
from paceenv.calibration.link_replay import LinkFit, PayloadFit, fit_links, receive
from paceenv.calibration.parameters import FROM_BASE, NOT_LIMITING, ROUND_US, bounded, identified, not_identifiable
from paceenv.calibration.two_state_fit import MIN_ITERATIONS, MIN_TIMEOUT_S, timed_out
from paceenv.core.intervals import Interval
from paceenv.sim.cluster.fabric import BURST_KB

USUAL_TIMEOUT_S: Final = 0.2
_SEEDS = 16
_FINEST = 1e-3

_UNIT: Final = {"nic_gbps": 1.0, "uplink_gbps": 1.0}

Array = NDArray[np.float64]
Replay = Callable[..., Array]
""":func:`receive` under the trace's own arrivals: when payloads end, seconds ``(T, G)``."""


def add_payload(builder: ClusterBuilder[JobStamps]) -> None:
    """Rates, latency and losses of links."""
    if builder.stamps.collective == "all_reduce":
        _add_uplink(builder)
    else:
        _add_incast(builder)
    if builder.base is None:
        latency_us = float(str(builder.cluster().fabric.latency_us))
        why, (lo, hi) = "at one size a round of messages is a part of the payload's time", ROUND_US
        builder.add(not_identifiable("fabric.latency_us", latency_us, why, "assumed", lo=lo, hi=hi))


def _add_uplink(builder: ClusterBuilder[JobStamps]) -> None:
    stamps, probed = builder.stamps, builder.probed
    if stamps.groups > 1 and builder.seconds("uplink_work_s", **_UNIT) <= 0.0:
        builder.data["fabric"]["nodes_per_leaf"] = 1  # groups inside a leaf could not meet, and these may
    unit_alone_s, unit_work_s = (builder.seconds(key, **_UNIT) for key in ("transfer_alone_s", "uplink_work_s"))
    latency_s = builder.seconds("latency_s")
    links = fit_links(probed, latency_s)
    if unit_alone_s <= 0.0 or stamps.duration_TG.mean() <= latency_s or not links.alone_s > 0.0:
        builder.ample()
        return
    own = links if probed is stamps else fit_links(stamps, latency_s)
    known_nic = builder.known("fabric", "nic_gbps")
    if not math.isfinite(links.alone_se) and known_nic is not None and links.alone_most_s is None:
        links = fit_links(probed, latency_s, known_alone_s=unit_alone_s / known_nic)
        links = replace(links, alone_se=math.inf, why_not="", work_most_s=None)
    _put_nic(builder, links, unit_alone_s, known_nic)
    _put_uplink(builder, links, unit_work_s)
    cap = links.work_s * stamps.groups / links.alone_s if stamps.groups > 1 else AMPLE
    builder.payload = PayloadFit(own, cap, unit_alone_s, unit_work_s * stamps.groups, latency_s)


def _put_nic(builder: ClusterBuilder[JobStamps], links: LinkFit, unit_alone_s: float, known: float | None) -> None:
    gbps = unit_alone_s / links.alone_s
    if math.isfinite(links.alone_se):
        builder.put(identified("fabric.nic_gbps", gbps, gbps * (links.alone_se / links.alone_s), _how(links)))
        return
    why = links.why_not or "starts vary too little to separate a group's own cap from the uplink's share"
    least = None if links.alone_most_s is None else unit_alone_s / links.alone_most_s
    if known is not None and least is not None and known < least:
        known = None
    gbps, source = (gbps, "the best fit") if known is None else (known, FROM_BASE)
    parameter = not_identifiable("fabric.nic_gbps", gbps, why, source, lo=least)
    if known is None and builder.stamps.groups > 1:  # from there on the uplink alone limits a group
        parameter = replace(parameter, top=unit_alone_s / links.work_s)
    builder.put(parameter)


def _put_uplink(builder: ClusterBuilder[JobStamps], links: LinkFit, unit_work_s: float) -> None:
    gbps, known = unit_work_s / links.work_s, builder.known("fabric", "uplink_gbps")
    if math.isfinite(links.work_se):
        builder.put(identified("fabric.uplink_gbps", gbps, gbps * (links.work_se / links.work_s), _how(links)))
        return
    limits = builder.stamps.groups > 1
    most_s = links.work_most_s if limits else links.alone_s / builder.stamps.groups
    least = None if most_s is None or unit_work_s <= 0.0 else unit_work_s / most_s
    if known is not None and least is not None and (known < least or links.alone_most_s is not None):
        known = None  # the trace shows more, or that this or a group's own links limit it
    source = FROM_BASE if known is not None else "the best fit" if limits else NOT_LIMITING
    gbps = gbps if limits else AMPLE * max(builder.data["fabric"]["nic_gbps"], least or 0.0)
    gbps = gbps if known is None else known
    builder.put(not_identifiable("fabric.uplink_gbps", gbps, links.why_not, source, lo=least))


def _how(links: LinkFit) -> str:
    way = (
        "response of payloads to delays taken on purpose"
        if links.probed
        else "payloads against starts as they happened to vary"
    )
    left = f", {links.outliers} iterations left out" if links.outliers else ""
    return f"{way}; what is left varies by {links.residual_TG.std() * 1e3:.3g} ms{left}"


def _add_incast(builder: ClusterBuilder[JobStamps]) -> None:
    """The rate of a port, its buffer and the timeout, with their evidence."""
    stamps, latency_s = builder.stamps, builder.seconds("latency_s")
    unit_s = builder.seconds("incast_flow_s", nic_gbps=1.0, uplink_gbps=1e9)
    known = builder.known("fabric", "nic_gbps")
    replay = partial(receive, stamps.entry_TR, stamps.groups, exchange=stamps.collective == "all_to_all")
    finish_TG = stamps.finish_TG - latency_s
    lasts_TG = finish_TG - stamps.arrival_TG
    collapsed_T = timed_out(lasts_TG.max(axis=1))
    if known is not None:  # where every step collapses, only this tells incast from a slow link
        late_T = (finish_TG - replay(message_s=unit_s / known)).max(axis=1) > MIN_TIMEOUT_S
        if late_T.sum() >= MIN_ITERATIONS:  # fewer are stalls of a machine
            collapsed_T |= late_T
    if known is not None and collapsed_T.all():
        message_s = unit_s / known
        builder.put(not_identifiable("fabric.nic_gbps", unit_s / message_s, "every step collapses", FROM_BASE))
    else:
        message = _message(replay, finish_TG, ~collapsed_T, float(lasts_TG[~collapsed_T].max()))
        if message is None:
            builder.ample()
            return
        message_s, message_se = message
        said = "messages through a port, one after the other, in steps that do not collapse"
        nic_gbps = unit_s / message_s
        builder.put(identified("fabric.nic_gbps", nic_gbps, nic_gbps * message_se / message_s, said))
    uplink_gbps = builder.known("fabric", "uplink_gbps") or AMPLE * stamps.ranks * (unit_s / message_s)
    source = builder.source("fabric", "uplink_gbps")
    builder.put(not_identifiable("fabric.uplink_gbps", uplink_gbps, "incast hides it", source))
    why = "a tenant and incast are not modelled together"
    builder.add(not_identifiable("tenants", 0.0, why, "none assumed"))
    excess_T = (finish_TG - replay(message_s=message_s)).max(axis=1)
    _add_losses(builder, partial(replay, message_s=message_s), excess_T, collapsed_T)


def _message(
    replay: Replay, finish_TG: Array, use_T: NDArray[np.bool_], highest_s: float
) -> tuple[float, float] | None:
    """The message time at which payloads that did not collapse take as long as replayed, and its standard error.

    None where payloads take no longer than latency.
    """

    def excess_N(message_s: float) -> Array:
        return (finish_TG - replay(message_s=message_s))[use_T].ravel()

    if highest_s <= 0.0 or excess_N(0.0).mean() <= 0.0:
        return None
    root_s = optimize.brentq(lambda m: float(excess_N(m).mean()), 0.0, highest_s, xtol=1e-6 * highest_s)
    step = 0.01 * root_s
    slope = float((excess_N(root_s - step) - excess_N(root_s + step)).mean()) / (2.0 * step)
    spread = float(excess_N(root_s).std()) / np.sqrt(use_T.sum())
    return float(root_s), spread / max(slope, 1e-12)


def _add_losses(
    builder: ClusterBuilder[JobStamps], replay: Replay, excess_T: Array, collapsed_T: NDArray[np.bool_]
) -> None:
    """Timeout and buffer; ``excess_T`` is how much longer steps take than replayed without losses, seconds."""
    n, k = len(collapsed_T), int(collapsed_T.sum())
    collapsed = Interval(k / n, *stats.binomtest(k, n).proportion_ci())
    share = f"{collapsed.value:.1%} of steps collapse [{collapsed.low:.1%}, {collapsed.high:.1%}]"
    shown_s = float(excess_T[collapsed_T].mean()) if k else USUAL_TIMEOUT_S
    senders = builder.stamps.ranks // builder.stamps.groups - 1

    def excess(fit: float) -> Array:
        """How much longer steps take in replays with a buffer of so many windows, seconds ``(seeds, T)``."""
        lossy = (replay(fit=fit, timeout_s=shown_s, seed=seed) for seed in range(_SEEDS))
        return np.array([(finish_TG - lossless_TG).max(axis=1) for finish_TG in lossy])

    def collapses(fit: float) -> float:
        return float((excess(fit) > 0.5 * shown_s).mean())

    def windows(wanted: float) -> float:
        """How many windows fit into the buffer if this share of the steps collapses."""
        if wanted >= collapses(_FINEST):
            return 0.0
        if wanted <= 0.0:
            return math.inf
        return float(optimize.brentq(lambda fit: collapses(fit) - wanted, _FINEST, float(senders), xtol=1e-3))

    lossless_TG = replay()
    fit = windows(collapsed.value)
    high, low = windows(collapsed.low) * BURST_KB, (windows(collapsed.high) if collapsed.high < 1.0 else 0.0) * BURST_KB
    known = builder.known("fabric", "buffer_kb")
    if not k:
        why = f"no step took a timeout longer than the others: either none collapses, or all do; {share}"
        known = known if known is not None and known >= low else None
        source = FROM_BASE if known is not None else "assumed lossless"
        builder.put(not_identifiable("fabric.buffer_kb", known, why, source, lo=low))
        timeout = float(builder.data["fabric"].get("timeout_ms", USUAL_TIMEOUT_S * 1e3))
        builder.add(not_identifiable("fabric.timeout_ms", timeout, "no step collapses", "from base or the usual 200"))
        return
    # a sender that lost may have been through before the last, so collapsed steps hide a part of the timeout; a few
    # steps may all hide nothing where others do: replays know how much that differs from step to step
    replayed = excess(fit)
    hidden = shown_s - replayed[replayed > 0.5 * shown_s]
    hidden_s, spread_s = (float(hidden.mean()), float(hidden.std())) if hidden.size else (0.0, 0.0)
    se_s = max(float(excess_T[collapsed_T].std(ddof=1)), spread_s) / math.sqrt(k)
    said = f"what collapsed steps take longer than replayed without loss; {share}"
    builder.put(identified("fabric.timeout_ms", (shown_s + hidden_s) * 1e3, se_s * 1e3, said))
    if k == n:
        known = known if known is not None and known <= high else high
        builder.put(not_identifiable("fabric.buffer_kb", known, share, "from base or the upper bound", hi=high))
        return
    said = f"opening windows of {BURST_KB:g} kB that fit if {share}, under the trace's own arrivals"
    builder.put(bounded("fabric.buffer_kb", Interval(fit * BURST_KB, low, high), said))
