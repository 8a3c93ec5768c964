"""Ticks become steps: local SGD, jobs that meet nobody, marks, and what cannot be read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceenv.live.observe import steps as steps_module
from paceenv.live.observe.batch import Kind
from paceenv.live.observe.log import Log
from paceenv.live.observe.stamps import HostStamps
from paceenv.live.observe.step import LEARNING_ITERATIONS, Step
from paceenv.live.observe.steps import BY_TICKS, LEAST_SHARE, Steps

COMPUTE_S, COLLECTIVE_S = 0.03, 0.01
PAYLOAD = Kind("all_reduce", 0, 1 << 20)
GATHER = Kind("all_gather", 0, 1 << 18)
SIDE = Kind("all_reduce", 2, 1 << 19, side=True)


class Rank:
    """One rank on a clock of its own."""

    def __init__(self, *, alone: bool = False) -> None:
        self.now_s = 1.0
        self.log = Log(HostStamps(lambda: self.now_s))
        self.steps = Steps(self.log, lambda delay, iteration: 0.0)
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
    assert [step.mark for step in steps] == [
        *["evaluation"] * 2,
        *["checkpoint"] * 2,
        *["evaluation"] * 3,
        "",
    ]
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
