"""A change of a job: nodes, oversubscription, ranks, pacing, settings; and the cluster with that change.

A trace of one size does not show how long a round of messages takes. So the changed job is predicted with the usual
time and with both ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Final, TypeVar

from paceenv.calibration.parameters import ROUND_US
from paceenv.core.errors import InputError, out_of_range
from paceenv.core.wording import name_ranks
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.environment import MAX_NODES
from paceenv.sim.engine.simulator import episode_keys

WHERE: Final = "whatif"
MAX_ROWS: Final = 64
MIN_PAYLOAD_SHARE: Final = 0.05
"""The smallest share of a collective's time that is payload, however long a round is."""
MOST_SHARE: Final = 2.0
"""The largest, should rounds be shorter than is assumed."""
BISECTIONS: Final = 14
SAME_STEP: Final = 0.001
"""Relative difference of two steps that count as equal."""
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Change:
    """One row of the answer; a field that is None or empty stays as it is.

    ``replaced`` ranks become like their peers. ``settings`` are ``key=value`` of the cluster config.
    """

    nodes: int | None = None
    oversubscription: float | None = None
    replaced: tuple[int, ...] = ()
    pacing: str = "passive"
    settings: tuple[str, ...] = ()
    SHOWN: ClassVar = ("label", "nodes", "oversubscription", "replaced", "pacing", "settings")

    @property
    def label(self) -> str:
        parts = [f"{self.nodes} nodes"] if self.nodes is not None else []
        if self.oversubscription is not None:
            parts.append(f"oversubscription {self.oversubscription:g}")
        if self.replaced:
            parts.append(f"{name_ranks(self.replaced)} replaced")
        return ", ".join([*parts, *self.settings, *([] if self.pacing == "passive" else [self.pacing])])


def combinations(
    nodes: str | None,
    oversubscription: str | None,
    replaced: str | None,
    pacing: Sequence[str],
    settings: Sequence[str],
) -> list[Change]:
    """Every combination of what the options name, one row each; ``settings`` are applied to every row."""
    sizes = _listed("--nodes", nodes, _size, f"numbers from 1 to {MAX_NODES}, with commas between")
    ratios = _listed("--oversubscription", oversubscription, _ratio, "positive numbers, with commas between")
    others = _listed("--replace-rank", replaced, _ranks, "ranks, one row each (0,3), or together (0+3)")
    policies = list(dict.fromkeys(pacing)) or ["passive"]
    rows = [
        Change(n, o, new or (), policy, tuple(settings))
        for n, o, new, policy in product(sizes, ratios, others, policies)
    ]
    if rows == [Change()]:
        options = "--nodes, --oversubscription, --replace-rank, --pacing, --set"
        raise InputError(f"nothing to change; allowed: at least one of {options}")
    if len(rows) > MAX_ROWS:
        raise out_of_range("combinations", len(rows), f"at most {MAX_ROWS}", WHERE)
    return rows


def _listed(
    option: str, text: str | None, read: Callable[[str], _Value], allowed: str
) -> Sequence[_Value] | Sequence[None]:
    if text is None:
        return (None,)
    try:
        return list(dict.fromkeys(read(part.strip()) for part in text.split(",")))
    except ValueError:
        raise out_of_range(option, text, allowed, WHERE) from None


def _size(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d{0,6}", text, re.ASCII) or int(text) > MAX_NODES:
        raise ValueError
    return int(text)


def _ratio(text: str) -> float:
    value = float(text)
    if not 0.0 < value < 1e9:
        raise ValueError
    return value


def _ranks(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,9}(\+\d{1,9})*", text, re.ASCII):
        raise ValueError
    return tuple(sorted({int(part) for part in text.split("+")}))


def apply(change: Change, cluster: Cluster, slow: Collection[int] | None) -> Cluster:
    """The changed cluster.

    A job of one process group keeps one. Several groups keep their size and become more, except those of a program
    that grow. Every rank keeps its batch.
    """
    job, where = cluster.job, f"{cluster.name}, {change.label}"
    if change.replaced and cluster.noise.slow_ranks and slow is None:
        raise InputError(
            f"{where}: which ranks of {cluster.name} are slow is drawn anew in every run; allowed: --set "
            "noise.slow_ranks=0"
        )
    if change.replaced and cluster.program is not None and cluster.program.has_own_ranks:
        raise InputError(
            f"{where}: ranks differ by phases of the program, so nothing says what the others would do; allowed: a "
            "program whose ranks all do the same; what a slow rank costs, paceenv diagnose says of the trace"
        )
    assignments: list[str] = []
    if change.nodes not in (None, job.nodes):
        assignments.append(f"job.nodes={change.nodes}")
        if job.nodes_per_group is not None and job.groups == 1:
            assignments.append("job.nodes_per_group=null")
    if healed := len(set(change.replaced) & set(slow or ())):
        assignments.append(f"noise.slow_ranks={cluster.noise.slow_ranks - healed}")
    if change.oversubscription is not None:
        assignments += [f"fabric.oversubscription={change.oversubscription!r}", "fabric.uplink_gbps=null"]
    assignments += change.settings
    return cluster.changed(assignments, cluster.name, "--set") if assignments else cluster


def with_rounds(cluster: Cluster, round_us: float) -> Cluster:
    """The cluster with rounds of this time and less payload, such that a step without lateness takes as long as before.

    Roughly: to a few thousandths of the payload.
    """
    assert isinstance(cluster.fabric.latency_us, float)
    wanted_s = _ideal_s(cluster, cluster.fabric.latency_us, 1.0)
    _, share = _bisected(lambda x: _ideal_s(cluster, round_us, x) > wanted_s, MIN_PAYLOAD_SHARE, MOST_SHARE)
    return _with_rounds(cluster, round_us, share)


def longest_round_us(cluster: Cluster) -> float:
    """The longest time of a round with which a step can be as long as today."""
    assert isinstance(cluster.fabric.latency_us, float)
    now_us, later_us = cluster.fabric.latency_us, ROUND_US[1]
    limit_s = (1.0 + SAME_STEP) * _ideal_s(cluster, now_us, 1.0)
    if _ideal_s(cluster, later_us, MIN_PAYLOAD_SHARE) <= limit_s:
        return later_us
    return _bisected(lambda us: _ideal_s(cluster, us, MIN_PAYLOAD_SHARE) > limit_s, now_us, later_us)[0]


def _bisected(is_above: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return low, high


def _ideal_s(cluster: Cluster, round_us: float, share: float) -> float:
    """The step when no rank is late, with rounds of this time and this share of today's payload, seconds."""
    one = _with_rounds(cluster, round_us, share)
    return float(derive(one, episode_keys([0])).jobs["ideal_step_s"][0])


def _with_rounds(cluster: Cluster, round_us: float, share: float) -> Cluster:
    """The cluster with rounds of this time, and links on which a payload takes this share of its time."""
    rates = {key: getattr(cluster.fabric, key) for key in ("nic_gbps", "uplink_gbps")}
    faster = [f"fabric.{key}={rate * (1.0 / share)!r}" for key, rate in rates.items() if isinstance(rate, int | float)]
    return cluster.changed([f"fabric.latency_us={round_us!r}", *faster], cluster.name)
