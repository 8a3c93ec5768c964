"""Pages for everybody: a phone, a dark room, a keyboard, a screen reader (axe); on pages of every kind."""

from __future__ import annotations

from pathlib import Path

import log_samples
import numpy as np
import pytest
from browser import WIDTH, Browser
from traced_jobs import job_of

from paceenv.cli import application
from paceenv.core.trace import write_trace

NARROW = 390
KINDS = ("report", "log")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind: of a trace, and of a text log."""
    root = tmp_path_factory.mktemp("pages")
    write_trace(job_of(np.tile([1.0, 1.0, 1.0, 2.0], (20, 1))), root / "run.parquet")
    step_s = 1.0 + 0.02 * np.random.default_rng(1).gamma(2.0, size=200)
    (root / "train.log").write_text(log_samples.nanogpt(step_s, 1))
    for kind, source in (("report", "run.parquet"), ("log", "train.log")):
        application.run(["report", str(root / source), "-o", str(root / f"{kind}.html")])
    return {kind: root / f"{kind}.html" for kind in KINDS}


LOOKS = [(kind, width, dark) for kind in KINDS for width, dark in ((WIDTH, False), (NARROW, True))]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "width", "dark"), LOOKS)
def test_axe_finds_nothing(browser: Browser, pages: dict[str, Path], kind: str, width: int, dark: bool) -> None:
    assert browser.violations(pages[kind], width, dark=dark) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_phone_shows_every_column(browser: Browser, pages: dict[str, Path], kind: str) -> None:
    seen = browser.look(pages[kind], NARROW)
    assert seen.problems == []
    assert seen.scroll_width <= NARROW
    assert 0 < seen.cells_right <= NARROW
    if kind == "report":
        assert "replace worker 3" in seen.text, "what to do"


def test_a_dark_page_keeps_its_pictures_readable(browser: Browser, pages: dict[str, Path]) -> None:
    light, dark = (browser.look(pages["report"], dark=dark) for dark in (False, True))
    assert light.screenshot[:40, :40].mean() > 0.95
    assert dark.screenshot[:40, :40].mean() < 0.2
    for before, after in zip(light.pictures, dark.pictures, strict=True):
        np.testing.assert_allclose(light.part(before).mean(), dark.part(after).mean(), atol=0.02)


def test_the_keyboard_reaches_everything(browser: Browser, pages: dict[str, Path]) -> None:
    """The link past the beginning first; then every picture, its box to enlarge it, and every table of numbers."""
    stops = browser.tab_stops(pages["report"])
    pictures = len(browser.look(pages["report"]).pictures)
    names = [name for name, _ in stops]
    assert names[0] == "skip"
    assert names.count("drawing") == names.count("input") == pictures
    assert names.count("summary") >= pictures
    assert all(visible for _, visible in stops)
