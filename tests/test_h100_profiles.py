"""Profiles of a real job on eight H100: steps of the device, clocks and arrivals, against what is known of them."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from traced_jobs import H100_DIR, needs_h100

from paceenv.cli import application
from paceenv.diagnosis.host_activity import find_late_hosts
from paceenv.importers.merge_ranks import Merged, merge_ranks
from paceenv.importers.profiler.kineto import import_kineto

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
    assert merged.trace.metadata.job["clock_error_s"] < 100e-6
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


def test_why_it_arrives_last(merged: Merged) -> None:
    """The GPUs of both idle until their hosts have launched the small kernels of the optimizer."""
    late = {
        one.rank: one
        for one in find_late_hosts(merged.activity, clock_error_s=merged.trace.metadata.job["clock_error_s"])
    }
    assert set(late) == {0, 1}
    assert late[1].iterations == (11, 12, 13)
    np.testing.assert_allclose(late[1].late_s, [0.0093, 0.0105, 0.0076], atol=1e-4)
    for one in late.values():
        assert one.reason == "host"
        assert one.extra_s["host"] > 0.9 * np.mean(one.late_s)
        assert abs(one.extra_s["compute"]) < 0.1 * np.mean(one.late_s)
        assert next(iter(one.ranges)) == "Optimizer.step#NorMuon.step"
    assert late[1].lead_s < 0.25 * late[1].peers_lead_s
    assert "waiting for its host" in late[1].text


def test_where_time_goes(merged: Merged) -> None:
    for one in merged.activity:
        parts = one.compute_s + one.to_device_s + one.other_copies_s + one.exposed_s + one.host_wait_s + one.idle_s
        assert parts == pytest.approx(one.end_s - one.start_s, abs=5e-5)
        assert one.compute_s == pytest.approx(0.0294, abs=1e-3), "all ranks and steps compute as much"


_METADATA = ("Collective name", "In msg nelems", "dtype", "Process Group Name", "Process Group Ranks")
_CALLS = ("nccl:", "c10d::", "record_param_comms")


@pytest.mark.slow
@pytest.mark.parametrize(("missing", "skewed", "no_metadata", "no_calls", "one_stream"), [((), True, True, True, True)])
def test_the_answer_stays(
    tmp_path: Path, missing: tuple[int, ...], skewed: bool, no_metadata: bool, no_calls: bool, one_stream: bool
) -> None:
    """Clocks off by up to a second, ranks missing, no word on collectives, or all on one stream."""
    draw, timelines = random.Random(1), []
    for rank in sorted({*range(RANKS)} - {*missing}):
        profile = json.loads(gzip.decompress((H100_DIR / f"rank{rank}.json.gz").read_bytes()))
        add_us, events = draw.uniform(-1e6, 1e6) if skewed else 0.0, []
        for event in profile["traceEvents"]:
            if event["ph"] != "X" or (no_calls and event["name"].startswith(_CALLS)):
                continue
            event["ts"] += add_us
            if no_metadata:
                event["args"] = {key: value for key, value in event.get("args", {}).items() if key not in _METADATA}
            if one_stream and event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
                event["tid"] = 7
            events.append(event)
        about = profile["distributedInfo"] | ({"pg_config": []} if no_metadata else {})
        path = tmp_path / f"rank{rank}.json"
        path.write_text(json.dumps({"distributedInfo": about, "traceEvents": events}))
        timelines.append(import_kineto(path)[0])
    merged = merge_ranks(timelines, "h100", "test")
    first, second = find_late_hosts(merged.activity, clock_error_s=merged.trace.metadata.job["clock_error_s"])
    assert (first.rank, first.iterations, first.reason) == (1, (11, 12, 13), "host")
    assert (second.rank, second.iterations, second.reason) == (0, (10,), "host")
    np.testing.assert_allclose(first.late_s, [0.0093, 0.0105, 0.0076], atol=3e-4)
    assert any(f"{len(missing)} of 8 ranks have no file" in note for note in merged.notes) == bool(missing)


def test_a_page_says_once_how_late_a_rank_is(tmp_path: Path) -> None:
    """The same rank had 9.28, 9.13 and 8.36 ms on one page, each by another definition."""
    out = tmp_path / "page.html"
    assert application.run(["report", str(H100_DIR), "-o", str(out)]) == 0
    text = re.sub(r"<svg.*?</svg>|<details.*?</details>", "", out.read_text(), flags=re.DOTALL)
    assert text.count("rank 1 arrives last in 3 of 4 steps, by") == 1
    assert "Rank 1, why it arrives last: " in text
    assert "Most is waited for rank 1." in text
    assert "1 complete iterations of its most usual kind" in text
