"""A part of an answer: a title, sentences, a table, a picture. A terminal prints it, and a page of one file shows it.

The page escapes all text, so that no name from a file becomes markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from paceenv.ui import output

MAX_ROWS: Final = 40
"""Rows of a table in a terminal, and of the numbers under a picture."""


@dataclass(frozen=True)
class Section:
    """All cells and sentences as plain text; an empty field is left out."""

    title: str
    text: Sequence[str] = ()  # sentences, a paragraph each; of a picture its caption
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    verdict: str = ""  # the answer itself, which a page shows first
    svg: str = ""  # a picture (``paceenv.ui.figures.svg``)


def print_sections(sections: Iterable[Section]) -> None:
    """Titles, tables, and below them the sentences."""
    for one in sections:
        left = len(one.rows) - MAX_ROWS
        more = [f"{left} more rows; --json has all"] if left > 0 else []
        text = "\n".join(filter(None, [*more, one.verdict, *one.text]))
        output.print_table(one.title, one.columns, one.rows[:MAX_ROWS], text)


def page(title: str, note: str, sections: Sequence[Section]) -> str:
    """A whole page: verdicts first, then all sections."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(loader=PackageLoader("paceenv.report", "."), autoescape=True, undefined=StrictUndefined)
    template = made.get_template("page.html.j2")
    return template.render(
        title=title, note=note, sections=sections, most=MAX_ROWS, are_numbers=output.are_numbers,
    )  # fmt: skip
