"""A whole cluster config from the trace of a job: structure, noise, links, collapse, tenant, with evidence for each.

Every part is fitted by a module of its own from the same stamps (:mod:`paceenv.calibration.structure`); here they
become keys of a cluster, and the cluster is simulated and held against the trace. A key that the trace cannot tell
keeps the value of ``base``, what the operator knows, or an assumption that limits nothing, and says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv import configs
from paceenv.calibration.collapse import CollapseFit, fit_collapse
from paceenv.calibration.compute import ComputeFit, fit_compute
from paceenv.calibration.exposed import ExposedFit, fit_exposed
from paceenv.calibration.links import LinkFit, fit_links, transfer_cv
from paceenv.calibration.parameters import ROUND_US, Parameter, bounded, estimated, told, untold
from paceenv.calibration.steps import Steps, of_trace, simulate
from paceenv.calibration.structure import JobStamps, read_job
from paceenv.calibration.tenants import LEAST_EXPLAINED, TenantFit, fit_tenant, is_disturbed
from paceenv.cluster import Cluster
from paceenv.cluster.derive import derive
from paceenv.engine.simulator import episode_keys
from paceenv.errors import InputError
from paceenv.trace import Trace

ASSUMED_BYTES: Final = 1e6
AMPLE: Final = 10.0
"""What is not seen to limit anything is assumed to be this many times as fast as what is."""
GOOD_MEAN, GOOD_CV = 0.05, 0.03
"""How far a good fit may be off: of the mean step relative to it, of its coefficient of variation."""
LEAST_JITTER: Final = 0.003
"""A tenant's own, where ours is less: what a computer has."""
LEAST_PHASE_SD: Final = 0.15
MOST_TRANSFER_CV: Final = 1.0
"""What a cluster config allows."""
LEAST_UNPACED: Final = 16
"""Steps without pacing from which on only those count as what the job does by itself."""
_SECTIONS = ("power", "reliability", "synchronization", "pacing", "noise", "exposed", "tenants", "calibration")

Array = NDArray[np.float64]


@dataclass(frozen=True)
class JobFit:
    """A calibrated cluster, its parameters with evidence, and how well it does what the job did.

    ``measured`` are the trace's steps without pacing (all, where too few), ``simulated`` those of the cluster.
    """

    cluster: Cluster
    parameters: tuple[Parameter, ...]
    measured: Steps
    simulated: Steps

    @property
    def mean_error(self) -> float:
        """Of the mean step, relative."""
        return self.simulated.mean_s / self.measured.mean_s - 1.0

    @property
    def cv_error(self) -> float:
        """Of the coefficient of variation."""
        return self.simulated.cv - self.measured.cv


def calibrate_job(
    trace: Trace,
    *,
    base: Cluster | None = None,
    name: str = "calibrated",
    probe: Trace | None = None,
    job: str | None = None,
) -> JobFit:
    """Fit a cluster config to a trace.

    ``base`` is what is known of the cluster: its numbers stand where the trace tells none. ``probe`` is a second trace
    of the same job with small random delays, from which the links are fitted. ``job`` names one of several in a trace.
    Raises InputError if the trace does not hold a job that can be described.
    """
    stamps = read_job(trace, job=job)
    return calibrate_stamps(stamps, None if probe is None else read_job(probe, job=job), base, name)


def calibrate_stamps(stamps: JobStamps, probed: JobStamps | None, base: Cluster | None, name: str) -> JobFit:
    """As :func:`calibrate_job`, from the stamps of a trace and, if there is one, of its probe."""
    probed = stamps if probed is None else probed
    if (probed.members, probed.ops) != (stamps.members, stamps.ops):
        raise InputError("probe: another job than the trace; allowed: the same ranks, groups and collectives")
    if base is not None and (base.workload is not None or base.fabric.torus is not None):
        raise InputError(f"base: {base.name} describes a workload or a torus; allowed: a job given by its times")
    return _Calibration(stamps, probed, base, name).fit()


class _Calibration:
    """The cluster's data and its parameters while they are put together."""

    def __init__(self, stamps: JobStamps, probed: JobStamps, base: Cluster | None, name: str) -> None:
        self.stamps, self.probed, self.base, self.name = stamps, probed, base, name
        step_T = stamps.step_T[stamps.unpaced_T]
        self.measured = of_trace(step_T if len(step_T) >= LEAST_UNPACED else stamps.step_T)
        self.parameters: list[Parameter] = []
        self.correlations: dict[str, dict[str, float]] = {}
        self.data: dict[str, Any] = {"fabric": {"nodes_per_leaf": 1, "nic_gbps": 1.0, "uplink_gbps": 1.0}, "job": {}}
        if base is not None:
            self.data = base.model_dump()
            self.data["fabric"] |= {"oversubscription": None, "ecmp_paths": None}
            for section in ("noise", "exposed", "tenants"):
                del self.data[section]
        self.data |= {"name": name, "description": f"Fitted to a trace of {stamps.name} ({stamps.source})."}

    def fit(self) -> JobFit:
        compute, exposed = fit_compute(self.stamps), fit_exposed(self.stamps)
        self._structure(compute)
        self._noise(compute)
        self._exposed(exposed)
        if self.stamps.collective == "all_reduce":
            self._links()
        else:
            self._incast()
        cluster = self._cluster()
        if self.base is None:
            self._round(cluster)
        measured, simulated = self.measured, simulate(cluster, len(self.stamps.step_T))
        record = {
            "source": f"{self.stamps.name} ({self.stamps.source}), {len(self.stamps.step_T)} iterations",
            "fitted": {p.key: p.to_record() for p in self.parameters if p.told},
            "cannot_tell": {p.key: p.to_record() for p in self.parameters if not p.told},
            "correlations": self.correlations,
            "measured": {
                "step_mean_s": measured.mean_s,
                "step_mean_se_s": measured.mean_sd,
                "step_cv": measured.cv,
            },
            "simulated": {"step_mean_s": simulated.mean_s, "step_cv": simulated.cv},
        }
        return JobFit(cluster.model_copy(update={"calibration": record}), tuple(self.parameters), measured, simulated)

    def _cluster(self, **fabric: float) -> Cluster:
        data = self.data | {"fabric": self.data["fabric"] | fabric}
        return configs.parse(Cluster, data, f"calibration of {self.stamps.name}")

    def _known(self, section: str, key: str) -> float | None:
        """A plain number that ``base`` gives."""
        value = getattr(getattr(self.base, section), key) if self.base is not None else None
        return float(value) if isinstance(value, int | float) else None

    def _structure(self, compute: ComputeFit) -> None:
        stamps, job = self.stamps, self.data["job"]
        job |= {"nodes": stamps.ranks, "ranks_per_node": 1, "nodes_per_group": stamps.ranks // stamps.groups}
        job |= {"barrier": stamps.barrier or stamps.groups > 1, "collective": stamps.collective}
        job |= {"compute_s": compute.noise.mean_compute_s.value, "overlap": 0.0, "tail_bytes": 0.0}
        rows = f"{len(stamps.step_T)} iterations alike, {stamps.dropped} left out"
        members = ", ".join("+".join(map(str, group)) for group in stamps.members)
        self._exactly("job.nodes", stamps.ranks, f"ranks in the trace, one a node; {rows}")
        self._exactly(
            "job.nodes_per_group", job["nodes_per_group"], f"ranks of the payload's process groups: {members}"
        )
        self._exactly("job.barrier", float(job["barrier"]), f"an iteration's collectives are {', '.join(stamps.ops)}")
        known = self._known("job", "gradient_bytes")
        if stamps.payload_bytes:
            job["gradient_bytes"] = float(stamps.payload_bytes)
            self._exactly("job.gradient_bytes", stamps.payload_bytes, "bytes of the payload's rows")
        else:
            job["gradient_bytes"] = ASSUMED_BYTES if known is None else known
            source = "assumed, and rates with it" if known is None else "from base"
            self._add(untold("job.gradient_bytes", job["gradient_bytes"], "its rows have no bytes", source))

    def _exactly(self, key: str, value: float, evidence: str) -> None:
        self._add(Parameter(key, float(value), 0.0, float(value), float(value), evidence))

    def _add(self, parameter: Parameter) -> None:
        self.parameters.append(parameter)

    def _noise(self, compute: ComputeFit) -> None:
        found, noise = compute.noise, compute.noise.to_config()["noise"]
        self._add(estimated("job.compute_s", found.mean_compute_s, "mean of what precedes the payload, healthy ranks"))
        for key in ("jitter_cv", "common_cv", "persistent_cv", "imbalance_cv", "imbalance_skew"):
            estimate = getattr(found, key)
            if estimate is not None:
                self._add(estimated(f"noise.{key}", estimate, "variance components of compute, jackknife over steps"))
        if found.slow_factor is not None:
            slow = [self.stamps.order_R[position] for position in found.slow_workers]
            said = f"persistently slower than their peers: {', '.join(f'rank {r}' for r in slow)}"
            self._exactly("noise.slow_ranks", len(slow), said)
            self._add(estimated("noise.slow_factor", found.slow_factor, said))
        episodes = compute.episodes
        if episodes is not None:
            noise |= {"fail_slow_share": min(episodes.share, 0.99), "fail_slow_factor": max(compute.factor, 1.0)}
            noise["fail_slow_mean_iterations"] = max(episodes.mean_iterations, 1.0)
            ranks = [self.stamps.order_R[r] for r in np.flatnonzero(episodes.on_TN.any(axis=0))]
            said = f"{episodes.count} episodes on {', '.join(f'rank {r}' for r in ranks)}"
            self._add(bounded("noise.fail_slow_share", episodes.share, episodes.share_interval, said))
            length = bounded(
                "noise.fail_slow_mean_iterations", episodes.mean_iterations, episodes.mean_iterations_interval, said
            )
            self._add(length)
            self._add(told("noise.fail_slow_factor", compute.factor, compute.factor_se, said))
        self.data["noise"] = noise

    def _exposed(self, found: ExposedFit) -> None:
        barrier_us = max(found.barrier_s, 0.0) * 1e6
        if self.data["job"]["barrier"]:
            self.data["fabric"]["barrier_us"] = barrier_us
            said = "from the last group's end of work to the end of the step, and what all groups have exposed alike"
            self._add(told("fabric.barrier_us", barrier_us, found.barrier_se * 1e6, said))
        exposed: dict[str, Any] = {"groups": len(found.always), "work_s": max(found.work_s, 0.0)}
        if found.always:
            named = ", ".join("+".join(map(str, self.stamps.members[g])) for g in found.always)
            said = f"between payload and barrier of the group of ranks {named}, beside what all groups have"
            self._exactly("exposed.groups", len(found.always), said)
            self._add(told("exposed.work_s", found.work_s, found.work_se, said))
        if found.episodes is not None:
            episodes, said = found.episodes, f"{found.episodes.count} episodes between payload and barrier"
            exposed |= {"share": min(episodes.share, 0.99), "mean_iterations": max(episodes.mean_iterations, 1.0)}
            exposed |= {"episode_s": found.episode_s, "episode_spread": found.spread}
            self._add(bounded("exposed.share", episodes.share, episodes.share_interval, said))
            lengths = episodes.mean_iterations_interval
            self._add(bounded("exposed.mean_iterations", episodes.mean_iterations, lengths, said))
            self._add(told("exposed.episode_s", found.episode_s, found.episode_se, said))
        self.data["exposed"] = exposed

    def _unit(self, key: str) -> float:
        """Seconds that a record of the engine has at 1 Gb/s everywhere."""
        return self._record(self._cluster(nic_gbps=1.0, uplink_gbps=1.0), key)

    @staticmethod
    def _record(cluster: Cluster, key: str) -> float:
        return float(derive(cluster, episode_keys([0])).jobs[key][0])

    def _round(self, cluster: Cluster) -> None:
        """What a round of messages is assumed to take, and between which ends it may lie."""
        assert isinstance(cluster.fabric.latency_us, float)
        why = "at one size a round of messages is a part of the payload's time"
        low_us, high_us = ROUND_US
        self._add(untold("fabric.latency_us", cluster.fabric.latency_us, why, "assumed", lo=low_us, hi=high_us))

    def _links(self) -> None:
        stamps, fabric = self.stamps, self.data["fabric"]
        if stamps.groups > 1 and self._unit("uplink_work_s") <= 0.0:
            fabric["nodes_per_leaf"] = 1  # groups inside a leaf could not meet, and these may
        unit_alone_s, unit_work_s = self._unit("transfer_alone_s"), self._unit("uplink_work_s")
        latency_s = self._record(self._cluster(), "latency_s")
        duration_T = stamps.duration_TG.mean(axis=1)
        if unit_alone_s <= 0.0 or duration_T.mean() <= latency_s:
            self._ample()
            return
        links = fit_links(self.probed, latency_s)
        own = links if self.probed is stamps else fit_links(stamps, latency_s)
        known_nic = self._known("fabric", "nic_gbps")
        if not math.isfinite(links.alone_se) and known_nic is not None and links.alone_most_s is None:
            links = fit_links(self.probed, latency_s, known_alone_s=unit_alone_s / known_nic)
            links = LinkFit(
                links.alone_s, math.inf, links.work_s, links.work_se, "", links.residual_TG, False, links.outliers
            )
        self._nic(links, unit_alone_s, known_nic)
        mean_s, residual_T = float(duration_T.mean()), own.residual_TG.mean(axis=1)
        steady_T = stamps.unpaced_T if stamps.unpaced_T.sum() >= LEAST_UNPACED else np.ones_like(stamps.unpaced_T)
        disturbed, said = is_disturbed(residual_T[steady_T], mean_s, self.measured.mean_s)
        if disturbed and unit_work_s > 0.0:
            jitter = max(self.data["noise"]["jitter_cv"], self.data["noise"]["imbalance_cv"], LEAST_JITTER)
            if self._tenant(links, unit_alone_s, unit_work_s, latency_s, jitter):
                return
            said = "durations vary in a way that no one periodic tenant explains"
        self._uplink(links, unit_work_s)
        self._add(untold("tenants", 0.0, said, "none assumed"))
        cv, se = transfer_cv(own, stamps.duration_TG, steady_T)
        said = "what each group's payloads differ from the links' model"
        if cv > MOST_TRANSFER_CV:
            said += f": {cv:.3g}, of which the simulator has {MOST_TRANSFER_CV:g} at most"
        self.data["noise"]["transfer_cv"] = min(cv, MOST_TRANSFER_CV)
        self._add(told("noise.transfer_cv", min(cv, MOST_TRANSFER_CV), se, said))

    def _ample(self) -> None:
        """Rates that limit nothing, where payloads take no time to speak of."""
        why = "its payload takes no longer than a round of messages"
        for key in ("nic_gbps", "uplink_gbps"):
            self.data["fabric"][key] = self._known("fabric", key) or AMPLE
            self._add(untold(f"fabric.{key}", self.data["fabric"][key], why, self._source("fabric", key)))

    def _together(self, one: str, other: str, correlation: float) -> None:
        """Record that the errors of two parameters hang together."""
        if correlation:
            self.correlations.setdefault(one, {})[other] = float(f"{correlation:.4g}")

    def _source(self, section: str, key: str) -> str:
        return "assumed not to limit" if self._known(section, key) is None else "from base"

    def _nic(self, links: LinkFit, unit_alone_s: float, known: float | None) -> None:
        fabric, how = self.data["fabric"], _how(links)
        if math.isfinite(links.alone_se):
            fabric["nic_gbps"] = unit_alone_s / links.alone_s
            relative = links.alone_se / links.alone_s
            self._add(told("fabric.nic_gbps", fabric["nic_gbps"], fabric["nic_gbps"] * relative, how))
            return
        why = links.why_not or "starts vary too little to tell a group's own cap from the uplink's share"
        least = None if links.alone_most_s is None else unit_alone_s / links.alone_most_s
        if known is not None and least is not None and known < least:
            known = None
        fabric["nic_gbps"] = known if known is not None else unit_alone_s / links.alone_s
        source = "from base" if known is not None else "the best fit, for want of anything better"
        self._add(untold("fabric.nic_gbps", fabric["nic_gbps"], why, source, lo=least))

    def _uplink(self, links: LinkFit, unit_work_s: float) -> None:
        fabric, known = self.data["fabric"], self._known("fabric", "uplink_gbps")
        if math.isfinite(links.work_se):
            fabric["uplink_gbps"] = unit_work_s / links.work_s
            relative = links.work_se / links.work_s
            self._add(told("fabric.uplink_gbps", fabric["uplink_gbps"], fabric["uplink_gbps"] * relative, _how(links)))
            self._together("fabric.nic_gbps", "fabric.uplink_gbps", links.correlation)
            return
        least = unit_work_s * self.stamps.groups / links.alone_s if unit_work_s > 0.0 else None
        limits = self.stamps.groups > 1
        if not limits and known is not None and least is not None and known < least:
            known = None  # the trace shows more
        value = unit_work_s / links.work_s if limits else AMPLE * max(fabric["nic_gbps"], least or 0.0)
        fabric["uplink_gbps"] = known if known is not None else value
        source = "from base" if known is not None else "the best fit" if limits else "assumed not to limit"
        why = links.why_not
        self._add(untold("fabric.uplink_gbps", fabric["uplink_gbps"], why, source, lo=None if limits else least))

    def _tenant(self, links: LinkFit, unit_alone_s: float, unit_work_s: float, latency_s: float, jitter: float) -> bool:
        """Fit a tenant and take it into the cluster; False if none explains the durations."""
        stamps, fabric, groups = self.stamps, self.data["fabric"], self.stamps.groups
        alone_s = float(np.quantile(stamps.duration_TG.mean(axis=1), 0.02)) - latency_s
        cap = links.work_s * groups / links.alone_s if groups > 1 else 1.0

        def make(ratio: float, share: float, whole_s: float) -> Cluster:
            """The uplink is what the payload of all groups fills when no tenant transfers, in ``whole_s``."""
            tenant = {"period_ratio": ratio, "comm_share": share, "ranks": stamps.ranks, "jitter_cv": jitter}
            data = self.data | {"tenants": [tenant]}
            rates = {"uplink_gbps": unit_work_s * groups / whole_s}
            rates["nic_gbps"] = unit_alone_s / whole_s * (cap if groups > 1 else AMPLE)
            data["fabric"] = fabric | rates
            return configs.parse(Cluster, data, f"calibration of {stamps.name}")

        def misfit(cluster: Cluster) -> float:
            """Of mean step and CV, in units of what counts as a good fit and of what one run differs from another."""
            simulated = simulate(cluster, len(stamps.step_T))
            mean = (simulated.mean_s - self.measured.mean_s) / math.hypot(
                GOOD_MEAN * simulated.mean_s, simulated.mean_sd
            )
            return math.hypot(mean, (simulated.cv - self.measured.cv) / math.hypot(GOOD_CV, simulated.cv_sd))

        found = fit_tenant(make, stamps, alone_s, latency_s, misfit)
        if found.explained < LEAST_EXPLAINED:
            return False
        best = make(found.period_ratio[0], found.comm_share[0], found.alone_s[0])
        self.data["tenants"] = [t.model_dump() | {"pause_rate": found.pause_rate[0]} for t in best.tenants]
        fabric |= {"nic_gbps": best.fabric.nic_gbps, "uplink_gbps": best.fabric.uplink_gbps}
        self.parameters = [p for p in self.parameters if p.key != "fabric.nic_gbps"]
        self._add_tenant(found, unit_work_s * groups)
        return True

    def _add_tenant(self, found: TenantFit, unit_whole_s: float) -> None:
        fabric = self.data["fabric"]
        said = (
            f"particle filter through the trace's own arrivals, which expects {found.explained:.0%} of the durations' "
            "variance one iteration ahead; of the posterior what comes nearest to mean and CV of the step"
        )
        value, sd, low, high = found.alone_s
        scaled = (unit_whole_s / value, unit_whole_s / value * sd / value, unit_whole_s / high, unit_whole_s / low)
        self._add(Parameter("fabric.uplink_gbps", *scaled, f"payload without the tenant takes {value:.4g} s: {said}"))
        why = "with a tenant on the uplink, whether a group's own links limit it as well"
        self._add(untold("fabric.nic_gbps", fabric["nic_gbps"], why, "assumed not to limit beyond the uplink"))
        self._add(Parameter("tenants.0.period_ratio", *found.period_ratio, said))
        self._add(Parameter("tenants.0.comm_share", *found.comm_share, said))
        (_, ratio_share, ratio_alone), (*_, share_alone), _ = found.correlation.tolist()
        self._together("tenants.0.period_ratio", "tenants.0.comm_share", ratio_share)
        self._together("tenants.0.period_ratio", "fabric.uplink_gbps", -ratio_alone)  # the longer alone, the slower
        self._together("tenants.0.comm_share", "fabric.uplink_gbps", -share_alone)
        why = "a tenant that takes less of the uplink for longer slows us alike"
        self._add(untold("tenants.0.rate_share", 1.0, why, "assumed to take what it gets"))
        said = "chance a period, by how often the filter loses sight of it"
        self._add(Parameter("tenants.0.pause_rate", *found.pause_rate, said))
        key, why = "tenants.0.phase", "the filter leaves open where it is in its period"
        if found.phase_sd < LEAST_PHASE_SD:
            self._add(
                told(key, found.phase, found.phase_sd, "of its period since its last transfer; not in the config")
            )
        else:
            self._add(untold(key, None, why, "not in the config: the simulator draws it"))

    def _incast(self) -> None:
        stamps, fabric = self.stamps, self.data["fabric"]
        latency_s = self._record(self._cluster(), "latency_s")
        if stamps.duration_TG.max() <= latency_s:
            self._ample()
            return
        unit_s = self._record(self._cluster(nic_gbps=1.0, uplink_gbps=1e9), "incast_flow_s")
        known = self._known("fabric", "nic_gbps")
        found = fit_collapse(stamps, latency_s, known_message_s=None if known is None else unit_s / known)
        nic = unit_s / found.message_s
        fabric["nic_gbps"], fabric["uplink_gbps"] = (
            nic,
            self._known("fabric", "uplink_gbps") or AMPLE * stamps.ranks * nic,
        )
        if found.share < 1.0:
            said = "messages through a port, one after the other, in steps that do not collapse"
            self._add(told("fabric.nic_gbps", nic, nic * found.message_se / found.message_s, said))
        else:
            self._add(untold("fabric.nic_gbps", nic, "every step collapses", "from base"))
        why = "incast hides it"
        self._add(untold("fabric.uplink_gbps", fabric["uplink_gbps"], why, self._source("fabric", "uplink_gbps")))
        why = "a tenant and incast are not modelled together"
        self._add(untold("tenants", 0.0, why, "none assumed"))
        self._buffer(found)

    def _buffer(self, found: CollapseFit) -> None:
        fabric = self.data["fabric"]
        burst_kb = float(fabric.setdefault("burst_kb", 14.48))
        low, high = (edge * burst_kb for edge in found.fit_interval)
        share = f"{found.share:.1%} of steps collapse [{found.share_interval[0]:.1%}, {found.share_interval[1]:.1%}]"
        if found.timeout_s is None:
            why = f"no step took a timeout longer than the others: either none collapses, or all do; {share}"
            known = self._known("fabric", "buffer_kb")
            fabric["buffer_kb"] = known if known is not None and known >= low else None
            source = "from base" if fabric["buffer_kb"] is not None else "assumed lossless"
            self._add(untold("fabric.buffer_kb", fabric["buffer_kb"], why, source, lo=low))
            timeout = float(fabric.get("timeout_ms", 200.0))
            self._add(untold("fabric.timeout_ms", timeout, "no step collapses", "from base or the usual 200"))
            return
        fabric["timeout_ms"] = found.timeout_s * 1e3
        said = f"what collapsed steps take longer than replayed without loss; {share}"
        self._add(told("fabric.timeout_ms", found.timeout_s * 1e3, found.timeout_se * 1e3, said))
        if found.fit is None:
            known = self._known("fabric", "buffer_kb")
            fabric["buffer_kb"] = known if known is not None and known <= high else high
            self._add(untold("fabric.buffer_kb", fabric["buffer_kb"], share, "from base or the upper bound", hi=high))
            return
        fabric["buffer_kb"] = found.fit * burst_kb
        said = f"opening windows of {burst_kb:g} kB that fit if {share}, under the trace's own arrivals"
        self._add(bounded("fabric.buffer_kb", fabric["buffer_kb"], (low, high), said))


def _how(links: LinkFit) -> str:
    way = (
        "response of payloads to delays taken on purpose"
        if links.probed
        else "payloads against starts as they happened to vary"
    )
    left = f", {links.outliers} iterations left out" if links.outliers else ""
    return f"{way}; what is left varies by {links.residual_TG.std() * 1e3:.3g} ms{left}"
