"""Pages of traces and of text logs: a wide window, a phone, a dark room, a keyboard, a screen reader (axe)."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from pathlib import Path

import log_samples
import numpy as np
import pytest
from browser import WIDTH, Browser, check_shown
from traced_jobs import job_of

from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.core.trace import TraceMetadata, write_trace

NARROW = 390
KINDS = ("report", "log")
OF_TRACE = ["Where the time goes", "Timeline of ranks", "Lateness of ranks", "Step time, step by step"]
OF_TRACE += ["Distribution of step times"]
OF_LOG = ["Step times", "Distribution"]
EVIL = "<script>alert(1)</script>"
EVIL_OP = "<img src=x onerror=alert(2)> $\\frac{1}{0}$"


def eventful(steps: int = 1200) -> np.ndarray:
    """Warm-up, two changes of level, and a long step every 100."""
    step_s = 1.0 + 0.02 * np.random.default_rng(1).gamma(2.0, size=steps)
    step_s[400:800] *= 1.1
    step_s[::100] += 3.0
    step_s[:3] = (9.0, 4.0, 2.0)
    return step_s


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind: of a trace with pipeline stages and names like markup and a formula, and of a text log."""
    root = tmp_path_factory.mktemp("pages")
    trace = job_of(np.tile([1.0, 1.0, 1.5, 2.0], (20, 1)), name=EVIL, op=np.repeat(["compute", EVIL_OP], 80))
    stages = tuple({"rank": r, "dp_rank": r // 2, "stage": r % 2} for r in range(4))
    write_trace(dataclasses.replace(trace, metadata=TraceMetadata({"name": EVIL}, stages, EVIL)), root / "run.parquet")
    (root / "<b>train.log").write_text(log_samples.torchrun(log_samples.nanogpt(eventful(), 1)))
    for kind, source in (("report", "run.parquet"), ("log", "<b>train.log")):
        out = [str(root / source), "-o", str(root / f"{kind}.html"), "--json", str(root / f"{kind}.json")]
        application.run(["report", *out])
    return {kind: root / f"{kind}.html" for kind in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "width", "dark"), [("report", WIDTH, False), ("log", NARROW, True)])
def test_axe_finds_nothing(browser: Browser, pages: dict[str, Path], kind: str, width: int, dark: bool) -> None:
    assert browser.violations(pages[kind], width, dark=dark) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_phone_shows_every_column(browser: Browser, pages: dict[str, Path], kind: str) -> None:
    seen = browser.look(pages[kind], NARROW)
    assert seen.problems == []
    assert seen.scroll_width <= NARROW, "pictures scroll by themselves"
    assert 0 < seen.cells_right <= NARROW
    assert all(picture["width"] > 600 for picture in seen.pictures), "text in them stays readable"


def test_names_from_a_file_are_text_and_a_dark_page_keeps_its_pictures(
    browser: Browser, pages: dict[str, Path]
) -> None:
    light, dark = (browser.look(pages["report"], dark=dark) for dark in (False, True))
    check_shown(light, OF_TRACE)
    assert light.scripts == 0
    assert EVIL in light.title
    assert html.escape(EVIL_OP) in pages["report"].read_text(), "the operation that ranks meet in"
    assert "2 pipeline stages" in light.text
    assert json.loads(pages["report"].with_suffix(".json").read_text())["policies"] == [], "so nothing is foretold"
    assert light.screenshot[:40, :40].mean() > 0.95
    assert dark.screenshot[:40, :40].mean() < 0.2
    for before, after in zip(light.pictures, dark.pictures, strict=True):
        np.testing.assert_allclose(light.part(before).mean(), dark.part(after).mean(), atol=0.02)


@pytest.mark.slow
def test_the_page_of_a_log(browser: Browser, pages: dict[str, Path]) -> None:
    wide = browser.look(pages["log"])
    check_shown(wide, OF_LOG)
    assert wide.title == "Step times of <b>train.log"
    assert "Outliers come every 100 steps" in wide.text
    assert "The level changes 2 times" in wide.text
    assert "Next: " in wide.text
    assert "No cause is named here" in wide.text
    assert json.loads(pages["log"].with_suffix(".json").read_text())["outliers"]["period_steps"] == 100


def test_logs_of_few_and_of_equal_values_and_of_a_pattern_of_ones_own(tmp_path: Path) -> None:
    for name, step_s in (("few", np.array([0.1, 0.11, 0.1, 0.12, 0.1])), ("same", np.full(50, 0.1))):
        log, out = tmp_path / f"{name}.log", tmp_path / f"{name}.html"
        log.write_text(log_samples.nanogpt(step_s, 1))
        for page in (out, tmp_path / "again.html"):
            application.run(["report", str(log), "-o", str(page)])
        assert page.read_text() == out.read_text()
        assert re.findall(r'role="img" aria-label="([^"]*)"', out.read_text()) == OF_LOG
    log = tmp_path / "own.log"
    log.write_text("".join(f"{i} took {90 + i % 7} millis\n" for i in range(80)))
    application.run(["report", str(log), "-o", str(tmp_path / "a.html"), "--pattern", r"took (?P<ms>\d+)"])
    assert (tmp_path / "a.html").stat().st_size > 10_000
    with pytest.raises(InputError, match=r"ends in \.html"):
        application.run(["report", str(log), "-o", str(tmp_path / "a.txt")])
