"""Is the live agent right about who is late? Real jobs of many shapes, each with one rank that sleeps in every step.

`python -m benchmarks.jobs.live_shapes --out DIR` starts each job as a user does, reads what `paceenv live status`
and the page that the job leaves say of it, and holds that against the truth. A run that is in DIR is not run again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks._common import campaign
from paceenv.live.record.snapshot import LATE, UNKNOWN, number
from paceenv.ui.output import markdown_table

SLOW_S, TOLERANCE = 0.02, 0.2
"""What the slow rank sleeps in an iteration, seconds, and by how much of it a stated lateness may be off."""
ITERATIONS, DEADLINE_S = 160, 150.0
TWO, FOUR, EIGHT = (2,), (4,), (8,)
RIGHT, UNSAID, INEXACT, MISSED, WRONG, FAILED = "right", "not attributable", "inexact", "missed", "wrong", "failed"
MEANINGS = {
    RIGHT: "the slow rank and no other is named, its lateness within 20 %; in a run without a slow rank nobody is",
    UNSAID: "nobody is named, and the reason is given",
    INEXACT: "the slow rank and no other is named, its lateness is off by more than 20 %",
    MISSED: "nobody is named, and no reason is given",
    WRONG: "another rank is named",
    FAILED: "the job failed",
}
SETTINGS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Run:
    """One job: its shape, ranks, and which of them sleeps where (``slow`` -1: none)."""

    shape: str
    ranks: int
    slow: int
    place: str

    @property
    def name(self) -> str:
        slow = f"rank{self.slow}-{self.place}" if self.slow >= 0 else "nobody"
        return f"{self.shape}-{self.ranks}-{slow}"


def _runs(shapes: str, ranks: Sequence[int], *slow: tuple[int, str]) -> list[Run]:
    return [Run(shape, size, *who) for shape in shapes.split() for size in ranks for who in slow if who[0] < size]


RUNS = (
    _runs("ddp", (2, 4, 8), (1, "load")),
    _runs("ddp", TWO, (0, "backward"), (1, "forward"), (-1, "load")),
    _runs("experts tensor_and_data", FOUR, (1, "load"), (2, "backward"), (-1, "load")),
    _runs("experts tensor_and_data", EIGHT, (1, "load")),
    _runs("fsdp2_hybrid three_dimensions", FOUR, (1, "load")),
    _runs("small_first", (2, 4, 8), (1, "backward")),
    _runs("fsdp2 tensors_distributed", (2, 4), (1, "load")),
    _runs("fsdp2", TWO, (0, "forward")),
    _runs("accumulation", (2, 4), (1, "forward")),
    _runs("three_dimensions", EIGHT, (5, "forward")),
    _runs("pipeline_by_hand", TWO, (1, "forward")),
    _runs("pipeline_1f1b", FOUR, (2, "forward")),
)


def command(run: Run, folder: Path) -> list[str]:
    """What a user types."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.ranks}"]
    agent = ["-m", "paceenv.live", "--out", str(folder / "live")]
    program = ["-m", "benchmarks.jobs._train", run.shape, "--told", str(folder), "--iterations", str(ITERATIONS)]
    slow = ["--slow", str(run.slow), "--place", run.place, "--slow-s", str(SLOW_S)]
    return [sys.executable, *launcher, *agent, *program, *slow]


def start(run: Run, folder: Path) -> str:
    """Run the job in a folder that gets its figures and its log; returns why it failed, or ""."""
    folder.mkdir(parents=True, exist_ok=True)
    environ = os.environ | SETTINGS | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with (folder / "log").open("wb") as log:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = subprocess.Popen(command(run, folder), **streams, env=environ)
        try:
            code = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            process.wait()
            return f"not through after {DEADLINE_S:g} s"
    return f"exit code {code}" if code else ""


def asked(folder: Path) -> tuple[dict[int, dict[str, Any]], str]:
    """What was said of a job: the ranks' status by rank, and the page."""
    paceenv = [sys.executable, "-c", "from paceenv.cli.application import main; main()"]
    asking = [*paceenv, "live", "status", str(folder / "live"), "--json", "-"]
    status = subprocess.run(asking, capture_output=True, text=True, cwd=ROOT, check=False)
    found = json.loads(status.stdout)["ranks"] if status.returncode == 0 else []
    page = folder / "live" / "summary.txt"
    return {rank["rank"]: rank for rank in found}, page.read_text() if page.exists() else ""


def named_on_page(page: str) -> set[int]:
    """The ranks that the page calls late. A line that continues is indented further."""
    text, ranks = re.sub(r"\n {6,}", " ", page), set[int]()
    for match in re.finditer(r"\branks? ([\d][\d, and-]*?)(?: \([^)]*\)| on [^ ]+)? (?:is|are) late\b", text):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", match[1]):
            ranks |= set(range(int(first), int(last or first) + 1))
    return ranks


def judge(run: Run, ranks: dict[int, dict[str, Any]], page: str, figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Hold what was said against the truth; lateness is per step of the agent, which may be several iterations."""
    arrivals = {rank: status.get("arrival") or {} for rank, status in ranks.items()}
    late = {rank: arrival for rank, arrival in arrivals.items() if arrival.get("verdict") == LATE}
    named = set(late) | named_on_page(page)
    slow = figures[max(run.slow, 0)]
    steps_s = number(ranks.get(max(run.slow, 0), {}), "step", "mean_s")
    iterations = max(round(steps_s / slow["iteration_s"]), 1) if steps_s else 1
    wanted_s, stated_s = slow["slept_s"] * iterations, late.get(run.slow, {}).get("late_s")
    unclear = {a["evidence"] for a in arrivals.values() if a.get("verdict") == UNKNOWN and a["evidence"]}
    if run.slow < 0:
        small = all(arrival["late_s"] <= TOLERANCE * SLOW_S for arrival in late.values())
        kind = RIGHT if small and named <= set(late) else WRONG
    elif named - {run.slow}:
        kind = WRONG
    elif run.slow in named:
        exact = stated_s is not None and abs(stated_s - wanted_s) <= TOLERANCE * wanted_s
        kind = RIGHT if exact else INEXACT
    else:
        claimed = arrivals.get(run.slow, {}).get("verdict", UNKNOWN) != UNKNOWN
        kind = UNSAID if unclear and not claimed else MISSED
    return {
        "verdict": kind,
        "named": sorted(named),
        "stated_s": stated_s,
        "wanted_s": wanted_s if run.slow >= 0 else 0.0,
        "step_s": steps_s,
        "why": "; ".join(sorted(unclear)) if kind == UNSAID else "",
    }


def measure(run: Run, folder: Path) -> dict[str, Any]:
    """Run a job in its folder, and judge what was said of it."""
    problem = start(run, folder)
    if problem:
        return {"verdict": FAILED, "named": [], "stated_s": None, "wanted_s": None, "why": problem}
    ranks, page = asked(folder)
    (folder / "page.txt").write_text(page)
    figures = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(run.ranks)]
    return judge(run, ranks, page, figures)


def table(results: Iterable[dict[str, Any]]) -> list[str]:
    """The results in Markdown."""

    def ms(seconds: float | None) -> str:
        return "" if seconds is None else f"{1e3 * seconds:.1f}"

    rows = [
        (
            r["shape"],
            str(r["ranks"]),
            f"{r['slow']}, {r['place']}" if r["slow"] >= 0 else "nobody",
            f"**{r['verdict']}**" if r["verdict"] in (WRONG, MISSED, FAILED) else r["verdict"],
            ", ".join(map(str, r["named"])),
            ms(r["wanted_s"]),
            ms(r["stated_s"]),
            r["why"],
        )
        for r in results
    ]
    return markdown_table(("shape", "ranks", "slow", "", "named", "late by, ms", "stated, ms", "why"), rows)


def main(
    out: Annotated[Path, typer.Option(help="Folder for the runs; those in it are not run again.")],
    only: Annotated[str, typer.Option(help="Regular expression: only runs whose name has it.")] = "",
) -> None:
    """Run the jobs one after the other; print one line each, then a table in Markdown."""
    results = campaign([run for runs in RUNS for run in runs], out, measure, only=only)
    counts = Counter(r["verdict"] for r in results)
    rows = [(kind, str(counts[kind]), means) for kind, means in MEANINGS.items()]
    print("\n".join([*markdown_table(("", "runs", "meaning"), rows), "", *table(results)]))


if __name__ == "__main__":
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    application.command()(main)
    application()
