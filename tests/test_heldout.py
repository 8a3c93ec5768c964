"""Held-out check of a calibration: it passes what stays as it was, and sees what does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traced_jobs import job_of

from benchmarks._common import recorded
from paceenv.calibration.fit_trace import fit_stamps, fit_trace
from paceenv.calibration.heldout import check_fit
from paceenv.calibration.job_stamps import JobStamps, read_job
from paceenv.calibration.posterior import measured_step
from paceenv.calibration.step_stamps import read_rows
from paceenv.cli import application
from paceenv.core.trace import write_trace
from paceenv.sim.cluster import load_cluster

JOB = ("noise.jitter_cv=0.06", "noise.common_cv=0.01", "noise.persistent_cv=0.01", "noise.transfer_cv=0.03")


@pytest.fixture(scope="module")
def stamps() -> JobStamps:
    return read_job(read_rows(recorded(load_cluster("null-jitter").changed(list(JOB)), 3, 240)))


def check_job(stamps: JobStamps) -> dict[str, Any]:
    return check_fit(stamps, lambda part: fit_stamps(part).cluster)


def lines_of(check: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {line["quantity"]: line for line in check["lines"]}


def test_a_job_that_stays_as_it_was_agrees_in_every_quantity(stamps: JobStamps) -> None:
    check = check_job(stamps)
    lines = lines_of(check)
    assert list(lines) == ["mean step", "CV of the step", "p99 of the step"]
    assert (check["fitted_steps"], check["held_out_steps"]) == (159, 80)
    assert check["good"]
    assert lines["mean step"]["low"] < lines["mean step"]["high"]
    kept = stamps.part(np.arange(len(stamps.step_T)) >= 159)
    assert lines["mean step"]["held_out"] == pytest.approx(kept.step_T.mean(), rel=1e-3)


def test_a_job_that_changes_is_off_in_what_changed(stamps: JobStamps) -> None:
    """Every second step held out, the fit would have seen the change as well."""
    late_T = np.arange(len(stamps.step_T)) >= 2 * len(stamps.step_T) // 3
    more_T = np.where(late_T, 0.2 * stamps.entry_TR.mean(axis=1), 0.0)
    changed = replace(
        stamps, entry_TR=stamps.entry_TR + more_T[:, None], finish_TG=stamps.finish_TG + more_T[:, None],
        ready_TG=stamps.ready_TG + more_T[:, None], step_T=stamps.step_T + more_T,
    )  # fmt: skip
    lines = lines_of(check_job(changed))
    assert {name for name, line in lines.items() if line["verdict"] == "off"} >= {"mean step", "p99 of the step"}


def test_too_few_steps_or_only_paced_ones_are_not_checked(stamps: JobStamps) -> None:
    few = stamps.part(np.arange(len(stamps.step_T)) < 20)
    assert "needed: 24" in str(check_fit(few, lambda part: fit_stamps(part).cluster))
    paced = replace(stamps, delay_TR=np.full_like(stamps.delay_TR, 0.01))
    assert "0 of them held out and without pacing" in str(check_fit(paced, lambda part: fit_stamps(part).cluster))


@pytest.mark.slow
def test_intervals_hold_what_is_held_out_as_often_as_they_say() -> None:
    """An interval over runs of the fitted cluster alone, as if its parameters were known, holds it too seldom."""
    rng, inside = np.random.default_rng(0), list[bool]()
    for _ in range(10):
        persistent, common = 1.0 + 0.02 * rng.standard_normal(8), 1.0 + 0.01 * rng.standard_normal((150, 1))
        compute_s_TR = 0.5 * persistent * common * (1.0 + 0.05 * rng.standard_normal((150, 8)))
        check = check_job(read_job(read_rows(job_of(compute_s_TR))))
        inside += [line["verdict"] == "agrees" for line in check["lines"]]
    assert 0.85 <= np.mean(inside) <= 0.995


def test_the_command_writes_check_and_error_into_the_config(tmp_path: Path) -> None:
    write_trace(recorded(load_cluster("null-jitter").changed(list(JOB)), 5, 120), tmp_path / "t.parquet")
    arguments = ["calibrate", str(tmp_path / "t.parquet"), "-o", str(tmp_path / "c.yaml")]
    assert application.run([*arguments, "--json", str(tmp_path / "c.json")]) == 0
    cluster, printed = load_cluster(tmp_path / "c.yaml"), json.loads((tmp_path / "c.json").read_text())
    record = cluster.calibration["held_out_steps"]
    assert printed["cluster"]["calibration"]["held_out_steps"] == record
    assert (record["fitted_steps"], record["held_out_steps"]) == (79, 40)
    assert {line["verdict"] for line in record["lines"]} <= {"agrees", "close", "off"}
    step = measured_step(cluster)
    assert step is not None
    assert step.value == pytest.approx(printed["cluster"]["calibration"]["measured"]["step_mean_s"])
    assert 0.0 < step.high - step.low < 0.05 * step.value
    assert cluster.job.nodes == 8  # fitted to all steps, not to those of the check


@pytest.mark.slow
def test_a_program_without_a_transfer_alone_has_the_steps_of_the_job() -> None:
    """A rate put so that transfers alone take as long as measured made each step 1.7 % too long."""
    fit = fit_trace(recorded(load_cluster("expert-layers"), 0, 300), check=True)
    assert fit.cluster.fabric.nic_gbps == pytest.approx(100.0, rel=0.01)
    assert fit.cluster.calibration["held_out_steps"]["good"]


def test_noise_that_is_rounding_is_none() -> None:
    quiet = load_cluster("null-jitter").changed(["noise.transfer_cv=0"])
    (found,) = [p for p in fit_trace(recorded(quiet, 0, 240)).parameters if p.key == "noise.transfer_cv"]
    assert found.value == 0.0
