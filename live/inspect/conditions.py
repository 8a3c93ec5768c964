"""Conditions of a run on which a pipeline may stop: ``paceenv live status --fail-if``, each with an exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceenv.core.errors import out_of_range
from paceenv.core.wording import duration, name_ranks
from paceenv.live.inspect.ranks import is_downgraded, is_silent, overdue
from paceenv.live.record.snapshot import LATE, Snapshot, entry, number, text


class View(NamedTuple):
    """What a condition is asked about: the ranks' statuses with verdicts, the name of the attempt, the time now."""

    snapshots: Sequence[Snapshot]
    attempt: str
    now_s: float


class Condition(NamedTuple):
    """A condition: the exit code, its meaning in words, and a function that says why it holds, or ""."""

    code: int
    means: str
    why: Callable[[View], str]


def _late(view: View) -> str:
    late = {int(s["rank"]): number(s, "arrival", "late_s") for s in view.snapshots if _arrives(s) == LATE}
    if not late:
        return ""
    return f"{name_ranks(list(late))} late by up to {duration(max(x or 0.0 for x in late.values()))}"


def _arrives(snapshot: Snapshot) -> str:
    return text(snapshot, "arrival", "verdict")


def _hurts(view: View) -> str:
    for snapshot in view.snapshots:
        candidates = entry(snapshot, "canary", "candidates")
        for one in (entry(snapshot, "canary"), *(candidates if isinstance(candidates, list) else ())):
            if isinstance(one, dict) and text(one, "verdict") == "hurts":
                return f"pacing {text(one, 'text')}"
    return ""


def _agent_lost(view: View) -> str:
    if gone := overdue(view.snapshots, view.attempt, view.now_s):
        return f"no status of {gone} ranks"
    if silent := [int(s["rank"]) for s in view.snapshots if is_silent(s, view.now_s)]:
        return f"{name_ranks(silent)} silent"
    for snapshot in view.snapshots:
        agents, size = number(snapshot, "agents", "count"), number(snapshot, "world_size")
        if agents is not None and size is not None and agents < size:
            return f"{agents:.0f} of {size:.0f} ranks have an agent"
    ended = [s for s in view.snapshots if text(s, "state") == "off" and text(s, "mode") != "off"]
    return f"{name_ranks([int(s['rank']) for s in ended])} off: {text(ended[0], 'reason')}" if ended else ""


def _unpaced(view: View) -> str:
    other = [s for s in view.snapshots if is_downgraded(s)]
    if not other:
        return ""
    state, mode, reason = (text(other[0], name) for name in ("state", "mode", "reason"))
    who = name_ranks([int(s["rank"]) for s in other])
    return f"{who} in mode {state}, asked for {mode}: {reason or 'no reason given'}"


def _undecided(view: View) -> str:
    for snapshot in view.snapshots:
        if text(snapshot, "canary", "verdict") == "insufficient evidence":
            return text(snapshot, "canary", "text")
    return ""


CONDITIONS = {
    "late": Condition(10, "a rank is late", _late),
    "hurts": Condition(11, "pacing, or a candidate, surely hurts", _hurts),
    "agent-lost": Condition(12, "a rank has no agent, no status, or has been silent for too long", _agent_lost),
    "unpaced": Condition(13, "a rank is not in the mode that was asked for", _unpaced),
    "undecided": Condition(14, "a canary has insufficient evidence", _undecided),
}
FAIL_IF_HELP = "End with the exit code of the first of these conditions that holds, commas between: " + "; ".join(
    f"{name} ({one.code}): {one.means}" for name, one in CONDITIONS.items()
)


def chosen_conditions(text: str | None) -> list[str]:
    """The names in an option ``--fail-if``. Raises InputError for an unknown one."""
    names = [name.strip() for name in text.split(",")] if text is not None else []
    for name in names:
        if name not in CONDITIONS:
            raise out_of_range("--fail-if", name, f"of {', '.join(CONDITIONS)}, commas between", "live status")
    return names


def holding(snapshots: Sequence[Snapshot], attempt: str, now_s: float) -> dict[str, str]:
    """The conditions that hold, each with the reason in words.

    Args:
        snapshots: statuses with the verdicts of the findings.
        attempt: its name, which holds the time of the start.
        now_s: seconds since 1970.
    """
    view = View(snapshots, attempt, now_s)
    return {name: why for name, one in CONDITIONS.items() if (why := one.why(view))}
