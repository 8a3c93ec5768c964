"""The released policy: what its file says is what the config says, and the score table is what it still scores."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from paceenv.core import metrics, signals
from paceenv.core.limits import LIMITS
from paceenv.policies import saved
from paceenv.policies.distilled import Distilled
from paceenv.policies.policy_file import load_policy
from paceenv.trainers.evaluation.evaluate import TUNED, outcome
from paceenv.trainers.evaluation.scores import POLICIES, SCORED
from paceenv.trainers.evaluation.suites import ALL, load_suite
from paceenv.trainers.training.train_config import load_train_config

ROOT = Path(__file__).resolve().parent.parent
SUITE = load_suite(ALL)


def test_it_was_trained_as_its_config_says() -> None:
    content = load_policy(saved.released())
    trained, config = content.provenance["config"], load_train_config("distilled").model_dump(mode="json")
    assert "added_after_training" not in content.provenance
    assert trained == config
    assert trained["environment"]["limits"] == asdict(LIMITS), "those of a live job"
    assert isinstance(content.policy, Distilled)
    assert set(content.calibrated_range) == set(signals.NAMES)
    assert saved.released().stat().st_size < 200_000


def test_the_table_has_every_policy_on_every_cluster() -> None:
    rows = json.loads((ROOT / "SCORES.json").read_text())
    found = {(row["suite"], row["cluster"], row["split"], row["null"], row["policy"]) for row in rows}
    policies = ["passive", "static", TUNED, *POLICIES]
    scored = [c for c in SUITE.cases if c.split in SCORED]
    expected = {(c.suite, c.name, c.split, c.null_case, p) for c in scored for p in policies}
    assert {row for row in found if row[0] != "random"} == expected
    drawn = {c.name for c in load_suite("random").only(["held-out"]).cases}
    assert {cluster for suite, cluster, *_ in found if suite == "random"} == drawn
    assert len(found) == len(rows)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("policy", ["learned", "adaptive"])
def test_the_table_is_what_policies_score(place: int, policy: str) -> None:
    case = [case for case in SUITE.only(SCORED).cases if case.load().ranks <= 32][place]
    rows = json.loads((ROOT / "SCORES.json").read_text())
    row = next(row for row in rows if row["cluster"] == case.name and row["policy"] == policy)
    passive, paced = (outcome(name, case.load(), SUITE) for name in ("passive", policy))
    gain, low, high = metrics.bootstrap_interval(passive.step_s_E / paced.step_s_E - 1.0)
    assert [row["throughput_gain"], *row["ci95"]] == pytest.approx([gain, low, high], abs=2e-4)
    assert row["cv"] == pytest.approx(paced.cv_E.mean(), abs=2e-4)
