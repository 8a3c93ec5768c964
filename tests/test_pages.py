"""Pages for everybody: a phone, a dark room, a keyboard, a screen reader (axe); on pages of every kind and the site."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import commands
import log_samples
import numpy as np
import pytest
from browser import WIDTH, Browser
from importer_samples import TABLE, dump_of
from traced_jobs import job_of

from paceenv.cli import application
from paceenv.core.trace import write_trace
from paceenv.ui import html_page

NARROW = 390
KINDS = ("report", "log", "analysis")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind: of a trace, of a text log, and of a folder with dumps of a hang and a bandwidth table."""
    root = tmp_path_factory.mktemp("pages")
    (root / "job").mkdir()
    write_trace(job_of(np.tile([1.0, 1.0, 1.0, 2.0], (20, 1))), root / "run.parquet")
    step_s = 1.0 + 0.02 * np.random.default_rng(1).gamma(2.0, size=200)
    (root / "train.log").write_text(log_samples.nanogpt(step_s, 1))
    for rank in range(2):
        dump = dump_of(rank, 0.0, timing=False)
        if rank:  # entered, not completed by the first alone
            dump["entries"] = dump["entries"][:-1]
        else:
            dump["entries"][-1]["state"] = "started"
        (root / "job" / f"dump_{rank}").write_text(json.dumps(dump))
    (root / "job" / "all_reduce_perf.txt").write_text(TABLE)
    for kind, source in (("report", "run.parquet"), ("log", "train.log")):
        application.run(["report", str(root / source), "-o", str(root / f"{kind}.html")])
    application.run(["analyse", str(root / "job"), "-o", str(root / "analysis.html")])
    return {kind: root / f"{kind}.html" for kind in KINDS}


LOOKS = [(kind, width, dark) for kind in KINDS for width, dark in ((WIDTH, False), (NARROW, True))]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "width", "dark"), LOOKS)
def test_axe_finds_nothing(browser: Browser, pages: dict[str, Path], kind: str, width: int, dark: bool) -> None:
    assert browser.violations(pages[kind], width, dark=dark) == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, as `make docs` builds it."""
    out = tmp_path_factory.mktemp("site")
    docs = Path(__file__).parents[1] / "docs"
    ended = commands.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(docs), str(out)], deadline_s=600.0
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(WIDTH, False), (NARROW, True)])
def test_axe_finds_nothing_on_the_site(browser: Browser, site: Path, width: int, dark: bool) -> None:
    """Pages with text, code, wide tables, all options."""
    for name in (
        "index",
        "tutorials/slow-job",
        "reference/environment",
        "reference/all-commands",
        "evidence/leaderboard",
    ):
        page = site / f"{name}.html"
        assert browser.violations(page, width, dark=dark) == [], name
        assert browser.look(page, width, dark=dark).scroll_width <= width, name


def test_axe_would_find_something(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(html_page.page("bad", ["<img src='data:image/png;base64,'><p style='color:#888'>pale</p>"]))
    assert {one.partition(":")[0] for one in browser.violations(path)} >= {"image-alt", "color-contrast"}


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
