"""Collectives that members of a group entered with different operations or sizes, which can never match."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final

from paceenv.diagnosis.observed.standstill import Standstill, Unit, ranks_text
from paceenv.importers.flight_recorder import Group

_SAME_INPUT: Final = frozenset(("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather"))
"""Collectives in which every member gives as much as the others."""


@dataclass(frozen=True)
class Mismatch:
    """One collective that its members entered differently.

    Attributes:
        group: the group.
        seq: its number in the group.
        what: "operation", "type", "size" or "sum of sizes".
        variants: what was entered and by which ranks, most ranks first.
    """

    group: Group
    seq: int
    what: str
    variants: tuple[tuple[str, tuple[int, ...]], ...]

    def text(self, where: str) -> str:
        """One line."""
        said = "; ".join(f"{name} on ranks {ranks_text(ranks)}" for name, ranks in self.variants)
        return f"collective {self.seq} of {where} does not match in {self.what}: {said}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        variants = [{"entered": name, "ranks": list(ranks)} for name, ranks in self.variants]
        return {
            "group": self.group.name,
            "description": self.group.description,
            "seq": self.seq,
            "differs_in": self.what,
        } | {"variants": variants}


def find_mismatches(job: Standstill) -> tuple[Mismatch, ...]:
    """The first unfinished collective of each group, where its members entered different ones.

    Groups whose sends and receives are coalesced are left out: their collectives' numbers may differ between ranks.
    """
    drifting = {unit.group for units in job.units.values() for unit in units if unit.is_p2p and len(unit.entries) > 1}
    first: dict[Group, dict[int, Unit]] = defaultdict(dict)
    for rank, units in job.pending.items():
        for unit in units:
            if not unit.is_p2p and unit.group not in drifting:
                first[unit.group].setdefault(rank, unit)
    found = []
    for group, units_R in first.items():
        seq = min(unit.seq for unit in units_R.values())
        here = {rank: unit for rank, unit in units_R.items() if unit.seq == seq}
        mismatch = _compare(group, seq, here, whole=len(here) == len(group.ranks) and not group.is_guess)
        if mismatch is not None:
            found.append(mismatch)
    return tuple(found)


def _compare(group: Group, seq: int, units: dict[int, Unit], *, whole: bool) -> Mismatch | None:
    kinds = {unit.kind for unit in units.values()}
    names = {rank: unit.op for rank, unit in units.items()}
    if len(kinds) > 1:
        return _mismatch(group, seq, "operation", names)
    if any(len(unit.entries) > 1 for unit in units.values()):
        return None  # parts of a coalesced one may be recorded in any number
    entries = {rank: unit.entries[0] for rank, unit in units.items()}
    if kinds <= _SAME_INPUT:
        for what, said in (
            ("type", {rank: entry.dtypes for rank, entry in entries.items()}),
            ("size", {rank: str(entry.items[0]) for rank, entry in entries.items() if entry.items[0] >= 0}),
        ):
            if len(set(said.values())) > 1:
                shown = {rank: f"{names[rank]} of {entries[rank].sizes} {entries[rank].dtypes}" for rank in said}
                return _mismatch(group, seq, what, shown)
    items = [entry.items for entry in entries.values()]
    if kinds == {"all_to_all"} and whole and min(map(min, items)) >= 0:
        sent, received = (sum(part) for part in zip(*items, strict=True))
        if sent != received:
            shown = {r: f"{names[r]} of {sent} numbers sent by all, {received} received" for r in entries}
            return _mismatch(group, seq, "sum of sizes", shown)
    return None


def _mismatch(group: Group, seq: int, what: str, said: dict[int, str]) -> Mismatch:
    by_name: dict[str, list[int]] = defaultdict(list)
    for rank, name in said.items():
        by_name[name].append(rank)
    variants = sorted(((name, tuple(sorted(ranks))) for name, ranks in by_name.items()), key=lambda v: -len(v[1]))
    return Mismatch(group, seq, what, tuple(variants))
