"""``-m paceenv.live``: a script runs as it does without it, and has the agent as soon as it has an optimizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, python
from live_jobs import run_ranks
from live_train import train

from paceenv.core.errors import InputError
from paceenv.live.options import OPTIONS, Options
from paceenv.live.record.run_folder import RunFolder
from paceenv.live.start.run_command import main

LOOKS_AROUND = """
    '''What a script can see of how it was started.'''
    import sys
    print(sys.argv, sys.path, __name__, __doc__, __file__, __package__, sorted(globals()), __spec__ and __spec__.name)
    print(sys.modules["__main__"].__dict__ is globals(), sys.excepthook, sys.flags)
    print([name for name in sys.modules if name.partition(".")[0] in ("paceenv", "numpy", "torch", "typer")])
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip())
    return path


def assert_same(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same output, errors and exit code with the launcher as without it."""
    plain = python(*arguments, folder=folder)
    launched = python("-m", "paceenv.live", "--mode", "shadow", "--policy", "paper", *arguments, folder=folder)
    assert (launched.stdout, launched.stderr) == (plain.stdout, plain.stderr)
    assert launched.returncode == plain.returncode
    return plain


@pytest.mark.parametrize("form", ["link", "module"])
def test_a_script_sees_what_it_always_sees(form: str, tmp_path: Path) -> None:
    script = write(tmp_path / "inner" / "train.py", LOOKS_AROUND)
    arguments: Sequence[str | Path] = [script.relative_to(tmp_path)]
    if form == "link":
        (tmp_path / "link.py").symlink_to(script)
        arguments = ["link.py"]
    else:
        arguments = ["-m", "inner.train"]
    seen = assert_same(tmp_path, *arguments, "--mode", "theirs", "-m", "x", "--help")
    assert "--help" in seen.stdout
    assert seen.returncode == 0, seen.stderr


@pytest.mark.parametrize("ending", ["import sys; sys.exit(3)", "def f():\n    raise ValueError('bad')\nf()"])
def test_a_script_ends_as_it_always_ends(ending: str, tmp_path: Path) -> None:
    write(tmp_path / "train.py", ending)
    assert_same(tmp_path, "train.py")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--cap-s", "30", "train.py"], ["cap_s = 30.0", "0 to 10"]), (["--lr", "3", "train.py"], ["--lr"])],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str],
    named: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path / "train.py", "print('started')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paceenv.live", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert all(name in err for name in named), err


@pytest.mark.parametrize(
    "option", [o for o in OPTIONS if o.metadata["meaning"].allowed], ids=lambda option: option.name
)
def test_an_option_is_checked_as_it_is_described(option: Field[Any]) -> None:
    means = option.metadata["meaning"]
    for value in (option.default, *means.choices):
        Options(**{option.name: value})
    for value in ("no such choice", means.low - 1, means.high + 1):
        with pytest.raises(InputError, match=f"^live: {option.name} = .*; allowed: .*{means.allowed}"):
            Options(**{option.name: value})


PROBE = """
    import json, os, sys
    seen = {"numpy": "numpy" in sys.modules, "torch": "torch" in sys.modules}
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    before = torch.optim.Optimizer.__init__
    seen["threads"] = torch.get_num_threads()
    seen["agent before"] = "paceenv.live.agent" in sys.modules
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    seen["agent after"] = "paceenv.live.agent" in sys.modules
    seen["init"] = torch.optim.Optimizer.__init__.__code__.co_filename.endswith("optimizer.py")
    optimizer.step()
    try:
        from paceenv.live.agent import attached
        agent = attached()
    except ImportError:
        agent = None
    seen["state"] = agent and agent.state
    seen["job"] = agent and agent.summary()["job"]
    seen["policy"] = agent and agent.summary()["policy"]["source"]
    print(json.dumps(seen))
"""


def probe(folder: Path, *options: str, **environ: str) -> tuple[Any, str]:
    """What a script with an optimizer finds, and what was said."""
    script = write(folder / "train.py", PROBE)
    ended = python("-m", "paceenv.live", *options, script, folder=folder, OMP_NUM_THREADS="2", **environ)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), ended.stderr


@pytest.mark.slow
def test_the_agent_comes_with_the_first_optimizer_and_pytorch_is_the_script_s_to_import(tmp_path: Path) -> None:
    seen, _ = probe(tmp_path, "--mode", "shadow", "--policy", "paper")
    expected = {"numpy": False, "torch": False, "threads": 1, "agent before": False, "agent after": True, "init": True}
    assert seen == expected | {"state": "shadow", "job": "train", "policy": "paper"}


@pytest.mark.slow
def test_the_kill_switch_leaves_nothing_of_the_agent(tmp_path: Path) -> None:
    seen, said = probe(tmp_path, "--mode", "active", "--policy", "paper", PACEENV_LIVE="off")
    assert (seen["agent after"], seen["state"]) == (False, None)
    assert said == "paceenv live run: PACEENV_LIVE=off switches the agent off, as any value but on and 1 does\n"


@pytest.mark.slow
def test_the_kill_file_is_where_the_job_was_launched_wherever_the_script_goes(tmp_path: Path) -> None:
    script = """
        import os, pathlib, time, torch
        from paceenv.live.agent import attached
        before = pathlib.Path("stop").absolute()
        os.chdir("/")
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        until_s = time.monotonic() + 60.0
        while attached().state != "off" and time.monotonic() < until_s:
            optimizer.step()
            before.touch()
            time.sleep(0.01)
        print(attached().reason)
    """
    write(tmp_path / "train.py", script)
    ended = python("-m", "paceenv.live", "--kill-file", "stop", "train.py", folder=tmp_path)
    assert ended.stdout == f"stopped by the kill file {tmp_path}/stop\n", ended.stderr


@pytest.mark.slow
def test_both_attempts_of_an_elastic_restart_are_kept(tmp_path: Path) -> None:
    plain = run_ranks(train, 2, tmp_path, fails=False)  # without torchrun and without the agent
    out = str(tmp_path / "run")
    arguments = ["-m", "paceenv.live", "--out", out, "-m", "live_train", str(tmp_path), "--fail-first"]
    environ = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "helpers"), str(ROOT)]),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else gloo may find the first attempt's addresses in the second
    }
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    ended = python(*torchrun, "--monitor-interval=0.1", *arguments, folder=tmp_path, **environ)
    assert ended.returncode == 0, ended.stderr
    assert "RuntimeError: as asked for" in ended.stderr
    assert "live/start/run_command.py" not in ended.stderr
    written = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [(rank["attempt"], rank["agent"], rank["losses"]) for rank in written] == [
        ("1", True, losses) for losses in plain
    ]
    run = RunFolder(tmp_path / "run")
    first, second = run.attempts()
    assert {s["rank"]: s["iterations"] for s in run.statuses(first)}[1] == 10
    page = (tmp_path / "run" / first / "summary.txt").read_text()
    assert "rank 1 raised RuntimeError: as asked for (live_train.py:30), after 10 iterations; after it, rank 0" in page
    assert "on time" not in page
    assert [(s["rank"], s["job"], s["state"], s["final"], s["iterations"]) for s in run.statuses(second)] == [
        (rank, "live_train", "observe", True, 20) for rank in range(2)
    ]
    assert "Where the step went" in ended.stderr
    assert all(1 in run.segments(attempt) for attempt in (first, second))


# Ranks that a script starts by itself have the agent, too, and every other child process is as before


@pytest.mark.slow
def test_a_child_that_is_no_rank_is_not_watched_and_a_script_without_an_optimizer_is_told_so(tmp_path: Path) -> None:
    script = """
        import subprocess, sys, torch
        from multiprocessing import get_context

        def sweep():
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(30):
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()

        if __name__ == "__main__":
            if len(sys.argv) > 1:
                sweep()
            else:
                for method in ("fork", "spawn"):
                    process = get_context(method).Process(target=sweep)
                    process.start()
                    process.join()
                    assert process.exitcode == 0
                subprocess.run([sys.executable, __file__, "again"], check=True)
    """
    path = write(tmp_path / "train.py", script)
    ended = python("-W", "ignore", "-m", "paceenv.live", "--out", "run", path, folder=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (ended.stdout + ended.stderr).count("paceenv") == 1
    assert "this process made no optimizer" in ended.stderr
    assert not (tmp_path / "run").exists()


LOOKS = """
    import os, subprocess, sys

    if len(sys.argv) > 1:
        import sitecustomize
        ours = [name for name in sys.modules if name.startswith("paceenv")]
        print(sys.path, ours, sitecustomize.__file__, os.environ.get("THEIRS"))
    else:
        subprocess.run([sys.executable, *{flags}, __file__, "child"])
"""


@pytest.mark.parametrize("flags", [[], ["-I"]])
def test_a_python_child_is_as_before(flags: list[str], tmp_path: Path) -> None:
    theirs = write(tmp_path / "theirs" / "sitecustomize.py", "import os\nos.environ['THEIRS'] = 'yes'").parent
    path = write(tmp_path / "train.py", LOOKS.replace("{flags}", repr(flags)))
    seen = []
    for before in ([], ["-m", "paceenv.live"]):
        ended = python(*before, path, folder=tmp_path, PYTHONPATH=os.pathsep.join([str(theirs), str(ROOT)]))
        seen.append((ended.returncode, ended.stdout, ended.stderr))
    assert seen[0] == seen[1]
    assert ("yes" in seen[0][1]) == (not flags)


@pytest.mark.slow
def test_a_child_with_broken_settings_or_without_the_package_trains_all_the_same(tmp_path: Path) -> None:
    script = """
        import torch
        model = torch.nn.Linear(4, 1)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        print("trained")
    """
    path = write(tmp_path / "train.py", script)
    found = {"mode": "nonsense", "root": str(ROOT), "process": 0, "policy": None}
    for settings, lines in (({"mode": "nonsense"}, 0), (found, 1)):
        environ = {"PYTHONPATH": str(ROOT / "live" / "children"), "PACEENV_LIVE_SETTINGS": json.dumps(settings)}
        ended = python(path, folder=tmp_path, **environ)
        assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
        assert ended.stderr.count("could not be attached") == ended.stderr.count("\n") == lines, ended.stderr
