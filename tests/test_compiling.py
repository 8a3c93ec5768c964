"""The first simulation on a machine compiles the engine, and says so."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceenv.cli import application
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import start
from paceenv.sim.engine import compiled


def test_machine_code_is_ready_once_it_is_kept(tmp_path: Path) -> None:
    def advance() -> None:
        """A function that was not compiled in this process."""

    advance.overloads = {}  # type: ignore[attr-defined]
    advance.stats = SimpleNamespace(cache_path=str(tmp_path / "engine"))  # type: ignore[attr-defined]
    assert not compiled.is_ready(advance)
    for folder in ("engine", "engine-of-another-checkout"):
        (tmp_path / folder).mkdir()
    (tmp_path / "engine-of-another-checkout" / "kernel.advance-223.py311.nbi").touch()
    (tmp_path / "engine" / "kernel.advance_programs-245.py311.nbi").touch()
    assert not compiled.is_ready(advance)
    (tmp_path / "engine" / "kernel.advance-223.py311.nbi").touch()
    assert compiled.is_ready(advance)


def test_the_command_line_says_that_it_compiles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = logging.getLogger("paceenv.engine")
    monkeypatch.setattr(engine, "handlers", [])
    monkeypatch.setattr("warnings.showwarning", None)
    monkeypatch.setattr("sys.argv", ["paceenv", "--version"])
    with pytest.raises(SystemExit):
        application.main()
    capsys.readouterr()
    job = start(load_cluster("null-jitter"), [0])
    job.run(job.off(), 1)
    assert not capsys.readouterr().err
    monkeypatch.setattr(compiled, "is_ready", lambda function: False)
    job.run(job.off(), 1)
    assert capsys.readouterr().err.startswith("paceenv: compiling the engine for this machine")
