"""The cluster config: a job, its fabric, its environment, and its pacing.

Frozen and validated; units are in the names. A quantity is a number, a distribution from which each episode draws
(``uniform``, ``loguniform``, ``normal``), or a law of growth with the number of nodes (``power_law``).
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

from pydantic import Field, model_validator

from paceenv.sim.cluster.environment import (
    Job,
    Noise,
    Pacing,
    PostCollectiveWork,
    Power,
    Reliability,
    Synchronization,
    Tenant,
)
from paceenv.sim.cluster.fabric import Fabric, changed_keys
from paceenv.sim.cluster.program.described_steps import described_plan
from paceenv.sim.cluster.program.fold import Folded, fold
from paceenv.sim.cluster.program.program_tables import StepPlan
from paceenv.sim.cluster.program.step_program import StepProgram, flat, resized
from paceenv.sim.cluster.quantity import LogUniform, Normal, Uniform
from paceenv.sim.cluster.transfers import use_of
from paceenv.sim.cluster.workload import Gpu, Workload
from paceenv.ui import config_files
from paceenv.ui.config_files import Config

STAND_INS = "stand_ins"
"""The entry of ``calibration`` with keys that nobody measured, and the values put there."""
MAX_EXCHANGE = 1024
"""Ranks of one all-to-all, whose messages are simulated pair by pair."""
_OF_TIMES = {
    "job": ("compute_s", "gradient_bytes", "nodes_per_group", "collective", "overlap", "tail_bytes"),
    "fabric": ("late_share", "placement", "buffer_kb"),
    "post_collective_work": ("groups", "share"),
    "synchronization": ("sync_period", "staleness"),
}
"""Keys that count only for a job that is described by times."""


class Cluster(Config):
    """All parameters of the simulator for one job and its environment."""

    name: str
    description: str = ""
    job: Job
    fabric: Fabric
    workload: Workload | None = Field(
        None, description="the model and how it is split; then compute_s and gradient_bytes follow"
    )
    gpu: Gpu | None = Field(None, description="on which GPU")
    program: StepProgram | None = Field(
        None, description="a step phase by phase, in place of compute_s and one collective"
    )
    noise: Noise = Noise()
    post_collective_work: PostCollectiveWork = PostCollectiveWork()
    synchronization: Synchronization = Synchronization()
    tenants: list[Tenant] = []
    power: Power = Power()
    reliability: Reliability = Reliability()
    pacing: Pacing = Pacing()
    calibration: dict[str, Any] = Field({}, description="where the numbers come from, with their errors; not simulated")

    @property
    def stand_ins(self) -> dict[str, float]:
        """Keys that nobody measured, with the values put there, as far as these were not changed since."""
        listed = self.calibration.get(STAND_INS)
        if not isinstance(listed, dict):
            return {}
        return {key: value for key, value in listed.items() if self._value(key) == value}

    def _value(self, key: str) -> Any:
        """The value of a key such as ``job.compute_s``; None without such a key."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section, None), name, None)

    @model_validator(mode="after")
    def _fits(self) -> Cluster:
        if self.noise.slow_ranks > self.job.ranks:
            raise ValueError(f"noise.slow_ranks at most the {self.job.ranks} ranks of the job")
        self._check_form()
        if self.post_collective_work.groups > self.groups:
            raise ValueError(f"post_collective_work.groups at most the {self.groups} groups of the job")
        if (self.post_collective_work.groups or self.post_collective_work.share != 0.0) and not self.barrier:
            raise ValueError("job.barrier: true where a group has post-collective work")
        self._check_collective()
        self._check_synchronization()
        return self

    def _check_form(self) -> None:
        """Measured numbers, a description or a program, and all of it."""
        if self.program is not None and (self.workload is not None or self.gpu is not None):
            raise ValueError("program or workload, not both")
        if (self.workload is None) != (self.gpu is None):
            raise ValueError("workload and gpu together, or neither")
        if not self.is_measured:
            self._check_beside("a workload" if self.program is None else "a program")
            if self.program is not None and any(phase.gather is not None for phase in flat(self.program.step)):
                raise ValueError("no gather in a program: the simulator has it as job.collective only")
            self.plan()  # raises for invalid values
            return
        if self.fabric.set_for_programs:
            raise ValueError(f"fabric.{self.fabric.set_for_programs[0]} by default without a workload or a program")
        for key in ("compute_s", "gradient_bytes"):
            if getattr(self.job, key) is None:
                raise ValueError(f"job.{key} given, or a workload and a gpu")

    def _check_beside(self, program: str) -> None:
        """Nothing that only a job that is described by times can have stands beside a workload or a program."""
        for section, keys in _OF_TIMES.items():
            for key in changed_keys(getattr(self, section), keys):
                raise ValueError(f"{section}.{key} by default with {program}: it counts without one only")
        drawn = [key for key, value in self.fabric if isinstance(value, Uniform | LogUniform | Normal)]
        if drawn:
            raise ValueError(f"fabric.{drawn[0]} fixed, not drawn, with {program}")

    def _check_collective(self) -> None:
        job = self.job
        if job.collective != "all_reduce" and (job.overlap != 0.0 or job.tail_bytes != 0.0):
            raise ValueError("job.overlap and job.tail_bytes 0 for a gather or an all_to_all")
        if self.tenants and job.collective != "all_reduce":
            raise ValueError("no tenants with a gather or an all_to_all, which share no uplink with them")
        members = job.group_nodes * job.ranks_per_node
        if job.collective == "all_to_all" and members > MAX_EXCHANGE:
            raise ValueError(f"at most {MAX_EXCHANGE} ranks in a group of an all_to_all ({members}), every pair counts")

    def _check_synchronization(self) -> None:
        every, staleness = self.synchronization.sync_period, self.synchronization.staleness
        if staleness and (self.barrier or self.groups > 1):
            raise ValueError("synchronization.staleness 0 with a barrier or several groups, which make ranks wait")
        if staleness and every > 1:
            raise ValueError("one of synchronization.sync_period and synchronization.staleness")
        if self.reliability.checkpoint_iterations % every:
            raise ValueError(f"reliability.checkpoint_iterations a multiple of synchronization.sync_period ({every})")

    @property
    def ranks(self) -> int:
        """Ranks of the job in the engine."""
        return self.job.ranks

    @property
    def groups(self) -> int:
        """Process groups that run their collectives side by side."""
        if self.folded is not None:
            return self.folded.groups
        return self.job.groups

    @property
    def barrier(self) -> bool:
        """Whether something beyond the collectives ends a step.

        It always does with several groups, and after a gather, whose senders would not wait for its end otherwise.
        """
        return self.job.barrier or self.groups > 1 or self.job.collective == "gather" or self.has_program

    @property
    def can_defer(self) -> bool:
        """Whether the job has transfers that can wait for others, so that the rule ``defer`` can do something."""
        return self.has_program and self.plan().can_defer

    @property
    def rank_phases(self) -> int:
        """Phases that all ranks go through in a step, one a rank of the simple kind: what a step costs, about."""
        if not self.has_program:
            return self.ranks
        plan = self.plan()
        return sum(len(plan.roles[role]) for role in plan.role_R)

    @property
    def samples_per_step(self) -> float:
        """Samples that the whole job processes in one step of the engine, from one synchronization to the next."""
        samples = self.job.samples_per_node * self.job.nodes
        if self.workload is not None:
            cut = self.workload.tensor_parallel * self.workload.pipeline_parallel
            samples = float(self.workload.batch * self.ranks // cut)
        return samples * self.synchronization.sync_period

    @property
    def is_measured(self) -> bool:
        """Whether the step is described by times: ``job.compute_s`` and one collective."""
        return self.program is None and self.workload is None

    @cached_property
    def folded(self) -> Folded | None:
        """The step of a workload of the simple kind; None for others, and for a job described by times, which is one.

        A program typed by hand runs as it is typed, so that its trace has every transfer; so do those whose transfers
        share links in their own way.
        """
        if self.workload is None or self.fabric.set_for_programs:
            return None
        return fold(self.plan(), use_of(self.fabric, self.job, has_tenants=True))

    @property
    def has_program(self) -> bool:
        """Whether a step is more than the simple kind, so that the engine runs it event by event."""
        return not self.is_measured and self.folded is None

    def plan(self) -> StepPlan:
        """What every rank does in a step, as typed by hand or as the workload says; not of a job described by times."""
        if self.program is not None:
            return self.program.plan(self.job.ranks)
        assert self.workload is not None
        assert self.gpu is not None
        return described_plan(self.workload, self.gpu, self.fabric, self.job)

    def changed(self, assignments: list[str], where: str = "--set", option: str = "--set") -> Cluster:
        """This cluster with some values changed, checked anew; its program becomes that of a job of as many ranks."""
        data = self.model_dump()
        for assignment in assignments:
            config_files.set_value(data, assignment, option)
        if self.program is not None and not any(one.startswith("program") for one in assignments):
            counts = [data["job"][key] for key in ("nodes", "ranks_per_node")]
            if all(isinstance(count, int) and count > 0 for count in counts):
                data["program"] = resized(self.program, self.job.ranks, counts[0] * counts[1]).model_dump()
        return config_files.parse(Cluster, data, where)

    def with_nodes(self, nodes: int) -> Cluster:
        """This cluster with the job on another number of nodes."""
        return self.changed([f"job.nodes={nodes}"], self.name)


def load_cluster(name: str | os.PathLike[str]) -> Cluster:
    """A cluster config by file or by name in ``configs/clusters``."""
    return config_files.load(Cluster, "clusters", name)
