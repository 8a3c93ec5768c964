"""What ``paceenv diagnose`` prints: causes, late ranks, where time went on devices, hangs, collectives."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from paceenv.core.wording import duration
from paceenv.diagnosis.answer import Answer
from paceenv.diagnosis.host_activity import LateHost
from paceenv.diagnosis.two_runs import Change
from paceenv.diagnosis.two_runs import headline as say_changes
from paceenv.diagnosis.verdict import Diagnosis, Verdict
from paceenv.importers.timelines import RankActivity
from paceenv.report.step_log_output import print_steps
from paceenv.ui import output
from paceenv.ui.output import sentence

if TYPE_CHECKING:  # what few need brings libraries that take a second to import
    from paceenv.diagnosis.collective_times import CollectiveTimes
    from paceenv.diagnosis.hang import Hang, LastSeen

ACTIVITY: Final = "Where a step's time went on each device"
_MOST_ROWS: Final = 16
_MOST_RANKS_HUNG: Final = 24
_SHOWN: Final = (
    ("kernels", "compute_s"),
    ("copies to it", "to_device_s"),
    ("other copies", "other_copies_s"),
    ("collectives exposed", "exposed_s"),
    ("hidden", "hidden_s"),
    ("waiting for its host", "host_wait_s"),
    ("idle", "idle_s"),
    ("host in data loader", "loader_s"),
)


def print_answer(found: Answer, verdict: Verdict | None, activity: Sequence[RankActivity], name: str) -> None:
    """Print all that was found."""
    for hang in found.hangs:
        _print_hang(hang)
    if found.ended:
        output.print_table("What else the logs say", (), (), "\n".join(map(sentence, found.ended)))
    if found.times is not None:
        _print_times(found.times)
    if found.diagnosis is not None and verdict is not None:
        _print_diagnosis(found.diagnosis, verdict, name)
    if found.lateness is not None and not found.lateness.why_not:
        output.print_table("When which rank was late", (), (), "\n".join(found.lateness.text()))
    if activity:
        columns, rows = activity_table(activity, found.late_hosts)
        more = f"{len(rows) - _MOST_ROWS} more ranks. " if len(rows) > _MOST_ROWS else ""
        why = "\n".join(late_sentences(found.late_hosts, found.diagnosis))
        output.print_table(ACTIVITY, columns, rows[:_MOST_ROWS], f"{more}{why}".strip())
    for steps in found.steps:
        print_steps(steps)


def print_changes(changes: tuple[Change, ...], before: str, after: str, ranks: tuple[int, int]) -> None:
    """Two runs side by side."""
    columns = ("what", "before", "after", "change", "")
    output.print_table(
        f"{before} and {after}", columns, [one.row() for one in changes], sentence(say_changes(changes, ranks))
    )


def headline(verdict: Verdict) -> str:
    """A verdict as sentences."""
    return " ".join(map(sentence, (verdict.lost, verdict.said, *verdict.checks)))


def activity_table(activity: Sequence[RankActivity], late: Sequence[LateHost]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of where a mean step's time went on each rank's device, those that are late first."""
    of_rank: dict[int, list[RankActivity]] = defaultdict(list)
    for one in activity:
        of_rank[one.rank].append(one)
    first = [one.rank for one in late]
    ranks = [*first, *(rank for rank in sorted(of_rank) if rank not in first)]
    shown = [(title, key) for title, key in _SHOWN if any(getattr(one, key) > 0.0 for one in activity)]
    rows = [[str(rank)] for rank in ranks]
    for row, rank in zip(rows, ranks, strict=True):
        means_s = [float(np.mean([getattr(one, key) for one in of_rank[rank]])) for _, key in shown]
        row += [duration(mean_s) if np.isfinite(mean_s) else "unknown" for mean_s in means_s]
    return ["rank", *(title for title, _ in shown)], rows


def late_sentences(late: Sequence[LateHost], found: Diagnosis | None) -> list[str]:
    """Why ranks are late; how late is said only once, in the headline where no causes can be named."""
    said = {one.rank for one in found.arrivals.late} if found is not None and found.refused else set()
    return [sentence(one.why if one.rank in said else one.text) for one in late]


def _print_diagnosis(found: Diagnosis, verdict: Verdict, name: str) -> None:
    """Causes with what to do, and the headline."""
    rows = [(c.cause, f"{c.share:.0%}", f"{c.lost_s:.4g}", c.evidence, verdict.advice(c)) for c in found.causes]
    known = found.bare_step_s is not None and found.causes
    bare = f" ({found.bare_step_s:.4g} s without any cause)" if known else ""
    ideal = ""
    if found.ideal_step_time_s is not None:
        ideal = (
            f"{bare}, with all ranks equal {found.ideal_step_time_s:.4g} s (slowdown {found.slowdown:.3f}; "
            f"replayed within {max(abs(found.replay_error), 1e-3):.1%})"
        )
    for note in found.notes:
        output.say(note)
    title = f"{name}: mean step {found.step_time_s:.4g} s{ideal}"
    output.print_table(title, ("cause", "of lost time", "s a step", "evidence", "advice"), rows, headline(verdict))


def _print_hang(hang: Hang) -> None:
    """The verdict, what each rank waits for, and what the ranks behind it were last seen doing."""
    dumps, silent = len(hang.job.dumps), len(hang.job.silent)
    what = "lines of the watchdog" if hang.of_watchdog else "Flight Recorder dumps"
    of = f"{dumps} of {dumps + silent} ranks" if silent or not hang.of_watchdog else f"{dumps} rank{'s' * (dumps > 1)}"
    title = f"{hang.name}: {what} of {of}"
    output.print_table(title, (), (), sentence(hang.verdict))
    if not hang.hangs or hang.apart:
        return
    rows, most = hang.waiting_rows(), _MOST_RANKS_HUNG
    more = f"{len(rows) - most} more rows; --json has all ranks" if len(rows) > most else ""
    columns = ("ranks", "wait in", "of the group", "for", "in the end for")
    output.print_table("What the ranks wait for", columns, rows[:most], more)
    if hang.last_seen:
        columns = ("rank", "last recorded", "behind", "did not enter", "called from")
        output.print_table("Last seen", columns, [_last_seen(one) for one in hang.last_seen[:most]])


def _last_seen(seen: LastSeen) -> tuple[str, ...]:
    last = seen.last
    if last is None:
        did = "nothing unfinished" + (f"; {seen.finished} was its last collective there" if seen.finished >= 0 else "")
    else:
        at = time.strftime(", at %H:%M:%S UTC", time.gmtime(last.created_s)) if last.created_s > 0.0 else ""
        number = last.p2p_seq if last.is_p2p else last.collective_seq
        did = f"{last.op} {number} of {seen.last_group}, {last.state}{at}"
    if seen.blind:
        did += f"; {seen.blind} ends never seen"
    behind = f"{seen.behind} collectives" if seen.behind else "-"
    following = f"{seen.next_op} of {seen.next_group}" if seen.next_op else "-"
    return str(seen.rank), did, behind, following, "; ".join(seen.frames) or "not recorded"


def _print_times(times: CollectiveTimes) -> None:
    """Who arrives last, and times and bandwidths by communicator, collective and size."""
    output.print_table(f"NCCL Inspector: logs of {times.processes} processes", (), (), sentence(times.verdict))
    columns = (
        "communicator", "collective", "bytes", "records", "time, ms", "99 %, ms", "algorithm GB/s", "bus GB/s",
        "slowest rank",
    )  # fmt: skip
    rows = [
        (
            row.communicator, row.op, str(row.size_bytes), str(row.calls), f"{row.time_s * 1e3:.4g}",
            f"{row.p99_s * 1e3:.4g}", f"{row.algbw_Bps / 1e9:.4g}", f"{row.busbw_Bps / 1e9:.4g}",
            f"{row.slowest_rank} ({row.slowest_s * 1e3:.4g} ms)",
        )
        for row in times.rows[:_MOST_ROWS]
    ]  # fmt: skip
    more = f"{len(times.rows) - _MOST_ROWS} more rows with --json. " if len(times.rows) > _MOST_ROWS else ""
    note = "Medians. Times include waiting for the last rank, so a rank that is late looks fast, not slow."
    output.print_table("Collectives", columns, rows, more + note)
