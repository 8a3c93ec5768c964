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
_STYLE: Final = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --soft: #555; --line: #ddd; --box: #f3f5f9;
  --link: #1a4fa0 }
@media screen and (prefers-color-scheme: dark) { :root { --text: #e6e8ec; --page: #16181d; --soft: #b6bcc7;
  --line: #3c424d; --box: #232938; --link: #9fc3ff } }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--text); background: var(--page); overflow-wrap: break-word }
h1 { font-size: 1.7rem; margin-bottom: .3rem } h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem }
p { margin: .4rem 0 } a { color: var(--link) }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px }
.skip { position: absolute; left: -999px } .skip:focus { position: static }
table { border-collapse: collapse; margin: .6rem 0; font-size: .92em }
td, th { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
th.number { text-align: right }
figure { margin: .8rem 0 } figcaption, .note { color: var(--soft); font-size: .92em }
.drawing { overflow-x: auto; background: #fff; color: #222; border-radius: 6px }
.drawing svg { width: 100%; height: auto; display: block }
.zoom { color: var(--link); font-size: .92em; cursor: pointer }
figure:has(.zoom input:checked) .drawing svg { width: 200% }
details { margin: .3rem 0 } summary { cursor: pointer; color: var(--link); font-size: .92em }
.verdict { border-left: 4px solid var(--link); background: var(--box); padding: .7rem 1rem; margin: 1rem 0;
  font-size: 1.1em }
.facts { display: flex; flex-wrap: wrap; gap: .3rem 2.2rem; margin: 1rem 0 }
.facts div { display: flex; flex-direction: column-reverse }
.facts dt { color: var(--soft); font-size: .85em } .facts dd { margin: 0; font-size: 1.35em }
code { font-size: .9em }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--box); padding: .5rem .8rem; font-size: .88em }
@media (max-width: 48rem) {
  .drawing svg { width: 44rem } figure:has(.zoom input:checked) .drawing svg { width: 88rem }
  table, tbody, tr { display: block }
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%) }
  tr { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; padding: .3rem .6rem }
  td, td.number { display: flex; gap: .6rem; border: 0; padding: .15rem 0; text-align: left; white-space: normal;
    overflow-wrap: anywhere }
  td:empty { display: none }
  td::before { content: attr(data-column); flex: 0 0 32%; color: var(--soft) }
}
@media print { body { margin: 0; max-width: none; font-size: 11px } figure, tr { break-inside: avoid }
  h2 { break-after: avoid } details:not([open]), .zoom, .skip { display: none } }
"""
"""On a narrow screen a row of a table is a card, so that no column is lost; pictures stay on white in the dark."""
_HEAD: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title><style>{style}</style></head>
<body><a class="skip" href="#content">Skip to the content</a><main id="content"><h1>{title}</h1>
"""


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page. Nothing in it can load from elsewhere."""
    return "\n".join(
        [
            _HEAD.format(title=html.escape(title), policy=_FROM_THIS_FILE, style=_STYLE),
            *parts,
            "</main></body></html>\n",
        ]
    )


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

    def cell(tag: str, role: str, c: int, text: str) -> str:
        kind = ' class="number"' if numbers[c] else ""
        column = f' data-column="{html.escape(columns[c])}"' if tag == "td" else ""
        return f'<{tag} role="{role}"{kind}{column}>{html.escape(text)}</{tag}>'

    def line(tag: str, role: str, cells: Sequence[str]) -> str:
        inside = "".join(cell(tag, role, c, text) for c, text in zip(range(len(columns)), cells, strict=True))
        return f'<tr role="row">{inside}</tr>'

    body = "".join(line("td", "cell", row) for row in rows)
    head = line("th", "columnheader", columns)
    return (  # with roles, which a browser forgets where a row is shown as a card
        f'<table role="table"><thead role="rowgroup">{head}</thead><tbody role="rowgroup">{body}</tbody></table>'
    )


def numbers(name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The numbers behind a picture: a table to open, and all of them to download.

    Args:
        name: of the file to download, without ``.csv``.
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
    """A picture with its caption, which a reader can enlarge; ``svg`` comes from ``paceenv.ui.figures.svg``."""
    zoom = '<label class="zoom"><input type="checkbox"> enlarge</label>'
    drawing = f'<div class="drawing" tabindex="0" role="group" aria-label="picture">{svg}</div>'
    return f"<figure>{drawing}{zoom}<figcaption>{html.escape(caption)}</figcaption></figure>"
