"""Closed forms of the collectives: a tree edge by edge, a pipeline chunk by chunk; a ring is held by hand elsewhere."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest

from paceenv.sim.cluster.collectives import Law, tree_parents, volume

S = 12.0e6


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


def test_the_square_root_term_is_the_cost_of_cutting_into_chunks() -> None:
    """A pipeline of depth d with the best whole number of chunks, against the law with ``2 sqrt(d hop / B)``."""
    hop, B, d = 1e-5, 1e10, 16
    law = Law(hop, B, 2 * math.sqrt(d * hop / B))
    for size in (1e8, 1e9):
        best = min((d + chunks) * (hop + size / chunks / B) for chunks in range(1, 20000))
        assert law.time_s(volume("broadcast", "ring", d + 1, size)) == pytest.approx(best, rel=1e-2)
