"""``paceenv live``: inspect a run by its folder, while it trains or after: status, summary, trace, dashboard."""

from __future__ import annotations

import sys
import time
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.live.record.history import compare_ranks
from paceenv.live.record.run_folder import RunFolder
from paceenv.live.record.snapshot import Snapshot, number, text
from paceenv.live.record.summary import count, duration, percent, summarise
from paceenv.ui import output

WATCH_S = 2.0
SILENT_S = 30.0
"""A rank without a new status for this long is called silent; agents write every two seconds."""
COLUMNS = ("rank", "host", "state", "iterations", "step", "CV", "wait", "arrives", "delay", "pacing", "heard")

application = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Inspect a live run by its folder: early and late ranks, effect of pacing, where the time goes.",
)

Folder = Annotated[Path, typer.Argument(help="The folder given to the agent as out.", show_default=False)]
Attempt = Annotated[
    int | None, typer.Option(help="Which start of the job's processes (0, 1, ... after restarts). Default: the latest.")
]


@application.command()
def status(
    folder: Folder,
    attempt: Attempt = None,
    watch: Annotated[bool, typer.Option("--watch", help="Again every 2 seconds, until all ranks have ended.")] = False,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """One line per rank: state, step time, waits, pacing, and the age of its last status."""
    if watch and json_ is not None:
        raise InputError("--watch: prints tables; allowed: without --json")
    run = RunFolder(folder)
    while True:
        chosen = run.chosen(attempt)
        snapshots = compare_ranks(run.statuses(chosen))
        if not snapshots and not watch:
            raise InputError(f"{folder}: attempt {chosen} has no status of any rank" + _notes(run))
        if json_ is not None:
            output.write_json(
                {"attempt": chosen, "attempts": run.attempts(), "ranks": snapshots, "notes": run.notes}, json_
            )
            return
        if watch and sys.stdout.isatty():
            sys.stdout.write("\x1b[H\x1b[2J")
        _print_status(run, chosen, snapshots)
        if not watch or (snapshots and not _missing(snapshots) and all(s.get("final") for s in snapshots)):
            return
        time.sleep(WATCH_S)


@application.command()
def summary(folder: Folder, attempt: Attempt = None) -> None:
    """One page: where the step went, which rank waits for which, what pacing did, the agent's messages."""
    run = RunFolder(folder)
    chosen = run.chosen(attempt)
    snapshots = compare_ranks(run.statuses(chosen))
    if not snapshots:
        raise InputError(f"{folder}: attempt {chosen} has no status of any rank" + _notes(run))
    sys.stdout.write(summarise(snapshots))
    _say_notes(run)


@application.command()
def trace(
    folder: Folder,
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace to write (Parquet), for paceenv calibrate.")],
    attempt: Attempt = None,
) -> None:
    """Merge the ranks' segments into one trace on one clock."""
    from paceenv.live.record.merge_segments import (  # pyarrow takes a while, and the other commands need none
        describe_spread,
        write_merged,
    )

    run = RunFolder(folder)
    merged = write_merged(run, out, attempt)
    _say_notes(run)
    output.say(
        f"wrote {out}: {count(merged.rows)} rows of {len(merged.spread_s)} ranks, attempt {merged.attempt}; "
        f"{describe_spread(merged)}"
    )


@application.command()
def dashboard(
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write; import it into Grafana.")],
) -> None:
    """Write the Grafana dashboard for the agents' Prometheus endpoints."""
    atomic_write(out, (resources.files("paceenv.live") / "dashboards" / "grafana.json").read_bytes())
    output.say(f"wrote {out}")


def _print_status(run: RunFolder, attempt: int, snapshots: list[Snapshot]) -> None:
    now_s = time.time()
    rows = [_row(snapshot, now_s) for snapshot in snapshots]
    missing = _missing(snapshots)
    newest = max(snapshots, key=lambda s: number(s, "unix_time_s") or 0.0, default={})
    notes = [f"no status of {missing} ranks" if missing else "", text(newest, "canary", "text"), *run.notes]
    title = f"{text(newest, 'job') or run.path}: attempt {attempt}, {count(number(newest, 'world_size'))} ranks"
    output.print_table(title, COLUMNS, rows, "; ".join(filter(None, notes)))


def _row(snapshot: Snapshot, now_s: float) -> tuple[str, ...]:
    state, mode = text(snapshot, "state"), text(snapshot, "mode")
    arrival = text(snapshot, "arrival", "verdict")
    amount = {"early": "early_s", "late": "late_s"}.get(arrival)
    return (
        str(snapshot["rank"]),
        text(snapshot, "host") or "-",
        (state if state == mode else f"{state} (asked: {mode})") or "-",
        count(number(snapshot, "iterations")),
        duration(number(snapshot, "step", "mean_s")),
        percent(number(snapshot, "step", "cv")),
        duration(number(snapshot, "wait", "mean_s")),
        f"{arrival} {duration(number(snapshot, 'arrival', amount))}" if amount else arrival or "-",
        duration(number(snapshot, "pacing", "mean_s")),
        text(snapshot, "canary", "verdict") or "-",
        _heard(snapshot, now_s),
    )


def _heard(snapshot: Snapshot, now_s: float) -> str:
    if snapshot.get("final"):
        return "ended"
    written_s = number(snapshot, "unix_time_s")
    if written_s is None:
        return "-"
    age_s = max(now_s - written_s, 0.0)
    return f"silent {duration(age_s)}" if age_s > SILENT_S else f"{age_s:.0f} s ago"


def _missing(snapshots: list[Snapshot]) -> int:
    size = max((number(s, "world_size") or 0.0 for s in snapshots), default=0.0)
    return max(int(size) - len(snapshots), 0)


def _notes(run: RunFolder) -> str:
    return "".join(f"; {note}" for note in run.notes)


def _say_notes(run: RunFolder) -> None:
    for note in run.notes:
        output.say(note)
