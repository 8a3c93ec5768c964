"""One collective a step: this version of the engine against another one, in turns, process by process.

``python -m benchmarks.speed.paired FOLDER`` wants a checkout of the other version, such as ``git worktree add`` makes.
Two processes of the same version differ by up to a tenth, by where their arrays lie in memory. So several pairs of
processes run, and the ratio is the median over pairs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks._common import NOISE
from benchmarks.speed.engine_speed import CALL_RANK_ITERATIONS, JITTER_CV, paceenv_job
from paceenv.sim.cluster.environment import Noise
from paceenv.ui import output

RANKS = (8, 64, 512)
PAIRS, TURNS, CALLS = 8, 5, 3
HERE = Path(__file__).resolve().parents[2]
JOBS = tuple(f"{ranks} ranks, {noise}" for ranks in RANKS for noise in ("everything on", "jitter only"))


def answer() -> None:
    """Say how many CPU seconds a call of each job that is asked for takes, a line each; the best of a few calls."""
    every = {"everything on": (NOISE, True), "jitter only": (Noise(jitter_cv=JITTER_CV), False)}
    calls = {}
    for name in JOBS:
        ranks, noise = int(name.split()[0]), name.partition(", ")[2]
        calls[name] = paceenv_job(ranks, every[noise][0], CALL_RANK_ITERATIONS // ranks, paced=every[noise][1])
        calls[name]()
    for line in sys.stdin:
        seconds = []
        for _ in range(CALLS):
            begin_s = time.process_time()
            calls[line.strip()]()
            seconds.append(time.process_time() - begin_s)
        print(min(seconds), flush=True)


def start(folder: Path) -> subprocess.Popen[str]:
    """A process that answers with the version in ``folder``."""
    command = [sys.executable, str(Path(__file__).resolve()), str(folder), "--child"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, text=True)


def ask(process: subprocess.Popen[str], name: str) -> float:
    """CPU seconds of a call of one job in a process."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(name + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main(
    folder: Annotated[Path, typer.Argument(help="A checkout of the other version.")],
    child: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """CPU time of this version over that of another one, for jobs with one collective a step."""
    if child:
        answer()
        return
    seconds = np.empty((2, len(JOBS), PAIRS, TURNS))
    for pair in range(PAIRS):
        processes = [start(HERE), start(folder)]
        for j, name in enumerate(JOBS):
            for turn in range(TURNS):
                for which in (0, 1) if turn % 2 else (1, 0):
                    seconds[which, j, pair, turn] = ask(processes[which], name)
        for process in processes:
            process.communicate()
    ratio_JP = np.median(seconds[0] / seconds[1], axis=2)
    best_J = seconds[0].min(axis=(1, 2)) / seconds[1].min(axis=(1, 2))
    rows = [
        (name, f"{np.median(ratio_P):.3f}", f"{ratio_P.min():.2f} to {ratio_P.max():.2f}", f"{best:.3f}")
        for name, ratio_P, best in zip(JOBS, ratio_JP, best_J, strict=True)
    ]
    output.print_table("CPU time, this version over the other", ("job", "median of pairs", "range", "best"), rows)


if __name__ == "__main__":
    typer.run(main)
