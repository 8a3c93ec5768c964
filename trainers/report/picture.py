"""The parts of every picture of a report: a caption, the drawing, the numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from paceenv.ui import figures, html_page


@dataclass(frozen=True)
class Numbers:
    """A table behind a picture, all cells as text; ``name`` is that of the file to download."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A section of a page: title, caption, the drawing (``paceenv.ui.figures.svg``), and the numbers in it."""

    title: str
    caption: str
    svg: str
    numbers: Sequence[Numbers]

    def html(self) -> str:
        """The picture in a section of its own."""
        tables = [html_page.numbers(n.name, n.columns, n.rows) for n in self.numbers]
        return "\n".join([html_page.heading(self.title), html_page.picture(self.svg, self.caption), *tables])


def drawn(title: str, caption: str, figure: Figure, *numbers: Numbers) -> Picture:
    """A picture from a finished figure.

    Args:
        title: of the section, and for readers who cannot see the figure.
        caption: what the figure shows.
        figure: the figure.
        numbers: tables behind it.
    """
    return Picture(title, caption, figures.svg(figure, title), numbers)


@dataclass(frozen=True)
class Unit:
    """A unit of time with readable numbers; ``per_s`` of it make a second."""

    name: str
    per_s: float

    @classmethod
    def of(cls, typical_s: float) -> Unit:
        """Seconds from one on, else milliseconds or microseconds."""
        if typical_s >= 1.0:
            return cls("s", 1.0)
        return cls("ms", 1e3) if typical_s >= 1e-3 else cls("us", 1e6)

    def text(self, value_s: float) -> str:
        """A time of so many seconds, for people."""
        return f"{self.per_s * value_s:.4g} {self.name}"
