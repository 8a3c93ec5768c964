"""Prints what Flight Recorder dumps say about a job that hangs or died."""

from __future__ import annotations

import time

from paceenv.diagnosis.observed.hang import Hang, LastSeen
from paceenv.ui import output

_MOST_ROWS = 24
WAIT_COLUMNS = ("ranks", "wait in", "of the group", "for", "in the end for")


def print_hang(hang: Hang) -> None:
    """Print the verdict, what each rank waits for, and what the ranks behind it were last seen doing."""
    dumps, silent = len(hang.job.dumps), len(hang.job.silent)
    title = f"{hang.name}: Flight Recorder dumps of {dumps} of {dumps + silent} ranks"
    verdict = f"{hang.verdict[:1].upper()}{hang.verdict[1:]}."
    output.print_table(title, (), (), verdict)
    if not hang.hangs:
        return
    rows = hang.waiting_rows()
    more = f"{len(rows) - _MOST_ROWS} more rows; --json has all ranks" if len(rows) > _MOST_ROWS else ""
    output.print_table("What the ranks wait for", WAIT_COLUMNS, rows[:_MOST_ROWS], more)
    seen = hang.last_seen
    if seen:
        columns = ("rank", "last recorded", "behind", "did not enter", "called from")
        output.print_table("Last seen", columns, [_row(one) for one in seen[:_MOST_ROWS]])


def _row(seen: LastSeen) -> tuple[str, ...]:
    last = seen.last
    if last is None:
        did = "nothing unfinished" + (f"; {seen.finished} was its last collective there" if seen.finished >= 0 else "")
    else:
        at = time.strftime("%H:%M:%S", time.gmtime(last.created_s)) if last.created_s > 0.0 else "?"
        number = last.p2p_seq if last.is_p2p else last.collective_seq
        did = f"{last.op} {number} of {seen.last_group}, {last.state}, at {at} UTC"
    if seen.blind:
        did += f"; {seen.blind} ends never seen"
    behind = f"{seen.behind} collectives" if seen.behind else "-"
    following = f"{seen.next_op} of {seen.next_group}" if seen.next_op else "-"
    return str(seen.rank), did, behind, following, "; ".join(seen.frames) or "not recorded"
