"""``paceenv live status``: who is silent, missing or worst, and the tables of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from paceenv.core.wording import count, duration, name_ranks, percent
from paceenv.live.options import DELAYING
from paceenv.live.record.course import Course
from paceenv.live.record.findings import Findings
from paceenv.live.record.findings_text import STOPS
from paceenv.live.record.run_folder import RunFolder, age_s, is_silent
from paceenv.live.record.side_by_side import Job
from paceenv.live.record.snapshot import EARLY, LATE, UNKNOWN, Snapshot, number, text, total
from paceenv.live.record.summary import held, shadowed, spent
from paceenv.ui import output

COLUMNS = ("rank", "host", "state", "iterations", "step", "CV", "wait", "arrives", "delay", "pacing", "heard")
NARROW = ("rank", "host", "state", "step", "own", "wait", "arrives", "heard")
"""Columns of the worst ranks: with names of hosts of ten letters they fit into 80."""
WORST, MOST_FINDINGS = 10, 4
"""Ranks, and lines of findings beside them, on one screen."""


def missing(snapshots: Sequence[Snapshot]) -> list[int]:
    """The ranks without a status."""
    return Job(snapshots).missing if snapshots else []


def is_downgraded(snapshot: Snapshot) -> bool:
    return text(snapshot, "state") != text(snapshot, "mode")


def worst(snapshots: Sequence[Snapshot], now_s: float) -> list[Snapshot]:
    """The ranks to look at first: silent, downgraded, late (the latest first), then by their own time of a step."""

    def order(snapshot: Snapshot) -> tuple[float, ...]:
        verdict = text(snapshot, "arrival", "verdict")
        late_s = (number(snapshot, "arrival", "late_s") or 0.0) if verdict == LATE else 0.0
        own_s = number(snapshot, "parts", "compute_s") or 0.0
        as_asked = not is_silent(snapshot, now_s), not is_downgraded(snapshot)
        return *as_asked, -late_s, verdict == EARLY, -own_s, snapshot["rank"]

    return sorted(snapshots, key=order)[:WORST]


def print_status(
    run: RunFolder, attempt: str, snapshots: Sequence[Snapshot], findings: Findings | None, *, few: bool
) -> None:
    """A line per rank; or, with ``few``, the findings and the :data:`WORST` ranks in about 24 lines."""
    newest: Mapping[str, object] = max(snapshots, key=lambda s: number(s, "unix_time_s") or 0.0, default={})
    size, below = number(newest, "world_size"), notes(run, snapshots)
    course = Course(Job(snapshots)) if snapshots else None
    silent, ended = (course.silent, course.ended) if course is not None else ([], [])
    title = f"{text(newest, 'job') or run.path}: attempt {attempt}, {count(size)} rank{'s' * (size != 1.0)}"
    shown, columns = (worst(snapshots, time.time()), NARROW) if few else (snapshots, COLUMNS)
    cells = [_cells(snapshot, time.time()) for snapshot in shown]
    rows = [[of[name] for name in columns] for of in cells]
    if not few:
        below += [line for line in (findings or {"text": ()})["text"] if line.startswith((UNKNOWN, STOPS))]
        output.print_table("\n".join([title, *silent, *ended]), columns, rows, "\n".join(below))
        return
    lines: list[str] = findings["text"][:MOST_FINDINGS] if findings else []
    below = [note for note in [*ended, *below] if note not in lines]
    output.print_screen([f"{title}; the {len(shown)} worst", *lines, *below], columns, rows)


def notes(run: RunFolder, snapshots: Sequence[Snapshot]) -> list[str]:
    """What holds for the whole job, a line each: missing ranks, why a mode is not in force, canary, what pacing did."""
    gone = missing(snapshots)
    lines = [f"no status of {name_ranks(gone)}" if gone else "", *_downgrades(snapshots)]
    lines += [f"rank {s['rank']}: {said}" for s in snapshots[:1] if (said := text(s, "canary", "text"))]
    lines += [*shadowed(snapshots), *held(snapshots)[:1]]
    if total(snapshots, "pacing", "taken") and not any(text(s, "state") in DELAYING for s in snapshots):
        lines.append(f"{spent(snapshots)}; none now")
    return list(filter(None, [*lines, *run.notes]))


def _downgrades(snapshots: Sequence[Snapshot]) -> list[str]:
    """Ranks in another mode than the requested one, by the reason."""
    of: dict[tuple[str, str, str], list[int]] = {}
    for snapshot in filter(is_downgraded, snapshots):
        key = text(snapshot, "mode"), text(snapshot, "state"), text(snapshot, "reason")
        of.setdefault(key, []).append(int(snapshot["rank"]))
    return [
        f"{name_ranks(ranks)} in mode {state or '-'}, asked for {mode}: {reason or 'no reason given'}"
        for (mode, state, reason), ranks in of.items()
    ]


def _cells(snapshot: Snapshot, now_s: float) -> dict[str, str]:
    state, foregone = text(snapshot, "state"), number(snapshot, "shadow", "mean_s")
    delays_s = number(snapshot, "pacing", "mean_s") if state in DELAYING else None  # now, and not before
    return {
        "rank": str(snapshot["rank"]),
        "host": text(snapshot, "host") or "-",
        "state": (state or "-") + "!" * is_downgraded(snapshot),
        "iterations": count(number(snapshot, "iterations")),
        "step": duration(number(snapshot, "step", "mean_s")),
        "CV": percent(number(snapshot, "step", "cv")),
        "own": duration(number(snapshot, "parts", "compute_s")),
        "wait": duration(number(snapshot, "wait", "mean_s")),
        "arrives": _arrives(snapshot),
        "delay": f"(would {duration(foregone)})" if foregone and state == "shadow" else duration(delays_s),
        "pacing": text(snapshot, "canary", "verdict") or "-",
        "heard": _heard(snapshot, now_s),
    }


def _arrives(snapshot: Snapshot) -> str:
    verdict = text(snapshot, "arrival", "verdict")
    amount = {EARLY: "early_s", LATE: "late_s"}.get(verdict)
    said = min(filter(None, (text(snapshot, "arrival", "evidence"), verdict)), key=len, default="-")
    return f"{verdict} {duration(number(snapshot, 'arrival', amount))}" if amount else said


def _heard(snapshot: Snapshot, now_s: float) -> str:
    if snapshot.get("final") or snapshot.get("gone"):
        return "ended" if snapshot.get("final") else "gone"
    age = age_s(snapshot, now_s)
    if age is None:
        return "-"
    return f"silent {duration(age)}" if is_silent(snapshot, now_s) else f"{age:.0f} s ago"
