"""Profiles of two ranks on an H200, one late by a known time, as they are and with less in them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traced_jobs import H200_DIR, needs_h200

from paceenv.diagnosis.answer import Answer, find_answer
from paceenv.importers.inputs import read_inputs

pytestmark = needs_h200
Events = list[dict[str, Any]]
TRUTH = {"ddp-slow": (1, 0.020), "fsdp-loader": (0, 0.030)}
EARLY = "operations launched before the profile began are left out, with their step"


def files_of(job: str) -> list[Path]:
    return [H200_DIR / f"{job}-rank{rank}.json.gz" for rank in range(2)]


def check(found: Answer, job: str, steps: list[int]) -> None:
    """The late rank, by how much, in which steps, and that its host is the reason."""
    rank, late_s = TRUTH[job]
    assert found.matrix is not None
    assert found.diagnosis is not None
    assert found.matrix.iteration_T.tolist() == steps
    (late,) = found.diagnosis.arrivals.late
    assert (late.rank, late.iterations) == (rank, tuple(steps))
    assert np.median(late.late_s) == pytest.approx(late_s, rel=0.2)
    assert [one.rank for one in found.late_hosts] == [rank]


@pytest.mark.parametrize("job", TRUTH)
def test_the_device_is_up_to_a_step_behind_its_host(job: str) -> None:
    found = find_answer(read_inputs(files_of(job)))
    check(found, job, list(range(16, 22)))
    assert sum(EARLY in note for note in found.notes) == 1, "said in one line for both ranks"
    assert found.late_hosts[0].reason == "host"
    assert found.late_hosts[0].extra_s["host"] == pytest.approx(TRUTH[job][1], rel=0.05)


def launches(events: Events) -> dict[int, float]:
    """When each correlation was launched, us."""
    calls = [event for event in events if event["cat"].endswith(("_runtime", "_driver"))]
    return {event["args"]["correlation"]: event["ts"] for event in calls if event["args"].get("correlation", 0) > 0}


def marks(events: Events) -> dict[int, tuple[float, float]]:
    found = [event for event in events if event["name"][:13] == "ProfilerStep#" and event["cat"] == "user_annotation"]
    return {int(event["name"][13:]): (event["ts"], event["ts"] + event["dur"]) for event in found}


def window(events: Events, first: int, last: int) -> Events:
    """What a profile of these steps has: also operations that were launched before them, and end in them."""
    begin, end = marks(events)[first][0], marks(events)[last][1]
    launched = launches(events)
    at = [launched.get(e["args"].get("correlation"), -1.0) if on_device(e) else e["ts"] for e in events]
    ends = [event["ts"] + event["dur"] for event in events]
    return [
        event
        for event, at_us, end_us in zip(events, at, ends, strict=True)
        if begin <= at_us <= end or (on_device(event) and at_us < begin < end_us)
    ]


def on_device(event: dict[str, Any]) -> bool:
    return event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")


def as_graphs(events: Events) -> Events:
    """One launch a step, and no word on the collectives."""
    launched, steps, first, kept = launches(events), marks(events), dict[int, int](), []
    step_of = {
        number: next((k for k, (begin, end) in steps.items() if begin <= at_us <= end), -1)
        for number, at_us in launched.items()
    }
    for number in sorted(launched, key=launched.__getitem__):
        first.setdefault(step_of[number], number)
    for event in events:
        number = event.get("args", {}).get("correlation")
        if event["name"].startswith(("nccl:", "c10d::", "record_param_comms")) or (
            number in launched and not on_device(event) and first[step_of[number]] != number
        ):
            continue
        kept.append(event | {"args": {"correlation": first.get(step_of.get(number, -1), number)}})
    return kept


def without_launches(events: Events, step: int) -> Events:
    begin, end = marks(events)[step]
    lost = {number for number, at_us in launches(events).items() if begin <= at_us <= end}
    return [e for e in events if on_device(e) or e.get("args", {}).get("correlation") not in lost]


@pytest.mark.parametrize(
    ("job", "parts", "changed", "steps"),
    [
        ("ddp-slow", [(17, 17)], list, [17]),
        ("ddp-slow", [(16, 21)], lambda events: without_launches(events, 18), [16, 17, 18, 19, 20, 21]),
        ("ddp-slow", [(16, 17), (20, 21)], as_graphs, [16, 17, 20, 21]),
        ("fsdp-loader", [(17, 18)], as_graphs, [17, 18]),
    ],
)
def test_profiles_with_less_in_them(
    tmp_path: Path, job: str, parts: list[tuple[int, int]], changed: Callable[[Events], Events], steps: list[int]
) -> None:
    """Fewer steps, two windows, launches that were lost, one launch a step of kernels of which nothing is said."""
    for rank, path in enumerate(files_of(job)):
        events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e["ph"] == "X"]
        for first, last in parts:
            about = {"rank": rank, "world_size": 2}
            profile = {"distributedInfo": about, "traceEvents": changed(window(events, first, last))}
            (tmp_path / f"rank{rank}_{last}.json").write_text(json.dumps(profile))
    found = find_answer(read_inputs([tmp_path]))
    check(found, job, steps)
    assert any("of 2 windows, which are read as one" in note for note in found.notes) == (len(parts) > 1)
