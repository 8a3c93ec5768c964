"""The first process of a testbed's private namespaces: builds the network, runs the jobs on it, reports progress.

:mod:`paceenv.live.testbed.private_namespaces` starts it with a request, a JSON file. It writes one JSON object per line
on standard output: ``up`` (seconds it took), ``progress`` (iterations of the main job), ``ended`` (exit codes by job
and host), ``failed`` (the reason). When this process ends, or is killed, the kernel kills all others in its namespaces
and takes the network down.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceenv.core.errors import InputError
from paceenv.live.testbed.namespaces import INTERFACE, address, build, host_name
from paceenv.live.testbed.torchrun import Torchrun

NAMES = Path("/run/netns")
FIRST_PORT = 29_500
POLL_S = 0.2
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
STEP_FILE, FLOAT_BYTES = "rank{rank:05d}.f64", 8
"""The file of a rank's step ends, written by ``training_job``; defined here because reading needs no PyTorch."""


def main(request_file: str) -> None:
    request = json.loads(Path(request_file).read_text())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(1))  # the first process of a namespace has no default action
    try:
        began_s = time.monotonic()
        NAMES.mkdir(parents=True, exist_ok=True)
        _mount_names()
        build(request["network"])
        _tell(event="up", seconds=time.monotonic() - began_s)
        if request["jobs"]:
            _tell(event="ended", exit_codes=_run(request))
        else:
            while True:
                signal.pause()
    except InputError as error:
        _tell(event="failed", reason=str(error))


def _mount_names() -> None:
    """Mount a folder for the namespaces' names that only this mount namespace sees."""
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(NAMES)], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"testbed: cannot mount on {NAMES}: {done.stderr.strip()}")


def _run(request: Mapping[str, Any]) -> dict[str, list[int | None]]:
    """Run the main job to its end with the others beside it; exit codes by job and host, None for a running one."""
    jobs = {job["name"]: job for job in request["jobs"]}
    main_job = jobs[request["main"]]
    running: dict[str, list[Torchrun]] = {}
    for port, (name, job) in enumerate(jobs.items(), start=FIRST_PORT):
        if name != request["main"]:
            running[name] = _start(job, port)
    waited_until_s = time.monotonic() + request["deadline_s"]
    while not all(_iterations(job) for job in jobs.values() if job is not main_job):
        if _failed(running) or time.monotonic() > waited_until_s:
            return _exit_codes(running)
        time.sleep(POLL_S)
    running[request["main"]] = _start(main_job, FIRST_PORT + len(jobs))
    deadline_s, told = time.monotonic() + request["deadline_s"], 0
    while any(process.poll() is None for process in running[request["main"]]):
        time.sleep(POLL_S)
        done = _iterations(main_job)
        if done != told:
            _tell(event="progress", iterations=done)
            deadline_s, told = time.monotonic() + request["deadline_s"], done
        if _failed(running) or time.monotonic() > deadline_s:
            break
    return _exit_codes(running)


def _start(job: Mapping[str, Any], port: int) -> list[Torchrun]:
    """torchrun on each of a job's hosts."""
    return [_launch(job, place, host, port) for place, host in enumerate(job["hosts"])]


def _launch(job: Mapping[str, Any], place: int, host: int, port: int) -> Torchrun:
    options = [
        *(f"--nnodes={len(job['hosts'])}", f"--node-rank={place}", f"--nproc-per-node={job['ranks_per_host']}"),
        *(f"--master-addr={address(job['hosts'][0])}", f"--master-port={port}", f"--local-addr={address(host)}"),
        "--monitor-interval=1",
    ]
    log, environ = Path(job["log"]) / f"host{host}.txt", _ENVIRONMENT | {"TMPDIR": job["tmp"]}
    return Torchrun(NAMES / host_name(host), [*options, *job["command"]], log, environ)


def _iterations(job: Mapping[str, Any]) -> int:
    """Steps that the first rank of a job has made."""
    try:
        return Path(job["first_steps"]).stat().st_size // FLOAT_BYTES
    except FileNotFoundError:
        return 0


def _failed(running: Mapping[str, list[Torchrun]]) -> bool:
    return any(process.poll() for processes in running.values() for process in processes)


def _exit_codes(running: Mapping[str, list[Torchrun]]) -> dict[str, list[int | None]]:
    return {name: [process.poll() for process in processes] for name, processes in running.items()}


def _tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
