"""Ranks that a script starts by itself have the launcher's agent too, and every other child process is as before."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import pytest
from commands import ROOT, python


def launched(script: Path, *arguments: str, folder: Path, agent: str = "") -> str:
    """Run a script under the launcher (``agent`` are its options); returns what was printed."""
    ended = python("-W", "ignore", "-m", "paceenv.live", *agent.split(), script, *arguments, folder=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text).lstrip())
    return path


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
    printed = launched(path, folder=tmp_path, agent="--out run")
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
    paths = os.pathsep.join([str(theirs), str(ROOT)])
    seen = []
    for before in ([], ["-m", "paceenv.live"]):
        ended = python(*before, path, folder=tmp_path, PYTHONPATH=paths)
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
    found = {"mode": "nonsense", "root": str(ROOT), "process": 0, "policy": None}
    for settings, lines in (({"mode": "nonsense"}, 0), (found, 1)):
        environ = {"PYTHONPATH": str(ROOT / "live" / "children"), "PACEENV_LIVE_SETTINGS": json.dumps(settings)}
        ended = python(path, folder=tmp_path, **environ)
        assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
        assert ended.stderr.count("could not be attached") == ended.stderr.count("\n") == lines, ended.stderr
