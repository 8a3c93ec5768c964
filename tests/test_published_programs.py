"""Published steps against described programs: what the page says is met stays met."""

from __future__ import annotations

import os
from pathlib import Path

import published_steps as cases
import pytest
from traced_jobs import STRAGGLER_DIR

DATA = Path(os.environ.get("PACEENV_DATA_DIR") or STRAGGLER_DIR.parent)


@pytest.mark.skipif(not (DATA / "jean-zay").is_dir(), reason="set PACEENV_DATA_DIR to data recorded by others")
def test_pipelines_of_a_university_cluster_follow_from_their_first_stage() -> None:
    rows = cases.jean_zay(DATA / "jean-zay")
    assert [row.case.split()[0] for row in rows] == ["4", "8", "16"]
    assert all(abs(row.error) < cases.TOLERANCE for row in rows)


@pytest.mark.slow
def test_fully_sharded_steps_follow_from_one_node_or_one_gather() -> None:
    sharded = [row for row in cases.torchtitan() if "128 GPUs" in row.case]
    assert len(sharded) == 3
    assert all(abs(row.error) < 0.05 for row in [*sharded, *cases.hybrid()])


@pytest.mark.slow
def test_rates_of_narrow_layers_follow_from_those_of_wide_ones_and_the_bytes_in_memory() -> None:
    """A rate of products taken from a wide row; the page takes it from the widest, which is slow to build."""
    rate = cases.megatron_rate(cases.MEGATRON[4])
    narrow = cases.megatron(rate, [cases.MEGATRON[k] for k in (0, 2)])
    assert all(abs(row.error) < cases.TOLERANCE for row in narrow)
    again = cases.megatron(rate, cases.MEGATRON[4:5])[0]
    assert again.error == pytest.approx(0.0, abs=0.005)  # what it was taken from


def test_exchanges_of_experts_are_slowed_by_gradients_and_gain_from_going_first() -> None:
    found = cases.priority(8, 8)
    assert found.slowest > 2.0
    assert found.first > 1.05
    assert found.first >= found.held
