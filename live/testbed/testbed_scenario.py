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
from paceenv.ui import config_files
from paceenv.ui.config_files import Config, Mechanism

Seconds = Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=1, le=10_000, allow_inf_nan=False)]
Kilobytes = Annotated[float, Field(ge=4, le=1_000_000, allow_inf_nan=False)]


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
    """Ranks that compute longer, always or in episodes."""

    ranks: list[Annotated[int, Field(ge=0)]] = Field(min_length=1, description="the slow ranks")
    factor: float = Field(ge=1, le=20, description="how many times longer")
    every: int | None = Field(None, ge=2, description="iterations from one episode to the next; empty: always slow")
    iterations: int | None = Field(None, ge=1, description="length of an episode")
    first: int = Field(0, ge=0, description="iteration of the first episode's begin")

    @model_validator(mode="after")
    def _episodes(self) -> Slow:
        if (self.every is None) != (self.iterations is None):
            raise ValueError("every and iterations together, or neither")
        if self.every is not None and self.iterations is not None and self.iterations >= self.every:
            raise ValueError(f"iterations less than every ({self.every})")
        return self


class Pause(Config):
    """Occasional pauses, as for a checkpoint; they change the job's phase against other jobs."""

    every: int = Field(ge=2, description="iterations from one to the next")
    at_most_s: Seconds = Field(description="each takes a time drawn evenly up to this, the same on all ranks")


class Compute(Config):
    """Emulated work: the rank sleeps, so that many ranks fit on few cores."""

    mean_s: Seconds = Field(description="mean time, s")
    jitter_cv: float = Field(0.0, ge=0, le=1, allow_inf_nan=False, description="normal, anew each rank and iteration")
    ranks: list[Annotated[int, Field(ge=0)]] | None = Field(None, description="ranks with this work; empty: all")
    slow: Slow | None = None
    pause: Pause | None = None


class Transfer(Config):
    """A collective."""

    bytes: Annotated[float, Field(ge=4, le=1e9)] = Field(description="payload of a rank")
    buckets: int = Field(1, ge=1, le=1000, description="parts, one after the other")
    group_size: int | None = Field(None, ge=2, description="neighbours in a process group; empty: all ranks of the job")
    communicator: str | None = Field(
        None, pattern=r"^[a-z][a-z0-9-]{0,31}$", description="process groups of its own, by name; empty: shared by all"
    )
    background: bool = Field(False, description="only starts here; ends at the end of the iteration")
    deferrable: bool = Field(False, description="the agent's rule defer may hold it back: its whole communicator")

    @model_validator(mode="after")
    def _can_wait(self) -> Transfer:
        if self.deferrable and not (self.background and self.communicator):
            raise ValueError("deferrable with background: true, and a communicator by whose name the agent knows it")
        return self


class Phase(Config):
    """One phase of an iteration: exactly one of these."""

    compute: Compute | None = None
    all_reduce: Transfer | None = Field(None, description="a collective of the group")
    gather: Transfer | None = Field(None, description="to the first of each group")
    all_to_all: Transfer | None = Field(None, description="bytes are what a rank sends to all others together")
    barrier: bool | None = Field(None, description="of all ranks")

    @model_validator(mode="after")
    def _one(self) -> Phase:
        if len(self.model_fields_set) != 1 or self.barrier is False:
            raise ValueError(f"exactly one of {', '.join(type(self).model_fields)}; barrier: true")
        return self

    @property
    def transfer(self) -> Transfer | None:
        """The transfer of this phase, whatever its kind."""
        return self.all_reduce or self.gather or self.all_to_all


class Job(Config):
    """One job. Rank r runs on ``hosts[r]``."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")
    hosts: list[Annotated[int, Field(ge=0)]] = Field(min_length=1, description="hosts that it runs on, a rank on each")
    iteration: list[Phase] = Field(description="phases of every rank in an iteration, from top to bottom")

    @model_validator(mode="after")
    def _fits(self) -> Job:
        if len(set(self.hosts)) != len(self.hosts):
            raise ValueError("hosts that differ from each other")
        for phase in self.iteration:
            transfer, compute = phase.transfer, phase.compute
            if transfer is not None and self.ranks % (transfer.group_size or self.ranks):
                raise ValueError(f"group_size that divides the {self.ranks} ranks ({transfer.group_size})")
            named = [*(compute.ranks or []), *(compute.slow.ranks if compute.slow else [])] if compute else []
            if any(rank >= self.ranks for rank in named):
                raise ValueError(f"ranks of a phase from 0 to {self.ranks - 1} ({max(named)})")
        if not any(phase.transfer or phase.barrier for phase in self.iteration):
            raise ValueError("at least one transfer or barrier in an iteration")
        return self

    @property
    def deferrable(self) -> list[str]:
        """Communicators whose transfers in the background the agent may hold back."""
        transfers = [phase.transfer for phase in self.iteration if phase.transfer is not None]
        return list(dict.fromkeys(t.communicator for t in transfers if t.communicator and t.deferrable))

    @property
    def ranks(self) -> int:
        return len(self.hosts)


class LoopPlan(Config):
    """How ``paceenv testbed --loop`` runs a scenario."""

    job: str = Field(description="the job that gets the agent; others run beside it until it ends")
    mechanism: Mechanism = Field("slack", description="the rule that is searched")
    expect: Literal["helps", "neutral", "hurts"] = Field(description="expected effect of pacing here")
    observe_iterations: int = Field(150, ge=20, description="of the run that is only watched")
    probe_s: float = Field(0.0, ge=0, le=0.1, description="longest random delay of the probe; 0: no probe")
    probe_iterations: int = Field(450, ge=20, description="of the run with probes; 200 are too few to tell effects")
    pairs: int = Field(8, ge=2, description="compared pairs of blocks with and without pacing")
    block_iterations: int | None = Field(None, ge=6, description="default: from the policy's own time constants")
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
        return self

    def job(self, name: str) -> Job:
        return next(job for job in self.jobs if job.name == name)


def load_scenario(name: str | os.PathLike[str]) -> Scenario:
    """A scenario by file or by name in ``configs/testbed``."""
    return config_files.load(Scenario, "testbed", name)
