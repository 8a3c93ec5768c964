"""The released policy: what its file says is what the config says, and SCORES.md is what it still scores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from paceenv.core import metrics, signals
from paceenv.core.intervals import Interval
from paceenv.core.limits import LIMITS
from paceenv.policies import names
from paceenv.policies.distilled import Distilled
from paceenv.policies.policy_file import load_policy
from paceenv.trainers.evaluation.evaluate import TUNED, Score, outcome
from paceenv.trainers.evaluation.score_table import COLUMNS, POLICIES, SCORED, cells
from paceenv.trainers.evaluation.suites import ALL, load_suite
from paceenv.trainers.training.train_config import load_train_config

ROOT = Path(__file__).resolve().parent.parent
SUITE = load_suite(ALL)
CASES = SUITE.only([SCORED]).cases


def test_it_was_trained_as_its_config_says() -> None:
    content = load_policy(names.released())
    trained, config = content.provenance["config"], load_train_config("distilled").model_dump(mode="json")
    assert "added_after_training" not in content.provenance
    about = {"description": config["description"]}  # prose, which may say how long it took
    assert _of_today(trained, config) | about == config
    assert trained["environment"]["limits"] == asdict(LIMITS), "those of a live job"
    assert isinstance(content.policy, Distilled)
    assert set(content.calibrated_range) == set(signals.NAMES)
    assert names.released().stat().st_size < 500_000


def _of_today(trained: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Without keys that became constants since."""
    return {
        key: _of_today(value, config[key]) if isinstance(value, dict) and isinstance(config[key], dict) else value
        for key, value in trained.items()
        if key in config
    }


def rows() -> list[list[str]]:
    """The cells of every row of a table of the page."""
    text = (ROOT / "SCORES.md").read_text()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_the_page_has_every_policy_on_every_cluster() -> None:
    found = {(row[1].removesuffix(" (null)"), row[0]) for row in rows() if len(row) == len(COLUMNS)}
    (static,) = {policy for _, policy in found if policy.startswith("static:")}
    policies = ["passive", static, TUNED, *POLICIES]
    assert found - {COLUMNS[1::-1]} - {("---", "---")} == {(case.name, p) for case in CASES for p in policies}
    drawn = {case.name for case in load_suite("random").only([SCORED]).cases}
    assert {row[0] for row in rows() if row[0].startswith("random-")} <= drawn


def test_a_table_shows_no_negative_zero() -> None:
    score = Score("a", "b", -1e-5, (-2e-5, -1e-6), 0.0, 0.0, False, Interval(-1e-4, -2e-4, 0.0), -1e-5)
    assert cells([score])[0][2:6] == ("+0.00%", "+0.00 to +0.00", "0% [0, 0]", "+0.00%")


def test_a_gap_closed_by_few_clusters_is_no_number() -> None:
    score = Score("a", "b", 0.01, (0.0, 0.02), 0.0, 0.0, False, Interval(0.2, -8.35, 1.0))
    assert cells([score])[0][4] == "cannot tell"


@pytest.mark.parametrize(("place", "policy"), [(0, "learned"), (2, "adaptive")])
def test_the_page_is_what_policies_score(place: int, policy: str) -> None:
    case = [case for case in CASES if case.load().ranks <= 32][place]
    row = next(row for row in rows() if (row[0], row[1].removesuffix(" (null)")) == (policy, case.name))
    passive, paced = (outcome(name, case.load(), SUITE) for name in ("passive", policy))
    gain, low, high = metrics.mean_interval(passive.step_s_E / paced.step_s_E - 1.0)
    said = [float(part) for part in re.findall(r"[-+\d.]+", f"{row[2]} {row[3]}")]
    assert said == pytest.approx([100 * gain, 100 * low, 100 * high], abs=0.06)
    assert float(row[6]) == pytest.approx(paced.cv_E.mean(), abs=6e-4)
