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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceenv.core.files import atomic_write
from paceenv.core.plain import plain
from paceenv.core.wording import duration

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


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """Print a table of plain text between its title and a note, or only these; columns of numbers to the right."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(escape(title), style="bold")
    if rows:
        console.print(_table(Table(), columns, rows))
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
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def _lines(description: str, total: float | None) -> Iterator[Callable[[float], None]]:
    """Write lines while the work goes on, on a thread of their own: silent work is reported, too."""
    began_s, ended, marks = time.monotonic(), threading.Event(), list[tuple[float, float]]()

    def mark(done: float) -> None:
        marks[1:] = [(time.monotonic(), done)]  # the first and the last

    def write() -> None:
        wait_s = FIRST_S
        while not ended.wait(wait_s):
            with suppress(OSError, ValueError):  # the stream is gone
                line = progress_line(description, marks or [(began_s, 0.0)], total, began_s, time.monotonic())
                print(line, file=sys.stderr, flush=True)
            wait_s = NEXT_S

    thread = threading.Thread(target=write, name="paceenv-progress", daemon=True)
    thread.start()
    try:
        yield mark
    finally:
        ended.set()
        thread.join()


def progress_line(
    description: str, marks: Sequence[tuple[float, float]], total: float | None, began_s: float, now_s: float
) -> str:
    """``train: 40 %, 20 s so far, about 30 s left``, by the pace since the first mark: what came before was no work.

    Args:
        marks: when how much was done, the first and the last report.
    """
    (first_s, first), (_, last) = marks[0], marks[-1]
    minutes, rest = divmod(round(now_s - began_s), 60)
    so_far = f"{minutes} min {rest} s so far" if minutes else f"{rest} s so far"
    if not total or last <= 0.0:
        return f"{description}: {so_far}"
    left = ""
    if first < last < total:
        left_s = (total - last) / (last - first) * (now_s - first_s)
        left = f", about {duration(max(round(left_s), 1))} left"
    return f"{description}: {min(100.0 * last / total, 100.0):.0f} %, {so_far}{left}"
