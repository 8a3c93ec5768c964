"""Profiles of a real job on eight H100: steps of the device, clocks and arrivals, against what is known of them."""

from __future__ import annotations

import numpy as np
import pytest
from traced_jobs import H100_DIR, needs_h100

from paceenv.importers.kineto import import_kineto
from paceenv.importers.merging.merge_ranks import Merged, merge_ranks

pytestmark = needs_h100
RANKS = 8


@pytest.fixture(scope="module")
def merged() -> Merged:
    return merge_ranks([import_kineto(path)[0] for path in sorted(H100_DIR.glob("rank*.json.gz"))], "h100", "test")


def test_steps_of_the_device(merged: Merged) -> None:
    """Two kinds of steps take turns; all ranks have the same operations in the same order."""
    trace = merged.trace
    rank, iteration, op = (trace.column(name) for name in ("rank", "iteration", "op"))
    begins = []
    for step, collectives in ((10, 8), (11, 20), (12, 8), (13, 20)):
        ops = [op[(rank == r) & (iteration == step)].tolist() for r in range(RANKS)]
        assert all(of_rank == ops[0] for of_rank in ops)
        assert sum(name != "compute" for name in ops[0]) == collectives
        of_rank = [trace.column("start_s")[(rank == r) & (iteration == step)].min() for r in range(RANKS)]
        begins.append(np.median(of_rank))
    assert set(iteration.tolist()) == {10, 11, 12, 13}
    np.testing.assert_allclose(np.diff(begins), [0.0361, 0.0476, 0.0427], atol=2e-4)


def test_clocks_agree(merged: Merged) -> None:
    shifts_s = np.array(list(merged.clocks.shift_s.values()))
    assert np.ptp(shifts_s) < 20e-6
    assert merged.clocks.error_s < 100e-6
    assert merged.clocks.shared == 56
    assert not merged.notes


def test_who_arrives_last(merged: Merged) -> None:
    """What the last rank to arrive costs, summed over a step's collectives: rank 0 first, then rank 1."""
    trace = merged.trace
    rank, iteration = trace.column("rank"), trace.column("iteration")
    for step, late_rank, late_ms in ((10, 0, 4.3), (11, 1, 9.3), (12, 1, 10.5), (13, 1, 7.6)):
        inside = (iteration == step) & ~trace.isin("op", "compute")
        start_RC = np.array([trace.column("start_s")[inside & (rank == r)] for r in range(RANKS)])
        order_RC = np.argsort(start_RC, axis=0)
        sorted_RC = np.sort(start_RC, axis=0)
        late_s_R = np.zeros(RANKS)
        np.add.at(late_s_R, order_RC[-1], sorted_RC[-1] - sorted_RC[-2])
        assert late_s_R.argmax() == late_rank
        assert late_s_R[late_rank] * 1e3 == pytest.approx(late_ms, abs=0.1)
