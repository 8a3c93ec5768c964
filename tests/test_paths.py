"""Every command that takes files: folders, patterns, what is unreadable or of a wrong kind; one line or an answer."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import numpy as np
import pytest
from traced_jobs import job_of

from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.core.trace import write_trace

COMMANDS = {
    "simulate": ["simulate", "{}", "-i", "3", "--seeds", "1"],
    "calibrate": ["calibrate", "{}", "-o", "{out}/c.yaml"],
    "calibrate with a base": ["calibrate", "{trace}", "--base", "{}", "-o", "{out}/c.yaml"],
    "calibrate with a probe": ["calibrate", "{trace}", "--probe", "{}", "-o", "{out}/c.yaml"],
    "diagnose": ["diagnose", "{}", "--no-simulate"],
    "the bare command": ["{}"],
    "whatif": ["whatif", "{}", "--replace-rank", "1"],
    "report": ["report", "{}", "-o", "{out}/r.html"],
    "evaluate": ["evaluate", "{}"],
    "evaluate on a suite": ["evaluate", "paper", "--suite", "{}"],
    "train": ["train", "{}", "-o", "{out}/run"],
    "train for a job": ["train", "--job", "{}", "-o", "{out}/run"],
    "sweep": ["sweep", "{}", "-o", "{out}/sweep"],
    "live status": ["live", "status", "{}"],
    "live set": ["live", "set", "{}", "--mode", "observe"],
    "testbed": ["testbed", "{}", "-o", "{out}/testbed"],
}
"""Command lines by name; ``{}`` is what is tried."""
BAD = ("empty folder", "folder of others", "deep folder", "socket", "binary", "empty file", "missing", "pattern")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A path of each bad kind, and a trace."""
    root = tmp_path_factory.mktemp("places")
    for name in ("empty folder", "folder of others", "deep folder/within"):
        (root / name).mkdir(parents=True)
    (root / "folder of others" / "note.md").write_text("# no recording\n")
    (root / "folder of others" / "x.bin").write_bytes(bytes(range(256)))
    (root / "binary.yaml").write_bytes(bytes(range(256)) * 16)
    (root / "empty.yaml").write_bytes(b"")
    found = {name: str(root / name) for name in BAD[:3]}
    found |= {"binary": str(root / "binary.yaml"), "empty file": str(root / "empty.yaml")}
    found |= {"missing": str(root / "no.yaml"), "pattern": str(root / "no*.yaml"), "socket": str(root / "s.yaml")}
    with socket.socket(socket.AF_UNIX) as unreadable:  # opening it fails, for root as well
        unreadable.bind(found["socket"])
    write_trace(job_of(np.tile([1.0, 1.0, 1.0, 2.0], (20, 1))), root / "run.parquet")
    return found | {"trace": str(root / "run.parquet")}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_path_gives_a_traceback(command: str, kind: str, places: dict[str, str], tmp_path: Path) -> None:
    """One line that names the path, and exit code 2, which is what InputError becomes."""
    words = [word.replace("{out}", str(tmp_path)).replace("{trace}", places["trace"]) for word in COMMANDS[command]]
    with pytest.raises(InputError, match=re.escape(Path(places[kind]).name)):
        application.run([word.replace("{}", places[kind]) for word in words])
    assert list(tmp_path.rglob("*.*")) == [], "nothing is left half-written"
