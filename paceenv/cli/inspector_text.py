"""Prints what NCCL Inspector's logs show."""

from __future__ import annotations

from paceenv.diagnosis.observed.collective_times import CollectiveTimes
from paceenv.ui import output

_MOST_ROWS = 16
_COLUMNS = (
    "communicator", "collective", "bytes", "records", "time, ms", "99 %, ms", "algorithm GB/s", "bus GB/s",
    "slowest rank",
)  # fmt: skip


def print_times(times: CollectiveTimes) -> None:
    """Print who arrives last, and times and bandwidths by communicator, collective and size."""
    verdict = f"{times.verdict[:1].upper()}{times.verdict[1:]}."
    output.print_table(f"NCCL Inspector: logs of {times.processes} processes", (), (), verdict)
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
    output.print_table("Collectives", _COLUMNS, rows, more + note)
