"""Testbeds that stay up between commands, each with a file that names the process that holds it up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.live.testbed import private_namespaces
from paceenv.live.testbed.namespaces import host_name
from paceenv.live.testbed.testbed_scenario import Scenario

FOLDER = Path("/run/paceenv-testbed")


@dataclass(frozen=True)
class Standing:
    """A testbed that is up: the process that holds its namespaces, and its start time by the kernel's clock."""

    name: str
    pid: int
    started: int
    hosts: int


def up(scenario: Scenario) -> tuple[Standing, float]:
    """Bring a scenario's network up and leave it up; returns it and the seconds it took. Raises InputError."""
    if any(one.name == scenario.name for one in standing()):
        raise InputError(f"testbed {scenario.name}: already up; paceenv testbed down {scenario.name}")
    if lacking := private_namespaces.missing():
        raise InputError(f"testbed: needs Linux with root and iproute2; missing: {lacking}")
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    request = {"network": scenario.network.model_dump(), "jobs": []}
    atomic_write(_file(scenario.name, "request"), json.dumps(request).encode())
    process = private_namespaces.start(
        _file(scenario.name, "request"), outlives_us=True, log=_file(scenario.name, "log")
    )
    try:
        took_s = next(event["seconds"] for event in private_namespaces.events(process) if event["event"] == "up")
        pid = _first_child(process.pid)
        found = Standing(scenario.name, pid, _started(pid), scenario.network.hosts)
        atomic_write(_file(scenario.name, "json"), json.dumps(asdict(found)).encode())
    except BaseException as error:
        private_namespaces.stop(process)
        if isinstance(error, StopIteration):
            raise InputError(f"testbed {scenario.name}: ended early; see {_file(scenario.name, 'log')}") from None
        raise
    private_namespaces.release(process)
    return found, took_s


def standing() -> list[Standing]:
    """The testbeds that are up; the files of ended ones are removed."""
    found = []
    for path in sorted(FOLDER.glob("*.json")) if FOLDER.is_dir() else []:
        try:
            one = Standing(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if _started(one.pid) == one.started:
            found.append(one)
        else:
            _forget(one.name)
    return found


def down(one: Standing) -> None:
    """Take it down: everything in its namespaces ends with the process that holds them."""
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(one.pid, signal.SIGKILL)
    _forget(one.name)


def execute(one: Standing, host: int, command: Sequence[str]) -> int:
    """Run a command on a host of a testbed.

    Args:
        one: the testbed.
        host: number of the host, from 0.
        command: the command and its arguments.

    Returns:
        The exit code.

    Raises:
        InputError: no such host.
    """
    if not 0 <= host < one.hosts:
        raise InputError(f"host = {host}; allowed: 0 to {one.hosts - 1} of testbed {one.name}")
    enter = ["nsenter", f"--target={one.pid}", "--mount", "--pid", "--net"]
    return subprocess.run([*enter, "ip", "netns", "exec", host_name(host), *command]).returncode


def _file(name: str, kind: str) -> Path:
    return FOLDER / f"{name}.{kind}"


def _forget(name: str) -> None:
    for kind in ("json", "request", "log"):
        _file(name, kind).unlink(missing_ok=True)


def _first_child(pid: int) -> int:
    """The process that ``unshare`` started: the first in its namespace."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _started(pid: int) -> int:
    """When a process started, clock ticks since boot; -1 if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] == "Z" else int(fields[19])
