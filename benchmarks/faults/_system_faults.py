"""Faults of the system: limits, file systems, files in the run's folder, clocks."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults._fault import Job, Start, fault

MIB = 1 << 20


def _as(mib: int) -> Start:
    return Start(fresh=True, limits={"AS": mib * MIB})


@fault("address space from the start", {f"{mib} MiB": _as(mib) for mib in (2500, 3500, 4500)})
def plain(job: Job) -> None:
    job.begin()
    job.train()


def _grow(mib: int) -> None:
    size = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
    limit = int(size.split()[1]) * 1024 + mib * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@fault("address space is short from the first step on", "0 1 4 20 64 160")
def address_space(job: Job) -> None:
    job.begin()
    job.train(before=lambda i: _grow(int(job.variant)) if i == 1 else None)


@fault("address space is short before the agent", "8 32 100 300")
def address_space_before(job: Job) -> None:
    job.begin()
    model = job.ddp()
    job.train(model, before=lambda i: None if i else _grow(int(job.variant)))


def _take_descriptors() -> list[int]:
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return taken


@fault("few descriptors", {str(n): Start(fresh=True, limits={"NOFILE": n}) for n in (22, 26, 32)})
def few_descriptors(job: Job) -> None:
    job.begin()
    job.train()


@fault("no descriptor left", "before_the_agent first_step later", Start(limits={"NOFILE": 200}))
def no_descriptors(job: Job) -> None:
    job.begin()
    model, taken = job.ddp(), list[int]()
    if job.variant == "before_the_agent":
        taken += _take_descriptors()
    when = {"first_step": 1, "later": 20}.get(job.variant)
    job.train(model, before=lambda i: taken.extend(_take_descriptors()) if i == when else None, pause_s=0.03)


@fault("no new threads", "RuntimeError MemoryError late")
def no_threads(job: Job) -> None:
    import _thread

    job.begin()
    error = MemoryError() if job.variant == "MemoryError" else RuntimeError("can't start new thread")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise error

    def patch(i: int) -> None:
        if i == (20 if job.variant == "late" else 0):
            for owner, name in (
                (_thread, "start_new_thread"),
                (threading, "_start_new_thread"),
                (_thread, "start_joinable_thread"),
                (threading, "_start_joinable_thread"),
            ):
                if hasattr(owner, name):
                    setattr(owner, name, refuse)

    job.train(before=patch)


@fault("limit of processes", {str(n): Start(nobody=True, limits={"NPROC": n}) for n in (1, 8)})
def few_processes(job: Job) -> None:
    job.begin()
    job.train()


@fault("limit of a file's size", {str(n): Start(limits={"FSIZE": n}) for n in (0, 100, 4096)})
def file_size(job: Job) -> None:
    job.begin()
    job.train()


@fault("full disk", {size: Start(mounts={"live": f"size={size}"}) for size in ("4k", "16k", "64k")})
def full_disk(job: Job) -> None:
    job.begin()
    job.train(pause_s=0.03)


@fault("no inodes", {str(n): Start(mounts={"live": f"nr_inodes={n}"}) for n in (1, 2, 4)})
def no_inodes(job: Job) -> None:
    job.begin()
    job.train(pause_s=0.03)


@fault("disk fills up", "4k 64k", Start(mounts={"live": "size=128k"}))
def fills_up(job: Job) -> None:
    job.begin()

    def fill(i: int) -> None:
        if i == 15:
            with contextlib.suppress(OSError):
                (job.live / "foreign").write_bytes(b"x" * (MIB if job.variant == "4k" else 65536))

    job.train(before=fill, pause_s=0.1)


@fault("read-only folder", {"mounted": Start(mounts={"live": "ro"}), "no right": Start(nobody=True)})
def read_only(job: Job) -> None:
    job.begin()
    job.train()


def _replace(path: Path, by: str) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists() or path.is_symlink():
        path.unlink()
    _put(path, by)


def _put(path: Path, what: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if what == "file":
        path.write_bytes(b"foreign")
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "loop":
        path.symlink_to(path)
    elif what == "dangling":
        path.symlink_to("/nowhere/at/all")
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as s:
            folder = os.open(path.parent, os.O_RDONLY)
            s.bind(f"/proc/self/fd/{folder}/{path.name}")
            os.close(folder)
    elif what == "full":
        path.symlink_to("/dev/full")
    elif what == "folder":
        path.mkdir()


@fault("the run's folder is not one", "file fifo loop dangling socket full")
def folder_is_none(job: Job) -> None:
    _put(job.live, job.variant)
    job.begin()
    job.train()


@fault("the run's folder is replaced", "removed file fifo loop dangling socket full")
def folder_replaced(job: Job) -> None:
    job.begin()
    job.train(before=lambda i: _replace(job.live, job.variant) if i in (20, 30) else None, pause_s=0.1)


@fault("umask", "000 077 777 022")
def umask(job: Job) -> None:
    job.begin()
    os.umask(int(job.variant, 8))
    job.train()


@fault(
    "system's files are hidden",
    {
        "proc": Start(mounts={"/proc": "size=4k"}),
        "sys": Start(mounts={"/sys": "size=4k"}),
        "dev": Start(mounts={"/dev": "size=4k"}),
    },
)
def hidden(job: Job) -> None:
    job.begin()
    job.train()


@fault(
    "the kill file is odd", "fifo folder loop dangling socket full name", Start(options=("--kill-file", "/tmp/none"))
)
def kill_file(job: Job) -> None:
    name = "k" * 300 if job.variant == "name" else "kill"
    os.environ["PACEENV_LIVE_KILL_FILE"] = str(job.folder / name)
    if job.variant != "name":
        _put(job.folder / name, job.variant)
    job.begin()
    job.train(pause_s=0.05)


def _controls(variant: str, path: Path, attempt: str) -> None:
    good: dict[str, Any] = {"schema": "paceenv.live.control/1", "id": "1", "attempt": attempt, "mode": "active"}
    good |= {"policy": "paper", "sha256": None, "from_iteration": 0, "kill": False}
    contents: dict[str, bytes] = {
        "garbage": os.urandom(5000),
        "deep": b"[" * 60000,
        "types": json.dumps(good | {"from_iteration": "soon", "kill": 7}).encode(),
        "number": json.dumps(good).replace(": 0,", f": {'9' * 5000},").encode(),
        "policy": json.dumps(good | {"policy": "/dev/zero", "sha256": "x"}).encode(),
        "nowhere": json.dumps(good | {"policy": "static:/nowhere.yaml"}).encode(),
        "kill": json.dumps(good | {"kill": True}).encode(),
        "off": json.dumps(good | {"mode": "off", "policy": None}).encode(),
        "active": json.dumps(good).encode(),
        "shadow": json.dumps(good | {"mode": "shadow"}).encode(),
    }
    if variant == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 34)
    elif variant in contents:
        path.write_bytes(contents[variant])
    else:
        _replace(path, variant)


CONTROLS = "garbage huge deep types number policy nowhere kill off active shadow fifo folder loop socket"


@fault("control.json is odd", CONTROLS)
def control_file(job: Job) -> None:
    job.begin()
    job.live.mkdir(exist_ok=True)

    def write(i: int) -> None:
        if i == 10:
            attempts = sorted(job.live.glob("attempt-*"))
            _controls(job.variant, job.live / "control.json", attempts[0].name if attempts else "")

    job.train(before=write, pause_s=0.1)


@fault("foreign files in the folder", "old names fifos links unreadable many", ranks=2)
def foreign_files(job: Job) -> None:
    job.begin()
    live = job.live
    live.mkdir(exist_ok=True)
    if job.rank:
        pass
    elif job.variant == "old":
        for name in ("rank00000-000000.parquet", "status/rank00000.json", "attempt0/rank00000.json", "run.json"):
            _put(live / name, "file")
    elif job.variant == "many":
        for i in range(2000):
            (live / f"20261123T053000-{i:06x}").mkdir()
    else:
        for name in (
            "20261123T053000-3f2a91",
            "summary.txt",
            ".summary.txt",
            "20261123T053001-3f2a91/h/rank00000.json",
            "20991123T053000-3f2a91/\udcff\n/rank00001-000.pace",
            "99999999T999999-zzzzzz",
        ):
            _put(live / name, {"fifos": "fifo", "links": "loop"}.get(job.variant, "file"))
    job.train(pause_s=0.05)


def _odd_clock(read: Callable[[], Any], how: str) -> Callable[[], Any]:
    readings, begun = itertools.count(), read()

    def fails() -> Any:
        raise OSError("no clock")

    odd: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "nan": lambda: float("nan"),
        "text": lambda: "noon",
        "back": lambda: begun - next(readings),
        "still": lambda: begun,
        "infinite": lambda: float("inf"),
        "jumps": lambda: read() + 3600 * (next(readings) // 7 % 3 - 1),
        "raises": fails,
        "sometimes": lambda: read() if next(readings) % 50 else None,
    }
    return odd[how]


@fault("perf_counter is odd", "none nan text back still infinite jumps raises sometimes")
def perf_counter(job: Job) -> None:
    job.begin()
    model = job.ddp()
    read = time.perf_counter

    def change() -> None:
        time.perf_counter = _odd_clock(read, job.variant)

    if job.seed % 2:  # after the agent has it
        job.train(model, before=lambda i: change() if i == 10 else None)
    else:
        change()
        job.train(model)
