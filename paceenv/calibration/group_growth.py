"""Which process groups of a job would have more members in a larger job: those that sum gradients.

Told by what runs on a communicator. Gradients are reduced in the background up to the end of the step, or in one piece
without compute in between. Exchanges among experts and messages between stages keep their groups, and so do all-reduces
that block again and again between compute, as those of activations in tensor parallelism do.

Axes: K transfers of a step, L = K + 1 segments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.parameters import Parameter, exact, not_identifiable
from paceenv.calibration.program_stamps import ProgramStamps
from paceenv.calibration.step_order import StepOrder
from paceenv.sim.cluster.program.step_program import WORLD, Communicator

KEY: Final = "program.communicators"
SMALL: Final = 0.01
"""Share of the largest payload of all communicators; smaller ones, such as a norm or a loss, say nothing."""
BETWEEN: Final = 0.05
"""Share of a step's compute that lies between activations of a model-parallel group at least, and between gradients in
one piece at most."""
SETTLES: Final = "--base with a typed program settles it, in which such groups have grows: true, the others a size"


class _Kind(NamedTuple):
    grows: bool | None
    """None: not known."""
    why: str


@dataclass(frozen=True)
class GroupGrowth:
    """Stamps whose communicators have ``grows``, and what is known of them in words."""

    stamps: ProgramStamps
    parameter: Parameter


def group_growth(stamps: ProgramStamps, order: StepOrder) -> GroupGrowth:
    """Mark the communicators of a job that grow with it."""
    used = list(dict.fromkeys(one.communicator for one in stamps.transfers))
    kinds = {name: _kind(stamps, order, name) for name in used}
    every = {WORLD: Communicator()} | dict(stamps.communicators)
    blocks = {name: (every[name].size or stamps.ranks) * every[name].stride for name in used}
    largest = max((blocks[name] for name, kind in kinds.items() if kind.grows), default=0)
    for name, kind in kinds.items():  # of shards within a node and sums between nodes, the latter grow
        if kind.grows and blocks[name] < largest:
            kinds[name] = _Kind(False, "shards of replicas")
    stamps = _marked(stamps, {name: bool(kind.grows) for name, kind in kinds.items() if kind.grows is not None})
    unknown = [f"{name} ({kind.why})" for name, kind in kinds.items() if kind.grows is None]
    if unknown or not largest:
        why = f"not known which groups have more members in a larger job: {', '.join(unknown)}"
        if not unknown:
            why = "no transfer sums gradients between replicas, so what a larger job adds is not in the trace"
        return GroupGrowth(stamps, not_identifiable(KEY, None, why, SETTLES))
    grow = [name for name, kind in kinds.items() if kind.grows]
    keep = [f"{name} ({kind.why})" for name, kind in kinds.items() if not kind.grows]
    said = f"with more ranks, groups of {', '.join(grow)} have more members" + (
        f"; the same number: {', '.join(keep)}" if keep else ""
    )
    return GroupGrowth(stamps, exact(KEY, len(used), said))


def _kind(stamps: ProgramStamps, order: StepOrder, name: str) -> _Kind:
    """Whether the groups of a communicator grow, and why."""
    ops = [one.op for one in stamps.transfers]
    largest = max(one.payload_bytes for one in stamps.transfers)
    mine_K = np.array([one.communicator == name for one in stamps.transfers])
    big_K = mine_K & np.array([one.payload_bytes > SMALL * largest for one in stamps.transfers])
    own = {op for op, is_big in zip(ops, big_K, strict=True) if is_big}
    reduces = bool((order.can_wait(ops) & mine_K).any())
    if {"all_to_all", "send"} & {op for op, is_mine in zip(ops, mine_K, strict=True) if is_mine}:
        return _Kind(None, "both exchanges and gradients") if reduces else _Kind(False, "exchanges or messages")
    if reduces:
        return _Kind(True, "gradients in the background")
    if not own:
        is_world = name == WORLD
        return _Kind(is_world, "small")
    if own <= {"all_reduce", "broadcast"} and not (order.background_K & big_K).any():
        between = _between(order, big_K)
        if between < BETWEEN and "all_reduce" in own:
            return _Kind(True, "gradients in one piece")
        if between >= BETWEEN and big_K.sum() > 1:
            return _Kind(False, "all-reduces that block between compute")
    return _Kind(None, f"{', '.join(sorted(own))}: of gradients or of activations")


def _between(order: StepOrder, big_K: NDArray[np.bool_]) -> float:
    """Share of the step's compute between the first and the last transfer of some."""
    places = np.flatnonzero(big_K)
    total_L = np.nansum(order.compute_TRL, axis=(0, 1))
    return float(total_L[places[0] + 1 : places[-1] + 1].sum() / max(total_L.sum(), 1e-300))


def _marked(stamps: ProgramStamps, grows: dict[str, bool]) -> ProgramStamps:
    """The stamps with what is known of their communicators; one of all ranks that keeps its size has a name."""
    found = dict[str, Communicator]()
    for name, one in stamps.communicators.items():
        if grows.get(name) is False and one.size is None and one.pairs is None:
            one = Communicator(size=stamps.ranks)
        found[name] = one.model_copy(update={"grows": True}) if grows.get(name) and one.size is not None else one
    if grows.get(WORLD) is not False:
        return replace(stamps, communicators=found)
    label = f"groups-of-{stamps.ranks}"
    found[label] = Communicator(size=stamps.ranks)
    transfers = [one._replace(communicator=label) if one.communicator == WORLD else one for one in stamps.transfers]
    return replace(stamps, communicators=found, transfers=tuple(transfers))
