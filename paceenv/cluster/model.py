"""The cluster config: a job, the fabric it runs on, what it meets there, and how it is paced.

Frozen and validated; units are in the names. A quantity is a number, or says how it is drawn anew each episode
(``uniform``, ``loguniform``, ``normal``), or how it grows with the number of nodes (``power_law``).
"""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import Field, model_validator

from paceenv import configs
from paceenv.cluster.collectives import Algorithm
from paceenv.cluster.fabric import Fabric
from paceenv.cluster.quantity import LogUniform, NonNegative, Normal, Part, Positive, Uniform
from paceenv.cluster.surroundings import Exposed, Noise, Pacing, Power, Reliability, Synchronization, Tenant
from paceenv.cluster.transfers import plan_step
from paceenv.cluster.workload import Gpu, Workload
from paceenv.configs import Config


class Job(Config):
    """The training job: who takes part, how long it computes, what it reduces."""

    nodes: int = Field(ge=1, description="number of nodes")
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
        "all_reduce", description="what ends a step's communication; gather: every member sends to its group's first"
    )
    algorithm: Algorithm = Field("hierarchical", description="of the all-reduce; auto: tree or ring by size, as NCCL")
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


class Cluster(Config):
    """Everything the simulator is told about one job and its surroundings."""

    name: str
    description: str = ""
    job: Job
    fabric: Fabric
    workload: Workload | None = Field(None, description="what is trained; then compute_s and gradient_bytes follow")
    gpu: Gpu | None = Field(None, description="on which GPU")
    noise: Noise = Noise()
    exposed: Exposed = Exposed()
    synchronization: Synchronization = Synchronization()
    tenants: list[Tenant] = []
    power: Power = Power()
    reliability: Reliability = Reliability()
    pacing: Pacing = Pacing()
    calibration: dict[str, Any] = Field({}, description="where the numbers come from, with their errors; not read")

    @model_validator(mode="after")
    def _fits(self) -> Cluster:
        if self.noise.slow_ranks > self.job.ranks:
            raise ValueError(f"noise.slow_ranks at most the {self.job.ranks} ranks of the job")
        self._check_form()
        if self.exposed.groups > self.groups:
            raise ValueError(f"exposed.groups at most the {self.groups} groups of the job")
        if (self.exposed.groups or self.exposed.share != 0.0) and not self.barrier:
            raise ValueError("job.barrier: true where a group has exposed work")
        self._check_collective()
        self._check_synchronization()
        return self

    def _check_form(self) -> None:
        """Either measured numbers or a description, and all of it."""
        job, measured = self.job, ("compute_s", "gradient_bytes")
        if (self.workload is None) != (self.gpu is None):
            raise ValueError("workload and gpu together, or neither")
        if self.workload is None:
            for key in measured:
                if getattr(job, key) is None:
                    raise ValueError(f"job.{key} given, or a workload and a gpu")
            return
        for key in (*measured, "nodes_per_group"):
            if getattr(job, key) is not None:
                raise ValueError(f"job.{key} or a workload, not both: it follows from the description")
        if job.collective != "all_reduce" or job.overlap != 0.0 or job.tail_bytes != 0.0:
            raise ValueError(
                "job.collective all_reduce, overlap 0 and tail_bytes 0 with a workload, which tells its own"
            )
        drawn = [key for key, value in self.fabric if isinstance(value, Uniform | LogUniform | Normal)]
        if drawn:
            raise ValueError(f"fabric.{drawn[0]} fixed, not drawn, with a workload")
        plan_step(self)

    def _check_collective(self) -> None:
        job, torus = self.job, self.fabric.torus
        if job.collective != "all_reduce" and (job.overlap != 0.0 or job.tail_bytes != 0.0):
            raise ValueError("job.overlap and job.tail_bytes 0 for a gather or an all_to_all")
        if (job.algorithm == "torus") != (torus is not None) and job.collective == "all_reduce":
            raise ValueError("job.algorithm torus with a fabric.torus, and only there")
        if torus is None:
            return
        if torus.chips != job.nodes:
            dims = " x ".join(map(str, torus.dims))
            raise ValueError(f"fabric.torus.dims that multiply to the {job.nodes} nodes ({dims} = {torus.chips})")
        if job.ranks_per_node > 1 or job.groups > 1:
            raise ValueError("one rank per node and one group on a torus")
        if job.collective == "gather":
            raise ValueError("job.collective all_reduce or all_to_all on a torus")

    def _check_synchronization(self) -> None:
        every, staleness = self.synchronization.every, self.synchronization.staleness
        if staleness and (self.barrier or self.groups > 1):
            raise ValueError("synchronization.staleness 0 with a barrier or several groups, which make ranks wait")
        if staleness and every > 1:
            raise ValueError("one of synchronization.every and synchronization.staleness")
        if self.reliability.checkpoint_iterations % every:
            raise ValueError(f"reliability.checkpoint_iterations a multiple of synchronization.every ({every})")

    @property
    def ranks(self) -> int:
        """Ranks of the job in the engine."""
        return self.job.ranks

    @property
    def groups(self) -> int:
        """Process groups that run their collectives side by side."""
        if self.workload is not None:
            return self.workload.tensor_parallel * self.workload.pipeline_parallel
        return self.job.groups

    @property
    def barrier(self) -> bool:
        """Whether something beyond the collectives ends a step: with several groups it always does."""
        return self.job.barrier or self.groups > 1

    @property
    def samples_per_step(self) -> float:
        """Samples that the whole job processes in one step of the engine, from one synchronization to the next."""
        samples = self.job.samples_per_node * self.job.nodes
        if self.workload is not None:
            samples = float(self.workload.batch * (self.workload.data_parallel or self.ranks // self.groups))
        return samples * self.synchronization.every

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
