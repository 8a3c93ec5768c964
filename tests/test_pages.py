"""Pages of traces: a wide window, a phone, a dark room, a keyboard, a screen reader (axe)."""

from __future__ import annotations

import dataclasses
import html
import json
from pathlib import Path

import numpy as np
import pytest
from browser import WIDTH, Browser, check_shown
from traced_jobs import job_of

from paceenv.cli import application
from paceenv.core.trace import TraceMetadata, write_trace

NARROW = 390
OF_TRACE = ["Where the time goes", "Timeline of ranks", "Lateness of ranks", "Step time, step by step"]
EVIL = "<script>alert(1)</script>"
EVIL_OP = "<img src=x onerror=alert(2)> $\\frac{1}{0}$"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a trace with pipeline stages and names like markup and a formula."""
    root = tmp_path_factory.mktemp("pages")
    trace = job_of(np.tile([1.0, 1.0, 1.5, 2.0], (20, 1)), name=EVIL, op=np.repeat(["compute", EVIL_OP], 80))
    stages = tuple({"rank": r, "dp_rank": r // 2, "stage": r % 2} for r in range(4))
    write_trace(dataclasses.replace(trace, metadata=TraceMetadata({"name": EVIL}, stages, EVIL)), root / "run.parquet")
    out = root / "page.html"
    application.run(["report", str(root / "run.parquet"), "-o", str(out), "--json", str(root / "page.json")])
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(WIDTH, False), (NARROW, True)])
def test_axe_finds_nothing(browser: Browser, page: Path, width: int, dark: bool) -> None:
    assert browser.violations(page, width, dark=dark) == []


@pytest.mark.slow
def test_a_phone_shows_every_column(browser: Browser, page: Path) -> None:
    seen = browser.look(page, NARROW)
    assert seen.problems == []
    assert seen.scroll_width <= NARROW, "pictures scroll by themselves"
    assert 0 < seen.cells_right <= NARROW
    assert all(picture["width"] > 600 for picture in seen.pictures), "text in them stays readable"


def test_names_from_a_file_are_text_and_a_dark_page_keeps_its_pictures(browser: Browser, page: Path) -> None:
    light, dark = (browser.look(page, dark=dark) for dark in (False, True))
    check_shown(light, OF_TRACE)
    assert light.scripts == 0
    assert EVIL in light.title
    assert html.escape(EVIL_OP) in page.read_text(), "the operation that ranks meet in"
    assert "a pipeline of 2 stages" in light.text
    assert json.loads(page.with_suffix(".json").read_text())["policies"] == [], "so nothing is foretold"
    assert light.screenshot[:40, :40].mean() > 0.95
    assert dark.screenshot[:40, :40].mean() < 0.2
    for before, after in zip(light.pictures, dark.pictures, strict=True):
        np.testing.assert_allclose(light.part(before).mean(), dark.part(after).mean(), atol=0.02)
