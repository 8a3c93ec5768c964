"""Starts a process in network, mount and process namespaces of its own that die with it, and with whoever started it.

A process namespace ends with its first process: the kernel kills every other in it, and with the last one go network
namespaces, interfaces and queues. So nothing has to be cleaned up by code that may itself be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceenv.core.errors import InputError

TOOLS: Mapping[str, str] = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "setpriv": "util-linux"}
"""What is run, and Debian's package that has it."""
ENDS_S = 30.0
"""Longest wait for one that said it was through."""


def missing() -> str:
    """What this machine lacks for a testbed, in words; "" if nothing."""
    lacking = {f"{tool} (apt-get install {package})" for tool, package in TOOLS.items() if shutil.which(tool) is None}
    return ", ".join(sorted(lacking) + (["root's rights"] if os.geteuid() else []))


def start(request_file: Path, *, outlives_us: bool = False, log: Path) -> subprocess.Popen[str]:
    """Start :mod:`paceenv.live.testbed.inside` with a request; what it tells comes on ``stdout``, its errors go to
    ``log``.

    Killed when the calling thread ends, unless it ``outlives_us``. Raises InputError where something is missing.
    """
    if lacking := missing():
        raise InputError(f"testbed: needs Linux with root and iproute2; missing: {lacking}")
    tied = [] if outlives_us else ["setpriv", "--pdeathsig", "KILL"]
    unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
    with log.open("wb") as errors:
        return subprocess.Popen(
            [*tied, *unshare, sys.executable, "-m", "paceenv.live.testbed.inside", str(request_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=outlives_us,
            env=os.environ | {"PYTHONSAFEPATH": "1"},  # a folder called live where we are started is not ours
        )


def events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """What the process tells, as it comes."""
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "failed":
            raise InputError(event["reason"])
        yield event


def ended(process: subprocess.Popen[str]) -> None:
    """Wait until it has ended by itself, and with it everything in its namespaces; not for ever."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENDS_S)


def stop(process: subprocess.Popen[str]) -> None:
    """Kill it, and everything in its namespaces."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def release(process: subprocess.Popen[str]) -> None:
    """Let go of one that outlives us."""
    if process.stdout is not None:
        process.stdout.close()
    process.returncode = 0  # else subprocess complains at exit that it still runs
