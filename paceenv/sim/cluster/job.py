"""The job section of a cluster config: its ranks, how long they compute, what they reduce."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceenv.sim.cluster.collectives import Algorithm
from paceenv.sim.cluster.quantity import NonNegative, Part, Positive
from paceenv.ui.config_files import Config


class Job(Config):
    """The training job: its ranks, how long they compute, what they reduce."""

    nodes: int = Field(ge=1, le=1_000_000, description="number of nodes")
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
    overlap: Part = Field(0.0, description="share of compute that follows the first gradients that are ready to go")
    tail_bytes: NonNegative = Field(0.0, description="the last gradients, which can only go after the compute, bytes")

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
