"""A rank's place: host, process and device; read once.

Nothing here raises; unknown fields are left out. Names of fields are the keys of the trace's metadata and of the
snapshot.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from paceenv.live.observe.log import tried


def describe(*, device: str = "cpu", backend: str = "", proc: Path = Path("/proc")) -> dict[str, Any]:
    """Everything about this rank's place, as plain JSON data."""
    place: dict[str, Any] = {
        "host": tried(socket.gethostname, None),
        "clock": tried(lambda: namespace("time", proc), None),
        "process": tried(lambda: f"{namespace('pid', proc)} {os.getpid()}", None),
        "backend": backend or None,
        "device": device,
    }
    return {name: value for name, value in place.items() if value is not None}


def namespace(kind: str, proc: Path = Path("/proc")) -> str:
    """This boot and namespace: ranks with the same one read the same clock (time), or number processes alike (pid)."""
    boot = (proc / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    inside = tried(lambda: os.readlink(proc / "self" / "ns" / kind), None)
    return f"{boot} {inside}" if inside else boot


def is_gone(process: str) -> bool:
    """Whether the process that a rank named is known to have ended; one of another machine or container is not."""
    space, _, number = process.rpartition(" ")
    if space != tried(lambda: namespace("pid"), None):
        return False
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
