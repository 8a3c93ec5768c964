"""A job and its environment: noise by cause, post-collective work, other jobs, heat, failures, and its pacing."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, model_validator

from paceenv.core.pacing import CLUSTER_DEFAULT
from paceenv.sim.cluster.collectives import Algorithm
from paceenv.sim.cluster.quantity import AtLeastOne, Cv, Fraction, NonNegative, Part, Positive, Rare, Share
from paceenv.sim.engine.layout import MAX_STALENESS
from paceenv.ui.config_files import Config, Mechanism

MAX_NODES: Final = 1_000_000


class Job(Config):
    """The training job: its ranks, how long they compute, what they reduce."""

    nodes: int = Field(ge=1, le=MAX_NODES, description="number of nodes")
    ranks_per_node: int = Field(1, ge=1, description="ranks on a node; 1 lets one rank stand for a node's GPUs")
    nodes_per_group: int | None = Field(None, ge=1, description="nodes of one process group; empty: all")
    barrier: bool = Field(False, description="whether a separate barrier ends the step, after the groups' collectives")
    samples_per_node: float = Field(
        256, gt=0, allow_inf_nan=False, description="samples a node processes in one step; not read with a workload"
    )
    compute_s: Positive | None = Field(
        None, description="mean forward and backward time of a rank, s; empty: from workload"
    )
    gradient_bytes: NonNegative | None = Field(
        None, description="payload, bytes: of a group's all-reduce, of a sender to a gather, of a member of all-to-all"
    )
    collective: Literal["all_reduce", "gather", "all_to_all"] = Field(
        "all_reduce", description="the last communication of a step; gather: every member sends to its group's first"
    )
    algorithm: Algorithm = Field(
        "hierarchical",
        description="of the all-reduce; auto: tree or ring by size, as NCCL. In a program hierarchical is a ring",
    )
    overlap: Part = Field(0.0, description="share of compute after the first gradients are ready")
    tail_bytes: NonNegative = Field(0.0, description="last gradients, sent only after the compute, bytes")

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


class Noise(Config):
    """Noise by cause; coefficients of variation are relative to ``job.compute_s``, one to a collective's duration."""

    jitter_cv: Cv = Field(0.0, description="variation of compute, normal, drawn for each rank and step")
    common_cv: Cv = Field(0.0, description="variation common to all ranks, drawn for each step")
    persistent_cv: Cv = Field(0.0, description="variation between ranks, fixed for an episode")
    slow_ranks: int = Field(0, ge=0, description="how many ranks are slow throughout")
    slow_factor: AtLeastOne = Field(1.0, description="how many times longer they compute")
    imbalance_cv: Cv = Field(0.0, description="data imbalance: shifted gamma, drawn for each rank and step")
    imbalance_skew: NonNegative = Field(1.0, description="skewness of the imbalance")
    fail_slow_share: Share = Field(0.0, description="share of time a rank spends in fail-slow episodes")
    fail_slow_mean_iterations: AtLeastOne = Field(200.0, description="mean length of such an episode, iterations")
    fail_slow_factor: AtLeastOne = Field(1.0, description="how many times longer the rank computes in it")
    drift_cv: Cv = Field(0.0, description="thermal and load drift: Ornstein-Uhlenbeck per rank")
    drift_iterations: AtLeastOne = Field(500.0, description="correlation time of the drift, iterations")
    stall_rate: Share = Field(0.0, description="runtime or control-plane stalls per rank and iteration")
    stall_mean_s: NonNegative = Field(0.0, description="mean length of a stall (exponential), s")
    transfer_cv: Cv = Field(0.0, description="variation of a group's collective, drawn for each group and step")
    late_wake_s: NonNegative = Field(0.0, description="how much longer than decided a delay lasts (exponential), s")
    stamp_noise_s: NonNegative = Field(0.0, description="error of what a rank measures of its collectives, s")
    missing_share: Rare = Field(
        0.0, description="share of steps that a rank cannot measure: it learns nothing and does not delay the next"
    )


class PostCollectiveWork(Config):
    """Work of a group that follows its collective and delays the end of the step: unequal slack on a shared uplink."""

    groups: int = Field(0, ge=0, description="groups that have work after every collective")
    work_s: NonNegative = Field(0.0, description="time of that work, s")
    share: Share = Field(0.0, description="share of time that any group spends in episodes of such work")
    mean_iterations: AtLeastOne = Field(200.0, description="mean length of an episode, iterations")
    episode_s: NonNegative = Field(0.0, description="mean work per step of an episode, s")
    episode_spread: Cv = Field(
        0.5, description="an episode's work is 1 - spread to 1 + spread times the mean, uniformly"
    )


class Tenant(Config):
    """Another job on the same uplink: computes, transfers, computes again; slowed by us as we are by it."""

    period_ratio: Positive = Field(description="its ideal period relative to ours; noise makes both longer")
    comm_share: Share = Field(description="share of its period in which it transfers")
    rate_share: Fraction = Field(1.0, description="the most of the uplink that it can take")
    weight: Positive = Field(1.0, description="its share in a tie relative to one of our groups")
    ranks: int = Field(1, ge=1, description="how many ranks it waits for in every step")
    jitter_cv: Cv | None = Field(None, description="idiosyncratic variation of their compute time; empty: as our own")
    bursty: bool = Field(False, description="background traffic: lengths of its gaps and transfers exponential")
    pause_rate: Share = Field(0.0, description="chance a period of standing still, after which its phase is new")
    pause_periods: AtLeastOne = Field(
        1.0,
        description="how many of its periods it stands still at most: 1 a checkpoint, many a job that comes and goes",
    )

    @model_validator(mode="after")
    def _no_pauses_in_bursts(self) -> Tenant:
        if self.bursty and self.pause_rate != 0.0:
            raise ValueError("pause_rate 0 where bursty is set: its phase is new every time")
        return self


class Pacing(Config):
    """Defaults of the ``static`` policy on this cluster."""

    mechanism: Mechanism = Field(CLUSTER_DEFAULT[0], description="the rule of policy static")
    threshold: float = Field(
        CLUSTER_DEFAULT[1], ge=0, le=1, allow_inf_nan=False, description="the ratio above which the rule acts"
    )
    window: float = Field(CLUSTER_DEFAULT[2], ge=0, le=1, description="delay window as a share of the baseline step")


class Synchronization(Config):
    """How often and how strictly ranks wait for one another; the default is every step, for everybody."""

    sync_period: int = Field(1, ge=1, description="steps from one synchronization to the next (local SGD)")
    staleness: int = Field(0, ge=0, le=MAX_STALENESS, description="steps a rank may run ahead of the slowest")


class Power(Config):
    """Power of a rank, and the cost of a warm node: a waiting rank spins, warms its node and slows it down."""

    compute_w: NonNegative = Field(0.0, description="one rank while it computes, W; 0: no power is accounted for")
    wait_w: NonNegative = Field(0.0, description="while it waits or communicates, W")
    delay_w: NonNegative = Field(0.0, description="while it is delayed, restarts or writes a checkpoint, W")
    heat_slowdown: NonNegative = Field(0.0, description="how much longer a node at full compute power computes")
    heat_iterations: AtLeastOne = Field(200.0, description="its thermal time constant, iterations")

    @model_validator(mode="after")
    def _power_for_heat(self) -> Power:
        if self.compute_w == 0.0 and any(v != 0.0 for v in (self.wait_w, self.delay_w, self.heat_slowdown)):
            raise ValueError("power.compute_w greater than 0 where wait_w, delay_w or heat_slowdown is set")
        return self


class Reliability(Config):
    """Checkpoints, failures and restarts; no failures unless a time between them is given."""

    checkpoint_iterations: int = Field(0, ge=0, description="iterations between checkpoints; 0: no checkpoints")
    checkpoint_s: NonNegative = Field(0.0, description="time that a checkpoint adds to its step, s")
    mtbf_iterations: Positive | None = Field(
        None, description="mean time between failures of one node, in ideal iterations"
    )
    failure_heat: NonNegative = Field(0.0, description="how many times more often a node at full power fails")
    restart_s: NonNegative = Field(0.0, description="from a failure to running again, s")
    warmup_iterations: int = Field(0, ge=0, description="iterations after a restart that are slow")
    warmup_factor: AtLeastOne = Field(1.0, description="how many times longer they compute")
