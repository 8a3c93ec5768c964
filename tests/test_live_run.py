"""``paceenv live run``: one command for torchrun, srun and a rank."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from pathlib import Path

import commands
import pytest

from paceenv.core.errors import InputError
from paceenv.live.live_command import application
from paceenv.live.record.run_folder import RunFolder
from paceenv.live.record.summary import summarise
from paceenv.live.start import run_command
from paceenv.live.start.run_command import Split, is_rank, split

MAIN = "import sys; from paceenv.cli.application import main; sys.argv[0] = 'paceenv'; main()"


@pytest.mark.parametrize(
    ("arguments", "launcher", "agent", "script"),
    [
        ("train.py --lr 1", "", "", "train.py --lr 1"),
        ("--nproc-per-node 2 --out d train.py", "--nproc-per-node 2", "--out d", "train.py"),
        ("--mode off --role=r -- a.py -- --mode x", "--role=r", "--mode off", "a.py -- --mode x"),
        ("-t 3 --policy learned -m pkg.train --nnodes 9", "-t 3", "--policy learned -m", "pkg.train --nnodes 9"),
        ("--rdzv-conf a=1,b=2 --cap-s 0.5 a.py -m x", "--rdzv-conf a=1,b=2", "--cap-s 0.5", "a.py -m x"),
    ],
)
def test_options_of_torchrun_and_of_the_agent_may_be_mixed(
    arguments: str, launcher: str, agent: str, script: str
) -> None:
    assert split(arguments.split()) == Split(launcher.split(), agent.split(), script.split())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--bogus 2 a.py", "no such option: --bogus"),
        ("--no-python ls", "--no-python: the agent needs a Python script"),
        ("missing.py", "script missing.py: no such file"),
        ("--nproc-per-node -2 train.py", "--nproc-per-node = '-2'; allowed: a number of ranks"),
        ("--nproc-per-node 2 --out train.py/run train.py", "train.py is none that can be written to"),
        ("--mode canary --policy lerned train.py", "mode canary cannot be entered: policy lerned: no such"),
        ("--mode shadow train.py", "mode shadow cannot be entered: no policy was given"),
        ("--mode canary --candidates slack;nope train.py", "cannot be entered"),
    ],
)
def test_a_mistake_ends_the_launch_before_anything_starts(
    arguments: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(file: str, words: list[str]) -> None:
        raise AssertionError("started")

    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", never)
    with pytest.raises(InputError, match=re.escape(problem)):
        application(args=["run", *arguments.split()], prog_name="paceenv live", standalone_mode=False)


def became(monkeypatch: pytest.MonkeyPatch, folder: Path, arguments: str, **environ: str) -> list[str]:
    """What the command becomes, after the interpreter."""
    (folder / "train.py").touch()
    monkeypatch.chdir(folder)
    for name in [n for n in os.environ if n.startswith(("SLURM", "PET_", "RANK", "WORLD_SIZE", "LOCAL_RANK"))]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    class Became(Exception):
        pass

    def become(file: str, words: list[str]) -> None:
        raise Became(words)

    monkeypatch.setattr(run_command.os, "execv", become)
    monkeypatch.setattr(run_command.os, "environ", dict(os.environ))
    with pytest.raises(Became) as found:
        application(args=["run", *arguments.split()], prog_name="paceenv live", standalone_mode=False)
    words: list[str] = found.value.args[0]
    assert words[0] == sys.executable
    return words[1:]


LAUNCH = ["-m", "torch.distributed.run"]


def test_alone_it_launches_on_one_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = "--nproc-per-node 2 --mode shadow --policy paper"
    found = became(monkeypatch, tmp_path, f"{options} train.py --lr 1")
    launcher = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node", "2"]
    assert found == [*LAUNCH, *launcher, "train.py", "--lr", "1"]
    settings = json.loads(os.environ["PACEENV_LIVE_SETTINGS"])
    assert (settings["mode"], settings["policy"], settings["process"]) == ("shadow", "paper", -os.getpid())


def test_a_rank_runs_in_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rank = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    found = became(monkeypatch, tmp_path, "--out d -m pkg.train --lr 1", **rank)
    assert found == ["-m", "pkg.train", "--lr", "1"]
    settings = json.loads(os.environ["PACEENV_LIVE_SETTINGS"])
    assert (settings["out"], settings["job"], settings["process"]) == (str(tmp_path / "d"), "pkg.train", os.getpid())
    assert is_rank({"RANK": "0", "WORLD_SIZE": "2"})
    assert not is_rank({"RANK": "0", "WORLD_SIZE": "2", "PET_NNODES": "2"})  # a node's, for the launcher in it
    assert not is_rank({})


def test_a_task_of_srun_is_a_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert became(monkeypatch, tmp_path, "--nproc-per-node 1 train.py", **batch_script)[:2] == LAUNCH
    assert became(monkeypatch, tmp_path, "train.py", **task) == ["train.py"]
    assert became(monkeypatch, tmp_path, "--nproc-per-node 1 train.py", **task)[:2] == LAUNCH


def test_a_rank_runs_without_its_policy_file_but_not_without_a_policy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert became(monkeypatch, tmp_path, "--mode canary --policy gone.safetensors train.py", **rank) == ["train.py"]
    with pytest.raises(InputError, match="mode canary cannot be entered: no policy was given"):
        became(monkeypatch, tmp_path, "--mode canary train.py", **rank)


def test_a_kill_file_that_exists_is_announced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stop").touch()
    became(monkeypatch, tmp_path, "--nproc-per-node 1 --kill-file stop train.py")
    assert f"warning: the kill file {tmp_path / 'stop'} exists" in capsys.readouterr().err


WAITS = "rank 1 has not started the collective that rank 0 waits in"
WAITED = (
    "rank 1 had not started the collective that rank 0 waited in; the job ended before its first step; rank 1 was at"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "act", "end", "exit_code", "page", "log"),
    [
        (
            0,
            "time.sleep(12)",
            "os.kill(os.getpid(), 9)",
            -9,
            f"{WAITED} train.py:12, <module>",
            f"{WAITS}.*; it is at train.py:12, <module>; py-spy dump",
        ),
        (
            60,
            "ctypes.PyDLL(None).sleep(12)",  # holds Python's lock
            "sys.exit(3)",
            3,
            "rank 1 raised SystemExit: 3 (train.py:17), after 100 iterations",
            rf"{WAITS}(.|\n)*: steps go on; that one took 1[12].* s$",
        ),
    ],
)
def test_a_rank_that_hangs_or_ends_is_named_and_the_report_is_headed_by_the_script(
    step: int, act: str, end: str, exit_code: int, page: str, log: str, tmp_path: Path
) -> None:
    script = """
        import ctypes, os, sys, time, torch
        import torch.distributed as dist
        from paceenv.live.record import course
        course.SILENT_S = 6.0  # half a minute
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(100):
            time.sleep(0.05)
            if step == {step} and dist.get_rank() == 1:
                {act}
                if step == 0: {end}
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
        if dist.get_rank() == 1:
            {end}
        dist.barrier()
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script.format(step=step, act=act, end=end)).lstrip())
    ended = commands.python(
        "-c", MAIN, "live", "run", "--nproc-per-node", "2", "--out", "run", "train.py", folder=tmp_path
    )
    assert ended.returncode == 1
    assert "\ntrain.py FAILED\n" in ended.stderr
    assert re.search(rf"Root Cause.*\n.*\n.*\n.*\n  rank      : 1 .*\n  exitcode  : {exit_code} ", ended.stderr)
    run = RunFolder(tmp_path / "run")
    said = (run.path / "summary.txt").read_text() + summarise(run.statuses(run.latest()))  # before a step SIGTERM kills
    assert page in " ".join(said.split())
    assert re.search(log, ended.stderr, re.MULTILINE)
