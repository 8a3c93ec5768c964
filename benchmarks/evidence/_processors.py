"""Keeps the machine's processors awake, and notes what a hypervisor takes away of their time meanwhile.

Jobs of the testbed sleep most of the time. A virtual processor that idles is given away, and comes back late: up to
half of the time was stolen from such jobs, and 17 % at most with something to do at idle priority, which any other
work displaces at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

SAMPLE_S: Final = 0.1
_STEAL: Final = 7
"""Where /proc/stat has it (``man proc_stat``), as have the first eight everything."""
_SPIN: Final = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = int(sys.argv[2])
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""

Array = NDArray[np.float64]


class Processors:
    """Awake, and watched, while it is entered."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._spinning: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Processors:
        for cpu in sorted(os.sched_getaffinity(0)):
            command = [sys.executable, "-c", _SPIN, str(cpu), str(os.getpid())]
            self._spinning.append(subprocess.Popen(command))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for process in self._spinning:
            process.kill()
            process.wait()

    def _sample(self) -> None:
        while True:
            ticks = np.array(Path("/proc/stat").read_text().splitlines()[0].split()[1:9], np.float64)
            self._samples.append((time.monotonic(), float(ticks[_STEAL]), float(ticks.sum())))
            if self._end.wait(SAMPLE_S):
                return

    def save(self, path: Path) -> None:
        """Keep what was noted, as ``(samples, 3)``: monotonic seconds, ticks stolen and ticks in all so far."""
        np.save(path, np.array(self._samples))


def stolen(path: Path, begin_s_W: Array, end_s_W: Array) -> Array:
    """Share of processor time that a hypervisor took, ``(W,)``.

    Args:
        path: samples that ``Processors.save`` wrote.
        begin_s_W: begin of each window, monotonic seconds.
        end_s_W: end of each window.
    """
    at_s, *counts = np.load(path, allow_pickle=False).T
    stolen_W, passed_W = (np.interp(end_s_W, at_s, n) - np.interp(begin_s_W, at_s, n) for n in counts)
    return np.asarray(stolen_W / np.maximum(passed_W, 1.0))
