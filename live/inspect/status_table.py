"""The status of a run as a table: a line per rank, or only the worst ranks on one screen."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from paceenv.core.wording import count, duration, name_ranks, percent
from paceenv.live.inspect.canary_outlook import canary_outlook
from paceenv.live.inspect.prediction import lines_of, read_prediction
from paceenv.live.inspect.ranks import age_s, is_downgraded, is_silent, missing, worst
from paceenv.live.record.findings import Findings
from paceenv.live.record.run_folder import RunFolder
from paceenv.live.record.snapshot import EARLY, LATE, Snapshot, entry, number, text
from paceenv.live.record.summary import held, shadowed, tuned
from paceenv.ui import output

COLUMNS = ("rank", "host", "state", "iterations", "step", "CV", "wait", "arrives", "delay", "pacing", "heard")
NARROW = ("rank", "host", "state", "step", "own", "wait", "arrives", "heard")
"""Columns of the worst ranks: with names of hosts of ten letters they fit into 80."""
MOST_FINDINGS = 4
"""Lines of findings beside the worst ranks."""


def print_status(run: RunFolder, attempt: str, snapshots: Sequence[Snapshot], *, again: bool = False) -> None:
    """A line per rank; ``again`` clears a terminal before.

    Args:
        run: the folder of the run.
        attempt: which of its attempts.
        snapshots: the ranks' last statuses.
        again: whether it replaces a table on the screen.
    """
    now_s = time.time()
    if again:
        output.clear_screen()
    rows = [_row(snapshot, now_s) for snapshot in snapshots]
    output.print_table(_title(run, attempt, snapshots), COLUMNS, rows, "\n".join(notes(run, attempt, snapshots)))


def print_worst(
    run: RunFolder, attempt: str, snapshots: Sequence[Snapshot], findings: Findings | None, most: int
) -> None:
    """Counts, findings and the worst ranks; about 24 lines with 10 ranks.

    Args:
        run: the run.
        attempt: name of the attempt.
        snapshots: statuses with the verdicts of the findings.
        findings: about them.
        most: number of ranks to show.
    """
    now_s = time.time()
    shown = worst(snapshots, most, now_s)
    rows = [_narrow(snapshot, now_s) for snapshot in shown]
    found = entry(findings or {}, "text")
    lines = [_counts(snapshots, now_s), *(found if isinstance(found, list) else [])[:MOST_FINDINGS]]
    lines += [note for note in notes(run, attempt, snapshots) if note not in lines]
    title = f"{_title(run, attempt, snapshots)}; the {len(rows)} worst"
    output.print_screen([title, *lines], NARROW, rows)


def notes(run: RunFolder, attempt: str, snapshots: Sequence[Snapshot]) -> list[str]:
    """What holds for the whole job, a line each: missing ranks, why a mode is not in force, canary, what pacing did.

    Args:
        run: the folder of the run.
        attempt: which of its attempts.
        snapshots: the ranks' last statuses.
    """
    gone = missing(snapshots)
    newest = max(snapshots, key=lambda s: number(s, "unix_time_s") or 0.0, default={})
    found = [f"no status of {gone} ranks" if gone else "", *_downgrades(snapshots)]
    found += [text(newest, "canary", "text"), text(newest, "canary", "forecast", "text")]
    found += [*shadowed(snapshots), *held(snapshots)[:1], *lines_of(read_prediction(run, attempt), snapshots, run.path)]
    if (ahead := canary_outlook(snapshots)) is not None:
        found.append(f"a canary here, with blocks for slack rules: {ahead[0].text(ahead[1])}")
    found += [*(line.strip() for line in tuned(snapshots)[1:]), *run.notes]
    return list(filter(None, found))


def _title(run: RunFolder, attempt: str, snapshots: Sequence[Snapshot]) -> str:
    newest: Mapping[str, object] = max(snapshots, key=lambda s: number(s, "unix_time_s") or 0.0, default={})
    return f"{text(newest, 'job') or run.path}: attempt {attempt}, {count(number(newest, 'world_size'))} ranks"


def _downgrades(snapshots: Sequence[Snapshot]) -> list[str]:
    """Ranks in another mode than the requested one, by the reason."""
    of: dict[tuple[str, str, str], list[int]] = {}
    for snapshot in filter(is_downgraded, snapshots):
        key = text(snapshot, "mode"), text(snapshot, "state"), text(snapshot, "reason")
        of.setdefault(key, []).append(int(snapshot["rank"]))
    return [
        f"{name_ranks(ranks)}: asked for {mode}, in force {state or '-'}: {reason or 'no reason given'}"
        for (mode, state, reason), ranks in of.items()
    ]


def _counts(snapshots: Sequence[Snapshot], now_s: float) -> str:
    states = Counter(text(s, "state") or "-" for s in snapshots)
    named = {
        "silent": sum(is_silent(s, now_s) for s in snapshots),
        "ended": sum(bool(s.get("final")) for s in snapshots),
        "late": sum(text(s, "arrival", "verdict") == LATE for s in snapshots),
    }
    steps_s = [x for s in snapshots if (x := number(s, "step", "mean_s")) is not None]
    step = f"step {duration(sorted(steps_s)[len(steps_s) // 2])}, " if steps_s else ""
    modes = ", ".join(f"{count(n)} in {state}" for state, n in states.most_common())
    return step + modes + "".join(f", {count(n)} {name}" for name, n in named.items() if n)


def _row(snapshot: Snapshot, now_s: float) -> tuple[str, ...]:
    state, mode = text(snapshot, "state"), text(snapshot, "mode")
    foregone = number(snapshot, "shadow", "mean_s")
    return (
        str(snapshot["rank"]),
        text(snapshot, "host") or "-",
        (state if state == mode else f"{state} (asked: {mode})") or "-",
        count(number(snapshot, "iterations")),
        duration(number(snapshot, "step", "mean_s")),
        percent(number(snapshot, "step", "cv")),
        duration(number(snapshot, "wait", "mean_s")),
        _arrives(snapshot),
        f"(would {duration(foregone)})" if foregone else duration(number(snapshot, "pacing", "mean_s")),
        text(snapshot, "canary", "verdict") or "-",
        _heard(snapshot, now_s),
    )


def _narrow(snapshot: Snapshot, now_s: float) -> tuple[str, ...]:
    return (
        str(snapshot["rank"]),
        text(snapshot, "host") or "-",
        (text(snapshot, "state") or "-") + "!" * is_downgraded(snapshot),
        duration(number(snapshot, "step", "mean_s")),
        duration(number(snapshot, "own", "mean_s")),
        duration(number(snapshot, "wait", "mean_s")),
        _arrives(snapshot),
        _heard(snapshot, now_s),
    )


def _arrives(snapshot: Snapshot) -> str:
    verdict = text(snapshot, "arrival", "verdict")
    amount = {EARLY: "early_s", LATE: "late_s"}.get(verdict)
    return f"{verdict} {duration(number(snapshot, 'arrival', amount))}" if amount else verdict or "-"


def _heard(snapshot: Snapshot, now_s: float) -> str:
    if snapshot.get("final"):
        return "ended"
    age = age_s(snapshot, now_s)
    if age is None:
        return "-"
    return f"silent {duration(age)}" if is_silent(snapshot, now_s) else f"{age:.0f} s ago"
