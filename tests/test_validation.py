"""Validation targets: what an expectation means, that every committed one is read, and that bad ones are refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceenv.calibration.fits.scaling_table import ScalingTarget, fit_scaling
from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.sim.cluster import load_cluster
from paceenv.ui import config_files
from paceenv.validation import closed_forms, scaling, simulated_runs
from paceenv.validation.checks import Check, Expected


def _kind(name: str) -> str:
    return str(config_files.read_yaml(config_files.find("targets", name)).get("kind", "scaling"))


def check(found: float, **expected: float | bool) -> Check:
    return Check("t", "r", "q", Expected(**expected), found, "predicted")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "expected", "error", "within"),
    [
        (1.05, {"value": 1.0, "tolerance": 0.1}, 0.05, True),
        (2.3, {"value": 2.0, "tolerance": 0.1}, 0.15, False),
        (-2.3, {"value": -2.0, "tolerance": 0.1}, -0.15, False),
        (0.13, {"value": 0.1, "tolerance": 0.02, "absolute": True}, 0.03, False),
        (5.0, {"at_least": 4.0}, 0.0, True),
        (3.0, {"at_least": 4.0}, 1.0, False),
        (9.0, {"at_least": 4.0, "at_most": 8.0}, -1.0, False),
        (0.97, {"value": 1.0, "tolerance": 0.1, "at_most": 0.95}, -0.03, False),
        (math.nan, {"value": 1.0, "tolerance": 0.1}, math.nan, False),
    ],
)
def test_an_expectation_is_a_number_with_a_tolerance_a_range_or_both(
    found: float, expected: dict[str, float | bool], error: float, within: bool
) -> None:
    one = check(found, **expected)
    assert one.error == pytest.approx(error, nan_ok=True)
    assert one.within is within


@pytest.mark.parametrize(
    "expected",
    [
        {},
        {"value": 1.0},
        {"tolerance": 0.1},
        {"value": 1.0, "tolerance": -0.1},
        {"value": 1.0, "tolerance": math.nan},
        {"value": 0.0, "tolerance": 0.1},
    ],
)
def test_an_expectation_that_could_not_hold_or_fail_is_refused(expected: dict[str, float]) -> None:
    with pytest.raises(InputError, match="allowed"):
        config_files.parse(Expected, expected, "test")


@pytest.mark.parametrize("name", [n for n in config_files.names("targets") if _kind(n) == "closed_form"])
def test_closed_forms_hold_or_say_that_they_miss(name: str) -> None:
    target = config_files.load(closed_forms.ClosedFormTarget, "targets", name)
    checks = list(closed_forms.checks(target))
    assert checks
    for one in checks:
        assert one.within is not one.remark.startswith("missed"), (one.row, one.found)


def _target(tmp_path: Path, text: str) -> str:
    path = tmp_path / "target.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: other", "scaling, simulated, closed_form"),
        ("{name: t, kind: simulated, source: s, rows: [{row: r, cluster: nul-jitter, quantity: cv, "
         "expected: {at_least: 0}}]}", "did you mean null-jitter"),
        ("{name: t, kind: simulated, source: s, rows: [{row: r, cluster: null-jitter, quantity: speed, "
         "expected: {at_least: 0}}]}", "quantity"),
        ("{name: t, kind: closed_form, source: s, rows: [{row: r, form: x, expected: {at_least: 0}}]}", "form x"),
        ("{name: t, kind: closed_form, source: s, rows: [{row: r, form: any_slow, arguments: {p: 1}, "
         "expected: {at_least: 0}}]}", "any_slow"),
    ],
)  # fmt: skip
def test_bad_targets_are_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        application.run(["validate", _target(tmp_path, text)])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_ratio_is_to_the_same_run_without_pacing(tmp_path: Path) -> None:
    text = (
        "{name: t, kind: simulated, source: s, rows: ["
        "{row: a, cluster: unequal-slack, pace: {mechanism: slack, window: 0.25}, quantity: step_s,"
        " expected: {at_least: 0}},"
        "{row: b, cluster: unequal-slack, quantity: step_s, expected: {at_least: 0}},"
        "{row: c, cluster: unequal-slack, pace: {mechanism: slack, window: 0.25}, quantity: step_s, over: [],"
        " expected: {at_most: 0.9}}]}"
    )
    target = config_files.load(simulated_runs.SimulatedTarget, "targets", _target(tmp_path, text))
    paced, passive, ratio = simulated_runs.checks(target, seeds=2, iterations=300)
    assert ratio.found == paced.found / passive.found
    assert ratio.within


# A scaling table: what pacing changes, and predictors that know nothing


def _table(*rows: tuple[float, float, float, float]) -> ScalingTarget:
    """Rows of (baseline throughput, cv, paced throughput, cv) at 4, 8, ... nodes."""
    data = [
        {
            "nodes": 4 * 2**i,
            "baseline": {"throughput": a, "cv": b, "fit": True},
            "coordination": {"throughput": c, "cv": d, "fit": False},
        }
        for i, (a, b, c, d) in enumerate(rows)
    ]
    return config_files.parse(ScalingTarget, {"name": "t", "cluster": "when-scaling-fails", "rows": data}, "test")


@given(
    st.lists(
        st.tuples(*2 * [st.integers(1, 10_000).map(float), st.integers(1, 50).map(lambda n: n / 100)]),
        min_size=1,
        max_size=5,
    )
)
def test_the_null_predictor_is_outside_in_every_scored_row(rows: list[tuple[float, float, float, float]]) -> None:
    target = _table(*rows)
    column = {row.nodes: (row.baseline.throughput, row.baseline.cv) for row in target.rows}
    columns = scaling.Columns(column, {scaling.NULL: column})
    scored = list(scaling.changes(target, columns, scaling.NULL))
    assert not any(one.within for one in scored)
    changed = [a != c for a, _, c, _ in rows] + [b != d for _, b, _, d in rows]
    assert len(scored) == sum(changed), "what did not change is not scored"


def test_a_predictor_that_is_right_has_all_rows_and_a_skill_of_one() -> None:
    target = _table((1000.0, 0.02, 1010.0, 0.02), (1800.0, 0.1, 2000.0, 0.05))
    baseline = {4: (900.0, 0.03), 8: (1800.0, 0.2)}  # a wrong baseline is the business of the baseline's rows
    right = {4: (909.0, 0.03), 8: (2000.0, 0.1)}
    table = scaling.predictors(target, scaling.Columns(baseline, {"right": right, scaling.NULL: baseline}))
    assert table.rows[1][-2:] == ("3 of 3", "1.00")
    assert table.rows[2][-2:] == ("0 of 3", "0.00")
    assert table.rows[0][1:3] == table.rows[1][1:3] == ("+1.00%", "+11.11%")


def test_structures_of_table_1_that_leave_nothing_to_pace() -> None:
    """Plain data parallelism, which the publication reads like, and leaves that nobody oversubscribes."""
    target = config_files.load(ScalingTarget, "targets", "when-scaling-fails")
    table = scaling.structure(target, load_cluster(target.cluster), seeds=4, iterations=4000)
    assert table is not None
    gain = {row[0]: float(row[2].rstrip("%")) for row in table.rows}
    assert gain["as fitted (4 nodes per group)"] > 4.0
    assert gain["one group of 64 (plain data parallelism)"] == 0.0
    assert abs(gain["leaves 1 : 1"]) < 0.6
    assert abs(gain["gradients overlap the last 0.9 of the compute"]) < 0.6


@pytest.mark.parametrize("free", [{}, {f"noise.k{i}": (0.0, 1.0) for i in range(99)}])
def test_a_table_that_does_not_determine_a_fit_is_refused(free: dict[str, tuple[float, float]]) -> None:
    target = _table((1.0, 0.1, 1.0, 0.1)).model_copy(update={"free": free})
    with pytest.raises(InputError, match=r"free = \d+ keys; allowed: 1 to"):
        fit_scaling(target, load_cluster(target.cluster))
