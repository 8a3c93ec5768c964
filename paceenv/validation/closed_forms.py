"""Targets about arithmetic: closed forms of collectives, amplification and topology with given arguments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, ValidationError, validate_call
from scipy import integrate, stats

from paceenv.core.errors import InputError, out_of_range
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.collectives import Algorithm, Law, Op, volume
from paceenv.sim.cluster.pipeline import pipeline_s
from paceenv.ui.config_files import Config
from paceenv.validation.checks import Check, Expected

Count = Annotated[int, Field(ge=1, le=10**9)]
Size = Annotated[float, Field(gt=0, lt=1e18)]


class Row(Config):
    """One number: a form of this module, its arguments, and the expected value."""

    row: str
    form: str
    arguments: dict[str, Any] = {}
    expected: Expected
    remark: str = ""


class ClosedFormTarget(Config):
    """Rows about closed forms, and where their numbers come from."""

    name: str
    kind: Literal["closed_form"]
    source: str
    rows: list[Row]


def collective_s(
    op: Op, algorithm: Algorithm, members: Count, payload_bytes: Size, link_GBps: Size, hop_us: NonNegativeFloat = 0.0
) -> float:
    """Seconds of one collective.

    Args:
        op: the collective.
        algorithm: ring, tree, ...
        members: ranks in the group.
        payload_bytes: size of the payload.
        link_GBps: rate of a link, GB/s.
        hop_us: latency of a hop, microseconds.
    """
    return float(Law(hop_us * 1e-6, link_GBps * 1e9).time_s(volume(op, algorithm, members, payload_bytes)))


def repeated_ms(
    op: Op, algorithm: Algorithm, members: Count, payload_bytes: Size, link_GBps: Size, launch_us: float, times: Count
) -> float:
    """Milliseconds of collectives one after the other, each with a launch.

    Args:
        op: the collective.
        algorithm: ring, tree, ...
        members: ranks in the group.
        payload_bytes: size of the payload.
        link_GBps: rate of a link, GB/s.
        launch_us: time of a launch, microseconds.
        times: number of collectives.
    """
    once_s = collective_s(op, algorithm, members, payload_bytes, link_GBps) + launch_us * 1e-6
    return 1e3 * times * once_s


def bus_bandwidth_GBps(members: Count, payload_bytes: Size, link_GBps: Size, hop_us: NonNegativeFloat) -> float:
    """Bus bandwidth of a ring all-reduce as ``nccl-tests`` defines it: ``2 (n-1)/n S`` over its time, GB/s.

    Args:
        members: ranks in the group, n.
        payload_bytes: size of the payload, S.
        link_GBps: rate of a link, GB/s.
        hop_us: latency of a hop, microseconds.
    """
    sent = volume("all_reduce", "ring", members, payload_bytes)
    return float(sent.sent_bytes) / float(Law(hop_us * 1e-6, link_GBps * 1e9).time_s(sent)) / 1e9


def expected_maximum(survival: Callable[[float], float], ranks: int, low: float, high: float) -> float:
    """Expected maximum of n draws, by quadrature of ``1 - F(x)**n``.

    Args:
        survival: ``1 - F``, so that no digits are lost in the tail.
        ranks: n.
        low: lower end of the support.
        high: upper end of the support.
    """

    def above(x: float) -> float:
        tail = survival(x)
        return 1.0 if tail >= 1.0 else -math.expm1(ranks * math.log1p(-tail))

    edges = itertools.pairwise(np.linspace(low, high, 65))
    return float(low + sum(integrate.quad(above, a, b, epsabs=1e-12, epsrel=1e-10)[0] for a, b in edges))


def normal_maximum(ranks: Count, cv: NonNegativeFloat) -> float:
    """Expected maximum over mean of compute times that vary normally.

    Args:
        ranks: how many compute side by side.
        cv: coefficient of variation of a rank's compute time.
    """
    return 1.0 + cv * expected_maximum(stats.norm.sf, ranks, -12.0, 12.0)


def lost_throughput(ranks: Count, cv: NonNegativeFloat) -> float:
    """Share of throughput lost to waiting for the slowest of ``ranks``.

    Args:
        ranks: how many compute side by side.
        cv: coefficient of variation of a rank's compute time.
    """
    return 1.0 - 1.0 / normal_maximum(ranks, cv)


def pipeline_slowdown(
    forward_s: list[float],
    backward_s: list[float],
    micro_batches: Count,
    slowest: list[float],
    mean: list[float],
) -> float:
    """Step of the slowest pipeline over that in which every operation takes the mean of its type over all stages.

    Args:
        forward_s: forward time of a micro-batch in each healthy stage, seconds.
        backward_s: backward time, likewise.
        micro_batches: micro-batches of a step.
        slowest: factor by which each stage of the slowest replica takes longer.
        mean: the same for the mean over all replicas.
    """
    stages, times = len(forward_s), (forward_s, backward_s)
    slow = [[t * k for t, k in zip(part, slowest, strict=True)] for part in times]
    equal = [[sum(t * k for t, k in zip(part, mean, strict=True)) / stages] * stages for part in times]
    return pipeline_s(slow[0], slow[1], micro_batches) / pipeline_s(equal[0], equal[1], micro_batches)


def bisection_ratio(torus: str, against: str, nodes: Count) -> float:
    """Bisection bandwidth of a torus over that of another fabric.

    Args:
        torus: cluster config with a torus.
        against: cluster config with the other fabric.
        nodes: node count of the other fabric.
    """
    return _bisection_gbps(torus, None) / _bisection_gbps(against, nodes)


def _bisection_gbps(name: str, nodes: int | None) -> float:
    """Gb/s in one direction between two halves: links that a cut of the longest dimension severs, or leaf uplinks."""
    cluster = load_cluster(name)
    torus = getattr(cluster.fabric, "torus", None)
    if torus is not None:
        return float(2.0 * math.prod(torus.dims) / max(torus.dims) * float(torus.link_gbps))
    count = nodes or cluster.job.nodes
    per_node: float = float(cluster.fabric.nic_gbps) * cluster.fabric.nics_per_node  # type: ignore[arg-type]
    return float(count / 2 * per_node) / float(getattr(cluster.fabric, "oversubscription", None) or 1.0)


def any_slow(probability: Annotated[float, Field(ge=0, le=1)], ranks: Count) -> float:
    """Probability that at least one of ``ranks`` is slow in a step, each with ``probability``: ``1 - (1 - p)**n``.

    Args:
        probability: that one rank is slow in a step.
        ranks: how many there are.
    """
    return float(-np.expm1(ranks * np.log1p(-probability))) if probability < 1.0 else 1.0


def exponential_rate(ranks: Count) -> float:
    """Expected maximum of n exponentials over their mean: the harmonic number ``1 + 1/2 + ... + 1/n``."""
    return float(np.sum(1.0 / np.arange(1, ranks + 1)))


_FORMS: dict[str, Callable[..., float]] = {
    f.__name__: validate_call(f)
    for f in (
        collective_s,
        repeated_ms,
        bus_bandwidth_GBps,
        normal_maximum,
        lost_throughput,
        bisection_ratio,
        pipeline_slowdown,
        any_slow,
        exponential_rate,
    )
}


def checks(target: ClosedFormTarget) -> Iterator[Check]:
    """Every row of the target beside its closed form."""
    for row in target.rows:
        if row.form not in _FORMS:
            raise InputError(f"{target.name}: form {row.form}; allowed: {', '.join(_FORMS)}")
        try:
            found = _FORMS[row.form](**row.arguments)
        except ValidationError as error:
            issue = error.errors()[0]
            key = ".".join(str(part) for part in issue["loc"])
            where = f"{target.name}, {row.row}: {row.form}"
            raise out_of_range(key, issue["input"], issue["msg"].lower(), where) from None
        except ValueError as error:
            raise InputError(f"{target.name}, {row.row}: {row.form} {row.arguments}: {error}") from None
        yield Check(target.name, row.row, row.form, row.expected, found, "closed form", row.remark)
