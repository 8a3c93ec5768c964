"""What a job is predicted from: its cluster config, or the one that its trace was calibrated to.

A parameter that the calibration could not identify stays a guess. A question that depends on a guess is refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from paceenv.calibration import step_phases
from paceenv.calibration.fit_trace import OFF, RUNS_APART, JobFit, fit_trace
from paceenv.calibration.parameters import ROUND_US, Parameter
from paceenv.calibration.posterior import measured_step, parameters_of
from paceenv.core.errors import InputError
from paceenv.core.intervals import Interval
from paceenv.core.trace import Trace
from paceenv.core.wording import duration, name_ranks
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.whatif.change import Change, longest_round_us, with_rounds

_NIC: Final = "fabric.nic_gbps"


@dataclass(frozen=True)
class Baseline:
    """A job as it is today."""

    source: str  # its name, for messages
    cluster: Cluster  # the cluster it is simulated on
    slow: frozenset[int] | None  # ranks known to be slow; None where every run draws which ones are
    ranks: tuple[int, ...]  # numbers of the ranks
    parameters: tuple[Parameter, ...] = ()  # of a calibration; none where the cluster has another origin
    measured_step_s: Interval | None = None  # mean step of the trace without pacing; None where nothing was measured
    measured_cv: Interval | None = None  # coefficient of variation of these steps
    steps: int = 400  # how many they are; where the record does not tell, the usual number
    knows_leaves: bool = True  # whether the calibration knew on which leaf each node is
    fit: JobFit | None = None  # of a trace, where it comes from one
    notes: tuple[str, ...] = ()  # assumptions, in words

    @property
    def counts_batches(self) -> bool:
        """Whether throughput counts batches of ranks, as a trace does not say how many samples they are."""
        job = self.cluster.job
        return self.fit is not None and job.samples_per_node == job.ranks_per_node

    @property
    def unexplained_s(self) -> float:
        """What the fitted cluster leaves of the measured mean step, seconds; 0 where it describes the job."""
        if self.measured_step_s is None or "simulated" not in self.cluster.calibration:
            return 0.0
        measured_s, simulated_s = self.measured_step_s.value, self.cluster.calibration["simulated"]["step_mean_s"]
        apart = self.fit.simulated.mean_sd / simulated_s if self.fit is not None else 0.0
        is_off = abs(simulated_s / measured_s - 1.0) > max(OFF, RUNS_APART * apart)
        return float(measured_s - simulated_s) if is_off else 0.0

    def check(self, changes: Iterable[Change]) -> None:
        """Raise InputError for a change that depends on a guess."""
        guessed = {p.key: p.reason for p in self.parameters if p.is_guess}
        if self.parameters and not self.knows_leaves:
            guessed["fabric.nodes_per_leaf"] = "where nodes sit; assumed to be each on a leaf of its own"
        for change in changes:
            check_ranks(change, self.ranks, self.source)
            for key in self._hinges(change):
                if key in guessed:
                    raise InputError(
                        f"{change.label}: depends on {key}, which the calibration of {self.source} cannot identify "
                        f"({guessed[key]}); allowed: a trace with --base, a cluster that gives it"
                    )

    @cached_property
    def round_ends_us(self) -> tuple[float, float] | None:
        """Between what the time of a round of messages may lie, where nobody knows it: the answer may depend on it."""
        guessed = {p.key: p.value for p in self.parameters if p.is_guess}
        if self.cluster.fabric.latency_us != guessed.get("fabric.latency_us", math.nan):
            return None
        return ROUND_US[0], longest_round_us(self.cluster)

    @property
    def at_ends(self) -> list[Cluster]:
        """The cluster at both ends of what nobody knows, and as it is; none where all is known."""
        if self.round_ends_us is None:
            return []
        return [*(with_rounds(self.cluster, round_us) for round_us in self.round_ends_us), self.cluster]

    def _hinges(self, change: Change) -> tuple[str, ...]:
        """Keys of the cluster that the answer depends on."""
        if change.oversubscription is not None:
            # non-blocking does not depend on leaves
            leaves = ("fabric.nodes_per_leaf",) if change.oversubscription > 1.0 else ()
            return ("fabric.nic_gbps", "fabric.uplink_gbps", *leaves)
        nodes = self.cluster.job.nodes if change.nodes is None else change.nodes
        if not self.cluster.is_measured:
            return self._hinges_of_program(change, nodes)
        if self.cluster.job.collective != "all_reduce" and nodes > self.cluster.job.nodes:
            return ("fabric.buffer_kb",)  # a few senders may lose nothing where many do
        if self.cluster.groups > 1 and (change.nodes is not None or change.pacing != "passive"):
            return ("fabric.uplink_gbps",)
        return ()

    def _hinges_of_program(self, change: Change, nodes: int) -> tuple[str, ...]:
        """Keys that the answer for a program depends on: groups that grow, their links, and links without a rate."""
        free = {p.key for p in self.parameters if p.is_guess and p.limits_nothing} & {_NIC}
        set_keys = {setting.partition("=")[0].strip() for setting in change.settings}
        resized = nodes != self.cluster.job.nodes or set_keys & {"job.nodes", "job.ranks_per_node"}
        keys = [step_phases.KEY] if resized else []
        if nodes > self.cluster.job.nodes or "job.nodes" in set_keys:
            keys += ["job.ranks_per_node", *free]
        return (*keys, *(free & set_keys))

    def assumes(self, changes: Sequence[Change]) -> list[str]:
        sized = [c for c in changes if c.nodes not in (None, self.cluster.job.nodes)]
        lines = [*self.notes, *(self._assumes_of_size(sized) if sized else [])]
        if self.cluster.tenants and any(c != Change(pacing=c.pacing) for c in changes):
            lines.append("other jobs on the uplink keep their period relative to ours")
        if self.slow:
            like = sorted({r for c in changes for r in c.replaced} - self.slow)
            slow = name_ranks(self.slow)
            lines += [f"rank {r} is a rank like the others; persistently slow: {slow}" for r in like]
        elif self.slow is not None and any(c.replaced for c in changes):
            said = "no rank of the fitted cluster is persistently slow, so another in its place changes nothing"
            lines.append(f"{said}; what a late rank costs, paceenv diagnose says")
        return lines

    def _assumes_of_size(self, sized: Sequence[Change]) -> list[str]:
        """Of other node counts."""
        job, fabric = self.cluster.job, self.cluster.fabric
        lines = ["other node counts: every rank keeps its batch, so a step on more nodes does more work"]
        if self.cluster.groups > 1 and self.cluster.workload is None:
            lines.append(f"process groups keep their {job.group_nodes} nodes and become more or fewer")
        if fabric.uplink_gbps is not None and any(c.oversubscription is None for c in sized):
            lines.append(
                f"the tier above the leaves keeps its {_number(fabric.uplink_gbps)} Gb/s in total at any size; "
                "--oversubscription gives every leaf uplinks of its own"
            )
        if self.cluster.noise.slow_ranks and not all(c.replaced for c in sized):
            lines.append(f"the number of slow ranks stays {self.cluster.noise.slow_ranks}")
        work = self.cluster.post_collective_work
        if self.parameters and (work.groups or work.share):
            lines.append("work after a group's collective is as frequent, and lasts as long as today")
        grown = next((p.evidence for p in self.parameters if p.key == step_phases.KEY), None)
        if self.cluster.program is not None:
            said = "process groups with grows: true or without a size have more members on more ranks, others stay"
            lines.append(f"the step is a program: {grown or said}; every transfer keeps its bytes")
        elif self.fit is not None:
            lines.append(
                f"the {job.collective} goes by the {job.algorithm} algorithm, a round of messages takes "
                f"{_number(fabric.latency_us)} us"
            )
        return lines

    @property
    def left_open(self) -> list[str]:
        """Open quantities inside the intervals: their ends, and the measurement that would identify them."""
        left = f"the {duration(abs(self.unexplained_s))} by which the fitted cluster misses the measured step"
        lines = [left] if self.unexplained_s else []
        if self.round_ends_us is None:
            return lines
        least_us, most_us = self.round_ends_us
        return [
            *lines,
            f"round of messages, {least_us:g} to {round(most_us, 1):g} us; identified by an nccl-tests table of "
            "this fabric (paceenv calibrate TABLE), with its latency in the cluster of --base",
        ]

    @property
    def cannot_tell(self) -> list[str]:
        """Open quantities outside of the intervals, in words."""
        held = {"fabric.latency_us"} if self.round_ends_us is not None else set[str]()
        lines = [f"{p.key}: {p.reason}" for p in self.parameters if not p.is_identified and p.key not in held]
        if self.cluster.power.compute_w == 0.0:
            lines.append("energy: the cluster has no power figures (power.compute_w)")
        return lines


def check_ranks(change: Change, ranks: Collection[int], source: str) -> None:
    """Raise InputError for a rank to replace that is none of ``ranks``."""
    if unknown := sorted(set(change.replaced) - set(ranks)):
        raise InputError(f"{change.label}: {source} has no rank {unknown[0]}; allowed: {name_ranks(sorted(ranks))}")


def of_config(name: str) -> Baseline:
    """The job of a cluster config, by file or by name."""
    cluster = load_cluster(name)
    if measured_step(cluster) is None:
        unknown = (
            "intervals hold the differences between runs only: the config was not calibrated from a job's trace, so "
            "the errors of its calibration are unknown"
        )
        notes = (unknown,) if cluster.calibration else ()
        return Baseline(name, cluster, None, tuple(range(cluster.ranks)), notes=notes)
    return _calibrated(name, cluster, tuple(parameters_of(cluster)))


def of_trace(trace: Trace, source: str, base: str | None, job: str | None) -> Baseline:
    stages = len(set(trace.metadata.of_ranks("stage", 0).values()))
    if stages > 1:
        raise InputError(
            f"{source}: a pipeline of {stages} stages, for which no cluster can be fitted; allowed: a cluster config. "
            "What a late rank or stage costs, paceenv diagnose says"
        )
    fit = fit_trace(trace, base=None if base is None else load_cluster(base), job=job)
    baseline = _calibrated(source, fit.cluster, fit.parameters)
    cluster = baseline.cluster
    if base is None:  # a batch of each rank
        cluster = cluster.changed([f"job.samples_per_node={cluster.job.ranks_per_node}"], source)
    notes = (*baseline.notes, *fit.notes)
    return replace(baseline, cluster=cluster, knows_leaves=base is not None, fit=fit, notes=notes, steps=fit.steps)


def is_config(sources: Sequence[str]) -> bool:
    """Whether this is a cluster config: a YAML file, or no file at all (then a config's name)."""
    if len(sources) != 1:
        return False
    path = Path(sources[0])
    return path.suffix in {".yaml", ".yml"} or not (path.exists() or path.suffix)


def _calibrated(source: str, cluster: Cluster, parameters: tuple[Parameter, ...]) -> Baseline:
    """From the record of a calibration, in the cluster."""
    by_key, notes = {p.key: p for p in parameters}, []
    ranks = tuple(cluster.calibration.get("ranks", ()))
    uplink = by_key.get("fabric.uplink_gbps")
    if uplink is not None and uplink.limits_nothing:
        # so it does not limit at other sizes either
        cluster = cluster.changed(["fabric.oversubscription=1", "fabric.uplink_gbps=null"], source)
        notes.append("the tier above the leaves is non-blocking, as the trace shows no limit there")
    if cluster.noise.fail_slow_share:
        notes.append("fail-slow episodes may hit any rank: those of a replaced rank go on elsewhere")
    return Baseline(
        source,
        cluster,
        frozenset(cluster.calibration.get("slow_ranks", ())),
        ranks if len(ranks) == cluster.ranks else tuple(range(cluster.ranks)),
        parameters,
        measured_step(cluster),
        Interval(cluster.calibration["measured"]["step_cv"]),
        knows_leaves=cluster.fabric.nodes_per_leaf != 1,  # the assumption of a calibration without a base
        notes=tuple(notes),
    )


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "drawn"
