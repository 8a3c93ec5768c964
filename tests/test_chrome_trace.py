"""The export to the JSON trace event format: what its viewers ask for, and silently mangle a trace without."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceenv.core.errors import InputError
from paceenv.core.trace import read_trace
from paceenv.policies.rollout import start
from paceenv.sim.cluster import load_cluster
from paceenv.sim.engine.recording import RecordingWriter
from paceenv.ui.chrome_trace import LANE, ChromeTraceWriter

Events = list[dict[str, Any]]


def write_jobs(path: Path, jobs: list[tuple[str, dict[str, Any]]]) -> None:
    """Whole jobs, each a name and the columns of a trace."""
    with ChromeTraceWriter(path) as writer:
        for pid, (name, columns) in enumerate(jobs, 1):
            writer.process(pid, name, {int(r): f"rank {int(r)}" for r in np.unique(columns["rank"])})
            writer.operations(pid, columns)


def read(path: Path) -> Events:
    """The events of a trace file, which must be the format's JSON object form."""
    content = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    assert set(content) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert content["displayTimeUnit"] in {"ms", "ns"}
    return list(content["traceEvents"])


def threads(events: Events) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(start, end) of the complete events of every (process, thread), in time, whole nanoseconds."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin, length = round(1000 * event["ts"]), round(1000 * event["dur"])
            assert length > 0
            found[event["pid"], event["tid"]].append((begin, begin + length))
    return {key: sorted(spans) for key, spans in found.items()}


def test_operations_become_complete_events_in_microseconds(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    columns = {"rank": [0, 1], "op": ["compute", "pace"], "start_s": [0.5, 0.0], "end_s": [2.0, 0.25], "iteration": 7}
    with ChromeTraceWriter(path, {"job": "a"}) as writer:
        writer.process(1, "job a", {0: "rank 0", 1: "rank 1"})
        writer.operations(1, columns)
        writer.counter(1, "step time, ms", [0.0, 2.0], {"step": [2000.0, 1999.5]})
    events = read(path)
    assert json.loads(path.read_text())["otherData"] == {"job": "a"}
    assert [e for e in events if e["ph"] == "X"] == [
        {
            "ph": "X",
            "pid": 1,
            "tid": 0,
            "name": "compute",
            "args": {"iteration": 7},
            "ts": 500_000.0,
            "dur": 1_500_000.0,
        },
        {"ph": "X", "pid": 1, "tid": 1, "name": "pace", "args": {"iteration": 7}, "ts": 0.0, "dur": 250_000.0},
    ]
    names = {(e["name"], e.get("tid")): e["args"].get("name") for e in events if e["ph"] == "M"}
    assert names["process_name", None] == "job a"
    assert (names["thread_name", 0], names["thread_name", 1]) == ("rank 0", "rank 1")
    counters = [(e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert counters == [(0.0, {"step": 2000.0}), (2_000_000.0, {"step": 1999.5})]


@given(
    st.lists(st.floats(0.0, 10.0), min_size=2, max_size=40, unique=True),
    st.floats(0.0, 1e6),
)
def test_what_follows_in_time_never_overlaps_however_late(
    tmp_path_factory: Any, stamps: list[float], late: float
) -> None:
    path = tmp_path_factory.mktemp("chain") / "chain.json"
    at_s = late + np.sort(stamps)
    write_jobs(path, [("job", {"rank": 3, "op": "compute", "start_s": at_s[:-1], "end_s": at_s[1:]})])
    found = threads(read(path))
    assert set(found) <= {(1, 3)}, "one after the other needs one thread"
    spans = found.get((1, 3), [])
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    total_ns = sum(end - begin for begin, end in spans)
    assert total_ns == round(1e9 * at_s[-1]) - round(1e9 * at_s[0]), "nothing is lost to rounding"


def test_what_a_rank_does_beside_something_else_gets_its_own_thread(tmp_path: Path) -> None:
    path = tmp_path / "beside.json"
    with ChromeTraceWriter(path) as writer:
        writer.operations(1, {"rank": 5, "op": ["a", "b"], "start_s": [0.0, 1.0], "end_s": [2.0, 3.0]})
        writer.operations(1, {"rank": 5, "op": ["c", "d"], "start_s": [2.0, 2.5], "end_s": [2.5, 4.0]})
    lanes = {e["name"]: e["tid"] for e in read(path) if e["ph"] == "X"}
    assert lanes == {"a": 5, "b": 5 + LANE, "c": 5, "d": 5}


@pytest.mark.parametrize("cluster", ["unequal-slack", "stale"])
def test_a_trace_of_the_simulator_exports_whole(cluster: str, tmp_path: Path) -> None:
    simulator = start(load_cluster(cluster), np.array([0]))
    with RecordingWriter(tmp_path / "run.parquet", simulator, cluster) as writer:
        writer.append(simulator.record(simulator.off(), 30))
    trace = read_trace(tmp_path / "run.parquet")
    columns = {name: trace.column(name) for name in ("rank", "op", "start_s", "end_s", "iteration")}
    for path in (tmp_path / "run.json", tmp_path / "run.json.gz"):
        write_jobs(path, [(cluster, columns)])
    assert read(tmp_path / "run.json") == read(tmp_path / "run.json.gz")
    found = threads(read(tmp_path / "run.json"))
    for spans in found.values():
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    total_ns = sum(end - begin for spans in found.values() for begin, end in spans)
    assert total_ns == pytest.approx(1e9 * (columns["end_s"] - columns["start_s"]).sum(), abs=1e3 * len(columns["op"]))
    beside = {tid for _, tid in found if tid >= LANE}
    assert bool(beside) == (cluster == "stale"), "only ranks that run ahead do two things at a time"


def test_a_file_comes_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "half.json.gz"
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match="not JSON compliant"), ChromeTraceWriter(path) as writer:
        writer.counter(1, "step", [0.0, 1.0], {"step": [1.0, float("nan")]})
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path], "nothing else is left"
    blocked = tmp_path / "half.json.gz" / "trace.json"
    with pytest.raises(InputError, match="cannot be written"), ChromeTraceWriter(blocked):
        pass
