"""Parts of an HTML page that is one file and needs no network: style, tables, pictures, numbers to download.

Every function takes plain text, escapes it and returns HTML, so that no name from a file becomes markup.
"""

from __future__ import annotations

import base64
import csv
import html
import io
from collections.abc import Iterable, Sequence
from typing import Final

from paceenv.ui.output import are_numbers

MAX_ROWS: Final = 40
"""Rows of a table that is shown under a picture; the file to download has all of them."""
_FROM_THIS_FILE: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_WITH_SCRIPTS: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src 'unsafe-inline' 'unsafe-eval'"
)
_HEAD: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width"><title>{title}</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; overflow-wrap: break-word }}
h1 {{ font-size: 1.7rem; margin-bottom: .3rem }} h2 {{ font-size: 1.25rem; margin: 2.2rem 0 .4rem }}
p {{ margin: .4rem 0 }}
table {{ border-collapse: collapse; margin: .6rem 0; font-size: .92em }}
td, th {{ padding: .25rem .7rem .25rem 0; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }}
th.number {{ text-align: right }}
figure {{ margin: .8rem 0 }} figcaption, .note {{ color: #555; font-size: .92em }}
figure svg {{ width: 100%; height: auto; display: block }}
@media (max-width: 40rem) {{ figure, table {{ overflow-x: auto }} table {{ display: block }}
  figure svg {{ width: 44rem }} }}
details {{ margin: .3rem 0 }} summary {{ cursor: pointer; color: #335; font-size: .92em }}
.verdict {{ border-left: 4px solid #4c72b0; background: #f3f5f9; padding: .7rem 1rem; margin: 1rem 0;
  font-size: 1.1em }}
.facts {{ display: flex; flex-wrap: wrap; gap: .3rem 2.2rem; margin: 1rem 0 }}
.facts div {{ display: flex; flex-direction: column-reverse }}
.facts dt {{ color: #555; font-size: .85em }} .facts dd {{ margin: 0; font-size: 1.35em }}
code {{ font-size: .9em }}
@media print {{ body {{ margin: 0; max-width: none; font-size: 11px }} figure, tr {{ break-inside: avoid }}
  h2 {{ break-after: avoid }} details:not([open]) {{ display: none }} }}
</style></head><body><h1>{title}</h1>
"""


def page(title: str, parts: Iterable[str], *, scripts: bool = False) -> str:
    """A whole page. Nothing in it can load from elsewhere.

    Args:
        title: plain text.
        parts: pieces of HTML, from the functions below.
        scripts: whether its own scripts may run.
    """
    policy = _WITH_SCRIPTS if scripts else _FROM_THIS_FILE
    return "\n".join([_HEAD.format(title=html.escape(title), policy=policy), *parts, "</body></html>\n"])


def heading(text: str) -> str:
    """A section's heading."""
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph; ``kind`` is ``note`` or ``verdict``."""
    said = f' class="{kind}"' if kind else ""
    return f"<p{said}>{html.escape(text)}</p>" if text else ""


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A row of numbers, each a name and a value."""
    items = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{items}</dl>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; columns of numbers to the right."""
    numbers = are_numbers(columns, rows)

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = (' class="number"' if is_number else "" for is_number in numbers)
        return "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{line('th', columns)}</tr></thead><tbody>{body}</tbody></table>"


def numbers(name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The numbers behind a picture: a table to open, and all of them to download.

    Args:
        name: of the file to download, without ``.csv``.
        columns: headers.
        rows: cells as plain text.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    content = base64.b64encode(text.getvalue().encode()).decode()
    left = f"; the first {MAX_ROWS} of {len(rows)} rows" if len(rows) > MAX_ROWS else ""
    to_save = f'<a download="{html.escape(name)}.csv" href="data:text/csv;charset=utf-8;base64,{content}">as CSV</a>'
    summary = f"<summary>the numbers: {html.escape(name.replace('-', ' '))}</summary>"
    shown = table(columns, rows[:MAX_ROWS])
    return f'<details>{summary}<p class="note">{to_save}{left}</p>{shown}</details>'


def picture(svg: str, caption: str) -> str:
    """A picture with its caption; ``svg`` comes from ``paceenv.ui.figures.svg``."""
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def link(address: str, text: str) -> str:
    """A link to a file beside the page."""
    return f'<a href="{html.escape(address)}">{html.escape(text)}</a>'
