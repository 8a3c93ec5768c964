"""The cluster config: a job on a two-tier fabric, its noise by cause, and what it shares with whom.

Frozen and validated; units are in the names. A quantity is a number, or says how it is drawn anew each episode
(``uniform``, ``loguniform``, ``normal``), or how it grows with the number of nodes (``power_law``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from paceenv import configs
from paceenv.configs import Config

_TINY = 1e-9
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


class Uniform(Config):
    """Drawn uniformly between two numbers each episode."""

    uniform: Pair


class LogUniform(Config):
    """Drawn log-uniformly between two positive numbers each episode."""

    loguniform: Pair


class Normal(Config):
    """Drawn from a normal (mean, standard deviation) each episode, as from a calibration; kept within the bounds.

    ``within`` are the bounds of the quantity it stands for, set when it is checked.
    """

    normal: Pair
    within: tuple[float, float] = Field((-math.inf, math.inf), exclude=True)


class PowerLaw(Config):
    """``value * (nodes / at_nodes) ** exponent``: a quantity that grows with the job."""

    value: float
    at_nodes: float = Field(gt=0)
    exponent: float


class Scaled(Config):
    """Wrapper that names the power law in the file."""

    power_law: PowerLaw


Quantity = float | Uniform | LogUniform | Normal | Scaled


def _within(low: float, high: float, *, open_low: bool = False) -> Callable[[Quantity], Quantity]:
    allowed = f"{'greater than' if open_low else 'at least'} {low:g}" + (
        f", at most {high:g}" if high < math.inf else ""
    )

    def check(quantity: Quantity) -> Quantity:
        for value in _ends(quantity):
            if not math.isfinite(value) or value < low or value > high or (open_low and value == low):
                raise ValueError(allowed)
        if isinstance(quantity, Normal):
            return quantity.model_copy(update={"within": (low + (_TINY if open_low else 0.0), high)})
        return quantity

    return check


def _ends(quantity: Quantity) -> list[float]:
    """The values to hold against the bounds."""
    match quantity:
        case Uniform():
            ends = quantity.uniform
        case LogUniform():
            ends = quantity.loguniform
            if min(ends) <= 0:
                raise ValueError("two positive numbers for loguniform")
        case Normal():
            if not 0.0 <= quantity.normal[1] < math.inf:
                raise ValueError("a standard deviation of at least 0")
            return quantity.normal[:1]
        case Scaled():
            if not math.isfinite(quantity.power_law.exponent):
                raise ValueError("a finite exponent")
            return [quantity.power_law.value]
        case _:
            return [float(quantity)]
    if ends[0] > ends[1]:
        raise ValueError("lower end first")
    return ends


Positive = Annotated[Quantity, AfterValidator(_within(0.0, math.inf, open_low=True))]
NonNegative = Annotated[Quantity, AfterValidator(_within(0.0, math.inf))]
Share = Annotated[Quantity, AfterValidator(_within(0.0, 0.99))]
AtLeastOne = Annotated[Quantity, AfterValidator(_within(1.0, math.inf))]
Cv = Annotated[Quantity, AfterValidator(_within(0.0, 1.0))]


class Job(Config):
    """The training job: who takes part, how long it computes, what it reduces."""

    nodes: int = Field(ge=1, description="number of nodes")
    ranks_per_node: int = Field(1, ge=1, description="ranks on a node; 1 lets one rank stand for a node's GPUs")
    nodes_per_group: int | None = Field(None, ge=1, description="nodes of one process group; empty: all")
    barrier: bool = Field(False, description="whether a separate barrier ends the step, after the groups' collectives")
    samples_per_node: float = Field(256, gt=0, allow_inf_nan=False, description="samples a node processes in one step")
    compute_s: Positive = Field(description="mean forward and backward time of a rank, s")
    gradient_bytes: NonNegative = Field(description="payload of a group's all-reduce, bytes")

    @model_validator(mode="after")
    def _groups_divide(self) -> Job:
        if self.nodes % self.group_nodes:
            raise ValueError(f"nodes to be a multiple of nodes_per_group ({self.nodes} and {self.group_nodes})")
        if self.nodes > self.group_nodes and not self.barrier:
            raise ValueError("barrier: true for several groups, as nothing else ends their common step")
        return self

    @property
    def group_nodes(self) -> int:
        return min(self.nodes_per_group or self.nodes, self.nodes)

    @property
    def groups(self) -> int:
        return self.nodes // self.group_nodes

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class Fabric(Config):
    """Two tiers: nodes on leaf switches through their NICs, leaves on one shared upper tier."""

    nic_gbps: Positive = Field(description="one NIC, Gb/s in each direction")
    nics_per_node: int = Field(1, ge=1)
    intra_node_gbps: Positive = Field(2400.0, description="a GPU's link inside the node, Gb/s in each direction")
    nodes_per_leaf: int = Field(ge=1, description="nodes on one leaf switch")
    placement: Literal["packed", "spread"] = Field(
        "packed", description="packed: a group's nodes share leaves where they can; spread: nodes in random order"
    )
    uplink_gbps: Positive = Field(description="capacity of the tier above the leaves that all traffic shares, Gb/s")
    latency_us: NonNegative = Field(10.0, description="one hop of a collective, us")
    barrier_us: NonNegative = Field(0.0, description="the barrier itself when everybody is there, us")


class Noise(Config):
    """Noise of compute time by cause; coefficients of variation are relative to ``job.compute_s``."""

    jitter_cv: Cv = Field(0.0, description="idiosyncratic, normal, anew each rank and step")
    common_cv: Cv = Field(0.0, description="common to all ranks, anew each step")
    persistent_cv: Cv = Field(0.0, description="fixed per rank for an episode")
    slow_ranks: int = Field(0, ge=0, description="how many ranks are slow throughout")
    slow_factor: AtLeastOne = Field(1.0, description="how many times longer they compute")
    imbalance_cv: Cv = Field(0.0, description="data imbalance: shifted gamma, anew each rank and step")
    imbalance_skew: NonNegative = Field(1.0, description="its skewness")
    fail_slow_share: Share = Field(0.0, description="share of time a rank spends in fail-slow episodes")
    fail_slow_mean_iterations: AtLeastOne = Field(200.0, description="their mean length, iterations")
    fail_slow_factor: AtLeastOne = Field(1.0, description="how many times longer the rank computes meanwhile")
    drift_cv: Cv = Field(0.0, description="thermal and load drift: Ornstein-Uhlenbeck per rank")
    drift_iterations: AtLeastOne = Field(500.0, description="its correlation time, iterations")
    stall_rate: Share = Field(0.0, description="runtime or control-plane stalls per rank and iteration")
    stall_mean_s: NonNegative = Field(0.0, description="their mean length (exponential), s")


class Exposed(Config):
    """Work of a group that follows its collective and delays the end of the step: unequal slack on a shared uplink."""

    groups: int = Field(0, ge=0, description="how many groups always have it")
    work_s: NonNegative = Field(0.0, description="how long it takes them, s")
    share: Share = Field(0.0, description="share of time any group spends in episodes of it")
    mean_iterations: AtLeastOne = Field(200.0, description="mean length of an episode, iterations")
    episode_s: NonNegative = Field(0.0, description="its mean per step, s")
    episode_spread: Cv = Field(0.5, description="an episode draws uniformly from 1 - spread to 1 + spread times that")


class Tenant(Config):
    """Another job on the same uplink: computes, transfers, computes again; slowed by us as we are by it."""

    period_ratio: Positive = Field(description="its ideal period relative to ours; noise makes both longer")
    comm_share: Share = Field(description="share of that period in which it transfers")
    rate_share: Annotated[Quantity, AfterValidator(_within(0.0, 1.0, open_low=True))] = Field(
        1.0, description="the most of the uplink that it can take"
    )
    weight: Positive = Field(1.0, description="its share in a tie relative to one of our groups")
    ranks: int = Field(1, ge=1, description="how many ranks it waits for in every step")
    jitter_cv: Cv | None = Field(None, description="idiosyncratic variation of their compute time; empty: as our own")


class Pacing(Config):
    """Defaults of the ``static`` policy on this cluster, and the cap no delay exceeds."""

    mechanism: Literal["slack", "slide"] = "slack"
    threshold: float = Field(0.0, ge=0, allow_inf_nan=False)
    window: float = Field(0.1, ge=0, le=1, description="delay window as a share of the baseline step")
    cap: float = Field(1.0, gt=0, le=1, description="the longest delay as a share of the ideal step")


class Cluster(Config):
    """Everything the simulator is told about one job and its surroundings."""

    name: str
    description: str = ""
    job: Job
    fabric: Fabric
    noise: Noise = Noise()
    exposed: Exposed = Exposed()
    tenants: list[Tenant] = []
    pacing: Pacing = Pacing()
    calibration: dict[str, Any] = Field({}, description="where the numbers come from, with their errors; not read")

    @model_validator(mode="after")
    def _fits(self) -> Cluster:
        if self.noise.slow_ranks > self.job.ranks:
            raise ValueError(f"noise.slow_ranks at most the {self.job.ranks} ranks of the job")
        if self.exposed.groups > self.job.groups:
            raise ValueError(f"exposed.groups at most the {self.job.groups} groups of the job")
        if (self.exposed.groups or self.exposed.share != 0.0) and not self.job.barrier:
            raise ValueError("job.barrier: true where a group has exposed work")
        return self

    @property
    def samples_per_step(self) -> float:
        """Samples that the whole job processes in one step."""
        return self.job.samples_per_node * self.job.nodes

    def changed(self, assignments: list[str], where: str = "--set") -> Cluster:
        """This cluster with ``key=value`` assignments applied and checked anew."""
        data = self.model_dump()
        for assignment in assignments:
            configs.set_value(data, assignment)
        return configs.parse(Cluster, data, f"{where} {' '.join(assignments)}" if assignments else where)

    def with_nodes(self, nodes: int) -> Cluster:
        """This cluster with the job on another number of nodes."""
        return self.changed([f"job.nodes={nodes}"], f"{self.name} at {nodes} nodes")


def load_cluster(name: str | os.PathLike[str]) -> Cluster:
    """A cluster config by file or by name in ``configs/clusters``."""
    return configs.load(Cluster, "clusters", name)
