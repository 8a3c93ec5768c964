"""NCCL Inspector's logs: all versions of the format, who arrives last, bandwidths, and a trace where stamps allow."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from inspector_logs import log_of, write_logs

from paceenv.cli import application
from paceenv.diagnosis.collective_times import measure_times
from paceenv.importers.inputs import read_inputs
from paceenv.importers.nccl_inspector import read_inspector


@pytest.mark.parametrize(
    ("version", "indent"), [("v4.0", None), ("v4.1", 2), ("v4.2", None), ("v4.3", 2), ("v4.4", None)]
)
def test_the_last_rank_is_named_whatever_the_version(tmp_path: Path, version: str, indent: int | None) -> None:
    inputs = read_inputs([write_logs(tmp_path, late={2: 0.003}, version=version, indent=indent)])
    assert inputs.trace is None
    assert "collectives without time stamps" in inputs.why_no_trace
    found = measure_times(inputs.inspected)
    (last,) = found.last_arrivals
    assert (last.rank, last.process, last.ranks, last.members, last.shared) == (2, "n0:1002", 4, 4, 90)
    assert last.share == 1.0
    assert last.late_s == pytest.approx(0.003, rel=0.05)
    assert last.waited_share == pytest.approx(0.75, rel=0.02), "3 of 4 ms"
    assert "rank 2 (n0:1002) arrives last in 100%, by 3 ms at the median" in found.verdict


def test_each_operation_of_a_communicator_is_numbered_apart(tmp_path: Path) -> None:
    """Rank 2 kept other, shorter collectives than the others, of the same numbers."""
    for rank in range(4):
        records = log_of(rank, 4, late={})
        kept = {"AllGather", "ReduceScatter"} if rank == 2 else {"AllReduce", "ReduceScatter"}
        records = [record for record in records if record["coll_perf"]["coll"] in kept]
        for record in records:
            if record["coll_perf"]["coll"] == "AllGather":
                record["coll_perf"]["coll_exec_time_us"] = 300
        (tmp_path / f"n0-pid{1000 + rank}.log").write_text("\n".join(map(json.dumps, records)))
    (last,) = measure_times(read_inputs([tmp_path]).inspected).last_arrivals
    assert last.shared == 30
    assert not last.is_late


def test_bytes_of_a_trace_are_the_whole_payload(tmp_path: Path) -> None:
    trace = read_inputs([write_logs(tmp_path, late={}, verbose=True)]).require_trace()
    found = {*zip(trace.column("op").tolist(), trace.column("bytes").tolist(), strict=True)}
    assert found == {("compute", 0), ("all_gather", 4 << 22), ("reduce_scatter", 4 << 24), ("all_reduce", 64)}


def test_stamps_of_all_collectives_give_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_logs(tmp_path, late={1: 0.004}, verbose=True, version="v4.2")
    trace = read_inputs([folder]).require_trace()
    assert trace.metadata.source == "NCCL Inspector"
    assert len(trace.metadata.ranks) == 4
    assert len(np.unique(trace.column("iteration"))) > 20
    assert set(trace.column("op").tolist()) == {"compute", "all_gather", "reduce_scatter", "all_reduce"}
    assert application.run(["diagnose", str(folder), "--no-simulate", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["nccl_inspector"]["last_arrivals"][0]["rank"] == 1
    assert "rank 1" in json.dumps(result["causes"])
    assert application.run(["diagnose", str(folder), "--no-simulate"]) == 0
    assert "arrives last" in capsys.readouterr().out


def test_missing_collectives_give_no_trace(tmp_path: Path) -> None:
    folder = write_logs(tmp_path, late={}, verbose=True)
    path = folder / "n0-pid1001.log"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:10] + lines[13:]))  # one of each operation
    inputs = read_inputs([folder])
    assert inputs.trace is None
    assert "n0-pid1001.log: 3 collectives of communicator 0xabc are missing" in inputs.why_no_trace


def test_a_torn_and_a_packed_log_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    text = "\n".join(json.dumps(record) for record in log_of(0, 2, late={})).encode()
    for name, content in (("torn.log", text[: len(text) // 2]), ("packed.log.gz", gzip.compress(text)[:-900])):
        (tmp_path / name).write_bytes(content)
        log = read_inspector(tmp_path / name)
        assert 20 < len(log.records) < 90
        assert log.notes
