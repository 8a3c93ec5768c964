"""A testbed scenario: hosts, racks and links, the jobs on them, and the plan of the closed loop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceenv.core.limits import LIMITS, Limits
from paceenv.live.decide.blocks import Plan, block_plan
from paceenv.live.decide.live_policy import find_policy
from paceenv.policies.base import INTERVAL_ITERATIONS
from paceenv.sim.cluster.program.program_tables import Start, StepPlan
from paceenv.sim.cluster.program.step_program import WORLD, StepProgram, flat
from paceenv.ui import config_files
from paceenv.ui.config_files import Config, Mechanism

Seconds = Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=1, le=10_000, allow_inf_nan=False)]
Kilobytes = Annotated[float, Field(ge=4, le=1_000_000, allow_inf_nan=False)]
RUN = ("all_reduce", "gather", "all_to_all")
"""Transfers that a testbed runs; an all-reduce of no bytes is a barrier."""
MAX_BYTES = 1e9


class Network(Config):
    """Hosts in racks; every link is a token bucket with a buffer in front of it, in either direction."""

    hosts: int = Field(ge=2, le=64, description="host i stands in rack i % racks")
    racks: int = Field(1, ge=1, le=16, description="leaf switches")
    host_mbps: Rate = Field(1000.0, description="a host's link to its rack")
    host_buffer_kb: Kilobytes = Field(1000.0, description="of the rack's port towards a host")
    uplink_mbps: Rate | None = Field(None, description="a rack's link to the spine; needed with several racks")

    @model_validator(mode="after")
    def _uplinks(self) -> Network:
        if (self.racks > 1) != (self.uplink_mbps is not None):
            raise ValueError("uplink_mbps with several racks, and only then")
        return self


class Slow(Config):
    """Ranks that compute longer in episodes; one that always does has more seconds in the program."""

    ranks: list[Annotated[int, Field(ge=0)]] = Field(min_length=1, description="the slow ranks")
    factor: float = Field(ge=1, le=20, description="how many times longer")
    every: int = Field(ge=2, description="iterations from one episode to the next")
    iterations: int = Field(ge=1, description="length of an episode")
    first: int = Field(0, ge=0, description="iteration of the first episode's begin")

    @model_validator(mode="after")
    def _episodes(self) -> Slow:
        if self.iterations >= self.every:
            raise ValueError(f"iterations less than every ({self.every})")
        return self


class Pause(Config):
    """Occasional pauses, as for a checkpoint; they change the job's phase against other jobs."""

    every: int = Field(ge=2, description="iterations from one to the next")
    at_most_s: Seconds = Field(description="each takes a time drawn evenly up to this, the same on all ranks")


class Job(Config):
    """One job. Rank r runs on ``hosts[r]``, and sleeps in place of computing, so that many ranks fit on few cores."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")
    hosts: list[Annotated[int, Field(ge=0)]] = Field(min_length=1, description="hosts that it runs on, a rank on each")
    program: StepProgram = Field(description="the step of every rank, as in a cluster config")
    slow: Slow | None = None
    pause: Pause | None = None

    @model_validator(mode="after")
    def _fits(self) -> Job:
        if len(set(self.hosts)) != len(self.hosts):
            raise ValueError("hosts that differ from each other")
        if not self.starts:
            raise ValueError("at least one transfer in a program")
        for one in self.starts:
            if one.op not in RUN or one.payload_bytes > MAX_BYTES:
                what = f"{one.op} of {one.payload_bytes:g} bytes"
                raise ValueError(f"a program with {', '.join(RUN)} of at most {MAX_BYTES:g} bytes ({what})")
            if one.can_wait and one.communicator == WORLD:
                raise ValueError("can_wait with a communicator of its own, by whose name the agent knows the transfer")
        named = [rank for one in flat(self.program.step) if one.compute for rank in one.compute.ranks or ()]
        named += self.slow.ranks if self.slow else []
        if any(rank >= self.ranks for rank in named):
            raise ValueError(f"ranks that compute from 0 to {self.ranks - 1} ({max(named)})")
        return self

    @property
    def plan(self) -> StepPlan:
        """What every rank does in a step."""
        return self.program.plan(self.ranks)

    @property
    def starts(self) -> list[Start]:
        """The transfers of a step."""
        return [one for role in self.plan.roles for one in role if isinstance(one, Start)]

    @property
    def overlaps(self) -> bool:
        """Whether one collective a step cannot describe the job: something runs in the background."""
        transfers = [phase.transfer() for phase in flat(self.program.step)]
        return any(transfer is not None and transfer[1].background for transfer in transfers)

    @property
    def ranks(self) -> int:
        return len(self.hosts)

    def spec(self) -> dict[str, Any]:
        """What the training script of a rank is told, as plain data."""
        plan = self.plan
        roles = [[(type(one).__name__, one._asdict()) for one in role] for role in plan.roles]
        named = {name: groups for name, groups in plan.communicators.items() if name != WORLD}
        spec = {"role_R": plan.role_R, "roles": roles, "communicators": named}
        return spec | self.model_dump(include={"slow", "pause"}) | {"length_cv": self.program.length_cv}


class LoopPlan(Config):
    """How ``paceenv testbed --loop`` runs a scenario."""

    job: str = Field(description="the job that gets the agent; others run beside it until it ends")
    mechanism: Mechanism = Field("slack", description="the rule that is searched")
    expect: Literal["helps", "neutral", "hurts"] = Field(description="expected effect of pacing here")
    observe_iterations: int = Field(150, ge=20, description="of the run that is only watched")
    probe_s: float = Field(0.0, ge=0, le=0.1, description="longest random delay of the probe; 0: no probe")
    probe_iterations: int = Field(450, ge=20, description="of the run with probes; 200 are too few to tell effects")
    pairs: int = Field(8, ge=2, description="compared pairs of blocks with and without pacing")
    block_iterations: int | None = Field(
        None,
        gt=0,
        multiple_of=INTERVAL_ITERATIONS,
        description=f"a multiple of {INTERVAL_ITERATIONS}; default: from the policy's own time constants",
    )
    quiet_first: int = Field(LIMITS.quiet_first, ge=1, description="iterations without any delay at the start")
    known: dict[str, Any] = Field({}, description="keys of a cluster config that the operator of this fabric knows")

    @property
    def limits(self) -> Limits:
        """Of every delay, in the job and in its simulation."""
        return replace(LIMITS, quiet_first=self.quiet_first)

    def schedule(self, policies: Sequence[str], seed: int = 0) -> Plan:
        """The blocks by which an agent with those candidates paces, ``seed`` being its option."""
        blocks = [block_plan(find_policy(policy).policy, self.block_iterations) for policy in policies]
        return Plan(seed, blocks, begin=self.quiet_first)

    def measure_iterations(self, policies: Sequence[str], pairs: int) -> int:
        """Iterations of such a run: the first tick, the quiet start, warming up, the pairs, a few to be taken in."""
        return 1 + self.schedule(policies).after(pairs) + 5


class Scenario(Config):
    """A network, the jobs on it, and the plan of the closed loop."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,47}$")
    description: str = ""
    seed: int = Field(0, ge=0, description="seed of the emulated noise")
    network: Network
    jobs: list[Job] = Field(min_length=1, max_length=8, description="jobs that run at the same time")
    loop: LoopPlan

    @model_validator(mode="after")
    def _fits(self) -> Scenario:
        names = [job.name for job in self.jobs]
        if len(set(names)) != len(names):
            raise ValueError("names of jobs that differ from each other")
        if self.loop.job not in names:
            raise ValueError(f"loop.job one of {', '.join(names)} ({self.loop.job})")
        for job in self.jobs:
            if max(job.hosts) >= self.network.hosts:
                raise ValueError(f"hosts of a job from 0 to {self.network.hosts - 1} ({max(job.hosts)})")
        if self.loop.probe_s and self.job(self.loop.job).overlaps:
            raise ValueError("loop.probe_s 0, as a job with transfers in the background is calibrated without a probe")
        return self

    def job(self, name: str) -> Job:
        return next(job for job in self.jobs if job.name == name)


def load_scenario(name: str | os.PathLike[str]) -> Scenario:
    """A scenario by file or by name in ``configs/testbed``."""
    return config_files.load(Scenario, "testbed", name)
