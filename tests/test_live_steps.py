"""Ticks become steps: local SGD, jobs that meet nobody, marks, what cannot be read; and what a step usually is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from paceenv.live.observe import steps as steps_module
from paceenv.live.observe.batch import Kind
from paceenv.live.observe.log import Group, Log
from paceenv.live.observe.stamps import HostStamps
from paceenv.live.observe.step import LEARNING_ITERATIONS, RELEARN_ITERATIONS, Operation, Shape, Step
from paceenv.live.observe.steps import BY_TICKS, LEAST_SHARE, YOUNG, Steps

COMPUTE_S, COLLECTIVE_S = 0.03, 0.01
PAYLOAD = Kind("all_reduce", 0, 1 << 20)
SIDE = Kind("all_reduce", 2, 1 << 19, side=True)


class Rank:
    """One rank on a clock of its own."""

    def __init__(self, *, alone: bool = False, traced: bool = False) -> None:
        self.now_s = 1.0
        self.log = Log(HostStamps(lambda: self.now_s))
        self.steps = Steps(self.log, lambda delay, iteration: 0.0, traced=traced)
        self.steps.alone = alone

    def compute(self) -> None:
        self.now_s += COMPUTE_S

    def collective(self, kind: Kind = PAYLOAD, *, unreadable: bool = False) -> None:
        entry = self.now_s
        self.now_s += COLLECTIVE_S
        self.log.add(self.log.kind(*kind), None if unreadable else entry)

    def tick(self) -> Step | None:
        self.log.tick()
        return self.steps.add(self.log.over.popleft())

    def run(self, rounds: int, *round_: Sequence[Kind]) -> list[Step | None]:
        """Ticks with these collectives each, ``rounds`` times over; what each tick ended."""
        found = []
        for kinds in rounds * list(round_):
            self.compute()
            for kind in kinds:
                self.collective(kind)
            found.append(self.tick())
        return found


def ended(found: Sequence[Step | None]) -> list[Step]:
    return [step for step in found if step is not None]


def test_a_tick_with_a_collective_is_a_step_from_exit_to_exit() -> None:
    found = Rank().run(30, [PAYLOAD])
    assert found[0] is None  # nothing before it
    steps = ended(found)
    assert [step.iteration for step in steps] == list(range(1, 30))
    assert {step.ticks for step in steps} == {1}
    assert all(step.step_s == pytest.approx(COMPUTE_S + COLLECTIVE_S) for step in steps)
    assert [step.regular for step in steps] == [t >= LEARNING_ITERATIONS for t in range(29)]


def test_local_sgd_that_meets_every_fourth_time_has_steps_of_four_ticks() -> None:
    rank = Rank()
    found = rank.run(40, [], [], [], [PAYLOAD])
    assert [t for t, step in enumerate(found) if step] == list(range(7, 160, 4))
    steps = ended(found)
    assert [step.iteration for step in steps] == list(range(7, 160, 4))  # of several ticks the last
    assert {step.ticks for step in steps} == {4}
    assert all(step.step_s == pytest.approx(4 * COMPUTE_S + COLLECTIVE_S) for step in steps)
    assert all(step.regular for step in steps[LEARNING_ITERATIONS:])


def test_without_any_collective_the_tick_ends_a_step_until_the_ranks_meet() -> None:
    rank = Rank()
    found = rank.run(BY_TICKS + 10, [])
    assert ended(found[: BY_TICKS + 1]) == []
    assert len(ended(found)) == 9
    rank.run(1, [PAYLOAD])
    assert ended(rank.run(1, [], [], [])) == []  # they do: what follows belongs to the next meeting
    [step] = ended(rank.run(1, [PAYLOAD]))
    assert step.ticks == 4


def test_a_mark_holds_over_the_ticks_between_its_beginning_and_its_end() -> None:
    rank, steps = Rank(), list[Step]()
    rank.run(12, [PAYLOAD])
    for kind, change in (("evaluation", 1), ("checkpoint", 1), ("checkpoint", -1), ("evaluation", -1)):
        rank.log.mark(kind, change)
        steps += ended(rank.run(2, [PAYLOAD]))
    # the end of a mark is in the iteration that has begun with the last exit
    assert [step.mark for step in steps] == ["evaluation"] * 2 + ["checkpoint"] * 2 + ["evaluation"] * 3 + [""]
    assert [step.regular for step in steps] == [False] * 7 + [True]


def test_a_stamp_that_could_not_be_recorded_costs_its_step_and_the_start_of_the_next() -> None:
    rank = Rank()
    rank.run(12, [PAYLOAD])
    rank.compute()
    rank.collective(unreadable=True)
    assert rank.tick() is None
    assert not rank.steps.inside
    assert rank.run(1, [PAYLOAD]) == [None]
    [step] = ended(rank.run(1, [PAYLOAD]))
    assert step.regular
    assert step.step_s == pytest.approx(COMPUTE_S + COLLECTIVE_S)


def test_the_operations_of_ranks_that_hardly_ever_meet_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "MAX_ROWS", 10)
    rank = Rank()
    rank.run(12, [PAYLOAD])
    for _ in range(40):
        assert rank.run(1, [SIDE]) == [None]
        assert len(rank.steps._operations) <= 10
    assert rank.run(1, [PAYLOAD]) == [None]  # its start is not known any more
    assert len(ended(rank.run(1, [PAYLOAD]))) == 1


def test_a_gpu_rank_without_collectives_is_not_watched_all_the_time() -> None:
    rank = Rank(alone=True)
    rank.log.on_device = True
    rank.run(5 * LEAST_SHARE, [])
    assert rank.steps.every == 4


@pytest.mark.parametrize(("compute_s", "traced", "every"), [(0.01, False, 8), (0.01, True, 1), (0.3, False, 1)])
def test_short_steps_are_not_all_watched_unless_they_are_traced(
    compute_s: float, traced: bool, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "COMPUTE_S", compute_s)
    rank = Rank(traced=traced)
    rank.run(YOUNG, [PAYLOAD])
    assert rank.steps.every == 1
    rank.run(8, [PAYLOAD])
    assert rank.steps.every == every


# What a step usually looks like: payload, barrier, and steps unlike the others


class Shaped:
    """A shape with its table of kinds; ``members`` is this rank's place in every group and the group's size."""

    def __init__(self, members: Mapping[int, tuple[int, int]]) -> None:
        self.kinds: list[Kind] = []
        self.groups = {number: Group(number, str(number), *place, None, object) for number, place in members.items()}
        self.shape = Shape(self.groups, self.kinds)

    def operations(self, *parts: tuple[str, int, int, float, float]) -> list[Operation]:
        found = []
        for op, group, size, start_s, end_s in parts:
            kind = Kind(op, group, size)
            if kind not in self.kinds:
                self.kinds.append(kind)
            found.append((self.kinds.index(kind), start_s, end_s))
        return found


WORLD, PAIR, BIG = 0, 1, 1 << 20
SHAPED = Shaped({WORLD: (3, 8), PAIR: (1, 2)})
operations_of = SHAPED.operations
USUAL = ("all_reduce", WORLD, BIG, 0.06, 0.1)
TENSOR_PARALLEL = [("all_reduce", PAIR, BIG, 0.01 * i, 0.01 * i + 0.005) for i in range(4)]


def learned(operations: Sequence[Operation], shaped: Shaped = SHAPED) -> Shape:
    shape = Shape(shaped.groups, shaped.kinds)
    assert not any(shape.observe(operations, 0.1) for _ in range(LEARNING_ITERATIONS))
    assert shape.known
    return shape


@pytest.mark.parametrize(
    ("parts", "payload", "comm_s", "barrier_s"),
    [
        ([USUAL], WORLD, 0.04, 0.0),
        ([("all_reduce", PAIR, BIG, 0.02, 0.06), ("barrier", WORLD, 0, 0.06, 0.09)], PAIR, 0.04, 0.03),
        ([*TENSOR_PARALLEL, ("all_reduce", WORLD, BIG, 0.05, 0.1), ("send", PAIR, BIG, 0.1, 0.11)], WORLD, 0.05, 0.0),
    ],
    ids=["plain", "a barrier of more ranks than the payload", "the group that ends the iteration is the payload's"],
)
def test_payload_and_barrier_are_found(parts: Any, payload: int, comm_s: float, barrier_s: float) -> None:
    operations = operations_of(*parts)
    shape = learned(operations)
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
    shape = learned(operations, shaped)
    assert shape.payload_group == gradients
    assert shape.comm_s(operations) == pytest.approx(0.07)


def test_an_iteration_with_other_collectives_is_irregular_until_it_is_the_rule() -> None:
    usual = operations_of(USUAL)
    two = usual + operations_of(("all_reduce", WORLD, BIG, 0.16, 0.2))
    shape = learned(usual)
    assert shape.observe(usual, 0.1)
    assert not shape.observe(two, 0.2)
    assert shape.observe(usual, 0.1)
    assert not any(shape.observe(two, 0.2) for _ in range(RELEARN_ITERATIONS))
    assert shape.observe(two, 0.2)


def test_sizes_and_order_may_change_and_only_what_goes_on_for_long_is_no_outlier() -> None:
    one, other = ("all_reduce", WORLD, BIG, 0.0, 0.1), ("all_gather", WORLD, BIG, 0.1, 0.2)
    shape = learned(operations_of(one, other))
    changed = operations_of(other, ("all_reduce", WORLD, 2 * BIG, 0.2, 0.3))
    assert [shape.observe(changed, step_s) for step_s in (0.1, 1.0, 30.0)] == [True, True, False]
    usual = operations_of(USUAL)
    shape = learned(usual)
    assert all(shape.observe(usual, 0.001) for _ in range(40))
    assert sum(shape.observe(usual, 0.3) for _ in range(100)) == 100 - RELEARN_ITERATIONS
