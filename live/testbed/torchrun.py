"""torchrun on a host, forked from a process with PyTorch loaded: importing it takes most of the start of a host."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWNET = 0x0002_0000, 0x4000_0000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 0x4000, 0x8_0000, 2
_LIBC = ctypes.CDLL(None, use_errno=True)


class Torchrun:
    """A torchrun process in a named network namespace.

    Args:
        namespace: the file of the network namespace.
        arguments: of torchrun.
        log: the file for its output.
        environ: environment variables to add.
    """

    def __init__(self, namespace: Path, arguments: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
        from torch.distributed import run  # in the parent, so that the fork has it

        self._exit_code: int | None = None
        self._pid = os.fork()
        if self._pid:
            return
        exit_code = 1
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            with log.open("wb") as output:
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
            os.environ.update(environ)
            tempfile.tempdir = None  # PyTorch may have cached it from our environment
            _enter(namespace)
            run.main(list(arguments))
            exit_code = 0
        except SystemExit as end:
            exit_code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self._exit_code is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code


def _enter(namespace: Path) -> None:
    """Enter the host's network and mount its /sys, as ``ip netns exec`` does."""
    with namespace.open() as file:
        _checked(_LIBC.setns(file.fileno(), _CLONE_NEWNET))
    _checked(_LIBC.unshare(_CLONE_NEWNS))
    _checked(_LIBC.mount(b"", b"/", b"none", _MS_SLAVE | _MS_REC, None))
    _LIBC.umount2(b"/sys", _MNT_DETACH)  # in some containers there is none
    _checked(_LIBC.mount(namespace.name.encode(), b"/sys", b"sysfs", 0, None))


def _checked(failed: int) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
