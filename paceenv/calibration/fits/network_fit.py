"""The network in a calibrated cluster: links that groups share, a tenant on them, or incast; with evidence for each.

Chooses among the fits (:mod:`paceenv.calibration.fits.links`, ``tenants``, ``incast_fit``) and makes keys of a cluster
from them. A key that the trace does not identify keeps the value of ``base``, or an assumption that limits nothing, and
its evidence says so.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from paceenv.calibration.cluster_builder import ClusterBuilder
from paceenv.calibration.fits.incast_fit import IncastFit, fit_incast
from paceenv.calibration.fits.links import LinkFit, fit_links, transfer_cv
from paceenv.calibration.fits.noise_fit import Estimate
from paceenv.calibration.fits.tenants import MIN_EXPLAINED, TenantFit, fit_tenant, is_disturbed
from paceenv.calibration.parameters import ROUND_US, bounded, estimated, identified, not_identifiable
from paceenv.calibration.step_statistics import GOOD_CV, GOOD_MEAN, simulate
from paceenv.core.intervals import Interval
from paceenv.sim.cluster import Cluster

AMPLE: Final = 10.0
"""A link that shows no limit is assumed to be this many times as fast as the one that limits."""
MIN_JITTER: Final = 0.003
"""A tenant's own jitter, where ours is less: that of any computer."""
MIN_PHASE_SD: Final = 0.15
MAX_TRANSFER_CV: Final = 1.0
"""What a cluster config allows."""
_UNIT: Final = {"nic_gbps": 1.0, "uplink_gbps": 1.0}


def fit_network(builder: ClusterBuilder) -> None:
    """Fit the network and add it to the builder, which must have compute and post-collective work already."""
    if builder.stamps.collective == "all_reduce":
        _links(builder)
    else:
        _incast(builder)
    if builder.base is None:
        _round(builder)


def _round(builder: ClusterBuilder) -> None:
    """The assumed time of a round of messages, and its bounds."""
    latency_us = builder.cluster().fabric.latency_us
    assert isinstance(latency_us, float)
    why = "at one size a round of messages is a part of the payload's time"
    builder.add(not_identifiable("fabric.latency_us", latency_us, why, "assumed", lo=ROUND_US[0], hi=ROUND_US[1]))


def _links(builder: ClusterBuilder) -> None:
    stamps, fabric = builder.stamps, builder.data["fabric"]
    if stamps.groups > 1 and builder.seconds("uplink_work_s", **_UNIT) <= 0.0:
        fabric["nodes_per_leaf"] = 1  # groups inside a leaf could not meet, and these may
    unit_alone_s, unit_work_s = (builder.seconds(key, **_UNIT) for key in ("transfer_alone_s", "uplink_work_s"))
    latency_s = builder.seconds("latency_s")
    duration_T = stamps.duration_TG.mean(axis=1)
    links = fit_links(builder.probed, latency_s)
    if unit_alone_s <= 0.0 or duration_T.mean() <= latency_s or not links.alone_s > 0.0:
        _ample(builder)
        return
    own = links if builder.probed is stamps else fit_links(stamps, latency_s)
    known_nic = builder.known("fabric", "nic_gbps")
    if not math.isfinite(links.alone_se) and known_nic is not None and links.alone_most_s is None:
        links = fit_links(builder.probed, latency_s, known_alone_s=unit_alone_s / known_nic)
        links = replace(links, alone_se=math.inf, why_not="", work_most_s=None)
    _nic(builder, links, unit_alone_s, known_nic)
    mean_s, residual_T = float(duration_T.mean()), own.residual_TG.mean(axis=1)
    disturbed, said = is_disturbed(residual_T[builder.steady_T], mean_s, builder.measured.mean_s)
    if disturbed and unit_work_s > 0.0:
        jitter = max(builder.data["noise"]["jitter_cv"], builder.data["noise"]["imbalance_cv"], MIN_JITTER)
        if _tenant(builder, links, unit_alone_s, unit_work_s, latency_s, jitter):
            return
        said = "durations vary in a way that no one periodic tenant explains"
    _uplink(builder, links, unit_work_s)
    builder.add(not_identifiable("tenants", 0.0, said, "none assumed"))
    cv, se = transfer_cv(own, stamps.duration_TG, builder.steady_T)
    said = "what each group's payloads differ from the links' model"
    if cv > MAX_TRANSFER_CV:
        said += f": {cv:.3g}, of which the simulator has {MAX_TRANSFER_CV:g} at most"
    builder.data["noise"]["transfer_cv"] = min(cv, MAX_TRANSFER_CV)
    builder.add(identified("noise.transfer_cv", min(cv, MAX_TRANSFER_CV), se, said))


def _ample(builder: ClusterBuilder) -> None:
    """Rates that limit nothing, where payloads take no time to speak of."""
    why = "its payload takes no longer than a round of messages"
    for key in ("nic_gbps", "uplink_gbps"):
        builder.data["fabric"][key] = builder.known("fabric", key) or AMPLE
        builder.add(not_identifiable(f"fabric.{key}", builder.data["fabric"][key], why, builder.source("fabric", key)))


def _nic(builder: ClusterBuilder, links: LinkFit, unit_alone_s: float, known: float | None) -> None:
    fabric, how = builder.data["fabric"], _how(links)
    if math.isfinite(links.alone_se):
        fabric["nic_gbps"] = unit_alone_s / links.alone_s
        relative = links.alone_se / links.alone_s
        builder.add(identified("fabric.nic_gbps", fabric["nic_gbps"], fabric["nic_gbps"] * relative, how))
        return
    why = links.why_not or "starts vary too little to separate a group's own cap from the uplink's share"
    least = None if links.alone_most_s is None else unit_alone_s / links.alone_most_s
    if known is not None and least is not None and known < least:
        known = None
    fabric["nic_gbps"] = known if known is not None else unit_alone_s / links.alone_s
    source = "from base" if known is not None else "the best fit"
    found = not_identifiable("fabric.nic_gbps", fabric["nic_gbps"], why, source, lo=least)
    if known is None and builder.stamps.groups > 1:  # from there on the uplink alone limits a group
        found = replace(found, top=unit_alone_s / links.work_s)
    builder.add(found)


def _uplink(builder: ClusterBuilder, links: LinkFit, unit_work_s: float) -> None:
    fabric, known = builder.data["fabric"], builder.known("fabric", "uplink_gbps")
    if math.isfinite(links.work_se):
        fabric["uplink_gbps"] = unit_work_s / links.work_s
        relative = links.work_se / links.work_s
        builder.add(
            identified("fabric.uplink_gbps", fabric["uplink_gbps"], fabric["uplink_gbps"] * relative, _how(links))
        )
        builder.add_correlation("fabric.nic_gbps", "fabric.uplink_gbps", links.correlation)
        return
    limits = builder.stamps.groups > 1
    most_s = links.work_most_s if limits else links.alone_s / builder.stamps.groups
    least = None if most_s is None or unit_work_s <= 0.0 else unit_work_s / most_s
    if known is not None and least is not None and (known < least or links.alone_most_s is not None):
        known = None  # the trace shows more, or that this or a group's own links limit it
    value = unit_work_s / links.work_s if limits else AMPLE * max(fabric["nic_gbps"], least or 0.0)
    fabric["uplink_gbps"] = known if known is not None else value
    source = "from base" if known is not None else "the best fit" if limits else "assumed not to limit"
    why = links.why_not
    builder.add(not_identifiable("fabric.uplink_gbps", fabric["uplink_gbps"], why, source, lo=least))


def _tenant(
    builder: ClusterBuilder, links: LinkFit, unit_alone_s: float, unit_work_s: float, latency_s: float, jitter: float
) -> bool:
    """Fit a tenant and take it into the cluster; False if none explains the durations."""
    stamps, fabric, groups = builder.stamps, builder.data["fabric"], builder.stamps.groups
    alone_s = float(np.quantile(stamps.duration_TG.mean(axis=1), 0.02)) - latency_s
    if alone_s <= 0.0:
        return False
    cap = links.work_s * groups / links.alone_s if groups > 1 else 1.0

    def make(ratio: float, share: float, whole_s: float) -> Cluster:
        """The uplink is what the payload of all groups fills when no tenant transfers, in ``whole_s``."""
        tenant = {"period_ratio": ratio, "comm_share": share, "ranks": stamps.ranks, "jitter_cv": jitter}
        data = builder.data | {"tenants": [tenant]}
        rates = {"uplink_gbps": unit_work_s * groups / whole_s}
        rates["nic_gbps"] = unit_alone_s / whole_s * (cap if groups > 1 else AMPLE)
        data["fabric"] = fabric | rates
        return builder.parse(data)

    def misfit(cluster: Cluster) -> float:
        """Of mean step and CV, in units of what counts as a good fit and of what one run differs from another."""
        simulated = simulate(cluster, len(stamps.step_T))
        mean = (simulated.mean_s - builder.measured.mean_s) / math.hypot(
            GOOD_MEAN * simulated.mean_s, simulated.mean_sd
        )
        return math.hypot(mean, (simulated.cv - builder.measured.cv) / math.hypot(GOOD_CV, simulated.cv_sd))

    found = fit_tenant(make, stamps, alone_s, latency_s, misfit)
    if found.explained < MIN_EXPLAINED:
        return False
    best = make(found.period_ratio.value, found.comm_share.value, found.alone_s.value)
    builder.data["tenants"] = [t.model_dump() | {"pause_rate": found.pause_rate.value} for t in best.tenants]
    fabric |= {"nic_gbps": best.fabric.nic_gbps, "uplink_gbps": best.fabric.uplink_gbps}
    builder.parameters = [p for p in builder.parameters if p.key != "fabric.nic_gbps"]
    _add_tenant(builder, found, unit_work_s * groups)
    return True


def _add_tenant(builder: ClusterBuilder, found: TenantFit, unit_whole_s: float) -> None:
    fabric = builder.data["fabric"]
    said = (
        f"particle filter through the trace's own arrivals, which expects {found.explained:.0%} of the durations' "
        "variance one iteration ahead; of the posterior what comes nearest to mean and CV of the step"
    )
    alone = found.alone_s
    rate = unit_whole_s / alone.value
    scaled = Estimate(rate, rate * alone.se / alone.value, unit_whole_s / alone.hi, unit_whole_s / alone.lo)
    evidence = f"payload without the tenant takes {alone.value:.4g} s: {said}"
    builder.add(estimated("fabric.uplink_gbps", scaled, evidence))
    why = "with a tenant on the uplink, whether a group's own links limit it as well"
    builder.add(not_identifiable("fabric.nic_gbps", fabric["nic_gbps"], why, "assumed not to limit beyond the uplink"))
    builder.add(estimated("tenants.0.period_ratio", found.period_ratio, said))
    builder.add(estimated("tenants.0.comm_share", found.comm_share, said))
    (_, ratio_share, ratio_alone), (*_, share_alone), _ = found.correlation.tolist()
    builder.add_correlation("tenants.0.period_ratio", "tenants.0.comm_share", ratio_share)
    builder.add_correlation(
        "tenants.0.period_ratio", "fabric.uplink_gbps", -ratio_alone
    )  # the longer alone, the slower
    builder.add_correlation("tenants.0.comm_share", "fabric.uplink_gbps", -share_alone)
    why = "a tenant that takes less of the uplink for longer slows us alike"
    builder.add(not_identifiable("tenants.0.rate_share", 1.0, why, "assumed to take what it gets"))
    said = "chance a period, by how often the filter loses sight of it"
    builder.add(estimated("tenants.0.pause_rate", found.pause_rate, said))
    key, why = "tenants.0.phase", "the filter leaves open where it is in its period"
    if found.phase_sd < MIN_PHASE_SD:
        builder.add(
            identified(key, found.phase, found.phase_sd, "of its period since its last transfer; not in the config")
        )
    else:
        builder.add(not_identifiable(key, None, why, "not in the config: the simulator draws it"))


def _incast(builder: ClusterBuilder) -> None:
    stamps, fabric = builder.stamps, builder.data["fabric"]
    latency_s = builder.seconds("latency_s")
    unit_s = builder.seconds("incast_flow_s", nic_gbps=1.0, uplink_gbps=1e9)
    known = builder.known("fabric", "nic_gbps")
    found = None
    if stamps.duration_TG.max() > latency_s:
        found = fit_incast(stamps, latency_s, known_message_s=None if known is None else unit_s / known)
    if found is None:
        _ample(builder)
        return
    nic = unit_s / found.message_s
    fabric["nic_gbps"], fabric["uplink_gbps"] = (
        nic,
        builder.known("fabric", "uplink_gbps") or AMPLE * stamps.ranks * nic,
    )
    if found.share.value < 1.0:
        said = "messages through a port, one after the other, in steps that do not collapse"
        builder.add(identified("fabric.nic_gbps", nic, nic * found.message_se / found.message_s, said))
    else:
        builder.add(not_identifiable("fabric.nic_gbps", nic, "every step collapses", "from base"))
    why = "incast hides it"
    builder.add(
        not_identifiable("fabric.uplink_gbps", fabric["uplink_gbps"], why, builder.source("fabric", "uplink_gbps"))
    )
    why = "a tenant and incast are not modelled together"
    builder.add(not_identifiable("tenants", 0.0, why, "none assumed"))
    _buffer(builder, found)


def _buffer(builder: ClusterBuilder, found: IncastFit) -> None:
    fabric = builder.data["fabric"]
    burst_kb = float(fabric.setdefault("burst_kb", 14.48))
    low, high = (edge * burst_kb for edge in found.fit_interval)
    share = f"{found.share.value:.1%} of steps collapse [{found.share.low:.1%}, {found.share.high:.1%}]"
    if found.timeout_s is None:
        why = f"no step took a timeout longer than the others: either none collapses, or all do; {share}"
        known = builder.known("fabric", "buffer_kb")
        fabric["buffer_kb"] = known if known is not None and known >= low else None
        source = "from base" if fabric["buffer_kb"] is not None else "assumed lossless"
        builder.add(not_identifiable("fabric.buffer_kb", fabric["buffer_kb"], why, source, lo=low))
        timeout = float(fabric.get("timeout_ms", 200.0))
        builder.add(not_identifiable("fabric.timeout_ms", timeout, "no step collapses", "from base or the usual 200"))
        return
    fabric["timeout_ms"] = found.timeout_s * 1e3
    said = f"what collapsed steps take longer than replayed without loss; {share}"
    builder.add(identified("fabric.timeout_ms", found.timeout_s * 1e3, found.timeout_se * 1e3, said))
    if found.fit is None:
        known = builder.known("fabric", "buffer_kb")
        fabric["buffer_kb"] = known if known is not None and known <= high else high
        builder.add(
            not_identifiable("fabric.buffer_kb", fabric["buffer_kb"], share, "from base or the upper bound", hi=high)
        )
        return
    fabric["buffer_kb"] = found.fit * burst_kb
    said = f"opening windows of {burst_kb:g} kB that fit if {share}, under the trace's own arrivals"
    builder.add(bounded("fabric.buffer_kb", Interval(fabric["buffer_kb"], low, high), said))


def _how(links: LinkFit) -> str:
    way = (
        "response of payloads to delays taken on purpose"
        if links.probed
        else "payloads against starts as they happened to vary"
    )
    left = f", {links.outliers} iterations left out" if links.outliers else ""
    return f"{way}; what is left varies by {links.residual_TG.std() * 1e3:.3g} ms{left}"
