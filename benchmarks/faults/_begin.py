"""Becomes a rank of a job: under limits, with file systems that only it sees."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys

_NEW_MOUNTS, _REMOUNT_READ_ONLY, _PRIVATE = 0x20000, 0x21, 0x44000


def main() -> None:
    """Arguments: a start as JSON, and the interpreter's own."""
    start = json.loads(sys.argv[1])
    if start["mounts"]:
        _mount(start["mounts"])
    for name, limit in {"CORE": 0, **start["limits"]}.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    os.execv(sys.executable, [sys.executable, *start["flags"], *sys.argv[2:]])


def _mount(mounts: dict[str, str]) -> None:
    """Mount small file systems that only this process sees."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    check(libc.unshare(_NEW_MOUNTS))
    check(libc.mount(b"none", b"/", None, _PRIVATE, None))
    for place, options in mounts.items():
        os.makedirs(place, exist_ok=True)
        given = b"size=16k" if options == "ro" else options.encode()
        check(libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, given))
        if options == "ro":
            check(libc.mount(b"tmpfs", place.encode(), b"tmpfs", _REMOUNT_READ_ONLY, None))


if __name__ == "__main__":
    main()
