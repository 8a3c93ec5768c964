"""What late ranks have in common: a host, the same place on every host, a stage.

Every way of saying which ranks are late has a length in bits: which property, which of its values, and which of the
ranks with those values, if not all (minimum description length, Rissanen 1978). The shortest one is taken, and only if
it is shorter than the plain list of ranks. So two of eight ranks of one host in a large job are "on host x", and two
ranks anywhere in a job of four are just two ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from typing import Final

HOST, LOCAL_RANK, STAGE = "host", "local rank", "stage"
WORTH_BITS: Final = 1.0
"""A description must be shorter than the list of ranks by this much."""


def in_common(late: Collection[int], ranks: Collection[int], places: Mapping[str, Mapping[int, Hashable]]) -> str:
    """What the late ranks have in common, in words; "" where the list of ranks is as short.

    Args:
        places: properties of ranks by name, such as HOST or STAGE; a property that some rank lacks (or has as None or
            ""), or that is the same for all, is left out. With hosts, the place on a host is a property, too.
    """
    everyone, chosen = set(ranks) | set(late), set(late)
    if len(chosen) < 2 or len(everyone) <= len(chosen):
        return ""
    known = {
        name: of
        for name, of in places.items()
        if all(of.get(rank) not in (None, "") for rank in everyone) and len({of[rank] for rank in everyone}) > 1
    }
    if HOST in known:
        known[LOCAL_RANK] = _local_ranks({rank: known[HOST][rank] for rank in everyone})
    lengths = {name: _bits(of, chosen, everyone) for name, of in known.items()}
    name = min(lengths, key=lengths.__getitem__, default="")
    listed_bits = math.log2(math.comb(len(everyone), len(chosen)))
    # which property it is costs bits, too
    if not name or lengths[name] + math.log2(len(known)) > listed_bits - WORTH_BITS:
        return ""
    of = known[name]
    used = {of[rank] for rank in chosen}
    values = ", ".join(map(str, sorted(used, key=lambda value: (str(type(value)), value))))
    several, total = "s" * (len(used) > 1), sum(of[rank] in used for rank in everyone)
    where = f"{'are on' if name == HOST else 'have'} {name}{several} {values}"
    return f"all late ranks {where}: {len(chosen)} of {'their' if several else 'its'} {total} ranks"


def _local_ranks(hosts: Mapping[int, Hashable]) -> dict[int, int]:
    """Each rank's place among the ranks of its host, from 0."""
    seen: dict[Hashable, int] = {}
    places = {}
    for rank in sorted(hosts):
        places[rank] = seen.get(hosts[rank], 0)
        seen[hosts[rank]] = places[rank] + 1
    return places


def _bits(of: Mapping[int, Hashable], late: set[int], everyone: set[int]) -> float:
    """Length of a description by a property: which values, and where not all of their ranks are late, which ones."""
    values, chosen = [of[rank] for rank in everyone], [of[rank] for rank in late]
    used = set(chosen)
    bits = math.log2(math.comb(len(set(values)), len(used)) or 1) + math.log2(len(set(values)))
    for value in used:
        total, part = values.count(value), chosen.count(value)
        bits += 1.0 if total == part else 1.0 + math.log2(total) + math.log2(math.comb(total, part))
    return bits
