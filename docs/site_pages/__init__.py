"""Fills pages of the site with what the code says of itself.

A page holds ``<!-- made from the code: NAME -->``. When the site is built, the comment gives way to the Markdown that
the function of that name returns, so nothing that the code knows is typed a second time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from site_pages import command_pages, config_pages, python_pages, tables

MAKERS: dict[str, Callable[[], str]] = {
    **command_pages.MAKERS,
    **config_pages.MAKERS,
    **python_pages.MAKERS,
    **tables.MAKERS,
}
MARK = re.compile(r"<!-- made from the code: ([\w-]+) -->")


def fill(text: str) -> str:
    """The page with every mark replaced; a KeyError names a mark that nothing makes."""
    return MARK.sub(lambda found: MAKERS[found[1]](), text)


def _fill_page(app: Any, page: str, source: list[str]) -> None:
    source[0] = fill(source[0])


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this when it loads the extension."""
    app.connect("source-read", _fill_page)
    return {"parallel_read_safe": True}
