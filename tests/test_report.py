"""Reports: pages as a browser shows them, pictures against closed forms, and what is said where a trace cannot tell."""

from __future__ import annotations

import dataclasses
import html
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, check_shown
from test_pages import EVIL, EVIL_OP, OF_TRACE
from traced_jobs import job_of

from benchmarks.evidence._pipeline_jobs import PipelineJob
from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.core.trace import write_trace
from paceenv.diagnosis.diagnose import diagnose
from paceenv.diagnosis.lateness_over_time import lateness
from paceenv.diagnosis.operation_matrix import read_matrix
from paceenv.report.fitted import try_policies
from paceenv.report.pictures import REST, parts
from paceenv.report.rank_pictures import WAIT, heat_map, spans, timeline
from paceenv.report.section import page
from paceenv.ui import figures


def simulate(cluster: str, path: Path, iterations: int, *options: str) -> Path:
    run = ["simulate", cluster, "-i", str(iterations), "--seeds", "1", "--trace", str(path), "--json", str(path) + "l"]
    assert application.run([*run, *options]) == 0
    return path


@pytest.mark.slow
def test_a_page_in_a_browser(browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unequal slack: the page says that pacing helps, as ``paceenv evaluate`` does, and all of it is drawn."""
    trace = simulate("unequal-slack", tmp_path / "run.parquet", 150)
    out = tmp_path / "sub" / "page.html"
    capsys.readouterr()
    assert application.run(["report", str(trace), "-o", str(out), "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {one["policy"]: one["verdict"] for one in result["policies"]}["learned"] == "helps"
    seen = browser.look(out)
    check_shown(seen, OF_TRACE)
    assert "Would pacing help?" in seen.text
    assert seen.scripts == 0
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


def test_why_nothing_was_simulated_is_said_without_advice() -> None:
    trace = PipelineJob(0, steps=12, stages=2, replicas=3, micro_batches=4, causes={"slow": 1.6}).trace()
    baseline, pacing = try_policies(trace, "run.parquet", None, diagnose(trace), ())
    assert baseline is None
    assert pacing.why_not == "a pipeline of 2 stages, for which no cluster can be fitted"


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
    ("options", "message"),
    [
        (["-o", "page.txt"], r"--out page.txt: allowed: a file that ends in .html"),
        (["--policy", "lerned"], "lerned"),
        (["--job", "other"], r"job = 'other'; allowed: one of \['plain'\]"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(job_of([[1.0, 2.0]] * 20), "trace.parquet")
    with pytest.raises(InputError, match=message):
        application.run(["report", "trace.parquet", *options])
    assert [path.name for path in tmp_path.iterdir()] == ["trace.parquet"]


def test_steps_that_take_no_time_are_refused(tmp_path: Path) -> None:
    write_trace(job_of([[0.0, 0.0]] * 20, 0.0), tmp_path / "trace.parquet")
    with pytest.raises(InputError, match="trace of plain: steps that take no time"):
        application.run(["report", str(tmp_path / "trace.parquet"), "-o", str(tmp_path / "page.html")])


@pytest.mark.parametrize(
    ("compute_TR", "said"),
    [
        ([[1.0, 2.0]] * 2, ("Insufficient evidence: 2 steps", "allowed: at least 16")),
        ([[1.0], [1.1]] * 10, ("Insufficient evidence: one rank",)),
    ],
)
def test_odd_traces_get_a_page_that_says_so(compute_TR: Any, said: tuple[str, ...], tmp_path: Path) -> None:
    write_trace(job_of(compute_TR), tmp_path / "trace.parquet")
    out = tmp_path / "page.html"
    assert application.run(["report", str(tmp_path / "trace.parquet"), "-o", str(out)]) == 0
    text = out.read_text()
    for words in said:
        assert words in text
    assert "Where the time goes" not in text
