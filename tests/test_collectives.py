"""Closed forms of the collectives, against the same algorithms executed message by message."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest

from paceenv.sim.cluster.collectives import Law, tree_parents, volume

S = 12.0e6


class Wire:
    """Counts what members send, round by round: every round lasts as long as its busiest member's busier direction."""

    def __init__(self) -> None:
        self.rounds, self.serial_bytes = 0, 0.0
        self.sent: defaultdict[int, float] = defaultdict(float)

    def round(self, messages: list[tuple[int, int, float]]) -> None:
        out: defaultdict[int, float] = defaultdict(float)
        into: defaultdict[int, float] = defaultdict(float)
        for source, target, size in messages:
            assert source != target
            out[source] += size
            into[target] += size
            self.sent[source] += size
        self.rounds += 1
        self.serial_bytes += max(*out.values(), *into.values())


def reduced(values: np.ndarray, wire: Wire, n: int, *, first: bool = True, second: bool = True) -> np.ndarray:
    """A ring of n members with one column per part: reduce-scatter, then all-gather."""
    for phase in range(2):
        if not (first, second)[phase]:
            continue
        for hop in range(n - 1):
            moves = [(i, (i + 1) % n, (i - hop + phase) % n) for i in range(n)]
            before = values.copy()
            for source, target, part in moves:
                values[target, part] = before[source, part] + (before[target, part] if phase == 0 else 0.0)
            wire.round([(source, target, S / n) for source, target, _ in moves])
    return values


@pytest.mark.parametrize("n", [2, 3, 8, 37])
def test_ring_equals_a_ring_executed_part_by_part(n: int) -> None:
    wire, data = Wire(), np.random.default_rng(n).normal(size=(n, n))
    expected = np.broadcast_to(data.sum(axis=0), (n, n)).copy()
    np.testing.assert_allclose(reduced(data, wire, n), expected)
    found = volume("all_reduce", "ring", n, S)
    assert found.rounds == wire.rounds
    assert found.sent_bytes == pytest.approx(wire.serial_bytes, rel=1e-6)
    assert found.sent_bytes < 2 * S


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 12, 31, 64, 100])
def test_double_tree_equals_two_trees_counted_edge_by_edge(n: int) -> None:
    sent: defaultdict[int, float] = defaultdict(float)
    depth = 0
    for mirrored in (False, True):
        name = (lambda i: i) if not mirrored else (lambda i: n - 1 - i) if n % 2 == 0 else (lambda i: (i + 1) % n)
        parents = tree_parents(n)
        for child, parent in parents.items():
            sent[name(child)] += S / 2  # its sum goes up
            sent[name(parent)] += S / 2  # the result comes down
        for leaf in range(n):
            climbed, at = 0, leaf
            while at in parents:
                at, climbed = parents[at], climbed + 1
            depth = max(depth, climbed)
    found = volume("all_reduce", "tree", n, S)
    assert found.sent_bytes == pytest.approx(max(sent.values()), rel=1e-6)
    assert found.rounds == 2 * math.ceil(math.log2(n))
    assert depth <= found.rounds / 2
    assert sum(sent.values()) == pytest.approx(n * volume("all_reduce", "ring", n, S).sent_bytes), "no more in total"


# Published and required numbers


def test_the_square_root_term_is_the_cost_of_cutting_into_chunks() -> None:
    """A pipeline of depth d with the best whole number of chunks, against the law with ``2 sqrt(d hop / B)``."""
    hop, B, d = 1e-5, 1e10, 16
    law = Law(hop, B, 2 * math.sqrt(d * hop / B))
    for size in (1e8, 1e9):
        best = min((d + chunks) * (hop + size / chunks / B) for chunks in range(1, 20000))
        assert law.time_s(volume("broadcast", "ring", d + 1, size)) == pytest.approx(best, rel=1e-2)
