"""``paceenv analyse``: what lies in a folder is recognised, and the next steps work when typed."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import log_samples
import numpy as np
import pytest
from importer_samples import TABLE, dump_of
from live_samples import record, snapshot
from traced_jobs import job_of

from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.core.files import packaged
from paceenv.core.trace import write_trace
from paceenv.live.record.run_folder import write_status
from paceenv.policies import __path__ as policies_path
from paceenv.trainers.report.recognised import NEXT, recognise

LONG = ("paceenv tailor", "paceenv train", "paceenv sweep", "paceenv testbed", "paceenv evaluate", "paceenv validate")
"""Next steps that take a while or a network of their own; their own tests run them."""


def trace(folder: Path) -> None:
    write_trace(job_of(np.tile([1.0, 1.0, 1.0, 2.0], (20, 1))), folder / "run.parquet")


def log(folder: Path) -> None:
    step_s = 1.0 + 0.02 * np.random.default_rng(1).gamma(2.0, size=200)
    (folder / "train.log").write_text(log_samples.nanogpt(step_s, 1))


def table(folder: Path) -> None:
    (folder / "all_reduce_perf.txt").write_text(TABLE)


def hang(folder: Path) -> None:
    for rank in range(2):
        dump = dump_of(rank, 0.0, timing=False)
        dump["entries"][-1]["state"] = "started"
        dump["entries"] = dump["entries"][: len(dump["entries"]) - rank]
        (folder / f"dump_{rank}").write_text(json.dumps(dump))


def live(folder: Path) -> None:
    for rank in range(2):
        record(folder / "mine", rank=rank, world_size=2)
        write_status(folder / "mine", snapshot(rank, world_size=2))


def cluster(folder: Path) -> None:
    shutil.copy(packaged("clusters") / "unequal-slack.yaml", folder)


def policy(folder: Path) -> None:
    shutil.copy(Path(policies_path[0]) / "learned.safetensors", folder / "mine.safetensors")


def analysed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert application.run([*words, "--json", "-"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("make", "said", "step"),
    [
        (trace, "a trace of 4 ranks", "paceenv whatif {} --replace-rank 3"),
        (log, "1 x log with step times", "paceenv report {} -o report.html"),
        (table, "1 x table of nccl-tests", "paceenv calibrate {}/all_reduce_perf.txt -o links.yaml"),
        (hang, "2 x Flight Recorder dump", "paceenv diagnose {} --json hang.json"),
        (live, "the folder of a live run", "paceenv live trace {}/mine -o trace.parquet"),
        (cluster, "cluster: ", "paceenv simulate {}/unequal-slack.yaml"),
        (policy, "policy file: ", "paceenv explain {}/mine.safetensors"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_folder_is_recognised_and_the_next_steps_work(
    make: Any, said: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "left behind"
    folder.mkdir()
    make(folder)
    monkeypatch.chdir(tmp_path)
    found = analysed(capsys, "analyse", str(folder))
    assert any(line.startswith(said) for line in found["found"]), found["found"]
    assert shlex.split(step.replace("{}", shlex.quote(str(folder)).strip("'").replace(" ", "\\ "))) in [
        shlex.split(one) for one in found["next"]
    ]
    for one in found["next"]:
        if not one.startswith(LONG):
            assert application.run(shlex.split(one)[1:]) == 0, one
    assert application.run([str(folder)]) == 0, "the bare command"
    out = capsys.readouterr().out
    assert all(one in " ".join(out.split()) for one in found["next"])


def test_everything_in_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trace is compared with the table; the dumps are of a hang; the log has a ceiling; one page holds it all."""
    for make in (trace, log, table, hang):
        make(tmp_path)
    page = tmp_path / "out" / "page.html"
    found = analysed(capsys, "analyse", str(tmp_path), "-o", str(page))
    assert len(found["found"]) == 4
    assert found["diagnosis"]["headline"]["pacing"]["claim"] == "gains nothing"
    assert "rank 1 stopped" in found["diagnosis"]["hang"][0]["verdict"]
    assert found["diagnosis"]["step_times"][0]["ceiling"]["value"] > 0.0
    text = page.read_text()
    for said in ("persistent slow rank", "Rank 1 stopped", "GB/s", "paceenv calibrate"):
        assert said in text, said


def test_pacing_on_a_cluster_is_that_of_what_if(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster(tmp_path)
    (rows,) = analysed(capsys, "analyse", str(tmp_path))["pacing"].values()
    gain = {row["policy"]: float(row["gain"].rstrip("%")) for row in rows}
    assert gain["learned"] > 10.0
    assert abs(gain["paper"]) < 5.0


CONFIGS = {"clusters": "cluster", "testbed": "scenario", "suites": "suite", "train": "training", "sweeps": "sweep"}
CONFIGS |= {"contests": "comparison", "targets": "target", "measurements": "measurements"}


@pytest.mark.parametrize("folder", CONFIGS)
def test_every_packaged_config_is_of_its_kind(folder: str) -> None:
    found = recognise([packaged(folder)])
    assert {kind for kind, _ in found.configs} == {CONFIGS[folder]}
    assert not found.recorded
    assert CONFIGS[folder] in NEXT


def test_what_is_no_command_and_no_path_is_refused() -> None:
    with pytest.raises(InputError, match="no command diagnos; did you mean diagnose"):
        application.run(["diagnos"])
    with pytest.raises(InputError, match=r"--out x.pdf: allowed: a file that ends in \.html"):
        application.run(["analyse", ".", "-o", "x.pdf"])
