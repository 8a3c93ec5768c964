"""Runs a command to its end or to its deadline; nothing that it leaves running can hold the test up.

Output goes through files: with pipes, the deadline of :func:`subprocess.run` waits for every process that still has
one open, and ranks whose launcher is killed do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0
_ENDS_S = 10.0
"""What a command that is asked to end is given before it is killed; torchrun ends its ranks meanwhile."""


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> subprocess.CompletedProcess[str]:
    """Run ``command``; past the deadline it is ended and the test fails with what was printed."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        nothing = subprocess.DEVNULL
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=nothing, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            process.wait(deadline_s)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            if process.returncode is None:
                _end(process)
        printed = [file.seek(0) or file.read().decode(errors="replace") for file in (output, errors)]
    assert not late, f"not through after {deadline_s:g} s: {command}\n{printed[0]}\n{printed[1]}"
    return subprocess.CompletedProcess(command, process.returncode, *printed)


def python(*arguments: str | Path, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter in ``folder`` with this checkout, outside of any launcher."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PACEENV", "SLURM", "PET_"))}
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return run([sys.executable, *arguments], cwd=folder, env=inherited | settings | environ)


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_ENDS_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
