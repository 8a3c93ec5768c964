"""A sweep under way: a table on the error stream, or a few lines if that is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from paceenv.trainers.sweep.ledger import Row
from paceenv.trainers.sweep.outcome.sweep_results import COLUMNS, Results, cells
from paceenv.trainers.sweep.sweep_run import Sweep
from paceenv.ui import output

ROWS, LINES, REFRESH_S = 8, 10, 0.5
"""Rows of the table; lines of a whole sweep where there is no terminal; seconds between looks at the ledger."""


class Screen:
    """Shows a sweep under way, from ``with`` to its end; :meth:`update` reports the end of a trial."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        console = Console(stderr=True, highlight=False)
        self._live = Live(console=console, auto_refresh=False, transient=True) if sys.stderr.isatty() else None
        self._shown_at, self._lines = 0.0, 0
        self._plain = ExitStack()
        self._done: Callable[[float], None] = lambda ended: None

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        else:
            lines = output.progress(f"sweep {self._sweep.config.name}", self._sweep.search.total or None)
            self._done = self._plain.enter_context(lines)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._plain.close()
        if self._live is not None:
            self._live.stop()

    def update(self, row: Row) -> None:
        """Show the sweep as it is, unless that was just done."""
        ended, total = len(self._sweep.ledger.rows), max(self._sweep.search.total, len(self._sweep.ledger.rows))
        if row["status"] != "done":
            output.say(f"trial {row['trial']} failed: {row['error']}")
        if self._live is None:
            self._done(ended)
            if ended * LINES // total > self._lines:
                self._lines = ended * LINES // total
                output.say(self._line(ended, total))
        elif time.monotonic() - self._shown_at > REFRESH_S:
            self._shown_at = time.monotonic()
            self._live.update(self._table(ended, total), refresh=True)

    def _line(self, ended: int, total: int) -> str:
        results = Results.of(self._sweep.ledger)
        best = [results.best(cluster) for cluster in results.clusters]
        so_far = f"; best so far: {', '.join(cells(best[0], results.objectives))}" if len(best) == 1 and best[0] else ""
        return f"{ended} of {total} trials{so_far}"

    def _table(self, ended: int, total: int) -> Group:
        results = Results.of(self._sweep.ledger)
        found = [best for cluster in results.clusters if (best := results.best(cluster)) is not None]
        shown = found if len(found) > 1 else results.front()
        failed = f", {len(results.failed)} failed" if results.failed else ""
        title = f"sweep {results.config.name}: {ended} of {total} trials, {len(self._sweep.running)} running{failed}"
        table = Table(title=escape(title), title_justify="left", title_style="bold")
        for name in columns(results):
            table.add_column(escape(name), overflow="fold")
        for candidate in shown[:ROWS]:
            table.add_row(*map(escape, cells(candidate, results.objectives)))
        return Group(table, ProgressBar(total=total, completed=ended, width=60))


def columns(results: Results) -> list[str]:
    """The head of a table of candidates."""
    where = ["cluster"] if any(results.clusters) else []
    return ["candidate", "trial", *where, *(COLUMNS[name] for name in results.objectives)]
