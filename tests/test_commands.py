"""The command line as a user meets it: results as JSON, one clear line for bad input and whatever lies at a path,
nothing half-written."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from traced_jobs import job_of, json_of

from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.core.limits import LIMITS
from paceenv.core.trace import write_trace
from paceenv.policies.names import released
from paceenv.trainers.evaluation import evaluate_command
from paceenv.trainers.evaluation.suites import load_suite
from paceenv.ui import output


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert application.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{heading}:\n" in text for heading in ("look at a job", "the simulator", "try it"))
    assert all(f"\n  {name}" in text for name in application.SUMMARIES)
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert set(application.SUMMARIES) == set(project["entry-points"][application.GROUP]), "each has its line"


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a command meets it only after it has begun."""
    monkeypatch.setitem(sys.modules, "stable_baselines3.common.logger", None)
    monkeypatch.delitem(sys.modules, "paceenv.trainers.training.training_run", raising=False)
    with pytest.raises(InputError, match=r"paceenv train needs stable_baselines3.*: pip install .*\[train\]"):
        application.run(["train", "demo", "--out", "unused"])


def test_simulate_prints_what_it_promises() -> None:
    summary = json_of("simulate", "unequal-slack", "--iterations", "400", "--seeds", "2")
    step = summary["step_time_s"]
    assert set(step) == {"mean", "sd", "cv", "p50", "p95", "p99"}
    assert summary["throughput_samples_per_s"] == pytest.approx(256 * 8 / step["mean"])
    assert (summary["nodes"], summary["policy"], summary["iterations"], summary["seeds"]) == (8, "passive", 400, 2)
    assert summary["mean_delay_s"] == 0.0
    assert step["mean"] == pytest.approx(summary["ideal_step_time_s"], rel=0.02), "noise keeps its groups apart, too"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulat", "null-jitter"], "no command simulat, and no such file or folder; did you mean simulate"),
        (["nosuch.log"], "nosuch.log: no such file"),
        (["simulate", "null-jitter", "--set", "noise.jiter_cv=0.1"], "did you mean jitter_cv"),
        (["simulate", "null-jitter", "--nodes", "0"], "--nodes"),
        (["simulate", "null-jitter", "--iterations", "-3"], "--help"),
        (["simulate", "null-jitter", "--policy", "pasive"], "did you mean passive"),
        (["simulate", "null-jitter", "--iterations", "1000000000", "--seeds", "1000"], "at most"),
        (["evaluate", "passive", "--suite", "dem"], "did you mean demo"),
        (["train", "demo", "-o", "unused", "--set", "sb3.learning_rat=1"], "did you mean learning_rate"),
        (["train", "paceenv/Pacing-v0", "-o", "unused"], "neither a file nor one of configs/train: demo"),
        (["evaluate", "learnt"], "clairvoyant, best-static, module:Class or a .safetensors file; did you mean"),
        (["evaluate", "passive", "--watch", "."], ".: is a folder; allowed: the name of a file"),
        (
            ["evaluate", "passive", "--json", __file__],
            "test_commands.py: is there, and no such answer; allowed: a new file",
        ),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        application.run(arguments)
    assert not Path("unused").exists()
    assert not Path("unused.yaml").exists()


def test_a_wrong_policy_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_command, "search_static", None)
    with pytest.raises(InputError, match=r"did you mean learned\?"):
        application.run(["evaluate", "best-static", "lerned"])


def test_bad_input_is_exit_code_2_on_the_error_stream() -> None:
    code = "from paceenv.cli.application import main; main()"
    result = subprocess.run([sys.executable, "-c", code, "simulate", "nowhere"], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("paceenv: error: nowhere")
    assert result.stderr.count("\n") == 1


def test_evaluate_pairs_policies_on_a_suite() -> None:
    options = ["--suite", "nulls", "--split", "validation", "--seeds", "4", "-i", "200"]
    answer = json_of("evaluate", "static", "paper", *options)
    rows, (paired,) = answer["rows"], answer["paired"]
    assert (paired["policy"], paired["against"]) == ("static", "paper")
    assert paired["ci95"][0] <= paired["throughput_gain"] <= paired["ci95"][1]
    cases = [case.name for case in load_suite("nulls").only(["validation"]).cases]
    assert {row["policy"] for row in rows} == {"passive", "static", "paper"}
    assert {row["cluster"] for row in rows} == set(cases)
    assert [row["policy"] for row in answer["means"]] == ["passive", "static", "paper"]
    for row in rows:
        assert set(row) == {
            *("suite", "cluster", "ranks", "split", "null", "policy"),
            *("throughput_gain", "ci95", "gains", "cv", "cv_passive", "gap_closed", "gap_ci95"),
            *("tenants_gain", "limits"),
        }
        assert row["limits"] == asdict(LIMITS)
        assert sum(row["gains"]) / 4 == pytest.approx(row["throughput_gain"])
        assert (row["suite"], row["split"], row["null"], row["gap_closed"]) == ("nulls", "validation", True, None)
        low, high = row["ci95"]
        assert low <= row["throughput_gain"] <= high
        if row["cluster"] in {"jitter-16", "alone-16"}:
            assert row["throughput_gain"] <= 1e-9, "no policy can gain where nothing is shared"


def test_evaluate_says_what_a_policy_may_have_been_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert application.run(["evaluate", "paper", "--suite", "nulls", "--seeds", "2", "-i", "60"]) == 0
    said = "12 train, 19 validation clusters; the policy may have been trained on those of train: --split validation"
    assert said in " ".join(capsys.readouterr().out.split())


def test_evaluate_tells_files_of_one_name_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / folder / "policy.safetensors" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_bytes(released().read_bytes())
    options = ["--suite", "demo", "--seeds", "2", "-i", "60", "--limit", "cap_share=0.2"]
    drawn, answer = tmp_path / "side-by-side.html", tmp_path / "scores.json"
    made = ["--watch", str(drawn), "--json", str(answer)]
    assert application.run(["evaluate", *map(str, paths), *options, *made]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert {row["policy"] for row in json.loads(answer.read_text())["rows"]} == {"passive", *map(str, paths)}
    same = f"{paths[0]} against {paths[1]}, paired, weighted mean: +0.00% [+0.00%, +0.00%]"
    assert same in printed, "they see the same noise"
    assert f"{paths[1]}: weighted mean gain where pacing may pay +" in printed
    assert "2 seeds x 60 iterations" in printed
    shown, mean = drawn.read_text(), "policy: mean step"
    assert [shown.count(text) for text in ("<svg", "without pacing: mean step", mean)] == [3, 3, 6], "one a cluster"
    assert {row["policy"] for row in json_of("evaluate", paths[0], *options)["rows"]} == {"passive", "policy"}


def test_a_score_table_fits_a_screen_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    policies = ["static:phase_shift=0.05/0.05,stagger=0.5/0.2", "clairvoyant"]
    found = SimpleNamespace(best=lambda: policies[0])
    monkeypatch.setattr(evaluate_command, "search_static", lambda *args: found)
    assert application.run(["evaluate", "best-static", *policies, "--suite", "demo", "--seeds", "2", "-i", "60"]) == 0
    printed = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    rows = [line for line in printed.splitlines() if line.startswith("│")]
    for name, lines in ((" static:phase_shift=0.05/0.05,", 4), ("  stagger=0.5/0.2", 4), (" clairvoyant", 4)):
        assert [row[2:].partition("│")[0].rstrip() for row in rows].count(name) == lines, "whole"
    assert sum(bool(re.search(r"│ +[-+][\d.]+% \[[-+][\d.]+, [-+][\d.]+\] │", row)) for row in rows) == 8
    assert "In a wider window: tenants, CV, delay." in printed
    assert f"\nbest-static is {policies[0]}\n" in printed


def test_commands_that_need_a_trace_refuse_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("".join(f"iter {i}: loss 3.0, time {100 + i % 7}.00ms\n" for i in range(100)))
    for command in ("report", "calibrate"):
        with pytest.raises(InputError, match="step times are no trace of ranks; paceenv diagnose"):
            application.run([command, str(log), "-o", str(tmp_path / "cluster.html")])


def test_silent_work_is_reported_on_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "FIRST_S", 0.01)
    said = ""
    with output.progress("work", 4.0) as done:
        done(0.0)
        done(1.0)
        deadline_s = time.monotonic() + 60.0
        while not said and time.monotonic() < deadline_s:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert re.fullmatch(r"work: 25 %, \d+ s so far\n", said), "the next line comes ten seconds later"


COMMANDS = (
    "simulate {} -i 3 --seeds 1", "calibrate {} -o {out}/c.yaml", "calibrate {trace} --base {} -o {out}/c.yaml",
    "calibrate {trace} --probe {} -o {out}/c.yaml", "diagnose {} --no-simulate", "{}", "whatif {} --replace-rank 1",
    "report {} -o {out}/r.html", "evaluate {}", "evaluate paper --suite {}", "train {} -o {out}/run",
    "train --job {} -o {out}/run", "sweep {} -o {out}/sweep", "live status {}", "live set {} --mode observe",
    "testbed {} -o {out}/testbed",
)  # fmt: skip
"""Command lines; ``{}`` is what is tried."""
BAD = ("empty folder", "folder of others", "deep folder", "s.yaml", "binary.yaml", "empty.yaml", "no.yaml", "no*.yaml")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with whatever is bad, and a trace."""
    root = tmp_path_factory.mktemp("places")
    for name in ("empty folder", "folder of others", "deep folder/within"):
        (root / name).mkdir(parents=True)
    (root / "folder of others" / "note.md").write_text("# no recording\n")
    (root / "folder of others" / "x.bin").write_bytes(bytes(range(256)))
    (root / "binary.yaml").write_bytes(bytes(range(256)) * 16)
    (root / "empty.yaml").write_bytes(b"")
    with socket.socket(socket.AF_UNIX) as unreadable:  # opening it fails, for root as well
        unreadable.bind(str(root / "s.yaml"))
    write_trace(job_of(np.tile([1.0, 1.0, 1.0, 2.0], (20, 1))), root / "run.parquet")
    return root


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_path_gives_a_traceback(command: str, bad: str, places: Path, tmp_path: Path) -> None:
    """One line that names the path, and exit code 2, which is what InputError becomes."""
    given = {"{}": places / bad, "{trace}": places / "run.parquet"}
    words = [str(given.get(word, word)).replace("{out}", str(tmp_path)) for word in command.split()]
    with pytest.raises(InputError, match=re.escape(bad)):
        application.run(words)
    assert list(tmp_path.rglob("*.*")) == [], "nothing is left half-written"
