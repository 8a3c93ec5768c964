"""Starts a process in its own network, mount and process namespaces; they end with it, and with its parent.

A process namespace ends with its first process: the kernel kills every other process in it. With the last one the
network namespaces, interfaces and queues disappear. So no clean-up depends on code that may itself be killed.
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
"""The needed tools, and Debian's packages for them."""
ENDS_S = 30.0
"""Longest wait for the end of a process that has reported its end."""


def missing() -> str:
    """The missing requirements of a testbed on this machine, in words; "" if there are none."""
    lacking = {f"{tool} (apt-get install {package})" for tool, package in TOOLS.items() if shutil.which(tool) is None}
    return ", ".join(sorted(lacking) + (["root's rights"] if os.geteuid() else []))


def start(request_file: Path, *, outlives_us: bool = False, log: Path) -> subprocess.Popen[str]:
    """Start :mod:`paceenv.live.testbed.inside` with a request; it reports on ``stdout``.

    Args:
        request_file: the request, a JSON file.
        outlives_us: otherwise the process is killed when the calling thread ends.
        log: the file for its error stream.

    Raises:
        InputError: a tool or root's rights are missing.
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
            env=os.environ | {"PYTHONSAFEPATH": "1"},  # the start folder may have a package of the same name
        )


def events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The events that the process reports, as they come. Raises InputError for the event ``failed``."""
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "failed":
            raise InputError(event["reason"])
        yield event


def ended(process: subprocess.Popen[str]) -> None:
    """Wait, at most ``ENDS_S``, until it and all processes in its namespaces have ended."""
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
    """Stop waiting for a process that outlives us."""
    if process.stdout is not None:
        process.stdout.close()
    process.returncode = 0  # else subprocess complains at exit that it still runs
