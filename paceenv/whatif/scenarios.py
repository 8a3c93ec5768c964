"""What a trace of one size leaves open and a changed job may depend on, predicted at its usual value and at both ends.

A trace of one size does not show how long a round of messages takes, and whether post-collective work grows with the
job.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from paceenv.calibration.parameters import ROUND_US
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import episode_keys
from paceenv.whatif.change import Change, apply

GROWTH: Final = (0.0, 0.5, 1.0)
"""Exponents of post-collective work over nodes: the low end, the prediction, the high end.

The one published scaling table that needs such work was fitted with 0.86 +- 0.35 (``when-scaling-fails``).
"""
MIN_PAYLOAD_SHARE: Final = 0.05
"""The smallest share of a collective's time that is payload, however long a round is."""
MOST_SHARE: Final = 2.0
"""The largest, should rounds be shorter than is assumed."""
BISECTIONS: Final = 14
SAME_STEP: Final = 0.001
"""Relative difference of two steps that count as equal."""
POST_WORK_S: Final = ("work_s", "episode_s")


@dataclass(frozen=True)
class Scenario:
    """One set of values for what the trace leaves open."""

    round_us: float | None = None  # time of a round of messages; None: as calibrated
    growth: float = 0.0  # exponent of post-collective work over nodes


@dataclass(frozen=True)
class Unknown:
    """Something that the trace leaves open."""

    name: str  # for tables
    key: str  # key of the cluster config
    between: str  # its two ends, in words
    identified_by: str  # the measurement that would identify it
    low: Mapping[str, float]  # values of a scenario at its low end
    high: Mapping[str, float]  # values of a scenario at its high end


def changed(change: Change, cluster: Cluster, slow: Collection[int] | None, scenario: Scenario) -> Cluster:
    """The changed cluster in a scenario; else as :func:`apply`."""
    if scenario.round_us is not None:
        cluster = with_rounds(cluster, scenario.round_us)
    if scenario.growth and change.nodes is not None:
        factor = (change.nodes / cluster.job.nodes) ** scenario.growth
        longer = {key: getattr(cluster.post_collective_work, key) for key in POST_WORK_S}
        assignments = [
            f"post_collective_work.{key}={factor * s!r}" for key, s in longer.items() if isinstance(s, float) and s
        ]
        cluster = cluster.changed(assignments, cluster.name) if factor != 1.0 and assignments else cluster
    return apply(change, cluster, slow)


def with_rounds(cluster: Cluster, round_us: float) -> Cluster:
    """The cluster with rounds of this time and less payload, such that a step without lateness takes as long as before.

    Roughly: to a few thousandths of the payload.
    """
    assert isinstance(cluster.fabric.latency_us, float)
    wanted_s, low, high = _ideal_s(cluster, cluster.fabric.latency_us, 1.0), MIN_PAYLOAD_SHARE, MOST_SHARE
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if _ideal_s(cluster, round_us, middle) > wanted_s else (middle, high)
    return _with_rounds(cluster, round_us, high)


def longest_round_us(cluster: Cluster) -> float:
    """The longest time of a round with which a step can be as long as today."""
    assert isinstance(cluster.fabric.latency_us, float)
    now_us, later_us = cluster.fabric.latency_us, ROUND_US[1]
    limit_s = (1.0 + SAME_STEP) * _ideal_s(cluster, now_us, 1.0)
    if _ideal_s(cluster, later_us, MIN_PAYLOAD_SHARE) <= limit_s:
        return later_us
    low, high = now_us, later_us
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if _ideal_s(cluster, middle, MIN_PAYLOAD_SHARE) > limit_s else (middle, high)
    return low


def _ideal_s(cluster: Cluster, round_us: float, share: float) -> float:
    """The step when no rank is late, with rounds of this time and this share of today's payload, seconds."""
    one = _with_rounds(cluster, round_us, share)
    return float(derive(one, episode_keys([0])).jobs["ideal_step_s"][0])


def _with_rounds(cluster: Cluster, round_us: float, share: float) -> Cluster:
    """The cluster with rounds of this time, and links on which a payload takes this share of its time."""
    rates = {key: getattr(cluster.fabric, key) for key in ("nic_gbps", "uplink_gbps")}
    faster = [f"fabric.{key}={rate * (1.0 / share)!r}" for key, rate in rates.items() if isinstance(rate, int | float)]
    return cluster.changed([f"fabric.latency_us={round_us!r}", *faster], cluster.name)


def unknown_rounds(cluster: Cluster) -> Unknown:
    """How long a round of messages takes."""
    longest_us = longest_round_us(cluster)
    return Unknown(
        "round of messages",
        "fabric.latency_us",
        f"{ROUND_US[0]:g} to {round(longest_us, 1):g} us",
        "an nccl-tests table of this fabric (paceenv calibrate TABLE), with its latency in the cluster of --base",
        {"round_us": ROUND_US[0]},
        {"round_us": longest_us},
    )


def unknown_growth() -> Unknown:
    """How post-collective work grows with the job."""
    return Unknown(
        "growth of post-collective work",
        "post_collective_work.work_s",
        "from not at all to in proportion to nodes",
        "a trace at a second size; then post-collective work as a power law in a cluster config",
        {"growth": GROWTH[0]},
        {"growth": GROWTH[-1]},
    )
