"""Output of commands: JSON for machines on request, tables for people, progress on the error stream."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceenv.core.files import atomic_write
from paceenv.core.plain import plain

_LONGEST_NUMBER = 40
"""Characters, with its interval and unit."""
FIRST_S, NEXT_S = 2.0, 10.0
"""Seconds of work before its first plain line of progress, and between two such lines."""


def write_json(data: Any, where: str | None) -> bool:
    """Write ``data`` as JSON to a file or, with ``-``, to standard output; whether that is left for people."""
    if where is not None:
        text = json.dumps(plain(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        if where == "-":
            sys.stdout.write(text)
        else:
            atomic_write(where, text)
    return where != "-"


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "", spare: Sequence[str] = ()
) -> None:
    """Print a table of plain text between its title and a note, or only these; columns of numbers to the right.

    Columns at the end that are ``spare`` are left out where there is no room.
    """
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(escape(title), style="bold")
    if rows:
        table, kept, unlimited = _table(Table(), columns, rows), len(columns), console.options.update(width=1000)
        while columns[kept - 1] in spare and console.measure(table, options=unlimited).maximum > console.width:
            kept -= 1
            table = _table(Table(), columns[:kept], [row[:kept] for row in rows])
        console.print(table)
        note = f"In a wider window: {', '.join(columns[kept:])}.\n{note}" if kept < len(columns) else note
    if note:
        console.print(escape(note))


def print_screen(lines: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Lines, of which the first is a title, and a table below, in place of what the terminal showed before.

    They are cropped to its size; the last lines are left out where the table needs their room.
    """
    is_terminal = sys.stdout.isatty()
    if is_terminal:
        sys.stdout.write("\x1b[H\x1b[2J")
    console = Console(width=None if is_terminal else 120, highlight=False)
    room = max(console.height - len(rows) - 2, 2) if is_terminal else len(lines)
    if len(lines) > room:
        lines = [*lines[: room - 1], f"({len(lines) - room + 1} more lines without --watch)"]
    for number, line in enumerate(lines):
        console.print(escape(line), style="bold" if number == 0 else None, no_wrap=True, overflow="ellipsis")
    console.print(_table(Table(box=None, padding=(0, 1, 0, 0)), columns, rows, no_wrap=True, overflow="ellipsis"))


def _table(table: Table, columns: Sequence[str], rows: Sequence[Sequence[str]], **style: Any) -> Table:
    for name, is_number in zip(columns, are_numbers(columns, rows), strict=True):
        table.add_column(escape(name), justify="right" if is_number else "left", **{"overflow": "fold"} | style)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown, columns of numbers to the right."""
    rule = ["---:" if is_number else "---" for is_number in are_numbers(columns, rows)]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in (columns, rule, *rows)]


def are_numbers(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Which columns, except the first, have numbers in all rows; a long text that begins with one does not count."""

    def is_number(cell: str) -> bool:
        return re.match(r"[-+*±–]*\d|–|$", cell) is not None and len(cell) <= _LONGEST_NUMBER

    return [c > 0 and all(is_number(row[c]) for row in rows) for c in range(len(columns))]


def say(text: str) -> None:
    """A line of progress for people, on the error stream."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(escape(text))


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


@contextmanager
def progress(description: str, total: float | None = None, *, shown: bool = True) -> Iterator[Callable[[float], None]]:
    """A progress bar on the error stream, or plain lines there where it is no terminal.

    The first line comes after two seconds, the next ones ten seconds apart. The function takes how much of ``total`` is
    done, which is None where nobody knows how much there is.
    """
    if shown and not sys.stderr.isatty():
        with _lines(description, total) as done:
            yield done
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def _lines(description: str, total: float | None) -> Iterator[Callable[[float], None]]:
    """Write lines while the work goes on, on a thread of their own: silent work is reported, too.

    They do not say how long it will take, as parts of the work differ in length.
    """
    began_s, ended, last = time.monotonic(), threading.Event(), 0.0

    def mark(done: float) -> None:
        nonlocal last
        last = done

    def write() -> None:
        wait_s = FIRST_S
        while not ended.wait(wait_s):
            minutes, rest = divmod(round(time.monotonic() - began_s), 60)
            share = f"{min(100.0 * last / total, 100.0):.0f} %, " if total and last > 0.0 else ""
            so_far = f"{minutes} min {rest} s so far" if minutes else f"{rest} s so far"
            with suppress(OSError, ValueError):  # the stream is gone
                print(f"{description}: {share}{so_far}", file=sys.stderr, flush=True)
            wait_s = NEXT_S

    thread = threading.Thread(target=write, name="paceenv-progress", daemon=True)
    thread.start()
    try:
        yield mark
    finally:
        ended.set()
        thread.join()
