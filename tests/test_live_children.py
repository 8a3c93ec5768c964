"""Ranks that a script starts by itself have the launcher's agent too, and every other child process is as before."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import commands
import pytest

TESTS = Path(__file__).parent
TRAINS = """
    import os, sys, torch
    import torch.distributed as dist

    def work(rank, port, world):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=rank, world_size=world)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
        dist.destroy_process_group()
"""
MP = """
    if __name__ == "__main__":
        import socket
        import torch.multiprocessing as mp
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        mp.start_processes(work, (port, 2), 2, start_method=sys.argv[1])
    """


def launched(script: Path, *arguments: str, folder: Path, agent: str = "", **environ: str) -> str:
    """Run a script under the launcher (``agent`` are its options); returns what was printed."""
    command = [sys.executable, "-W", "ignore", "-m", "paceenv.live", *agent.split(), *arguments]
    variables = os.environ | {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"} | environ
    ended = commands.run(command, cwd=folder, env=variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text).lstrip())
    return path


@pytest.mark.slow
def test_every_rank_that_a_script_starts_has_an_agent(tmp_path: Path) -> None:
    path = script(tmp_path, textwrap.dedent(TRAINS) + textwrap.dedent(MP))
    launched(path, str(path), "spawn", folder=tmp_path, agent="--out run --job mine")
    statuses = [json.loads(file.read_text()) for file in sorted((tmp_path / "run").rglob("rank*.json"))]
    assert [status["rank"] for status in statuses] == [0, 1]
    assert len({status["attempt"] for status in statuses}) == 1
    for status in statuses:
        assert (status["world_size"], status["job"], status["final"]) == (2, "mine", True)
        assert status["agents"] == {"count": 2, "complete": True, "reason": ""}
        assert status["regular"] > 30


@pytest.mark.slow
def test_a_child_that_is_no_rank_is_not_watched(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
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
        """,
    )
    printed = launched(path, str(path), folder=tmp_path, agent="--out run")
    assert printed.count("paceenv") == 1, printed  # of the launched process: that it made no optimizer
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
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    script(theirs, "import os\nos.environ['THEIRS'] = 'yes'", "sitecustomize.py")
    path = script(tmp_path, LOOKS.replace("{flags}", repr(flags)))
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(theirs), str(TESTS.parent)])}
    seen = []
    for before in ([], ["-m", "paceenv.live"]):
        ended = commands.run([sys.executable, *before, str(path)], cwd=tmp_path, env=variables)
        seen.append((ended.returncode, ended.stdout, ended.stderr))
    assert seen[0] == seen[1]
    assert ("yes" in seen[0][1]) == (not flags)


@pytest.mark.slow
def test_a_child_with_broken_settings_or_without_the_package_trains_all_the_same(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(4, 1)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        print("trained")
        """,
    )
    folder = str(TESTS.parent / "live" / "children")
    for paths in ([folder], [folder, str(TESTS.parent)]):  # in a checkout the package is where PYTHONPATH says
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PACEENV_LIVE_SETTINGS": '{"mode": "nonsense"}'}
        ended = commands.run([sys.executable, str(path)], cwd=tmp_path, env=variables)
        assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
        assert "Traceback" not in ended.stderr
