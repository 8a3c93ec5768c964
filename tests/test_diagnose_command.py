"""``paceenv diagnose`` and the bare command: what lies there is recognised, and the next steps work when typed."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import log_samples
import numpy as np
import pytest
from importer_samples import dump_of
from live_samples import record, snapshot
from test_bandwidth import LAW, printed
from traced_jobs import job_of, json_of

from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.core.trace import write_trace
from paceenv.live.record.run_folder import write_status


def trace(folder: Path) -> None:
    write_trace(job_of(np.tile([1.0, 1.0, 1.0, 2.0], (20, 1))), folder / "run.parquet")


def pair(folder: Path) -> None:
    trace(folder)
    write_trace(job_of(np.tile([1.0, 1.0, 1.0, 3.0], (20, 1))), folder / "second.parquet")
    (folder / "LICENSE").write_text("text")


def log(folder: Path) -> None:
    step_s = 1.0 + 0.02 * np.random.default_rng(1).gamma(2.0, size=200)
    (folder / "train.log").write_text(log_samples.nanogpt(step_s, 1))


def table(folder: Path) -> None:
    (folder / "all_reduce_perf.txt").write_text(printed(LAW))


def hang(folder: Path) -> None:
    for rank in range(2):
        dump = dump_of(rank)
        dump["entries"][-1]["state"] = "started"
        dump["entries"] = dump["entries"][: len(dump["entries"]) - rank]
        (folder / f"dump_{rank}").write_text(json.dumps(dump))


def live(folder: Path) -> None:
    for rank in range(2):
        record(folder / "mine", rank=rank, world_size=2)
        write_status(folder / "mine", snapshot(rank, world_size=2))


@pytest.mark.parametrize(
    ("make", "said", "steps"),
    [
        (trace, "persistent slow rank", ["paceenv whatif {} --replace-rank 3", "paceenv report {} -o report.html"]),
        (
            pair,
            "2.5 s before, 3.5 s after",
            [
                "paceenv whatif {}/second.parquet --replace-rank 3",
                "paceenv report {}/second.parquet -o report.html",
            ],
        ),
        (log, "ceiling: all that removing variation gains", []),
        (table, "all_reduce among", ["paceenv calibrate {}/all_reduce_perf.txt -o links.yaml"]),
        (hang, "Flight Recorder dumps of 2 of 2 ranks", []),
        (live, "Where the step went", ["paceenv report {} -o report.html"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_folder_is_recognised_and_the_next_steps_work(
    make: Any, said: str, steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = tmp_path / "left behind"
    folder.mkdir()
    make(folder)
    monkeypatch.chdir(tmp_path)
    assert application.run([str(folder)]) == 0, "the bare command"
    printed = capsys.readouterr().out
    assert said in " ".join(printed.split())
    found = [shlex.split(line) for line in printed.partition("\nWith this input\n")[2].splitlines()]
    assert found == [[word.replace("{}", str(folder)) for word in shlex.split(step)] for step in steps]
    for words in found:
        assert application.run(words[1:]) == 0, words


def test_more_than_two_traces_are_all_named(tmp_path: Path) -> None:
    pair(tmp_path)
    write_trace(job_of(np.tile([1.0, 2.0], (20, 1))), tmp_path / "third.parquet")
    named = ", ".join(f"{tmp_path / name}.parquet" for name in ("run", "second", "third"))
    with pytest.raises(InputError) as said:
        application.run([str(tmp_path)])
    assert str(said.value).startswith(f"3 whole traces ({named}); allowed: one of them")
    assert str(said.value).endswith(f": paceenv diagnose {tmp_path / 'run.parquet'}")


def test_no_change_is_offered_that_cannot_be_simulated(tmp_path: Path) -> None:
    trace(tmp_path)
    assert json_of("diagnose", tmp_path, "--no-simulate")["next"] == [f"paceenv report {tmp_path} -o report.html"]


def test_of_a_job_that_hung_the_next_step_is_that_of_the_hang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hang(tmp_path)
    log(tmp_path)
    assert application.run([str(tmp_path)]) == 0
    following = " ".join(capsys.readouterr().out.split()).split("Next: ")[1:]
    assert [one[:12] for one in following] == ["on the hosts"]


def test_a_live_run_is_a_page_and_a_trace(tmp_path: Path) -> None:
    """Its ranks' segments are one trace, which what-if and a report read as well; without them the page is left."""
    live(tmp_path)
    run = tmp_path / "mine"
    found = json_of("diagnose", run, "--no-simulate")
    assert found["runs"][str(run)].startswith("paceenv live: job")
    [lead] = [line for line in found["runs"][str(run)].splitlines() if "of the time, the longest" in line]
    assert found["verdict"].startswith(" ".join(lead.split())), "the verdict leads with what the page says"
    assert found["step_time_s"] > 0.0
    answer = json_of("whatif", run, "--replace-rank", "1")
    assert answer["changed"][0]["change"]["label"] == "rank 1 replaced"
    assert any("no rank of the fitted cluster is persistently slow" in line for line in answer["assumes"])
    assert application.run(["train", "--job", str(run), "-o", str(tmp_path / "trained"), "--seconds", "10"]) == 0
    shutil.copytree(run, tmp_path / "theirs")
    for segment in run.rglob("*.pace"):
        segment.unlink()
    following = json_of("diagnose", run, tmp_path / "theirs", "--no-simulate")["next"]
    assert following == [f"paceenv report {tmp_path / 'theirs'} -o report.html"], "of two runs one has a trace"
    left = json_of("diagnose", run)
    assert left["runs"] == found["runs"]
    assert left["next"] == []
    assert any("no trace yet; its page has the answer" in note for note in left["notes"])
    for status in run.rglob("*.json"):
        status.unlink()
    (run / "note.txt").write_text("x")
    with pytest.raises(InputError, match=r"note\.txt: unknown format"):
        application.run(["diagnose", str(run)])
