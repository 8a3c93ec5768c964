"""Closed forms of the collectives, against the same algorithms executed message by message."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest

from paceenv.sim.cluster.collectives import TREE_BELOW_BYTES, Algorithm, Law, Op, hierarchical, tree_parents, volume

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


@pytest.mark.parametrize("op", ["reduce_scatter", "all_gather"])
@pytest.mark.parametrize("n", [2, 5, 16])
def test_half_a_ring_is_half_of_it(op: Op, n: int) -> None:
    wire = Wire()
    reduced(np.ones((n, n)), wire, n, first=op == "reduce_scatter", second=op == "all_gather")
    assert volume(op, "ring", n, S) == (wire.rounds, pytest.approx(wire.serial_bytes, rel=1e-6))


@pytest.mark.parametrize("n", [2, 4, 16, 3, 6, 13, 31])
def test_halving_doubling_equals_its_rounds_executed(n: int) -> None:
    """Rabenseifner's all-reduce on real numbers, with the fold of the members beyond a power of two."""
    wire, data = Wire(), np.random.default_rng(n).normal(size=(n, 64))
    total = data.sum(axis=0)
    p = 1 << (n.bit_length() - 1)
    extra = range(p, n)
    if p < n:
        wire.round([(i, i - p, S) for i in extra])
        for i in extra:
            data[i - p] += data[i]
    low, width = np.zeros(p, int), 64
    distance = p // 2
    while distance:
        width //= 2
        before = data.copy()
        for i in range(p):
            low[i] += width if i & distance else 0
            data[i, low[i] : low[i] + width] += before[i ^ distance, low[i] : low[i] + width]
        wire.round([(i, i ^ distance, S * width / 64) for i in range(p)])
        distance //= 2
    distance = 1
    while distance < p:
        before, before_low = data.copy(), low.copy()
        for i in range(p):
            other = before_low[i ^ distance]
            data[i, other : other + width] = before[i ^ distance, other : other + width]
            low[i] = min(low[i], other)
        wire.round([(i, i ^ distance, S * width / 64) for i in range(p)])
        width, distance = 2 * width, 2 * distance
    if p < n:
        wire.round([(i - p, i, S) for i in extra])
        for i in extra:
            data[i] = data[i - p]
    np.testing.assert_allclose(data, np.broadcast_to(total, (n, 64)))
    found = volume("all_reduce", "halving_doubling", n, S)
    assert found.rounds == wire.rounds
    assert found.sent_bytes == pytest.approx(wire.serial_bytes, rel=1e-6)


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


@pytest.mark.parametrize("n", [2, 3, 8, 11])
def test_bruck_all_to_all_sends_each_part_once_for_each_one_bit(n: int) -> None:
    wire = Wire()
    held = {i: [(i, target) for target in range(n)] for i in range(n)}  # who holds which (source, target)
    for k in range((n - 1).bit_length()):
        moving = {i: [p for p in held[i] if (p[1] - i) % n >> k & 1] for i in range(n)}
        wire.round([(i, (i + 2**k) % n, S / n * len(moving[i])) for i in range(n)])
        held = {i: [p for p in held[i] if p not in moving[i]] + moving[(i - 2**k) % n] for i in range(n)}
    assert all(sorted(held[i]) == [(source, i) for source in range(n)] for i in range(n))
    found = volume("all_to_all", "halving_doubling", n, S)
    assert found == (wire.rounds, pytest.approx(wire.serial_bytes, rel=1e-6))
    assert volume("all_to_all", "ring", n, S) == (n - 1, pytest.approx((n - 1) / n * S))


@pytest.mark.parametrize("dims", [(4, 4), (3, 3, 3), (8,), (5, 5)])
def test_torus_all_reduce_equals_its_parts_link_by_link(dims: tuple[int, ...]) -> None:
    """Every part takes the dimensions in its own order; what is left of it shrinks on the way and grows back."""
    k, n = len(dims), math.prod(dims)
    carried, steps = np.zeros(k), 0
    for part in range(k):
        size = S / (2 * k)  # one of the two directions
        for step in range(k):
            d = dims[(part + step) % k]
            carried[(part + step) % k] += 2 * (d - 1) / d * size
            steps += 2 * (d - 1) if part == 0 else 0
            size /= d
    found = volume("all_reduce", "torus", n, S, dims=dims)
    assert found.rounds == steps
    np.testing.assert_allclose(carried, found.sent_bytes, rtol=1e-6)


@pytest.mark.parametrize("dims", [(4, 4), (5, 3), (8,), (4, 2, 3)])
def test_torus_all_to_all_equals_shortest_routes_counted_link_by_link(dims: tuple[int, ...]) -> None:
    load: defaultdict[tuple[tuple[int, ...], int, int], float] = defaultdict(float)
    nodes = list(np.ndindex(*dims))
    for source in nodes:
        for target in nodes:
            at = list(source)
            for axis, d in enumerate(dims):
                ahead = (target[axis] - at[axis]) % d
                for direction, hops in ((1, ahead), (-1, d - ahead)):
                    share = 0.5 if 2 * ahead == d else float(hops < d / 2)
                    here = at.copy()
                    for _ in range(hops % d if share else 0):
                        load[tuple(here), axis, direction] += share * S / len(nodes)
                        here[axis] = (here[axis] + direction) % d
                at[axis] = target[axis]
    assert volume("all_to_all", "torus", len(nodes), S, dims=dims).sent_bytes == pytest.approx(max(load.values()))


def test_a_torus_must_multiply_to_its_members() -> None:
    with pytest.raises(ValueError, match=r"torus dims \[4, 4\] multiply to 16, not to the 8 members"):
        volume("all_reduce", "torus", 8, S, dims=[4, 4])


OPS: tuple[Op, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send")
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree", "halving_doubling", "hierarchical", "torus", "auto")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_member_sends_nothing_and_arrays_equal_numbers(op: Op, algorithm: Algorithm) -> None:
    assert volume(op, algorithm, 1, S) == (0.0, 0.0)
    sizes = np.array([0.0, 1.0, 26214399.0, 26214400.0, 1e9])
    many = volume(op, algorithm, 16, sizes, dims=(4, 4))
    for k, size in enumerate(sizes):
        one = volume(op, algorithm, 16, float(size), dims=(4, 4))
        assert np.broadcast_to(many.rounds, 5)[k] == one.rounds
        assert np.asarray(many.sent_bytes)[k] == one.sent_bytes


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "hierarchical"])
def test_no_all_reduce_is_below_what_any_must_send(algorithm: Algorithm) -> None:
    for n in (2, 4, 64, 1024):
        assert volume("all_reduce", algorithm, n, S).sent_bytes == pytest.approx(2 * (n - 1) / n * S)


def test_hierarchical_splits_between_inside_and_across() -> None:
    inside, across = hierarchical("all_reduce", 16, 8, S)
    assert inside == (14.0, pytest.approx(2 * 7 / 8 * S))
    assert across == (30.0, pytest.approx(2 * 15 / 16 * S / 8))
    assert volume("all_reduce", "hierarchical", 128, S, per_node=8) == across


def test_auto_goes_over_from_tree_to_ring_with_size() -> None:
    edge = TREE_BELOW_BYTES
    assert volume("all_reduce", "auto", 4, edge - 1) == volume("all_reduce", "tree", 4, edge - 1)
    assert volume("all_reduce", "auto", 4, edge) == volume("all_reduce", "ring", 4, edge)
    assert volume("all_reduce", "auto", 4, S, tree_below_bytes=0.0) == volume("all_reduce", "ring", 4, S)


# Published and required numbers


def test_large_rings_approach_2S_over_B() -> None:
    law = Law(hop_s=0.0, bandwidth_Bps=50e9)
    assert law.time_s(volume("all_reduce", "ring", 10**6, S)) == pytest.approx(2 * S / 50e9, rel=2e-6)


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "tree"])
@pytest.mark.parametrize("n", [2, 8, 512])
def test_ten_billion_half_precision_parameters_at_50_GBps_take_400_ms(algorithm: Algorithm, n: int) -> None:
    assert Law(0.0, 50e9).time_s(volume("all_reduce", algorithm, n, 2 * 10e9)) >= 0.4


@pytest.mark.parametrize(("hop_us", "launch_us"), [(0.0, 0.0), (1.0, 10.0), (3.0, 60.0)])
def test_96_layers_of_tensor_parallel_all_reduces_take_192_to_384_ms(hop_us: float, launch_us: float) -> None:
    """Two of 200 MB a layer among 8 GPUs at 600 GB/s, both directions together: 1 to 2 ms each with their launch."""
    law = Law(hop_us * 1e-6, 300e9)  # 600 GB/s of NVSwitch are 300 in each direction
    total_s = 96 * 2 * (law.time_s(volume("all_reduce", "ring", 8, 200e6)) + launch_us * 1e-6)
    assert 0.192 <= total_s <= 0.384


def test_eight_a100_on_nvswitch_reach_about_280_of_300_GBps() -> None:
    """Bus bandwidth of a 200 MB message from link rate and hop latency (3.4 us: NCCL's table, ring on NVLink)."""
    time_s = Law(hop_s=3.4e-6, bandwidth_Bps=300e9).time_s(volume("all_reduce", "ring", 8, 200e6))
    assert 2 * 7 / 8 * 200e6 / time_s == pytest.approx(280e9, rel=0.03)


def test_the_square_root_term_is_the_cost_of_cutting_into_chunks() -> None:
    """A pipeline of depth d with the best whole number of chunks, against the law with ``2 sqrt(d hop / B)``."""
    hop, B, d = 1e-5, 1e10, 16
    law = Law(hop, B, 2 * math.sqrt(d * hop / B))
    for size in (1e8, 1e9):
        best = min((d + chunks) * (hop + size / chunks / B) for chunks in range(1, 20000))
        assert law.time_s(volume("broadcast", "ring", d + 1, size)) == pytest.approx(best, rel=1e-2)
