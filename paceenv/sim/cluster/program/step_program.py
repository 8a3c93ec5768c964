"""Section ``program`` of a cluster config, and of a job of the testbed: a step typed by hand.

On another number of ranks the job has more or fewer data-parallel replicas, and each does what those of today do.
Process groups that grow with the job have more members, all others keep their size. Ranks are numbered as today: within
a block of ranks that such a group spans, replicas follow each other; blocks, which are pipeline stages, follow
outermost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, get_args

from pydantic import Field, model_validator

from paceenv.core.errors import InputError
from paceenv.sim.cluster.collectives import Op
from paceenv.sim.cluster.program.program_tables import Compute, Instruction, Start, StepPlan, Wait
from paceenv.ui.config_files import Config

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.-]{0,31}$")]
Seconds = Annotated[float, Field(ge=0, le=1e5, allow_inf_nan=False)]
Ranks = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Pair = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]
WORLD = "world"
"""The communicator of all ranks, where none is named."""


class Communicator(Config):
    """Process groups of equal size over all ranks."""

    size: int | None = Field(None, ge=1, description="ranks of a group; empty: all")
    stride: int = Field(1, ge=1, description="distance of neighbours in a group; 1: consecutive ranks")
    grows: bool = Field(
        False, description="a job of more ranks has more members in a group, not more groups; always without a size"
    )

    pairs: list[Pair] | None = Field(
        None, description="in place of size and stride: sender and receiver of each message; no rank twice"
    )

    @model_validator(mode="after")
    def _no_rank_twice(self) -> Communicator:
        members = [rank for pair in self.pairs or () for rank in pair]
        if len(set(members)) < len(members):
            raise ValueError("pairs in which no rank is twice")
        if self.pairs is not None and (self.size is not None or self.stride != 1 or self.grows):
            raise ValueError("pairs without size, stride and grows")
        return self

    def groups(self, ranks: int) -> list[list[int]]:
        """The groups of a job of that many ranks."""
        if self.pairs is not None:
            return [list(pair) for pair in self.pairs]
        size = self.size or ranks
        block = size * self.stride
        return [
            list(range(first + k, first + block, self.stride))
            for first in range(0, ranks, block)
            for k in range(self.stride)
        ]


class Work(Config):
    """A rank computes."""

    seconds: Seconds = Field(description="mean time, s")
    micro_batch: int = Field(-1, ge=-1, le=4095, description="whose length the time follows; -1: none")
    ranks: Ranks | None = Field(None, description="ranks with this work; empty: all")


class TransferPhase(Config):
    """A collective of each group of a communicator, or one message from its first member to its second."""

    name: Name | None = Field(None, description="for a wait")
    bytes: Annotated[float, Field(ge=0, le=1e15)] = Field(
        description="payload: the whole tensor; of an all-to-all what one rank holds; of a send the message"
    )
    communicator: Name = Field(WORLD, description="a name of program.communicators; world: all ranks")
    background: bool = Field(False, description="only starts here; ends at its wait, or at the end of the step")
    can_wait: bool = Field(False, description="the rule defer may hold it back; needs background")
    every: int = Field(1, ge=1, le=1_000_000, description="it happens in one of so many iterations")
    ranks: Ranks | None = Field(None, description="ranks that take part, whole groups; empty: all")

    @model_validator(mode="after")
    def _needs_background(self) -> TransferPhase:
        if self.can_wait and not self.background:
            raise ValueError("can_wait only with background: true, as nobody can compute while it is held otherwise")
        return self


class ProgramPhase(Config):
    """One phase of a step: exactly one of these, or a repeated part."""

    compute: Work | None = None
    all_reduce: TransferPhase | None = None
    all_gather: TransferPhase | None = None
    reduce_scatter: TransferPhase | None = None
    all_to_all: TransferPhase | None = None
    broadcast: TransferPhase | None = None
    send: TransferPhase | None = Field(None, description="from the first of each group to its second")
    gather: TransferPhase | None = Field(None, description="to the first of each group; on the testbed only")
    wait: Name | None = Field(None, description="for all transfers of that name that are under way")
    repeat: int | None = Field(None, ge=1, le=10_000, description="how often the phases of step follow each other")
    step: list[ProgramPhase] = Field([], description="of repeat")

    @model_validator(mode="after")
    def _one(self) -> ProgramPhase:
        kinds = [name for name in type(self).model_fields if name != "step"]
        if sum(getattr(self, name) is not None for name in kinds) != 1:
            raise ValueError(f"exactly one of {', '.join(kinds)}")
        if bool(self.step) != (self.repeat is not None):
            raise ValueError("step with repeat, and only with it")
        return self

    def transfer(self) -> tuple[Op, TransferPhase] | None:
        """Kind and transfer, if it is one."""
        for kind in get_args(Op):
            transfer = getattr(self, kind)
            if transfer is not None:
                return kind, transfer
        return None


class StepProgram(Config):
    """A step as a program: computing and transfers in order, on communicators, some in the background."""

    communicators: dict[Name, Communicator] = Field({}, description="process groups by name; world is all ranks")
    step: list[ProgramPhase] = Field(min_length=1, description="phases of every rank, from top to bottom")
    length_cv: float = Field(
        0.0, ge=0, le=1, description="variation of the length of a micro-batch, drawn for each rank and step"
    )

    @property
    def has_own_ranks(self) -> bool:
        """Whether some ranks compute what others do not."""
        return any(phase.compute is not None and phase.compute.ranks is not None for phase in flat(self.step))

    def plan(self, ranks: int) -> StepPlan:
        """What every rank of a job does."""
        every = {WORLD: Communicator()} | self.communicators
        for name, one in every.items():
            if any(rank >= ranks for pair in one.pairs or () for rank in pair):
                raise ValueError(f"program.communicators.{name}.pairs of the {ranks} ranks")
            if one.pairs is None and ranks % ((one.size or ranks) * one.stride):
                raise ValueError(f"program.communicators.{name}: size x stride that divides the {ranks} ranks")
        roles: dict[tuple[Instruction, ...], int] = {}
        role_R = []
        for rank in range(ranks):
            row = tuple(self._instructions(rank))
            role_R.append(roles.setdefault(row, len(roles)))
        used = {one.communicator for row in roles for one in row if isinstance(one, Start)}
        unknown = sorted(used - every.keys())
        if unknown:
            raise ValueError(f"communicator {unknown[0]}: one of {', '.join(sorted(every))}")
        self._check_waits()
        communicators = {name: one.groups(ranks) for name, one in every.items() if name in used}
        return StepPlan(role_R, list(roles), communicators)

    def _check_waits(self) -> None:
        """A misspelled name would wait for nothing, and the step would come out too short."""
        phases = list(flat(self.step))
        known = {
            transfer[1].name
            for phase in phases
            if (transfer := phase.transfer()) is not None and transfer[1].background
        }
        for phase in phases:
            if phase.wait is not None and phase.wait not in known:
                names = ", ".join(sorted(filter(None, known))) or "there is none"
                raise ValueError(f"wait {phase.wait}: the name of a transfer in the background: {names}")

    def _instructions(self, rank: int) -> list[Instruction]:
        rows, pending = list[Instruction](), list[tuple[str | None, Wait]]()
        for phase in flat(self.step):
            transfer = phase.transfer()
            if phase.compute is not None:
                if phase.compute.ranks is None or rank in phase.compute.ranks:
                    rows.append(Compute(phase.compute.seconds, phase.compute.micro_batch))
            elif transfer is not None:
                op, one = transfer
                paired = getattr(self.communicators.get(one.communicator), "pairs", None)
                if one.ranks is not None and rank not in one.ranks:
                    continue
                if paired is not None and all(rank not in pair for pair in paired):
                    continue
                wait = Wait(len(rows))
                rows.append(Start(one.communicator, op, one.bytes, one.can_wait, one.every))
                if one.background:
                    pending.append((one.name, wait))
                else:
                    rows.append(wait)
            else:
                rows += [wait for name, wait in pending if name == phase.wait]
                pending = [item for item in pending if item[0] != phase.wait]
        return rows + [wait for _, wait in pending]


def flat(step: list[ProgramPhase]) -> Iterator[ProgramPhase]:
    """The phases of a step in order, repeated ones as often as they happen."""
    for phase in step:
        if phase.repeat is None:
            yield phase
        for _ in range(phase.repeat or 0):
            yield from flat(phase.step)


def resized(program: StepProgram, before: int, after: int) -> StepProgram:
    """The program of a job of ``after`` ranks whose program for ``before`` ranks is known.

    Raises:
        InputError: the ranks do not make whole replicas, or replicas differ, so that nothing says what new ones do.
    """
    if before == after:
        return program
    size = _Size(program.communicators, before, after)
    communicators = {name: size.group(name, one) for name, one in program.communicators.items()}
    step = [size.phase(phase) for phase in program.step]
    return program.model_copy(update={"communicators": communicators, "step": step})


class _Size:
    """Ranks of the job, of a block and of a replica within a block, before and after."""

    def __init__(self, communicators: Mapping[str, Communicator], before: int, after: int) -> None:
        blocks = {one.size * one.stride for one in communicators.values() if one.grows and one.size is not None}
        if len(blocks) > 1:
            said = f"groups that grow span {sorted(blocks)} ranks; allowed: all the same"
            raise InputError(f"program.communicators: {said}")
        block = blocks.pop() if blocks else before
        kept = [one.size * one.stride for one in communicators.values() if one.size is not None and not one.grows]
        replica = math.lcm(1, *(n for n in kept if block % n == 0))
        if block * after % before or block * after // before % replica:
            raise InputError(
                f"{after} ranks: no whole number of replicas, as process groups that keep their size span {replica} "
                f"ranks of each of {before // block} stages; allowed: a multiple of {before // block * replica}"
            )
        self.before, self.after, self.block, self.new_block = before, after, block, block * after // before
        self.replica = replica

    def ranks(self, today: Sequence[int]) -> list[int]:
        """The ranks that do what ``today``'s do; InputError where not all replicas have it."""
        some = set(today)
        for rank in range(self.before):
            first = rank - rank % self.block + rank % self.block % self.replica
            if (rank in some) != (first in some):
                shown = ", ".join(map(str, today[:6])) + (", ..." if len(today) > 6 else "")
                raise InputError(
                    f"{self.after} ranks: a phase of ranks {shown} is not that of every replica of "
                    f"{self.replica} ranks, so which new ranks have it is open; allowed: phases of all replicas"
                )
        new_ranks = range(self.after)
        return [r for r in new_ranks if r // self.new_block * self.block + r % self.new_block % self.replica in some]

    def group(self, name: str, one: Communicator) -> Communicator:
        """A communicator after."""
        where = f"program.communicators.{name}"
        if one.pairs is not None:
            raise InputError(f"{where}: pairs of {self.before} ranks do not say which {self.after} have")
        if one.size is None or (not one.grows and self.block % (one.size * one.stride) == 0):
            return one
        if one.grows:
            members = one.size * self.new_block // self.block
            if members * one.stride != self.new_block:
                raise InputError(f"{where}: no whole number of members on {self.after} ranks")
            return one.model_copy(update={"size": members})
        if one.stride % self.block:
            raise InputError(
                f"{where}: neither within the {self.block} ranks of a group that grows nor from one such block to the "
                f"next; allowed: one of both, for another size than {self.before} ranks"
            )
        return one.model_copy(update={"stride": one.stride // self.block * self.new_block})

    def phase(self, phase: ProgramPhase) -> ProgramPhase:
        """A phase after."""
        transfer = phase.transfer()
        if phase.repeat is not None:
            return phase.model_copy(update={"step": [self.phase(one) for one in phase.step]})
        key, own = ("compute", phase.compute) if transfer is None else transfer
        if own is None or own.ranks is None:
            return phase
        return phase.model_copy(update={key: own.model_copy(update={"ranks": self.ranks(own.ranks)})})
