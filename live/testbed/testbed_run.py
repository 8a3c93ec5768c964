"""Runs a scenario's jobs on its network and collects the results: step times, agents' status, merged traces.

The network and the jobs live in network, mount and process namespaces of their own. A process namespace ends with its
first process (:mod:`paceenv.live.testbed.inside`), which ends with us: the kernel kills every other process in it, and
the network disappears. So no clean-up depends on code that may itself be killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.live.record.merge_segments import write_merged
from paceenv.live.record.run_folder import RunFolder
from paceenv.live.record.snapshot import Snapshot
from paceenv.live.testbed.inside import POLL_S, STEP_FILE, steps_made
from paceenv.live.testbed.testbed_scenario import Job, LoopPlan, Scenario
from paceenv.ui import config_files

DEADLINE_S = 600.0
"""Longest time without a step of the main job, its start included; the whole run may last longer."""
_WARNING = re.compile(r"\[?W\d{4} ")
TOOLS: Mapping[str, str] = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "setpriv": "util-linux"}
"""The needed tools, and Debian's packages for them."""


class JobResult(NamedTuple):
    """The result of one job. ``steps_s_TR`` are the ends of its steps by the machine's monotonic clock, seconds."""

    steps_s_TR: NDArray[np.float64]
    snapshots: tuple[Snapshot, ...]
    trace: Path | None

    @property
    def end_s_T(self) -> NDArray[np.float64]:
        """Ends of the steps, each with its last rank, seconds ``(T,)``."""
        return np.asarray(self.steps_s_TR.max(axis=1))

    @property
    def step_s_T(self) -> NDArray[np.float64]:
        """Durations of the steps after the first, seconds ``(T - 1,)``."""
        return np.diff(self.end_s_T)


def agent_options(plan: LoopPlan, mode: str) -> list[str]:
    """Options of ``-m paceenv.live`` for the job with the agent."""
    block = [] if plan.block_iterations is None else ["--block-iterations", str(plan.block_iterations)]
    return ["--mode", mode, "--quiet-first", str(plan.quiet_first), *block]


def run_scenario(
    scenario: Scenario,
    out: Path,
    *,
    agents: Mapping[str, Sequence[str]] | None = None,
    iterations: int | None = None,
    deadline_s: float = DEADLINE_S,
    on_progress: Callable[[float], None] = lambda done: None,
) -> dict[str, JobResult]:
    """Bring the network up, run the main job with the others beside it, take the network down; results by job.

    ``agents`` are options of ``python -m paceenv.live`` by job; ``iterations`` of the main job, which fails if it makes
    no step for ``deadline_s``.

    Raises:
        InputError: the testbed is not possible here, ``out`` is in use, or a job fails; the logs are in ``out`` then.
    """
    agents, iterations = agents or {}, scenario.loop.observe_iterations if iterations is None else iterations
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: already exists; allowed: a new or an empty folder")
    folder = out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    config_files.write_yaml(folder / "scenario.yaml", scenario.model_dump(exclude_unset=True))
    request = {
        "network": scenario.network.model_dump(),
        "main": scenario.loop.job,
        "deadline_s": deadline_s,
        "jobs": [_prepare(scenario, job, folder, agents.get(job.name), iterations) for job in scenario.jobs],
    }
    atomic_write(folder / "request.json", json.dumps(request, indent=1))
    exit_codes = _follow(folder, folder / scenario.loop.job, on_progress)
    if failed := _first_failed(exit_codes, scenario.loop.job):
        job, rank = failed
        how = f"made no step for {deadline_s:g} s" if exit_codes[job][rank] is None else "failed"
        raise InputError(f"testbed: job {job} {how}: {_why(folder / job / 'log' / f'rank{rank}.txt')}")
    return {job.name: _collect(folder / job.name, job) for job in scenario.jobs}


def _prepare(
    scenario: Scenario, job: Job, folder: Path, agent: Sequence[str] | None, iterations: int
) -> dict[str, Any]:
    """Make the job's directories and data files; returns the job's part of the request."""
    place = folder / job.name
    for name in ("log", "steps", "tmp"):
        (place / name).mkdir(parents=True)
    spec = job.spec() | {
        "seed": [scenario.seed, scenario.jobs.index(job)],
        "iterations": iterations if job.name == scenario.loop.job else None,
        "steps": str(place / "steps"),
    }
    atomic_write(place / "job.json", json.dumps(spec, indent=1))
    command = ["-m", "paceenv.live.testbed.training_job", str(place / "job.json")]
    if agent is not None:
        deferrable = dict.fromkeys(one.communicator for one in job.starts if one.can_wait)
        defer = ["--defer", ",".join(deferrable)] if deferrable else []
        command = ["-m", "paceenv.live", "--out", str(place / "live"), "--job", job.name, *defer, *agent, *command]
    return {"name": job.name, "hosts": job.hosts, "command": command, "folder": str(place)}


def missing() -> str:
    """The missing requirements of a testbed on this machine, in words; "" if there are none."""
    lacking = {f"{tool} (apt-get install {package})" for tool, package in TOOLS.items() if shutil.which(tool) is None}
    return ", ".join(sorted(lacking) + (["root's rights"] if os.geteuid() else []))


def _follow(folder: Path, main: Path, on_progress: Callable[[float], None]) -> dict[str, list[int | None]]:
    """Run the request to its end in private namespaces; exit codes by job and rank."""
    if lacking := missing():
        raise InputError(f"testbed: needs Linux with root and iproute2; missing: {lacking}")
    alone = ["setpriv", "--pdeathsig", "KILL"]
    alone += ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
    errors, done = folder / "testbed.txt", 0
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            [*alone, sys.executable, "-m", "paceenv.live.testbed.inside", str(folder / "request.json")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | {"PYTHONSAFEPATH": "1"},  # the start folder may have a package of the same name
        ) as process,
    ):
        try:
            while process.poll() is None:  # until its end, jobs beside the main one write files that we collect
                time.sleep(POLL_S)
                if (now := steps_made(main)) != done:
                    done = now
                    on_progress(done)
            exit_codes = process.communicate()[0]
        finally:
            process.kill()
    if not exit_codes:
        raise InputError(f"testbed: {_why(errors)}")
    return dict(json.loads(exit_codes))


def _first_failed(exit_codes: Mapping[str, Sequence[int | None]], main: str) -> tuple[str, int] | None:
    """Job and rank of the first failure. A main job that still runs has failed; the other jobs are killed."""
    failed = [(name, rank) for name, codes in exit_codes.items() for rank, code in enumerate(codes) if code]
    if not failed and main not in exit_codes:
        failed = [(next(iter(exit_codes)), 0)]  # jobs beside the main one never made a step
    still = [(main, rank) for rank, code in enumerate(exit_codes.get(main, ())) if code is None]
    return next(iter([*failed, *still]), None)


def _why(log: Path) -> str:
    """The last four lines of a process's output in one, without warnings."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    kept = [" ".join(line.split()) for line in lines if line.strip() and not _WARNING.match(line)]
    return " | ".join(kept[-4:]) or f"no output in {log}"


def _collect(place: Path, job: Job) -> JobResult:
    steps = [np.fromfile(place / "steps" / STEP_FILE.format(rank=rank)) for rank in range(job.ranks)]
    steps_s_TR = np.stack([rank_s[: min(map(len, steps))] for rank_s in steps], axis=1)
    np.save(place / "steps.npy", steps_s_TR)
    for name in ("steps", "tmp"):
        shutil.rmtree(place / name)
    if not (place / "live").is_dir():
        return JobResult(steps_s_TR, (), None)
    run, trace = RunFolder(place / "live"), place / "trace.parquet"
    write_merged(run, trace)
    return JobResult(steps_s_TR, tuple(run.statuses(run.latest())), trace)
