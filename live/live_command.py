"""``paceenv live``: inspect a run by its folder, while it trains or after, and change what its agents do."""

from __future__ import annotations

import sys
import time
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.core.wording import count, duration, percent
from paceenv.live import control_file
from paceenv.live.record.findings import find, with_verdicts
from paceenv.live.record.run_folder import RunFolder, status_period_s
from paceenv.live.record.snapshot import Snapshot, number, text
from paceenv.live.record.summary import summarise, tuned
from paceenv.ui import output

WATCH_S = 2.0
SILENT_S, SILENT_PERIODS = 30.0, 5.0
"""A rank without a new status for this long, and for so many of its periods, is called silent."""
COLUMNS = ("rank", "host", "state", "iterations", "step", "CV", "wait", "arrives", "delay", "pacing", "heard")

application = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Inspect a live run by its folder: early and late ranks, effect of pacing, where the time goes.",
)

Folder = Annotated[Path, typer.Argument(help="The folder given to the agent as out.", show_default=False)]
Attempt = Annotated[
    str | None,
    typer.Option(help="A start of the job's processes, by the beginning of its name (the time). Default: the latest."),
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
        snapshots = run.statuses(chosen)
        if not snapshots and not watch:
            raise InputError(f"{folder}: attempt {chosen} has no status of any rank" + _notes(run))
        findings = find(snapshots) if snapshots else None
        if findings is not None:
            snapshots = with_verdicts(snapshots, findings)
        if json_ is not None:
            found = {"attempt": chosen, "attempts": run.attempts(), "ranks": snapshots, "findings": findings}
            output.write_json(found | {"notes": run.notes}, json_)
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
    snapshots = run.statuses(chosen)
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
    run = RunFolder(folder)
    try:  # pyarrow takes a while, and neither a job nor the other commands need it
        from paceenv.live.record.merge_segments import describe_spread, write_merged
    except ModuleNotFoundError as error:
        raise InputError(f"paceenv live trace: needs {error.name}; install it: pip install 'paceenv[sim]'") from None

    merged = write_merged(run, out, attempt)
    _say_notes(run)
    output.say(
        f"wrote {out}: {count(merged.rows)} rows of {len(merged.spread_s)} ranks, attempt {merged.attempt}; "
        f"{describe_spread(merged)}"
    )


@application.command(name="set")
def set_(
    folder: Folder,
    mode: Annotated[str, typer.Option(help=f"The new mode: one of {', '.join(control_file.MODES)}.")] = "observe",
    policy: Annotated[str | None, typer.Option(help="Decides in modes shadow, canary and active.")] = None,
    kill: Annotated[bool, typer.Option("--kill", help="Detach the agents for good; no set brings them back.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until every rank has changed over, or refused.")] = False,
) -> None:
    """Change mode and policy of a running job's agents, on all ranks before the same iteration."""
    run = RunFolder(folder)
    attempt = run.latest()
    statuses = [status for status in run.statuses(attempt) if not status.get("final")]
    if not statuses:
        raise InputError(f"{folder}: no rank of attempt {attempt} is running")
    wish = control_file.make_wish(statuses, mode, policy, kill)
    control_file.write_wish(folder, wish)
    what = "detach for good" if kill else f"change to mode {mode}" + f", policy {wish.policy}" * bool(wish.policy)
    when = f"before iteration {count(wish.from_iteration)}" if wish.from_iteration else "at once"
    output.say(f"asked attempt {attempt} ({len(statuses)} ranks with a status): {what}, {when}")
    while wait:
        time.sleep(WATCH_S)
        done, why = _followed(run.statuses(attempt), wish)
        if why:
            raise InputError(f"{folder}: {why}")
        if done:
            output.say(f"{done} ranks have changed over")
            return


def _followed(statuses: list[Snapshot], wish: control_file.Wish) -> tuple[int, str]:
    """The number of ranks if all have changed over, else 0; and why that will not happen."""
    followed = 0
    for snapshot in statuses:
        taken: dict[str, Any] = snapshot.get("control") or {}
        state, heard = text(snapshot, "state"), taken.get("id") == wish.id
        if heard and taken.get("refused"):
            return 0, f"rank {snapshot['rank']} does not follow: {taken['refused']}"
        if snapshot.get("final"):
            return 0, f"rank {snapshot['rank']} has ended"
        changed = heard and not taken.get("waiting")
        if changed and state != ("off" if wish.kill else wish.mode):
            return 0, f"rank {snapshot['rank']} is in mode {state}: {text(snapshot, 'reason') or 'no reason given'}"
        followed += changed
    return (followed if followed == len(statuses) and not _missing(statuses) else 0), ""


@application.command()
def dashboard(
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write; import it into Grafana.")],
) -> None:
    """Write the Grafana dashboard for the agents' Prometheus endpoints."""
    atomic_write(out, (resources.files("paceenv.live") / "dashboards" / "grafana.json").read_bytes())
    output.say(f"wrote {out}")


def _print_status(run: RunFolder, attempt: str, snapshots: list[Snapshot]) -> None:
    now_s = time.time()
    rows = [_row(snapshot, now_s) for snapshot in snapshots]
    missing = _missing(snapshots)
    newest = max(snapshots, key=lambda s: number(s, "unix_time_s") or 0.0, default={})
    notes = [f"no status of {missing} ranks" if missing else "", text(newest, "canary", "text")]
    notes += [text(newest, "canary", "forecast", "text"), *(line.strip() for line in tuned(snapshots)[1:]), *run.notes]
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
    period_s = status_period_s(int(number(snapshot, "world_size") or 1))
    silent = age_s > max(SILENT_S, SILENT_PERIODS * period_s)
    return f"silent {duration(age_s)}" if silent else f"{age_s:.0f} s ago"


def _missing(snapshots: list[Snapshot]) -> int:
    size = max((number(s, "world_size") or 0.0 for s in snapshots), default=0.0)
    return max(int(size) - len(snapshots), 0)


def _notes(run: RunFolder) -> str:
    return "".join(f"; {note}" for note in run.notes)


def _say_notes(run: RunFolder) -> None:
    for note in run.notes:
        output.say(note)
