"""The one way in: files, folders and patterns of any format; the rest is named and skipped."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pyarrow.compute as pc
import pytest
from importer_samples import profile_of, written

from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.diagnosis.answer import find_answer
from paceenv.importers import formats as file_list
from paceenv.importers.formats import list_files
from paceenv.importers.inputs import read_inputs


def profiles(folder: Path, ranks: int = 3) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    return written(folder, {f"rank{rank}.json.gz": profile_of(rank, 0.7 + 0.1 * rank) for rank in range(ranks)})


def test_files_folders_and_patterns_give_the_same_trace(tmp_path: Path) -> None:
    files = profiles(tmp_path / "run" / "profiles")
    expected = read_inputs(files).require_trace()
    assert read_inputs([tmp_path]).require_trace() == expected
    assert read_inputs([tmp_path / "run" / "*" / "rank?.json.gz"]).require_trace() == expected
    assert read_inputs([f"{tmp_path}/**/*.gz", tmp_path, *files]).require_trace() == expected, "each file once"


def test_foreign_files_are_named_in_one_line_a_reason(tmp_path: Path) -> None:
    profiles(tmp_path)
    for name in ("LICENSE", "a.py", "b.py", "c.py", "d.py"):
        (tmp_path / name).write_text("text")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "broken.json").write_text('{"traceEvents": 3}')
    (tmp_path / ".hidden").write_text("text")
    found = read_inputs([tmp_path])
    assert found.trace is not None
    assert [note.replace(f"{tmp_path}/", "") for note in found.notes] == [
        "LICENSE, a.py, b.py and 2 more: unknown format; skipped",
        'broken.json: not a JSON trace: no list "traceEvents" in its first 4 MB; skipped',
        "empty: empty; skipped",
    ]


def test_nothing_usable_is_one_line_with_the_first_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(InputError, match=r"a\.txt: unknown format; allowed: .* \(1 more file cannot be used either\)"):
        application.run(["diagnose", str(tmp_path)])
    assert not capsys.readouterr().out


def test_a_part_that_cannot_be_diagnosed_is_a_note_beside_the_others(tmp_path: Path) -> None:
    written(tmp_path, {f"rank{rank}.json": profile_of(rank) for rank in range(3)})
    log = tmp_path / "train.log"
    log.write_text("".join(f"iter {i}: loss 3.0, time {ms}ms, mfu 1%\n" for i, ms in enumerate((5000, 500, 501, 500))))
    answer = find_answer(read_inputs([tmp_path]))
    assert answer.diagnosis is not None
    assert not answer.steps
    assert "train.log: 3 step times after the warm-up" in answer.notes[-1]
    with pytest.raises(InputError, match="another"):
        find_answer(read_inputs([tmp_path]), "another")
    log.write_text("".join(f"iter {i}: loss 3.0, time {500 + i % 7}ms, mfu 1%\n" for i in range(40)))
    found = read_inputs([tmp_path])
    trace = found.require_trace()
    first = trace.table.filter(pc.equal(trace.table["iteration"], trace.column("iteration")[0]))
    answer = find_answer(replace(found, trace=replace(trace, table=first)))
    assert answer.steps
    assert answer.diagnosis is not None
    assert "one step does not show whether it lasts" in answer.diagnosis.refused


def test_of_two_recordings_of_the_same_ranks_one_is_read(tmp_path: Path) -> None:
    profiles(tmp_path / "iteration_10")
    profiles(tmp_path / "iteration_20", ranks=2)
    found = read_inputs([tmp_path])
    assert len(found.require_trace().metadata.ranks) == 3
    assert [note for note in found.notes if "iteration_20: another recording of the same ranks; skipped" in note]


def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        ("nowhere", "nowhere: no such file or folder"),
        ("no*where", r"no\*where: no file has such a name"),
        ("pipe", "pipe: is no regular file"),
        ("", ": no file; allowed"),
    ):
        with pytest.raises(InputError, match=message):
            list_files([tmp_path / path])
    with pytest.raises(InputError, match="none given"):
        list_files([])
    for name in "abc":
        (tmp_path / name).write_text("x")
    monkeypatch.setattr(file_list, "MAX_FILES", 2)
    with pytest.raises(InputError, match="more than 2 files"):
        list_files([tmp_path])


def test_links_that_lead_in_circles_end(tmp_path: Path) -> None:
    profiles(tmp_path / "run")
    (tmp_path / "run" / "again").symlink_to(tmp_path)
    assert len(list_files([tmp_path])) == 3
