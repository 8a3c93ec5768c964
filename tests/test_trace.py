"""The trace file (contract 3) and its importers: round trips, and one clear line for every way a file can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceenv.core import trace as trace_module
from paceenv.core.errors import InputError
from paceenv.core.trace import METADATA_KEY, SCHEMA, Trace, TraceMetadata, TraceWriter, read_trace, write_trace
from paceenv.importers.formats import find_format
from paceenv.importers.inputs import read_inputs
from paceenv.importers.straggler import import_straggler


def load_trace(path: Path) -> Trace:
    """The trace in a file of either Parquet format."""
    return read_inputs([path]).require_trace()


METADATA = TraceMetadata(
    job={"name": "tiny", "nodes": 2},
    ranks=({"rank": 0, "stage": 0, "host": "a"}, {"rank": 1, "stage": 1, "host": "b"}),
    source="test",
)


def rows(iteration: int, **changed: Any) -> dict[str, Any]:
    """Two ranks computing and reducing in one iteration."""
    start_s = np.array([0.0, 1.0, 0.0, 1.5]) + 2.0 * iteration
    columns: dict[str, Any] = {"job": "tiny", "rank": np.array([0, 0, 1, 1]), "iteration": iteration}
    columns |= {"seq": np.array([0, 1, 0, 1]), "op": np.array(["compute", "all_reduce"] * 2), "start_s": start_s}
    columns |= {"end_s": start_s + np.array([1.0, 0.75, 1.5, 0.25])}
    return columns | changed


def write(path: Path, iterations: int = 3) -> Path:
    with TraceWriter(path, METADATA) as writer:
        for iteration in range(iterations):
            writer.append(rows(iteration))
    return path


def test_round_trip_fills_defaults_and_keeps_metadata(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet")
    trace = read_trace(path)
    assert trace.metadata == METADATA
    assert trace.table.schema.equals(SCHEMA)
    assert trace.column("iteration").tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert trace.column("op").tolist() == ["compute", "all_reduce"] * 6
    assert trace.isin("op", "all_reduce", "barrier").tolist() == [False, True] * 6
    assert set(trace.column("group")) == set(trace.column("micro_batch")) == {-1}
    assert trace.metadata.of_ranks("stage") == {0: 0, 1: 1}
    write_trace(trace, tmp_path / "again.parquet")
    assert read_trace(tmp_path / "again.parquet") == trace
    assert find_format(path) == "paceenv trace"
    assert load_trace(path) == trace


@given(data=st.data())
def test_any_rows_survive_the_file(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    size = data.draw(st.integers(0, 30), label="rows")

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return data.draw(st.lists(values, min_size=size, max_size=size))

    int32 = st.integers(-(2**31), 2**31 - 1)
    start_s = np.array(column(st.floats(-1e9, 1e9)), dtype=np.float64)
    columns: dict[str, Any] = {
        name: np.array(column(int32), dtype=np.int64) for name in ("rank", "iteration", "seq", "group", "micro_batch")
    }
    columns |= {name: np.array(column(st.text(st.characters(codec="utf-8"))), dtype=object) for name in ("job", "op")}
    columns |= {"bytes": np.array(column(st.integers(0, 2**63 - 1)), dtype=np.int64)}
    columns |= {"start_s": start_s, "end_s": start_s + np.array(column(st.floats(0, 1e9)), dtype=np.float64)}
    path = tmp_path_factory.mktemp("any") / "t.parquet"
    cut = data.draw(st.integers(0, size), label="cut")
    with TraceWriter(path, METADATA) as writer:
        writer.append({name: values[:cut] for name, values in columns.items()})
        writer.append({name: values[cut:] for name, values in columns.items()})
    read = read_trace(path)
    for name, values in columns.items():
        assert read.column(name).tolist() == values.tolist()


def test_some_steps_of_several_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "ROW_GROUP_ROWS", 7)
    path = write(tmp_path / "t.parquet", iterations=10)
    assert pq.ParquetFile(path).num_row_groups > 1
    whole, part = read_trace(path), read_trace(path, [range(2, 4), range(3, 5), range(9, 20)])
    assert part.table == whole.table.filter(pc.is_in(whole.table["iteration"], pa.array([2, 3, 4, 9], pa.int32())))


def test_an_exception_leaves_nothing_behind_and_the_old_file_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet")
    before = path.read_bytes()

    def job(*iterations: dict[str, Any]) -> None:
        with TraceWriter(path, METADATA) as writer:
            for columns in iterations:
                writer.append(columns)
            raise RuntimeError("job died")

    with pytest.raises(RuntimeError, match="job died"):
        job(rows(0), rows(1))
    with pytest.raises(InputError, match="row 5: start_s = 5"):
        job(rows(0), rows(1, start_s=np.array([2.0, 5.0, 2.0, 3.0]), end_s=np.array([3.0, 4.0, 3.0, 4.0])))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": np.array([0, 0, 1])}, "'rank' must be int32, 4 values"),
        ({"rank": np.array([0.0, 0.5, 1.0, 1.0])}, "'rank' must be int32"),
        ({"seq": 2**40}, "'seq' must be int32"),
        ({"op": np.arange(4)}, "'op' must be"),
        ({"op": np.array(["compute", None] * 2)}, "'op' has empty values"),
        ({"op": np.array(["compute"] * 3)}, "'op' must be .* 4 values: it has 3"),
        ({"end_s": np.full(4, np.nan)}, "row 0: start_s = 0.0, end_s = nan"),
        ({"end_s": np.full(4, np.inf)}, "row 0"),
        ({"delay_s": 0.0}, r"unknown \['delay_s'\]"),
    ],
)
def test_rows_that_do_not_fit_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    path = tmp_path / "t.parquet"
    with pytest.raises(InputError, match=message), TraceWriter(path, METADATA) as writer:
        writer.append(rows(0, **changed))
    with pytest.raises(InputError, match=message):
        Trace.from_columns(rows(0, **changed), METADATA)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept", [10, 0.3, 0.9, -1])
def test_truncated_file(tmp_path: Path, kept: float) -> None:
    path = write(tmp_path / "t.parquet")
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if 0 < kept < 1 else int(kept)])
    for read in (read_trace, load_trace, find_format, import_straggler):
        with pytest.raises(InputError, match=r"t\.parquet: truncated or damaged Parquet file"):
            read(path)


def test_files_that_are_not_parquet(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("rank,iteration\n0,0\n")
    for name, message in (
        ("none", "no such file"),
        ("empty", "empty file"),
        ("text", "not a Parquet file"),
        ("", "not a file"),
    ):
        with pytest.raises(InputError, match=message):
            read_trace(tmp_path / name)


def raw(path: Path, table: pa.Table, metadata: dict[str, Any] | str | None) -> Path:
    text = metadata if isinstance(metadata, str) else json.dumps(metadata)
    pq.write_table(table.replace_schema_metadata(None if metadata is None else {METADATA_KEY: text.encode()}), path)
    return path


def test_wrong_columns_types_and_rows_in_a_file(tmp_path: Path) -> None:
    good = read_trace(write(tmp_path / "t.parquet"))
    content = json.loads(good.metadata.to_json())
    table, rank = good.table, SCHEMA.names.index("rank")
    retyped = table.set_column(rank, "rank", table["rank"].cast(pa.int64()))
    with pytest.raises(InputError, match="type of column 'rank' = 'int64'; allowed: int32"):
        read_trace(raw(tmp_path / "a", retyped, content))
    with pytest.raises(InputError, match=r"missing \['op'\], unknown \['node'\]"):
        read_trace(raw(tmp_path / "b", table.rename_columns({"op": "node"}), content))
    with pytest.raises(InputError, match=r"no metadata 'paceenv\.trace'; columns \['job'"):
        read_trace(raw(tmp_path / "c", table, None))
    reversed_times = table.rename_columns({"start_s": "end_s", "end_s": "start_s"})
    with pytest.raises(InputError, match=r"row 0: start_s = 1\.0, end_s = 0\.0"):
        read_trace(raw(tmp_path / "d", reversed_times, content))
    holes = table.set_column(rank, pa.field("rank", pa.int32()), pa.array([None] * table.num_rows, pa.int32()))
    with pytest.raises(InputError, match="'rank' has empty values"):
        read_trace(raw(tmp_path / "e", holes, content))
    shuffled = table.select(SCHEMA.names[::-1])
    assert read_trace(raw(tmp_path / "f", shuffled.drop_columns(["chunk", "bytes"]), content)) == good


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 4}, "schema_version = 4; allowed: 1 to 3"),
        ({"schema_version": "1"}, "schema_version = '1'"),
        ({"ranks": [{"stage": 0}]}, "each with an integer 'rank'"),
        ({"job": None}, "job: an object"),
        ({"source": 3}, "source: a string"),
        ("{", "metadata is not JSON"),
        ("[]", "allowed: a JSON object"),
    ],
)
def test_metadata_is_checked(tmp_path: Path, change: dict[str, Any] | str, message: str) -> None:
    good = read_trace(write(tmp_path / "t.parquet"))
    metadata = change if isinstance(change, str) else json.loads(good.metadata.to_json()) | change
    with pytest.raises(InputError, match=message):
        read_trace(raw(tmp_path / "t.parquet", good.table, metadata))


def straggler_columns() -> dict[str, Any]:
    """Two stages of two data-parallel ranks; the time restarts in the second step, and its rows come first."""
    per_worker = [
        ("params-all-gather", 0.0, 0.5, 0, 0, -1),
        ("forward-compute", 0.5, 1.0, 0, 0, 0),
        ("forward-send", 1.5, 0.5, 0, -1, -1),
        ("forward-compute", 1.5, 1.0, 1, 0, 1),
        ("forward-send", 2.5, 0.25, 1, -1, -1),
        ("embedding-grads-all-reduce", 2.75, 0.25, 0, -1, -1),
    ]
    table = [
        (dp_rank, stage, 10 * stage + dp_rank, step, *row)
        for step in (7, 4)
        for stage in (1, 0)
        for dp_rank in (0, 1)
        for row in per_worker
    ]
    names = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id")
    columns = {name: np.array(values) for name, values in zip(names, zip(*table, strict=True), strict=True)}
    return columns | {"gmc": np.full(len(table), -1)}


def test_straggler_import(tmp_path: Path) -> None:
    path = tmp_path / "trace-XY.parquet"
    pq.write_table(pa.table(straggler_columns()), path)
    (tmp_path / "meta-XY.yaml").write_text("dp_size: 2\npp_size: 2\n")
    assert find_format(path) == "straggler trace"
    trace = load_trace(path)
    assert trace.metadata.job == {"name": "XY", "dp_size": 2, "pp_size": 2}
    assert trace.metadata.of_ranks("stage") == {0: 0, 1: 0, 10: 1, 11: 1}
    assert trace.metadata.of_ranks("dp_rank") == {0: 0, 1: 1, 10: 0, 11: 1}
    assert trace.column("iteration").tolist() == [4] * 24 + [7] * 24
    mine = (trace.column("rank") == 11) & (trace.column("iteration") == 7)
    assert trace.column("seq")[mine].tolist() == [0, 1, 2, 3, 4, 5]
    assert trace.column("group")[mine].tolist() == [1, -1, -1, -1, -1, 3]
    assert trace.column("micro_batch")[mine].tolist() == [-1, 0, -1, 1, -1, -1], "the last stage sends to nobody"
    first_stage = (trace.column("rank") == 1) & (trace.column("iteration") == 7)
    assert trace.column("micro_batch")[first_stage].tolist() == [-1, 0, 0, 1, 1, -1]
    assert trace.column("chunk")[first_stage].tolist() == [-1, 0, 0, 0, 0, -1]
    np.testing.assert_allclose(trace.column("start_s")[mine], [3.0, 3.5, 4.5, 4.5, 5.5, 5.75])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"duration": np.full(48, -1.0)}, "row 0: .*end_s = -1"),
        ({"start_ts": np.full(48, np.nan)}, "'start_ts' has empty or infinite values"),
        ({"rank": np.full(48, 3)}, r"more than one \(dp_rank, stage\)"),
        ({"step": np.full(48, 0.5)}, "a column has another type: Float value 0.50* was truncated"),
        ({"optype": None}, r"straggler trace \(columns|no columns \['optype'\]"),
        ({"mb_id": [None] * 48}, "'mb_id' has empty or infinite values"),
    ],
)
def test_straggler_import_refuses(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    columns = straggler_columns() | change
    path = tmp_path / "trace-XY.parquet"
    pq.write_table(pa.table({name: column for name, column in columns.items() if column is not None}), path)
    for read in (load_trace, import_straggler):
        with pytest.raises(InputError, match=message):
            read(path)
