"""``paceenv live``: run a job with the agent, inspect its run by the folder, and change what its agents do."""

from __future__ import annotations

import sys
import time
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from paceenv.core.errors import InputError, needs
from paceenv.core.files import atomic_write
from paceenv.core.wording import count
from paceenv.live import control_file
from paceenv.live.inspect.conditions import CONDITIONS, FAIL_IF_HELP, chosen_conditions, holding
from paceenv.live.inspect.prediction import lines_of, policies_of, predict, read_prediction, write_prediction
from paceenv.live.inspect.ranks import is_silent, missing, patience_s
from paceenv.live.inspect.status_table import print_status, print_worst
from paceenv.live.record.findings import find, with_verdicts
from paceenv.live.record.run_folder import RunFolder
from paceenv.live.record.snapshot import Snapshot, number, text
from paceenv.live.record.summary import summarise
from paceenv.live.start import run_command
from paceenv.ui import output

WATCH_S = 2.0
REST = 30.0
"""With --watch: at least so many times the time that a look takes passes before the next one."""
WORST = 10

application = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run a training script with the agent, and inspect its run: late ranks, effect of pacing, where time goes.",
)

application.command(
    name="run", cls=run_command.RunCommand, help=run_command.HELP, context_settings={"allow_interspersed_args": False}
)(run_command.run)

Folder = Annotated[Path, typer.Argument(help="The folder given to the agent as out.", show_default=False)]
Attempt = Annotated[
    str | None,
    typer.Option(help="A start of the job's processes, by the beginning of its name (the time). Default: the latest."),
]


@application.command()
def status(
    folder: Folder,
    attempt: Attempt = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Again and again, the worst ranks only, until all ranks have ended.")
    ] = False,
    worst: Annotated[
        int | None, typer.Option(min=1, help="Only so many of the worst ranks. Default: all; with --watch 10.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="With --watch: a line for every rank.")] = False,
    fail_if: Annotated[str | None, typer.Option(help=f"{FAIL_IF_HELP}.")] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> int:
    """State, step time, waits, pacing of the ranks, and the age of their last status.

    Examples: paceenv live status runs/mine -- paceenv live status runs/mine --watch -- in a pipeline:
    paceenv live status runs/mine --json status.json --fail-if hurts,agent-lost

    Exit codes: 0; 2 for a mistake in the command or a folder that is no run; those of --fail-if. With --watch and
    --fail-if it ends as soon as a condition holds.
    """
    if watch and json_ is not None:
        raise InputError("--watch: prints tables; allowed: without --json")
    if all_ and worst is not None:
        raise InputError("--all: shows every rank; allowed: without --worst")
    wanted = chosen_conditions(fail_if)
    run = RunFolder(folder)
    most = worst or (WORST if watch and not all_ else None)
    while True:
        began_s = time.monotonic()
        chosen = run.chosen(attempt)
        snapshots = run.statuses(chosen)
        if not snapshots and not watch:
            raise InputError(f"{folder}: attempt {chosen} has no status of any rank" + _notes(run))
        findings = find(snapshots) if snapshots else None
        if findings is not None:
            snapshots = with_verdicts(snapshots, findings)
        hold = holding(snapshots, chosen, time.time())
        if json_ is not None:
            found = {"attempt": chosen, "attempts": run.attempts(), "ranks": snapshots, "findings": findings}
            found |= {"conditions": hold, "prediction": read_prediction(run, chosen), "notes": run.notes}
            output.write_json(found, json_)
        elif most is not None:
            print_worst(run, chosen, snapshots, findings, most)
        else:
            print_status(run, chosen, snapshots, again=watch)
        failed = next((name for name in wanted if name in hold), None)
        if failed is not None:
            output.say(f"{folder}: {failed}: {hold[failed]}")
            return CONDITIONS[failed].code
        if not watch or (snapshots and not missing(snapshots) and all(s.get("final") for s in snapshots)):
            return 0
        time.sleep(max(WATCH_S, REST * (time.monotonic() - began_s)))


@application.command()
def summary(folder: Folder, attempt: Attempt = None) -> None:
    """One page: where the step went, which rank waits for which, what pacing did, the agent's messages."""
    run = RunFolder(folder)
    chosen = run.chosen(attempt)
    snapshots = run.statuses(chosen)
    if not snapshots:
        raise InputError(f"{folder}: attempt {chosen} has no status of any rank" + _notes(run))
    sys.stdout.write(summarise(snapshots))
    sys.stdout.writelines(f"{line}\n" for line in lines_of(read_prediction(run, chosen), snapshots, run.path))
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
        raise needs("paceenv live trace", error.name, "sim") from None

    with output.progress("merge the ranks' segments"):
        merged = write_merged(run, out, attempt)
    _say_notes(run)
    output.say(
        f"wrote {out}: {count(merged.rows)} rows of {len(merged.spread_s)} ranks, attempt {merged.attempt}; "
        f"{describe_spread(merged)}"
    )


@application.command(name="predict")
def predict_(
    folder: Folder,
    attempt: Attempt = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Predict for this policy; repeatable. Default: those of the run.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, help="Simulated runs of each policy.")] = 16,
    iterations: Annotated[int, typer.Option(min=40, help="Iterations of a simulated run.")] = 2000,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Predict what the run's policy would gain: simulated on the cluster that its trace calibrates to.

    Needs paceenv with its extra sim, and not on a node of the job: copy the folder. The prediction is kept with the
    run, and status and summary show it. Where the trace does not allow one, it says what is missing.
    """
    run = RunFolder(folder)
    chosen = run.chosen(attempt)
    policies = list(dict.fromkeys(policy or policies_of(run.statuses(chosen))))
    if not policies:
        raise InputError(f"{folder}: the run has no policy; allowed: with --policy NAME")
    with output.progress(f"predict {', '.join(policies)}", 1) as done:
        found = predict(run, chosen, policies, seeds=seeds, iterations=iterations, on_done=done)
    write_prediction(run, found)
    if json_ is not None:
        output.write_json(found, json_)
    if json_ != "-":
        sys.stdout.writelines(f"{line}\n" for line in lines_of(found, [], run.path))
        for name, lines in (("assumed", found.get("assumes")), ("not identified", found.get("not_identified"))):
            for line in lines or ():
                output.say(f"{name}: {line}")
    _say_notes(run)


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
    if wait:
        with output.progress("wait for all ranks to change over"):
            done = _wait(run, attempt, wish)
        output.say(f"{done} ranks have changed over")


def _wait(run: RunFolder, attempt: str, wish: control_file.Wish) -> int:
    """The number of ranks, once all have changed over. Raises InputError where one does not."""
    done, begun_s = 0, time.monotonic()
    while not done:
        time.sleep(WATCH_S)
        statuses = run.statuses(attempt)
        done, why = _followed(statuses, wish)
        waited_s, lost = time.monotonic() - begun_s, missing(statuses)
        if lost and waited_s > patience_s(int(number(statuses[0], "world_size") or 1)):
            why = f"{lost} ranks have no status"
        if why:
            raise InputError(f"{run.path}: {why}")
    return done


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
        if is_silent(snapshot, time.time()):
            return 0, f"rank {snapshot['rank']} is silent"
        changed = heard and not taken.get("waiting")
        if changed and state != ("off" if wish.kill else wish.mode):
            return 0, f"rank {snapshot['rank']} is in mode {state}: {text(snapshot, 'reason') or 'no reason given'}"
        followed += changed
    return (followed if followed == len(statuses) and not missing(statuses) else 0), ""


@application.command()
def dashboard(
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write; import it into Grafana.")],
) -> None:
    """Write the Grafana dashboard for the agents' Prometheus endpoints."""
    atomic_write(out, (resources.files("paceenv.live") / "dashboards" / "grafana.json").read_bytes())
    output.say(f"wrote {out}")


def _notes(run: RunFolder) -> str:
    return "".join(f"; {note}" for note in run.notes)


def _say_notes(run: RunFolder) -> None:
    for note in run.notes:
        output.say(note)
