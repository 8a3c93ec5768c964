"""A typed or fitted program on another number of ranks.

The job has more or fewer data-parallel replicas, and each does what those of today do. Process groups that grow with
the job have more members, all others keep their size. Ranks are numbered as today: within a block of ranks that such a
group spans, replicas follow each other; blocks, which are pipeline stages, follow outermost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceenv.core.errors import InputError
from paceenv.sim.cluster.program.step_program import Communicator, ProgramPhase, StepProgram


def resized(program: StepProgram, before: int, after: int) -> StepProgram:
    """The program of a job of ``after`` ranks whose program for ``before`` ranks is known.

    Args:
        program: for today's ranks.
        before: ranks today.
        after: ranks wanted.

    Raises:
        InputError: the ranks do not make whole replicas, or replicas differ, so that nothing says what new ones do.
    """
    if before == after:
        return program
    size = _size(program.communicators, before, after)
    communicators = {name: _resized_group(name, one, size) for name, one in program.communicators.items()}
    step = [_resized_phase(phase, size) for phase in program.step]
    return program.model_copy(update={"communicators": communicators, "step": step})


@dataclass(frozen=True)
class _Size:
    """Ranks of the job, of a block and of a replica within a block, before and after."""

    before: int
    after: int
    block: int
    new_block: int
    replica: int

    def ranks(self, today: Sequence[int]) -> list[int]:
        """The ranks that do what ``today``'s do.

        Args:
            today: ranks with a phase of their own.

        Raises:
            InputError: where not all replicas have it.
        """
        some = set(today)
        for rank in range(self.before):
            first = rank - rank % self.block + rank % self.block % self.replica
            if (rank in some) != (first in some):
                raise InputError(
                    f"{self.after} ranks: a phase of ranks {_shown(today)} is not that of every replica of "
                    f"{self.replica} ranks, so which new ranks have it is open; allowed: phases of all replicas"
                )
        found = range(self.after)
        return [r for r in found if r // self.new_block * self.block + r % self.new_block % self.replica in some]


def _size(communicators: Mapping[str, Communicator], before: int, after: int) -> _Size:
    blocks = {one.size * one.stride for one in communicators.values() if one.grows and one.size is not None}
    if len(blocks) > 1:
        raise InputError(f"program.communicators: groups that grow span {sorted(blocks)} ranks; allowed: all the same")
    block = blocks.pop() if blocks else before
    kept = [one.size * one.stride for one in communicators.values() if one.size is not None and not one.grows]
    replica = math.lcm(1, *(n for n in kept if block % n == 0))
    if block * after % before or block * after // before % replica:
        raise InputError(
            f"{after} ranks: no whole number of replicas, as process groups that keep their size span {replica} ranks "
            f"of each of {before // block} stages; allowed: a multiple of {before // block * replica}"
        )
    return _Size(before, after, block, block * after // before, replica)


def _resized_pairs(name: str, pairs: Sequence[Sequence[int]], size: _Size) -> list[list[int]]:
    """The pairs of all replicas, from those of the first replica of each block.

    Args:
        name: of the communicator.
        pairs: today.
        size: ranks before and after.
    """

    def of_all(block: int) -> list[list[int]]:
        own = [pair for pair in pairs if all(rank % size.block < size.replica for rank in pair)]
        return [
            [rank // size.block * block + first + rank % size.block for rank in pair]
            for first in range(0, block, size.replica)
            for pair in own
        ]

    if sorted(of_all(size.block)) != sorted(map(list, pairs)):
        raise InputError(f"program.communicators.{name}: pairs of single replicas; allowed: such as all replicas have")
    return of_all(size.new_block)


def _resized_group(name: str, one: Communicator, size: _Size) -> Communicator:
    if one.pairs is not None:
        return one.model_copy(update={"pairs": _resized_pairs(name, one.pairs, size)})
    if one.size is None:
        return one
    if one.grows:
        members = one.size * size.new_block // size.block
        if members * one.stride != size.new_block:
            raise InputError(f"program.communicators.{name}: no whole number of members on {size.after} ranks")
        return one.model_copy(update={"size": members})
    if size.block % (one.size * one.stride) == 0:
        return one
    if one.stride % size.block:
        raise InputError(
            f"program.communicators.{name}: neither within the {size.block} ranks of a group that grows nor from one "
            f"such block to the next; allowed: one of both, for another size than {size.before} ranks"
        )
    return one.model_copy(update={"stride": one.stride // size.block * size.new_block})


def _resized_phase(phase: ProgramPhase, size: _Size) -> ProgramPhase:
    found = phase.transfer()
    if phase.repeat is not None:
        return phase.model_copy(update={"step": [_resized_phase(one, size) for one in phase.step]})
    key, own = ("compute", phase.compute) if found is None else found
    if own is None or own.ranks is None:
        return phase
    return phase.model_copy(update={key: own.model_copy(update={"ranks": size.ranks(own.ranks)})})


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
