"""The page of a text log, as a browser shows it on a wide and on a narrow screen."""

from __future__ import annotations

import json
from pathlib import Path

import log_samples
import numpy as np
import pytest
from browser import Browser, check_shown

from paceenv.cli import application
from paceenv.core.errors import InputError

PICTURES = ["Step times", "Distribution and memory", "How much there is to win at most"]
NARROW = 390


def eventful(steps: int = 1200) -> np.ndarray:
    """Warm-up, two changes of level, and a long step every 100."""
    step_s = 1.0 + 0.02 * np.random.default_rng(1).gamma(2.0, size=steps)
    step_s[400:800] *= 1.1
    step_s[::100] += 3.0
    step_s[:3] = (9.0, 4.0, 2.0)
    return step_s


def test_a_page_on_a_wide_and_a_narrow_screen(browser: Browser, tmp_path: Path) -> None:
    log, out, data = tmp_path / "<b>train.log", tmp_path / "page.html", tmp_path / "page.json"
    log.write_text(log_samples.torchrun(log_samples.nanogpt(eventful(), 1)))
    application.run(["report", str(log), "-o", str(out), "--json", str(data)])
    wide = browser.look(out)
    check_shown(wide, PICTURES)
    assert wide.title == "Step times of <b>train.log"
    assert "Outliers come every 100 steps" in wide.text
    assert "The level changes 2 times" in wide.text
    assert "What to record next" in wide.text
    assert "No cause is named here" in wide.text
    narrow = browser.look(out, NARROW)
    assert narrow.problems == []
    assert narrow.scroll_width <= NARROW, "pictures scroll by themselves"
    assert all(picture["width"] > 600 for picture in narrow.pictures), "text in them stays readable"
    assert json.loads(data.read_text())["outliers"]["period_steps"] == 100


def test_few_values_and_values_that_do_not_vary(browser: Browser, tmp_path: Path) -> None:
    for name, step_s, pictures in (("few", np.array([0.1, 0.11, 0.1, 0.12, 0.1]), 2), ("same", np.full(50, 0.1), 3)):
        log, out = tmp_path / f"{name}.log", tmp_path / f"{name}.html"
        log.write_text(log_samples.nanogpt(step_s, 1))
        application.run(["report", str(log), "-o", str(out)])
        check_shown(browser.look(out), PICTURES[:pictures])


def test_a_pattern_and_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    log = tmp_path / "own.log"
    log.write_text("".join(f"{i} took {90 + i % 7} millis\n" for i in range(80)))
    application.run(["report", str(log), "-o", str(tmp_path / "a.html"), "--pattern", r"took (?P<ms>\d+)"])
    assert (tmp_path / "a.html").stat().st_size > 10_000
    with pytest.raises(InputError, match=r"ends in \.html"):
        application.run(["report", str(log), "-o", str(tmp_path / "a.txt")])
