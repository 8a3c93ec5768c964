"""Does the live agent harm a job in which something else is wrong? Real jobs with faults, each with and without it.

`python -m benchmarks.faults.live_faults --out DIR` holds exit codes, printed output and parameters of a job with the
agent against those of the same job without it under the same fault. A run that is in DIR is not run again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks._common import campaign
from benchmarks.faults import _process_faults, _system_faults, _torch_faults  # noqa: F401  # they register
from benchmarks.faults._fault import FAULTS
from paceenv.ui.output import markdown_table

DEADLINE_S = 90.0
"""A job that takes longer hangs; without a fault it takes two seconds."""
UNHARMED, HARMED = "unharmed", "harmed"
TRIES = 3
"""A job that differs from so many without the agent is harmed: some faults have no certain outcome."""
ROOT = Path(__file__).resolve().parents[2]
ENVIRON = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
ENVIRON |= {"PYTHONPATH": str(ROOT)}
_FRAME = re.compile(r'^\s+File "([^"]+)", line \d+')
_OURS = re.compile(rf"^{re.escape(str(ROOT))}/(live|core|policies|paceenv)/")


@dataclass(frozen=True)
class Run:
    """One job with a fault."""

    kind: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return re.sub(r"[^a-z0-9]+", "_", f"{self.kind} {self.variant} {self.seed}".lower())


@dataclass(frozen=True)
class Ended:
    """A rank's exit code (negative: a signal; None: it hung) and what it printed."""

    code: int | None
    out: str
    err: str


def run_job(run: Run, folder: Path, *, agent: bool, ranks: int = 0) -> list[Ended]:
    """Run the job in an empty folder, with another number of ranks than its own where that is given."""
    fault = FAULTS[run.kind]
    size, start = ranks or fault.ranks, fault.variants[run.variant]
    shutil.rmtree(folder, ignore_errors=True)
    live = folder / "live"
    how = "" if not agent else "attach" if fault.attach else "launcher"
    script = ["-m", "benchmarks.faults._fault_job", run.kind, run.variant, str(run.seed), str(folder), how]
    launcher = ["-m", "paceenv.live", "--out", str(live), *start.options] if how == "launcher" else []
    mounts = {str(live) if place == "live" else place: options for place, options in start.mounts.items()}
    begin = json.dumps(asdict(start) | {"mounts": mounts})
    command = [sys.executable, "-m", "benchmarks.faults._begin", begin, *launcher, *script]
    environ = os.environ | ENVIRON | {"WORLD_SIZE": str(size), "MASTER_PORT": str(_port())}
    environ.pop("PYTHONFAULTHANDLER", None)
    processes = []
    for rank in range(size):
        place = folder / f"rank{rank}"
        place.mkdir(parents=True)
        folder.chmod(0o777)
        with (place / "out").open("ab") as out, (place / "err").open("ab") as err:
            own = environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            processes.append(subprocess.Popen(command, **streams, env=own, start_new_session=True))
    codes = _wait(processes)
    texts = [
        [(folder / f"rank{rank}" / name).read_text(errors="replace") for name in ("out", "err")] for rank in range(size)
    ]
    return [Ended(code, *text) for code, text in zip(codes, texts, strict=True)]


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit codes, negative for a signal; None for a rank that had to be killed."""
    codes, until_s = list[int | None](), time.monotonic() + DEADLINE_S
    for process in processes:
        try:
            codes.append(process.wait(max(until_s - time.monotonic(), 0.0)))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what the rank has left behind
        process.wait()
    return codes


@cache
def reference(ranks: int, seed: int, out: Path) -> list[Ended]:
    """How a job ends without a fault and without the agent: one that ends like that was not harmed."""
    return run_job(Run("no fault", "", seed), out / f"reference_{ranks}_{seed}", agent=False, ranks=ranks)


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def faults_of(err: str) -> list[str]:
    """What an error stream says of faults of ours: a traceback that ends in our code, a fatal error."""
    found, last, source = list[str](), "", ""
    for line in err.splitlines():
        frame = _FRAME.match(line)
        if frame is not None:
            last, source = frame[1], ""
        elif last and line.startswith("    "):
            source = source or line.strip()
        elif last:
            if _OURS.match(last) and "original(" not in source:  # there, the error is of what we call
                found.append(f"{Path(last).name}: {source}: {line}"[:200])
            last = ""
    found += [line for line in err.splitlines() if line.startswith(("Fatal Python error", "terminate called"))]
    found += [line for line in err.splitlines() if re.search(r"paceenv|/live/\w+\.py", line) and "Warning:" in line]
    return found


def differences(bare: Sequence[Ended], watched: Sequence[Ended], *, code_only: bool) -> list[str]:
    """How a job with the agent ended otherwise than without it."""
    found = []
    for rank, (one, other) in enumerate(zip(bare, watched, strict=True)):
        if one.code != other.code:
            found.append(f"rank {rank}: exit code {_said(other.code)}, without the agent {_said(one.code)}")
        if not code_only and one.out != other.out:
            found.append(f"rank {rank}: printed {other.out[-60:]!r}, without the agent {one.out[-60:]!r}")
        missing = faults_of(one.err)
        found += [f"rank {rank}: {text}" for text in faults_of(other.err) if text not in missing]
    return found


def _said(code: int | None) -> str:
    return "none (hangs)" if code is None else str(code)


def measure(run: Run, folder: Path) -> dict[str, Any]:
    """Run a job with a fault in its folder, with the agent and without."""
    watched = run_job(run, folder / "watched", agent=True)
    bare = reference(FAULTS[run.kind].ranks, run.seed, folder.parent)
    found = differences(bare, watched, code_only=False)
    for _ in range(TRIES):
        if not found:
            break
        bare = run_job(run, folder / "bare", agent=False)
        found = differences(bare, watched, code_only=FAULTS[run.kind].code_only)
    return {
        "verdict": HARMED if found else UNHARMED,
        "why": "; ".join(found[:4]),
        "ended": [rank.code for rank in bare],
        "said": sorted({line for rank in watched for line in rank.err.splitlines() if " live" in line})[:6],
    }


def planned() -> list[Run]:
    """All runs, the first of every kind first."""
    runs = list[tuple[int, Run]]()
    for kind, fault in FAULTS.items():
        places = [(variant, seed) for seed in range(fault.seeds) for variant in fault.variants]
        runs += [(place, Run(kind, variant, seed)) for place, (variant, seed) in enumerate(places)]
    return [run for _, run in sorted(runs, key=lambda run: run[0])]


def table(results: Iterable[dict[str, Any]]) -> list[str]:
    """One line per kind, in Markdown."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        kinds.setdefault(result["kind"], []).append(result)
    rows = []
    for kind, found in kinds.items():
        harmed = [r for r in found if r["verdict"] == HARMED]
        codes = sorted({"/".join(map(_said, r["ended"])) for r in found})
        why = "; ".join(f"{r['variant']}: {r['why']}".removeprefix(": ") for r in harmed)
        variants = ", ".join(dict.fromkeys(r["variant"] for r in found))
        number = f"**{len(harmed)}**" if harmed else "0"
        rows.append((kind, variants, str(len(found)), number, ", ".join(codes), why.replace("|", "/")))
    return markdown_table(("fault", "variants", "runs", "harmed", "exit codes", "how"), rows)


def main(
    out: Annotated[Path, typer.Option(help="Folder for the runs; those in it are not run again.")],
    only: Annotated[str, typer.Option(help="Regular expression: only runs whose name has it.")] = "",
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Jobs at a time.")] = 2,
) -> None:
    """Run jobs with faults; print one line each, then a table in Markdown. Exit code 1 if one was harmed."""
    results = campaign(planned(), out, measure, only=only, jobs=jobs)
    harmed = sum(r["verdict"] == HARMED for r in results)
    kinds = len({r["kind"] for r in results})
    print("\n".join([f"{len(results)} runs of {kinds} kinds, {harmed} harmed.", "", *table(results)]))
    raise typer.Exit(1 if harmed else 0)


if __name__ == "__main__":
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    application.command()(main)
    application()
