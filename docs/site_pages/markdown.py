"""Pieces of Markdown that all made pages share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def plain(text: str) -> str:
    """Text that Markdown leaves as it is; paragraphs stay apart."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; a cell is one line of Markdown."""
    cells = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(" ".join(cell.split()) for cell in row) + " |" for row in cells]
