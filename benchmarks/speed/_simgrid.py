"""SimGrid for the benchmarks: installs it, compiles ``simgrid_job.cpp`` once, and talks JSON with the program.

SimGrid is a Debian package that pip does not have. Its Python interface runs every actor in a thread (12,000
rank-iterations per CPU second at 64 ranks where its C++ does 500,000), so the job is C++.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.sim.engine import compiled

PACKAGES = ("g++", "libsimgrid-dev", "nlohmann-json3-dev")
SOURCE = Path(__file__).with_name("simgrid_job.cpp")
FLOW_BPS = 1e9
"""Capacity of the uplink where a collective is one flow; sizes follow from it, so that only ratios matter."""
_HOW = f"`python -m benchmarks.speed.simgrid --install` as root installs {', '.join(PACKAGES)}"
_QUIET = "--log=root.thres:warning"


def missing() -> str:
    """What is missing to compile and run the job in SimGrid, in one line; empty if nothing."""
    try:
        program()
    except InputError as error:
        return str(error)
    return ""


def program(source: Path = SOURCE) -> Path:
    """The compiled job, made when it or its source is new; raises ``InputError`` where SimGrid is not installed."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    path = compiled.cache_directory().parent / f"simgrid-job-{digest}"
    if path.exists():
        return path
    compiler = shutil.which("g++")
    if compiler is None:
        raise InputError(f"g++: not found; {_HOW}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "job"
        command = [compiler, "-std=c++17", "-O2", "-o", str(made), str(source), "-lsimgrid"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            why = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr[:200])
            raise InputError(f"SimGrid: the job does not compile ({why.strip()}); {_HOW}")
        os.replace(made, path)
    return path


def install() -> None:
    """Install SimGrid and what compiles against it with apt-get; needs root."""
    apt = shutil.which("apt-get")
    if apt is None:
        raise InputError(f"apt-get: not found; allowed: a Debian system, or install {' '.join(PACKAGES)} otherwise")
    if os.geteuid() != 0:
        raise InputError(f"--install: needs root; or have somebody run: apt-get install {' '.join(PACKAGES)}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *PACKAGES]):
        if subprocess.run([apt, *arguments], stdout=2, env=environment, check=False).returncode:
            raise InputError(f"apt-get {' '.join(arguments)}: failed; its output stands above")
    program()


def version() -> str:
    """Which SimGrid the program runs on."""
    said = subprocess.run([str(program()), "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"SimGrid version ([\d.]+)", said)
    return found.group(1) if found else "of unknown version"


def ask(job: dict[str, Any], source: Path = SOURCE) -> tuple[NDArray[np.float64], float]:
    """Run a job in SimGrid: its step times ``(T,)`` in seconds, and the CPU seconds of all but its first step.

    Args:
        job: what the program is told.
        source: of the program.
    """
    text = json.dumps(job)
    result = subprocess.run([str(program(source)), _QUIET], input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"SimGrid ended with {result.returncode}: {result.stderr.strip()[-500:]}")
    answer = json.loads(result.stdout)
    return np.array(answer["step_s"]), float(answer["cpu_s"])
