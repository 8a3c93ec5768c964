"""``paceenv live``: run a job with the agent, see how its ranks are, and change what its agents do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from paceenv.core.errors import InputError
from paceenv.core.wording import count, name_ranks
from paceenv.live import control_file
from paceenv.live.inspect_status import missing, print_status
from paceenv.live.options import DECIDING
from paceenv.live.record.findings import find, with_verdicts
from paceenv.live.record.run_folder import NOT_YET, RunFolder, is_silent, patience_s
from paceenv.live.record.snapshot import Snapshot, number, text
from paceenv.live.start import run_command
from paceenv.ui import output
from paceenv.ui.json_option import JsonFile

WATCH_S = 2.0
REST = 30.0
"""With --watch: at least so many times the time that a look takes passes before the next one."""

application = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run a training script with the agent, see how its ranks are, change what the agents do. "
    "The run's page: paceenv diagnose FOLDER.",
)

application.command(
    name="run", cls=run_command.RunCommand, help=run_command.HELP, context_settings=run_command.SETTINGS
)(run_command.run)

Folder = Annotated[Path, typer.Argument(help="The folder given to the agent as out.", show_default=False)]


@application.command()
def status(
    folder: Folder,
    watch: Annotated[
        bool, typer.Option("--watch", help="Again and again, the ten worst ranks, until all ranks have ended.")
    ] = False,
    json_: JsonFile = None,
) -> None:
    """State, step time, waits, pacing of the ranks, and the age of their last status.

    Examples: paceenv live status runs/mine -- paceenv live status runs/mine --watch
    -- paceenv live status runs/mine --json status.json
    """
    if watch and json_ is not None:
        raise InputError("--watch: prints tables; allowed: without --json")
    if watch and not folder.exists():
        output.say(f"{folder}: not there yet; {NOT_YET}")
        while not folder.exists():
            time.sleep(WATCH_S)
    run = RunFolder(folder)
    while True:
        began_s = time.monotonic()
        attempt = run.latest()
        snapshots = run.statuses(attempt)
        if not snapshots and not watch:
            notes = "".join(f"; {note}" for note in run.notes)
            raise InputError(f"{folder}: attempt {attempt} has no status of any rank{notes}")
        findings = find(snapshots) if snapshots else None
        snapshots = with_verdicts(snapshots, findings) if findings is not None else snapshots
        if json_ is not None:
            data = {"attempt": attempt, "attempts": run.attempts(), "ranks": snapshots, "findings": findings}
            output.write_json(data | {"notes": run.notes}, json_)
        else:
            print_status(run, attempt, snapshots, findings, few=watch)
        if not watch or (snapshots and not missing(snapshots) and all(s.get("final") for s in snapshots)):
            return
        time.sleep(max(WATCH_S, REST * (time.monotonic() - began_s)))


@application.command(name="set")
def set_(
    folder: Folder,
    mode: Annotated[str, typer.Option(help=f"The new mode: one of {', '.join(control_file.MODES)}.")],
    policy: Annotated[str | None, typer.Option(help="Decides in modes shadow, canary and active.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until every rank has changed over, or refused.")] = False,
) -> None:
    """Change mode and policy of a running job's agents, on all ranks before the same iteration."""
    run = RunFolder(folder)
    attempt = run.latest()
    statuses = [s for s in run.statuses(attempt) if not (s.get("final") or s.get("gone"))]
    if not statuses:
        raise InputError(f"{folder}: no rank of attempt {attempt} is running")
    wish = control_file.make_wish(statuses, mode, policy)
    gone = [f"rank {s['rank']} does not follow: {why}" for s in statuses if (why := control_file.off_for_good(s))]
    if gone and (mode in DECIDING or len(gone) == len(statuses)):  # else the others may follow
        raise InputError(f"{folder}: {gone[0]}")
    control_file.write_wish(folder, wish)
    with_policy = f", policy {wish.policy}" if wish.policy else ""
    when = f"before iteration {count(wish.from_iteration)}" if wish.from_iteration else "at once"
    output.say(
        f"asked attempt {attempt} ({len(statuses)} ranks with a status): change to mode {mode}{with_policy}, {when}"
    )
    if wait:
        with output.progress("wait for all ranks to change over"):
            done = _wait(run, attempt, wish)
        output.say(f"{done} ranks have changed over")


def _wait(run: RunFolder, attempt: str, wish: control_file.Wish) -> int:
    """The number of ranks, once all have changed over. Raises InputError where one does not."""
    begun_s = time.monotonic()
    while True:
        time.sleep(WATCH_S)
        statuses = run.statuses(attempt)
        changed, lost = [_has_changed(run, snapshot, wish) for snapshot in statuses], missing(statuses)
        if changed and all(changed) and not lost:
            return len(changed)
        if lost and time.monotonic() - begun_s > patience_s(int(number(statuses[0], "world_size") or 1)):
            raise InputError(f"{run.path}: no status of {name_ranks(lost)}")


def _has_changed(run: RunFolder, snapshot: Snapshot, wish: control_file.Wish) -> bool:
    """Whether a rank has changed over. Raises InputError where it will not."""
    taken: dict[str, Any] = snapshot.get("control") or {}
    state, reason, heard = text(snapshot, "state"), text(snapshot, "reason"), taken.get("id") == wish.id
    changed = heard and bool(not taken.get("waiting") or control_file.off_for_good(snapshot))
    for fails, why in (
        (heard and taken.get("refused"), f"does not follow: {taken.get('refused')}"),
        (snapshot.get("final"), "has ended"),
        (is_silent(snapshot, time.time()), "is silent"),
        (changed and state != wish.mode, f"is in mode {state}: {reason or 'no reason given'}"),
    ):
        if fails:
            raise InputError(f"{run.path}: rank {snapshot['rank']} {why}")
    return changed
