"""What a rank's own times add up to: parts of the step, collectives, and blocks that are the same on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from live_samples import make_batch

from paceenv.live.observe.batch import STREAM, THREAD, Batch, Kind
from paceenv.live.record.history import BLOCK_ITERATIONS, BLOCKS, KEPT_COLLECTIVES, History
from paceenv.live.record.segments import joined

KINDS = (
    Kind("all_reduce", 0, 1000),
    Kind("barrier", 0, 0),
    Kind("all_reduce", 1, 500, THREAD),
    Kind("all_gather", 1, 500, STREAM),
)
STEP_S, REDUCE_S, BARRIER_S, PACE_S = 0.1, 0.03, 0.02, 0.01


def steps(first: int, number: int, *, own_s: float = 0.04, **more: Any) -> Batch:
    """Steps of a delay, own work, a reduction and a barrier."""
    iterations, operations = [], []
    for i in range(number):
        start = 100.0 + (first + i) * STEP_S
        go = start + PACE_S
        reduce, barrier = go + own_s, go + own_s + REDUCE_S
        iterations.append((first + i, start, barrier + BARRIER_S, start, go))
        operations += [(i, 0, reduce, barrier), (i, 1, barrier, barrier + BARRIER_S)]
    return make_batch(iterations, operations, kinds=KINDS, barrier_s=BARRIER_S, **more)


def one_step(
    operations: Sequence[tuple[int, float, float]], *, kinds: Sequence[Kind] = KINDS, still_s: float = math.nan
) -> History:
    """The account of a step of a second with these operations: kind, start and end in it."""
    history = History()
    rows = [(0, kind, start, end) for kind, start, end in operations]
    history.take(make_batch([(0, 0.0, 1.0, 0.0, 0.0)], rows, kinds=kinds, still_s=still_s))
    return history


def total_s(history: History, op: str) -> float:
    return sum(float(c["blocked_s"]) for c in history.as_dict()["collectives"] if c["op"] == op)


def test_parts_add_up_to_the_step() -> None:
    history = History()
    history.take(steps(0, 5, ticks=4))
    parts = history.as_dict()["parts"]
    assert parts == pytest.approx({"compute_s": 0.04, "collective_s": 0.03, "barrier_s": 0.02, "pacing_s": 0.01})
    assert sum(parts.values()) == pytest.approx(history.as_dict()["step"]["mean_s"])
    assert history.as_dict()["step_iterations"] == 4.0


def test_nothing_measured_is_unknown_and_not_zero() -> None:
    history = History()
    history.take(make_batch([]))
    for found in (history.as_dict()[name] for name in ("parts", "step", "wait")):
        assert set(found.values()) == {None}
    assert history.as_dict()["collectives"] == []
    assert history.as_dict()["side"] == {"seconds": 0.0, "streams_s": 0.0}


def test_overlapping_operations_count_once_and_those_of_another_thread_not_at_all() -> None:
    history = one_step([(2, 0.0, 0.9), (0, 0.2, 0.5), (1, 0.4, 0.6), (0, 0.45, 0.55), (2, 0.55, 1.4), (1, 0.8, 0.9)])
    assert history.as_dict()["parts"]["compute_s"] == pytest.approx(1.0 - 0.4 - 0.1)
    assert total_s(history, "all_reduce") == pytest.approx(0.3)
    assert total_s(history, "barrier") == pytest.approx(0.1 + 0.1)
    assert history.as_dict()["side"] == pytest.approx({"seconds": 0.9 + 0.85, "streams_s": 0.0})


@pytest.mark.parametrize(("still_s", "collective_s"), [(math.nan, 0.5), (0.0, 0.1), (0.15, 0.25)])
def test_a_collective_on_another_stream_tells_arrivals_and_costs_what_the_compute_stands_still(
    still_s: float, collective_s: float
) -> None:
    history = one_step([(3, 0.1, 0.4), (3, 0.3, 0.5), (0, 0.8, 0.9)], still_s=still_s)
    assert history.as_dict()["own"]["blocks"]["own_s"] == pytest.approx([1.0 - collective_s])
    assert history.as_dict()["parts"]["collective_s"] == pytest.approx(collective_s)
    assert total_s(history, "all_gather") == pytest.approx(0.4)


@pytest.mark.parametrize("mark", [0, 1])
def test_marked_steps_and_outliers_are_left_out(mark: int) -> None:
    """A long step that a rank marks, of a checkpoint, say, is a stop as on the ranks that wait for it."""
    history = History()
    history.take(steps(0, 40))
    before = history.as_dict()["own"], history.as_dict()["collectives"], history.count
    history.take(steps(40, 3, own_s=0.5, mark=1))
    history.take(steps(43, 1, own_s=60.0, mark=mark))
    assert (history.as_dict()["own"], history.as_dict()["collectives"], history.count) == before
    stopped, now_s = history.as_dict()["stopped"], time.time() - time.perf_counter()
    assert (stopped["count"], stopped["longest_s"], stopped["total_s"]) == pytest.approx((1, 60.06, 60.06))
    assert stopped["own_s"] == pytest.approx(60.0, abs=0.1)
    assert history.as_dict()["step"]["longest_s"] == pytest.approx(60.06)
    assert stopped["unix_time_s"] == pytest.approx(now_s + 100.0 + 43 * STEP_S + 60.06, abs=1.0)
    history.take(steps(44, 1, own_s=0.2))  # long, but a step of the job
    assert history.count == 41


def own_of(iteration: int) -> float:
    """Own work that tells iterations apart."""
    return 0.01 + 1e-5 * iteration


def account(last: int, chunk: int) -> dict[str, Any]:
    """The blocks of a rank whose steps up to ``last`` came in batches of ``chunk``."""
    history = History()
    for begin in range(0, last, chunk):
        numbers = range(begin, min(begin + chunk, last))
        history.take(joined([steps(number, 1, own_s=own_of(number)) for number in numbers]))
    return {**history.as_dict()["own"]["blocks"], "collectives": history.as_dict()["collectives"]}


@pytest.mark.parametrize("last", [1, 16, 100, 511, 512, 513, 1500])
def test_a_block_is_the_mean_over_the_same_iterations_however_they_came(last: int) -> None:
    blocks, other = account(last, 37), account(last, 256)
    size = blocks["iterations"]
    assert size & (size - 1) == 0
    assert size >= BLOCK_ITERATIONS
    assert (len(blocks["own_s"]) - 1) * size < last <= BLOCKS * size
    for k, own_s in enumerate(blocks["own_s"]):
        inside = [own_of(t) for t in range(k * size, min((k + 1) * size, last))]
        assert own_s == pytest.approx(np.mean(inside))
        assert blocks["steps"][k] == len(inside)
    assert (blocks["iterations"], blocks["steps"]) == (other["iterations"], other["steps"])
    assert blocks["own_s"] == pytest.approx(other["own_s"])
    assert {len(c["blocks_s"]) for c in blocks["collectives"]} == {len(blocks["own_s"])}
    reduction = next(c for c in blocks["collectives"] if c["op"] == "all_reduce")
    assert reduction["blocks_s"] == pytest.approx([REDUCE_S] * len(blocks["own_s"]))


def test_collectives_beyond_those_kept_become_other_and_nothing_is_lost() -> None:
    number = KEPT_COLLECTIVES + 10
    kinds = [Kind("all_reduce", group, 100) for group in range(number)]
    operations = [(group, 0.01 * group, 0.01 * group + 0.001 * (1 + group / number)) for group in range(number)]
    listed = one_step(operations, kinds=kinds).as_dict()["collectives"]
    assert len(listed) == KEPT_COLLECTIVES
    assert (listed[0]["op"], listed[0]["group"]) == ("other", -1), "the most time"
    assert [c["group"] for c in listed[1:]] == list(range(KEPT_COLLECTIVES - 2, -1, -1))
    assert sum(c["blocked_s"] for c in listed) == pytest.approx(sum(end - begin for _, begin, end in operations))
