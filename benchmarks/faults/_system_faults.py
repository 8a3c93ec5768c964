"""Faults of the system: the interpreter, limits, file systems, files in the run's folder, clocks."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults._fault import Job, Start, breaks, fault

MIB, NOBODY = 1 << 20, 65534


def _flags(*flags: str) -> Start:
    return Start(flags=flags)


def _limits(name: str, *limits: int) -> dict[str, Start]:
    return {str(n): Start(limits={name: n}) for n in limits}


def _mounts(place: str, *options: str) -> dict[str, Start]:
    return {text: Start(mounts={place: text}) for text in options}


STARTS: dict[str, dict[str, Start]] = {
    "no fault": {"": Start()},
    "interpreter's flags": {
        "-O": _flags("-O"),
        "-X dev": _flags("-X", "dev"),
        "-W error": _flags("-W", "error", "-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"),
        "-W error::ResourceWarning": _flags("-X", "dev", "-W", "error::ResourceWarning"),
    },
    "address space from the start": _limits("AS", 2500 * MIB, 3500 * MIB, 4500 * MIB),
    "few descriptors": _limits("NOFILE", 22, 26, 32),
    "limit of a file's size": _limits("FSIZE", 100, 4096),
    "full disk": _mounts("live", "size=4k", "size=16k", "size=64k"),
    "no inodes": _mounts("live", "nr_inodes=1", "nr_inodes=2", "nr_inodes=4"),
    "read-only folder": {"mounted": Start(mounts={"live": "ro"})},
    "system's files are hidden": {place: Start(mounts={place: "size=4k"}) for place in ("/proc", "/sys")},
}
"""A plain job that is started oddly: kinds, and how each variant is started."""
for _kind, _variants in STARTS.items():
    fault(_kind, _variants)(Job.train)

fault(
    "options that cannot be followed",
    {
        "port taken": Start(options=("--metrics-port", "1")),
        "active": Start(options=("--mode", "active", "--policy", "static:slack=0.02/0.4")),
        "probe": Start(options=("--mode", "probe")),
        "canary": Start(options=("--mode", "canary", "--policy", "paper")),
    },
    ranks=2,
)(Job.train)


@breaks("address space is short", "before_8 before_100 later_0 later_4 later_64")
def address_space(job: Job, i: int) -> None:
    when, mib = job.variant.split("_")
    if i == (0 if when == "before" else 1):
        size = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
        limit = int(size.split()[1]) * 1024 + int(mib) * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@breaks("no descriptor left", "before later", Start(limits={"NOFILE": 200}))
def no_descriptors(job: Job, i: int) -> None:
    if i == (0 if job.variant == "before" else 20):
        with contextlib.suppress(OSError):
            while True:
                job.kept.append(os.open(os.devnull, os.O_RDONLY))


@breaks("no new threads", "RuntimeError MemoryError late")
def no_threads(job: Job, i: int) -> None:
    import _thread

    error = MemoryError() if job.variant == "MemoryError" else RuntimeError("can't start new thread")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise error

    if i == (20 if job.variant == "late" else 0):
        for owner, name in itertools.product((_thread, threading), ("start_new_thread", "start_joinable_thread")):
            for spelled in (name, f"_{name}"):
                if hasattr(owner, spelled):
                    setattr(owner, spelled, refuse)


@breaks("disk fills up", "4k 64k", Start(mounts={"live": "size=128k"}), pause_s=0.1)
def fills_up(job: Job, i: int) -> None:
    if i == 15:
        with contextlib.suppress(OSError):
            (job.live / "foreign").write_bytes(b"x" * (MIB if job.variant == "4k" else 65536))


def _put(path: Path, what: str) -> None:
    """Put something odd, or nothing, in the place of a path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if what == "file":
        path.write_bytes(b"foreign")
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what != "removed":
        path.symlink_to({"loop": str(path), "dangling": "/nowhere/at/all", "full": "/dev/full"}[what])


@fault("the run's folder is not one", "file fifo loop dangling full")
def folder_is_none(job: Job) -> None:
    _put(job.live, job.variant)
    job.train()


@breaks("the run's folder is replaced", "removed file fifo loop dangling full", pause_s=0.1)
def folder_replaced(job: Job, i: int) -> None:
    if i in (20, 30):
        _put(job.live, job.variant)


@breaks("perf_counter is odd", "none nan back still jumps raises sometimes", seeds=2)
def perf_counter(job: Job, i: int) -> None:
    """Before the agent has it, or after."""
    if i != (10 if job.seed % 2 else 0):
        return
    readings, read = itertools.count(), time.perf_counter
    begun = read()
    odd: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "nan": lambda: float("nan"),
        "back": lambda: begun - next(readings),
        "still": lambda: begun,
        "jumps": lambda: read() + 3600 * (next(readings) // 7 % 3 - 1),
        "raises": lambda: 1 / 0,
        "sometimes": lambda: read() if next(readings) % 50 else None,
    }
    time.perf_counter = odd[job.variant]
