"""Pages in headless Chromium, for tests: what a reader of a file would see, with the network denied."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image
from numpy.typing import NDArray
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import ConsoleMessage, Page, sync_playwright

DEADLINE_S = 90.0
"""For a browser that hangs, which then fails; no test waits for it otherwise."""
WIDTH = 1200
_OPTIONS = [
    "--enable-unsafe-swiftshader",  # draws without a graphics card, which some of plotly's pictures need
    "--host-resolver-rules=MAP * ~NOTFOUND",
]
_LOOK = """() => {
  const seen = [...document.querySelectorAll('svg[role=img], .js-plotly-plot')];
  const boxes = seen.map(e => e.getBoundingClientRect());
  return {
    text: document.body.innerText, title: document.title,
    pictures: seen.map((e, i) => ({
      name: e.getAttribute('aria-label') || '', width: boxes[i].width,
      height: boxes[i].height, xy: [boxes[i].x, boxes[i].y + window.scrollY],
      marks: e.querySelectorAll('path, rect, image, text, canvas').length,
    })),
    scroll_width: document.documentElement.scrollWidth,
    scripts: document.scripts.length,
    cells_right: Math.max(0, ...[...document.querySelectorAll('td')].map(e => e.getBoundingClientRect().right)),
  };
}"""
_TWO_FRAMES = "() => new Promise(d => requestAnimationFrame(() => requestAnimationFrame(d)))"


@dataclass(frozen=True)
class Seen:
    """A page as it was shown.

    ``problems`` are console errors, exceptions and refused loads, ``requests`` all addresses asked for but its own,
    ``cells_right`` is where the rightmost cell of a table ends, ``screenshot`` is ``(height, width, 3)`` from 0 to 1.
    """

    text: str
    title: str
    pictures: list[dict[str, Any]]
    scroll_width: int
    scripts: int
    cells_right: float
    problems: list[str]
    requests: list[str]
    screenshot: NDArray[np.float64]

    def part(self, picture: dict[str, Any]) -> NDArray[np.float64]:
        """A picture's pixels."""
        x, y = (int(v) for v in picture["xy"])
        return self.screenshot[y : y + int(picture["height"]), x : x + int(picture["width"])]


class Browser:
    """A Chromium that runs; one page at a time."""

    def __init__(self, chromium: Chromium) -> None:
        self._chromium = chromium

    def _open(self, path: Path, width: int, *, dark: bool, opened: bool = False) -> Page:
        page = self._chromium.new_page(
            viewport={"width": width, "height": 900}, offline=True, color_scheme="dark" if dark else "light"
        )
        page.set_default_timeout(1e3 * DEADLINE_S)
        if opened:
            page.goto(path.resolve().as_uri())
            page.evaluate("() => document.querySelectorAll('details').forEach(e => e.open = true)")
        return page

    def violations(self, path: Path, width: int = WIDTH, *, dark: bool = False) -> list[str]:
        """What axe finds wrong for readers with a screen reader, a keyboard or weak eyes; all tables opened.

        The marks inside a picture are one image to it.
        """
        page = self._open(path, width, dark=dark, opened=True)
        page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
        found = page.evaluate("() => axe.run({exclude: [['svg *']]})")
        page.context.close()
        assert len(found["passes"]) > 10, "axe has looked"
        return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found["violations"]]

    def look(self, path: Path, width: int = WIDTH, *, dark: bool = False) -> Seen:
        """Show a file in a window so many pixels wide, wait until it is drawn, and tell what there is."""
        problems: list[str] = []
        requests: list[str] = []
        page = self._open(path, width, dark=dark)
        page.on("console", lambda message: problems.extend(_problem(message)))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("requestfailed", lambda request: problems.append(f"failed: {request.url}: {request.failure}"))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.resolve().as_uri())
        page.evaluate(_TWO_FRAMES)
        found = page.evaluate(_LOOK)
        png = page.screenshot(full_page=True, animations="allow", caret="initial")
        page.context.close()
        outside = [url for url in requests if not url.startswith(("data:", "blob:", path.resolve().as_uri()))]
        pixels = np.asarray(image.imread(io.BytesIO(png), format="png"), np.float64)[..., :3]
        return Seen(**found, problems=problems, requests=outside, screenshot=pixels)


def _problem(message: ConsoleMessage) -> list[str]:
    """An error or a warning of the page; how fast a graphics driver is, which Chromium warns of, is no matter here."""
    serious = message.type in {"error", "warning", "assert"} and "GL Driver Message" not in message.text
    return [message.text] if serious else []


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium; where it is missing the test is skipped, except in CI, where it fails."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium here (apt-get install chromium)")
        pytest.skip("no chromium here (apt-get install chromium)")
    with sync_playwright() as driver:
        yield Browser(driver.chromium.launch(executable_path=program, args=_OPTIONS))


def check_shown(seen: Seen, pictures: list[str]) -> None:
    """A page that is whole: pictures drawn, nothing wrong, nothing asked of the network, as wide as the window."""
    assert seen.problems == []
    assert seen.requests == []
    assert seen.scroll_width <= WIDTH
    assert [picture["name"] for picture in seen.pictures] == pictures
    for picture in seen.pictures:
        assert picture["marks"] > 10, picture
        assert picture["width"] > 700
        pixels = seen.part(picture)
        assert pixels.std() > 0.02, f"{picture['name']} is blank"
