"""What an iteration of a job usually looks like: payload, barrier, and iterations unlike the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from live_operations import Shaped

from paceenv.live.observe.step import LEARNING_ITERATIONS, RELEARN_ITERATIONS, Operation, Shape

WORLD, PAIR = 0, 1
MEMBERS = {WORLD: (3, 8), PAIR: (1, 2)}
BIG = 1 << 20


_shaped = Shaped(MEMBERS)


def _operations(*parts: tuple[str, int, int, float, float]) -> list[Operation]:
    return _shaped.operations(*parts)


def _learned(operations: Sequence[Operation], step_s: float = 0.1) -> Shape:
    shape = Shape(_shaped.groups, _shaped.kinds)
    assert not any(shape.observe(operations, step_s) for _ in range(LEARNING_ITERATIONS))
    assert shape.known
    return shape


TENSOR_PARALLEL = [("all_reduce", PAIR, BIG, 0.01 * i, 0.01 * i + 0.005) for i in range(4)]


@pytest.mark.parametrize(
    ("parts", "payload", "comm_s", "barrier_s"),
    [
        ([("all_reduce", WORLD, BIG, 0.06, 0.1)], WORLD, 0.04, 0.0),
        ([("all_reduce", PAIR, BIG, 0.02, 0.06), ("barrier", WORLD, 0, 0.06, 0.09)], PAIR, 0.04, 0.03),
        (
            [*TENSOR_PARALLEL, ("all_reduce", WORLD, BIG, 0.05, 0.1), ("send", PAIR, BIG, 0.1, 0.11)],
            WORLD,
            0.05,
            0.0,
        ),
    ],
    ids=["plain", "a barrier of more ranks than the payload", "the group that ends the iteration is the payload's"],
)
def test_payload_and_barrier_are_found(parts: Any, payload: int, comm_s: float, barrier_s: float) -> None:
    operations = _operations(*parts)
    shape = _learned(operations)
    assert (shape.payload_group, shape.has_barrier) == (payload, barrier_s > 0.0)
    assert (shape.comm_s(operations), shape.barrier_s(operations)) == pytest.approx((comm_s, barrier_s))
    assert shape.barrier_alone_s == pytest.approx(barrier_s)


def test_groups_of_the_same_ranks_carry_the_payload_together() -> None:
    """As weights and gradients of sharded training, each on a communicator of its own."""
    weights, gradients, tensor = 0, 1, 2
    shaped = Shaped({weights: (3, 8), gradients: (3, 8), tensor: (1, 2)})
    for group, listed in ((weights, "0-7"), (gradients, "0-7"), (tensor, "2-3")):
        shaped.groups[group].listed = listed
    operations = shaped.operations(
        ("all_gather", weights, BIG, 0.0, 0.02),
        ("all_reduce", tensor, BIG, 0.02, 0.03),
        ("reduce_scatter", gradients, BIG, 0.05, 0.1),
    )
    shape = Shape(shaped.groups, shaped.kinds)
    for _ in range(LEARNING_ITERATIONS):
        shape.observe(operations, 0.1)
    assert shape.payload_group == gradients
    assert shape.comm_s(operations) == pytest.approx(0.07)


def test_an_iteration_with_other_collectives_is_irregular_until_it_is_the_rule() -> None:
    usual = _operations(("all_reduce", WORLD, BIG, 0.06, 0.1))
    two = usual + _operations(("all_reduce", WORLD, BIG, 0.16, 0.2))
    shape = _learned(usual)
    assert shape.observe(usual, 0.1)
    assert not shape.observe(two, 0.2)
    assert shape.observe(usual, 0.1)
    assert not any(shape.observe(two, 0.2) for _ in range(RELEARN_ITERATIONS))
    assert shape.observe(two, 0.2)


def test_sizes_and_order_may_change_and_a_suspended_process_is_an_outlier() -> None:
    one, other = ("all_reduce", WORLD, BIG, 0.0, 0.1), ("all_gather", WORLD, BIG, 0.1, 0.2)
    shape = _learned(_operations(one, other))
    changed = _operations(other, ("all_reduce", WORLD, 2 * BIG, 0.2, 0.3))
    assert [shape.observe(changed, step_s) for step_s in (0.1, 1.0, 30.0)] == [True, True, False]


def test_what_goes_on_for_long_is_no_outlier() -> None:
    usual = _operations(("all_reduce", WORLD, BIG, 0.06, 0.1))
    shape = _learned(usual)
    assert all(shape.observe(usual, 0.001) for _ in range(40))
    assert sum(shape.observe(usual, 0.3) for _ in range(100)) == 100 - RELEARN_ITERATIONS
