"""NCCL Inspector's logs: all versions of the format, who arrives last, bandwidths, and a trace where stamps allow."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inspector_logs import OPS, log_of, write_logs

from paceenv.cli import application
from paceenv.core.errors import InputError
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
    (last,) = found.arrivals
    assert (last.rank, last.process, last.ranks, last.members, last.shared) == (2, "n0:1002", 4, 4, 90)
    assert last.share == 1.0
    assert last.late_s == pytest.approx(0.003, rel=0.05)
    assert last.waited_share == pytest.approx(0.75, rel=0.02), "3 of 4 ms"
    assert "rank 2 (n0:1002) arrives last in 100%, by 3 ms at the median" in found.verdict
    assert {(row.op, row.size_bytes) for row in found.rows} == set(OPS)
    row = next(row for row in found.rows if row.op == "AllGather")
    assert (row.ranks, row.calls) == (4, 120)
    assert row.time_s == pytest.approx(0.004, rel=0.05)
    assert row.busbw_Bps == pytest.approx(1.75 * row.algbw_Bps)
    assert row.slowest_rank != 2


def test_nobody_is_named_where_ranks_take_turns(tmp_path: Path) -> None:
    found = measure_times(read_inputs([write_logs(tmp_path, late={})]).inspected)
    assert not found.arrivals[0].is_late
    assert found.verdict.startswith("no rank is usually the last to arrive in 90 collectives")


def test_one_log_tells_nothing_of_others(tmp_path: Path) -> None:
    write_logs(tmp_path, late={2: 0.003})
    found = measure_times(read_inputs([tmp_path / "n0-pid1001.log"]).inspected)
    assert found.verdict == "who arrives last cannot be determined; no communicator has logs of two ranks"
    assert found.rows


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
    (last,) = measure_times(read_inputs([tmp_path]).inspected).arrivals
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
    assert "worker 1" in json.dumps(result["causes"])


def test_missing_collectives_give_no_trace(tmp_path: Path) -> None:
    folder = write_logs(tmp_path, late={}, verbose=True)
    path = folder / "n0-pid1001.log"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:10] + lines[13:]))  # one of each operation
    inputs = read_inputs([folder])
    assert inputs.trace is None
    assert "n0-pid1001.log: 3 collectives of communicator 0xabc are missing" in inputs.why_no_trace


def test_the_command_prints_what_was_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README").write_text("logs of a job")
    write_logs(tmp_path, late={2: 0.003})
    assert application.run(["diagnose", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "arrives last in 100%" in out
    assert "ReduceScatter" in out
    assert "README: unknown format; skipped" in err.replace("\n", "")


def test_a_torn_and_a_packed_log_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    text = "\n".join(json.dumps(record) for record in log_of(0, 2, late={})).encode()
    for name, content in (("torn.log", text[: len(text) // 2]), ("packed.log.gz", gzip.compress(text)[:-900])):
        (tmp_path / name).write_bytes(content)
        log = read_inspector(tmp_path / name)
        assert 20 < len(log.sn_V) < 90
        assert log.notes


def test_what_the_plugin_dropped_is_said(tmp_path: Path) -> None:
    records = log_of(0, 2, late={}, version="v4.1")
    records[0]["dump_stats"]["coll_dropped_since_last_dump"] = 12
    path = tmp_path / "n0-pid1.log"
    path.write_text("\n".join(map(json.dumps, records)))
    assert read_inspector(path).notes == (f"{path}: the plugin dropped 12 collectives",)


def test_sends_and_receives_are_rows_only(tmp_path: Path) -> None:
    for rank in range(2):
        records: list[dict[str, Any]] = log_of(rank, 2, late={})
        perf = {"p2p": "Send", "p2p_sn": 1, "p2p_peer": 1, "p2p_msg_size_bytes": 512, "p2p_exec_time_us": 50}
        perf |= {"p2p_timing_source": "kernel_cpu", "p2p_algobw_gbs": 30.0, "p2p_busbw_gbs": 30.0}
        records.append(records[0] | {"p2p_perf": perf})
        del records[-1]["coll_perf"]
        (tmp_path / f"pid{rank}.log").write_text("\n".join(map(json.dumps, records)))
    found = measure_times(read_inputs([tmp_path]).inspected)
    assert found.arrivals[0].shared == 90
    assert [row.calls for row in found.rows if row.op == "Send"] == [2]
    assert "some times are those of the host, not of the device" in found.notes


def test_a_log_without_records_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text('{"header": {"id": 1}, "coll_perf": {"coll": "AllReduce", "coll_sn": "x"}}\n')
    with pytest.raises(InputError, match=r"no collective of NCCL Inspector in it \(1 records that cannot be read\)"):
        read_inputs([path])


_RECORDS = log_of(0, 2, late={}, steps=8, verbose=True, version="v4.1")
_ODD = st.sampled_from([None, -1, 1 << 70, 1e308, "x", [], {}, [[]], {"a": 1}, 1.5, True, 0, "0xabc", -1e300])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), at=st.integers(0, 4000), new=st.binary(max_size=3))
def test_whatever_a_log_holds_it_is_read_or_refused(tmp_path: Path, data: st.DataObject, at: int, new: bytes) -> None:
    records = json.loads(json.dumps(_RECORDS))
    for _ in range(data.draw(st.integers(0, 5))):
        place = data.draw(st.sampled_from(records))
        if data.draw(st.booleans()):
            inner = [value for value in place.values() if isinstance(value, dict) and value]
            place = data.draw(st.sampled_from(inner)) if inner else place
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(_ODD)
    content = "\n".join(map(json.dumps, records)).encode()
    paths = [tmp_path / "a.log", tmp_path / "b.log"]
    paths[0].write_bytes(content[:at] + new + content[at + len(new) :])
    paths[1].write_bytes(content)
    refused = ""
    try:
        inputs = read_inputs(paths)
        found = measure_times(inputs.inspected)
        assert found.verdict
        json.dumps(found.to_json())
    except InputError as error:
        refused = str(error)
    assert "\n" not in refused
