"""Reports: pages as a headless Chromium shows them, with the network denied (wide, on a phone, dark, to a screen
reader), pictures against closed forms, and what is said where a trace cannot tell."""

from __future__ import annotations

import dataclasses
import html
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
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
from traced_jobs import job_of, json_of

from benchmarks.evidence._pipeline_jobs import PipelineJob
from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.core.operation_matrix import read_matrix
from paceenv.core.trace import TraceMetadata, write_trace
from paceenv.diagnosis.diagnose import diagnose
from paceenv.diagnosis.lateness_over_time import lateness
from paceenv.report.pictures import REST, parts
from paceenv.report.rank_pictures import WAIT, heat_map, spans, timeline
from paceenv.report.section import page
from paceenv.ui import figures

WIDTH, NARROW = 1200, 390
OF_TRACE = ["Where the time goes", "Timeline of ranks", "Lateness of ranks", "Step time, step by step"]
EVIL = "<script>alert(1)</script>"
EVIL_OP = "<img src=x onerror=alert(2)> $\\frac{1}{0}$"
LOOK = """() => {
  const seen = [...document.querySelectorAll('svg[role=img]')];
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

    def _open(self, width: int, *, dark: bool) -> Page:
        page = self._chromium.new_page(
            viewport={"width": width, "height": 900}, offline=True, color_scheme="dark" if dark else "light"
        )
        page.set_default_timeout(90e3)  # for a browser that hangs; no test waits for it otherwise
        return page

    def violations(self, path: Path, width: int, *, dark: bool) -> list[str]:
        """What axe finds wrong for readers with a screen reader, a keyboard or weak eyes; all tables opened.

        The marks inside a picture are one image to it.
        """
        page = self._open(width, dark=dark)
        page.goto(path.resolve().as_uri())
        page.evaluate("() => document.querySelectorAll('details').forEach(e => e.open = true)")
        page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
        found = page.evaluate("() => axe.run({exclude: [['svg *']]})")
        page.context.close()
        assert len(found["passes"]) > 10, "axe has looked"
        return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found["violations"]]

    def look(self, path: Path, width: int = WIDTH, *, dark: bool = False) -> Seen:
        """Show a file in a window so many pixels wide, wait until it is drawn, and tell what there is."""
        problems: list[str] = []
        requests: list[str] = []
        page = self._open(width, dark=dark)
        page.on("console", lambda message: problems.extend(_problem(message)))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("requestfailed", lambda request: problems.append(f"failed: {request.url}: {request.failure}"))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.resolve().as_uri())
        page.evaluate("() => new Promise(d => requestAnimationFrame(() => requestAnimationFrame(d)))")
        found = page.evaluate(LOOK)
        png = page.screenshot(full_page=True, animations="allow", caret="initial")
        page.context.close()
        outside = [url for url in requests if not url.startswith(("data:", "blob:", path.resolve().as_uri()))]
        pixels = np.asarray(image.imread(io.BytesIO(png), format="png"), np.float64)[..., :3]
        return Seen(**found, problems=problems, requests=outside, screenshot=pixels)


def _problem(message: ConsoleMessage) -> list[str]:
    """An error or a warning of the page; how fast a graphics driver is, which Chromium warns of, is no matter here."""
    serious = message.type in {"error", "warning", "assert"} and "GL Driver Message" not in message.text
    return [message.text] if serious else []


@pytest.fixture(scope="module")  # while its driver runs, no test can run an event loop of its own
def browser() -> Iterator[Browser]:
    """The system's Chromium; where it is missing the test is skipped, except in CI, where it fails."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no chromium here (apt-get install chromium)")
    with sync_playwright() as driver:
        options = ["--host-resolver-rules=MAP * ~NOTFOUND"]
        yield Browser(driver.chromium.launch(executable_path=program, args=options))


def check_shown(seen: Seen) -> None:
    """A page that is whole: pictures drawn, nothing wrong, nothing asked of the network, as wide as the window."""
    assert seen.problems == []
    assert seen.requests == []
    assert seen.scripts == 0
    assert seen.scroll_width <= WIDTH
    assert [picture["name"] for picture in seen.pictures] == OF_TRACE
    for picture in seen.pictures:
        assert picture["marks"] > 10, picture
        assert picture["width"] > 700
        pixels = seen.part(picture)
        assert pixels.std() > 0.02, f"{picture['name']} is blank"


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def test_axe_finds_nothing(browser: Browser, evil: Path, width: int, dark: bool) -> None:
    assert browser.violations(evil, width, dark=dark) == []


@pytest.mark.slow
def test_a_phone_shows_every_column(browser: Browser, evil: Path) -> None:
    seen = browser.look(evil, NARROW)
    assert seen.problems == []
    assert seen.scroll_width <= NARROW
    assert 0 < seen.cells_right <= NARROW
    assert all(picture["width"] <= NARROW for picture in seen.pictures), "whole; enlarge makes their text readable"


def test_names_from_a_file_are_text_and_a_dark_page_keeps_its_pictures(browser: Browser, evil: Path) -> None:
    light, dark = (browser.look(evil, dark=dark) for dark in (False, True))
    check_shown(light)
    assert EVIL in light.title
    assert html.escape(EVIL_OP) in evil.read_text(), "the operation that ranks meet in"
    assert "no cluster to simulate: a pipeline of 2 stages, for which no cluster can be fitted." in light.text
    assert json.loads(evil.with_suffix(".json").read_text())["policies"] == [], "so nothing is foretold"
    assert light.screenshot[:40, :40].mean() > 0.95
    assert dark.screenshot[:40, :40].mean() < 0.2
    for before, after in zip(light.pictures, dark.pictures, strict=True):
        np.testing.assert_allclose(light.part(before).mean(), dark.part(after).mean(), atol=0.02)


@pytest.mark.slow
def test_a_page_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    """Unequal slack: the page says that pacing helps, as ``paceenv evaluate`` does, and all of it is drawn."""
    trace, out = tmp_path / "run.parquet", tmp_path / "sub" / "page.html"
    json_of("simulate", "unequal-slack", "-i", "150", "--seeds", "1", "--trace", trace)
    result = json_of("report", trace, "-o", out)
    assert {one["policy"]: one["verdict"] for one in result["policies"]}["learned"] == "helps"
    seen = browser.look(out)
    check_shown(seen)
    assert "Would pacing help?" in seen.text
    headline = result["headline"]
    for said in (headline["lost"], headline["pacing"]["policy"]):
        assert said[1:] in seen.text
    assert "pacing helps against communication contention (simulated: learned +" in seen.text.lower()
    assert result["causes"]
    for cause in result["causes"]:
        assert cause["evidence"] in seen.text
        assert cause["advice"] in seen.text
    assert out.stat().st_size < 8e6


def test_the_parts_of_a_step_add_up() -> None:
    found = dict(parts(diagnose(job_of(np.tile([1.0, 1.0, 1.0, 2.0], (20, 1))))))
    assert found == pytest.approx({"step without any of it": 1.5, "persistent slow rank": 1.0, REST: 0.0}, abs=1e-9)
    job = PipelineJob(0, steps=12, stages=2, replicas=3, micro_batches=4, causes={"jitter": 0.1, "slow": 1.6})
    diagnosis = diagnose(job.trace())
    assert sum(value for _, value in parts(diagnosis)) == pytest.approx(diagnosis.step_time_s)
    assert parts(diagnose(job_of([[1.0, 2.0]] * 2))) == [], "two steps are no evidence"


def test_who_waits_and_who_is_late_in_closed_form() -> None:
    cells = read_matrix(job_of(np.tile([1.0, 1.0, 1.0, 2.0], (20, 1))))
    time_s = {}
    for kind in spans(cells):
        length_n = (kind.end_nT - kind.start_nT).mean(axis=1)
        time_s[kind.name] = np.bincount(cells.rank_N[kind.operation_n], length_n, 4)
    np.testing.assert_allclose(time_s["compute"], [1.0, 1.0, 1.0, 2.0])
    np.testing.assert_allclose(time_s[WAIT], [1.0, 1.0, 1.0, 0.0], atol=1e-9)
    np.testing.assert_allclose(time_s["collective"], 0.5)
    np.testing.assert_allclose(lateness(cells), np.tile([[0.0], [0.0], [0.0], [1.0]], (1, 20)), atol=1e-9)


@pytest.mark.slow
def test_a_job_of_1000_ranks_and_2000_steps_stays_small() -> None:
    few = read_matrix(job_of(1.0 + 0.1 * np.random.default_rng(0).random((4, 1000))))
    steps = 2000
    cells = dataclasses.replace(few, iteration_T=np.arange(steps), step_s_T=np.ones(steps))
    late_RT = np.random.default_rng(0).normal(size=(1000, steps))
    picture = heat_map(cells, late_RT)
    assert "mean over 13 steps of the latest of 11 ranks" in picture.text[0]
    assert "mean over 13 steps of the latest of 11 ranks" in picture.svg, "on the picture itself"
    assert len(page("", "", [picture])) < 2e6
    lines = timeline(few, spans(few), np.zeros(1000))
    assert "16 of 1000 ranks" in lines.text[0]
    assert len(page("", "", [lines])) < 5e5


def test_labels_are_never_formulas() -> None:
    figure, panel = figures.axes("", "", "")
    panel.set_title(figures.literal(f"{EVIL_OP}\n\x07{'x' * 99}"))
    drawn = figures.svg(figure, EVIL)
    assert "<img" not in drawn
    assert "&lt;img src=x onerror=alert(2)&gt; $\\frac{1}{0}$" in drawn
    assert "…" in drawn
    assert f'aria-label="{html.escape(EVIL)}"' in drawn


@pytest.mark.parametrize(
    ("options", "longer", "message"),
    [
        (["-o", "page.txt"], 1.0, r"--out page.txt: allowed: a file that ends in .html"),
        (["--policy", "lerned"], 1.0, "lerned"),
        (["--job", "other"], 1.0, r"job = 'other'; allowed: one of \['plain'\]"),
        (["-o", "page.html"], 0.0, "trace of plain: steps that take no time"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    options: list[str], longer: float, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(job_of(longer * np.tile([1.0, 2.0], (20, 1)), 0.5 * longer), "trace.parquet")
    with pytest.raises(InputError, match=message):
        application.run(["report", "trace.parquet", *options])
    assert [path.name for path in tmp_path.iterdir()] == ["trace.parquet"]


@pytest.mark.parametrize(
    ("compute_TR", "said"), [([[1.0, 2.0]] * 2, "2 steps.*allowed: at least 16"), ([[1.0], [1.1]] * 10, "one rank")]
)
def test_odd_traces_get_a_page_that_says_so(compute_TR: list[list[float]], said: str, tmp_path: Path) -> None:
    write_trace(job_of(compute_TR), tmp_path / "trace.parquet")
    out = tmp_path / "page.html"
    assert application.run(["report", str(tmp_path / "trace.parquet"), "-o", str(out)]) == 0
    text = out.read_text()
    assert re.search(f"Insufficient evidence: {said}", text, re.DOTALL)
    assert "Where the time goes" not in text
