"""A preference of variation against throughput, as a policy file is told it where it is named."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from paceenv.core import signals
from paceenv.core.errors import InputError
from paceenv.live.decide.live_policy import find_policy
from paceenv.policies import names
from paceenv.policies.distilled import Distilled
from paceenv.policies.policy_file import PolicyFile, save_policy
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import load_cluster


def learned(preference: float | None = 0.5) -> Distilled:
    outputs, known = (1, None) if preference is None else (2, (0.0, 2.0))
    layers = [(np.zeros((outputs, signals.SIGNALS), np.float32), np.zeros(outputs, np.float32))]
    return Distilled(
        layers, [{"slack": (0.02, 0.4)}], margin=0.1, hysteresis=0.1, preference=preference, preference_range=known
    )


def saved_at(folder: Path) -> Path:
    save_policy(folder / "mine.safetensors", PolicyFile(learned(), {"step_cv": (-0.5, 0.5)}))
    return folder / "mine.safetensors"


def test_a_file_is_told_its_preference_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cluster = saved_at(tmp_path), load_cluster("null-jitter")
    monkeypatch.setattr(names, "released", lambda: path)
    for text, preference in (
        (path, 0.5),
        (f"{path}:preference=1.5", 1.5),
        ("learned", 0.5),
        ("learned:preference=0", 0),
    ):
        simulated, live = select_policy(str(text), cluster), find_policy(str(text))
        assert isinstance(simulated, Distilled)
        assert isinstance(live.policy, Distilled)
        assert simulated.preference == live.policy.preference == preference
        assert live.fault == ""
        assert live.sha256 is not None
        assert live.policy.calibrated_range == simulated.calibrated_range == {"step_cv": (-0.5, 0.5)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{file}:preference=2.5", "preference = 2.5; allowed: 0 to 2"),
        ("{file}:preference=nan", "preference = nan; allowed: 0 to 2"),
        ("{file}:preference=much", "unknown option preference=much; allowed: preference=NUMBER"),
        ("{file}:preferenc=1", "unknown option preferenc=1; allowed: preference=NUMBER"),
        ("{old}:preference=1", "policy old: preference = 1; allowed: no preference, as it was trained for one"),
        ("learned", "policy learned: none is released yet; allowed: a .safetensors file"),
        ("learnt:preference=1", "no such file; allowed: passive, paper, adaptive, static, learned"),
        ("learnt", "did you mean learned?"),
    ],
)
def test_what_is_wrong_with_a_spelling_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.setattr(names, "released", lambda: tmp_path / "unreleased.safetensors")
    save_policy(tmp_path / "old.safetensors", PolicyFile(learned(None)))
    files = {"file": saved_at(tmp_path), "old": tmp_path / "old.safetensors", "missing": tmp_path / "no.safetensors"}
    spelled = text.format(**files)
    with pytest.raises(InputError, match=re.escape(expected)):
        select_policy(spelled, load_cluster("null-jitter"))
    assert expected in find_policy(spelled).fault, "live observes for the same reason"
