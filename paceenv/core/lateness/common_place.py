"""What late ranks have in common: a host, a rack, the same place on every host, a stage.

Every way of saying which ranks are late has a length in bits: which property, which of its values, and which of the
ranks with those values, if not all (minimum description length, Rissanen 1978). The shortest one is taken, and only if
it is shorter than the plain list of ranks. So two of eight ranks of one host in a large job are "on host x", and two
ranks anywhere in a job of four are just two ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Final, NamedTuple

HOST, RACK, LOCAL_RANK, STAGE = "host", "rack", "local rank", "stage"
WORTH_BITS: Final = 1.0
"""A description must be shorter than the list of ranks by this much."""


class CommonPlace(NamedTuple):
    """The ranks that are late are ``late`` of the ``ranks`` with one of ``values`` of the property ``key``.

    Values are names of hosts and racks, or numbers.
    """

    key: str
    values: tuple[Hashable, ...]
    late: int
    ranks: int
    late_hosts: int = 0
    """Hosts with a late rank; 0 where hosts are not known."""
    hosts: int = 0

    @property
    def complete(self) -> bool:
        """Whether all ranks at that place are late."""
        return self.late == self.ranks


def local_ranks(hosts: Mapping[int, Hashable]) -> dict[int, int]:
    """Each rank's place among the ranks of its host, from 0."""
    seen: dict[Hashable, int] = {}
    places = {}
    for rank in sorted(hosts):
        places[rank] = seen.get(hosts[rank], 0)
        seen[hosts[rank]] = places[rank] + 1
    return places


def find_common_place(
    late: Collection[int], ranks: Collection[int], places: Mapping[str, Mapping[int, Hashable]]
) -> CommonPlace | None:
    """The shortest description of which ranks are late; None where the list of ranks is as short.

    Args:
        places: properties of ranks by name, such as HOST, RACK or STAGE; a property that some rank lacks (or has as
            None or ""), or that is the same for all, is left out. With hosts, the place on a host is a property, too.
    """
    everyone, chosen = set(ranks) | set(late), set(late)
    if len(chosen) < 2 or len(everyone) <= len(chosen):
        return None
    known = {
        name: of
        for name, of in places.items()
        if all(of.get(rank) not in (None, "") for rank in everyone) and len(set(_on(of, everyone))) > 1
    }
    if HOST in known and LOCAL_RANK not in known:
        known[LOCAL_RANK] = local_ranks({rank: known[HOST][rank] for rank in everyone})
    descriptions = [(_bits(of, chosen, everyone), _describe(name, of, chosen, everyone)) for name, of in known.items()]
    best = _shortest(descriptions, len(chosen), len(everyone))
    if best is None or HOST not in known:
        return best
    late_hosts, hosts = (len(set(_on(known[HOST], some))) for some in (chosen, everyone))
    return best._replace(late_hosts=late_hosts, hosts=hosts)


def _shortest(descriptions: Sequence[tuple[float, CommonPlace]], late: int, ranks: int) -> CommonPlace | None:
    """The shortest description, if it is shorter than the list of ranks; which property it is costs bits, too."""
    listed, kinds = math.log2(math.comb(ranks, late)), math.log2(max(len(descriptions), 1))
    bits, best = min(descriptions, key=lambda row: row[0], default=(math.inf, None))
    return best if bits + kinds <= listed - WORTH_BITS else None


def _on(of: Mapping[int, Hashable], ranks: Collection[int]) -> list[Hashable]:
    return [of[rank] for rank in ranks]


def _bits(of: Mapping[int, Hashable], late: set[int], everyone: set[int]) -> float:
    """Length of a description by a property: which values, and where not all of their ranks are late, which ones."""
    values, chosen = _on(of, everyone), _on(of, late)
    used = set(chosen)
    bits = math.log2(math.comb(len(set(values)), len(used)) or 1) + math.log2(len(set(values)))
    for value in used:
        total, part = values.count(value), chosen.count(value)
        bits += 1.0 if total == part else 1.0 + math.log2(total) + math.log2(math.comb(total, part))
    return bits


def _describe(name: str, of: Mapping[int, Hashable], late: set[int], everyone: set[int]) -> CommonPlace:
    used = sorted(set(_on(of, late)), key=lambda value: (str(type(value)), value))
    values = _on(of, everyone)
    return CommonPlace(name, tuple(used), len(late), sum(values.count(v) for v in used))


def describe(place: CommonPlace) -> str:
    """A place in words."""
    values = ", ".join(str(value) for value in place.values)
    several = "s" if len(place.values) > 1 else ""
    share = f"{place.late} of {'their' if several else 'its'} {place.ranks} ranks"
    if place.key == LOCAL_RANK:
        where = f", on {place.late_hosts} of {place.hosts} hosts" if place.hosts else ""
        return f"all late ranks have local rank{several} {values}{where}"
    if place.key in (HOST, RACK):
        return f"all late ranks are on {place.key}{several} {values}: {share}"
    return f"all late ranks have {place.key}{several} {values}: {share}"
