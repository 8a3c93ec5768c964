"""The distilled policy at run time: which setting it takes, alone as in a batch, from a file that is data only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save
from test_policy_file import CANDIDATES, random_policy, refused

from paceenv.core import pacing, signals
from paceenv.core.errors import InputError
from paceenv.live.decide.live_policy import find_policy
from paceenv.policies import names
from paceenv.policies.distilled import Distilled
from paceenv.policies.policy_file import PolicyFile, load_policy, save_policy
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import load_cluster


def policy(margin: float = 1.0, hysteresis: float = 0.5, **changed: Any) -> Distilled:
    """Says of every candidate what it is told: outputs are the first two signals, in %."""
    weight = np.zeros((2, signals.SIGNALS), np.float32)
    weight[0, 0] = weight[1, 1] = 1.0
    arguments = {"layers": [(weight, np.zeros(2, np.float32))], "candidates": CANDIDATES, **changed}
    return Distilled(margin=margin, hysteresis=hysteresis, **arguments)


def views(*gains: tuple[float, float]) -> np.ndarray[Any, np.dtype[np.float32]]:
    found = np.zeros((len(gains), signals.SIGNALS), np.float32)
    found[:, :2] = gains
    return found


@pytest.mark.parametrize(
    ("gains", "choices"),
    [
        ([(0.9, 0.5)], [0]),  # not worth it
        ([(1.1, 0.5)], [0]),  # worth it, but no pacing counts the hysteresis more
        ([(1.6, 0.5)], [1]),
        ([(1.6, 0.5), (0.9, 0.5)], [1, 1]),  # kept below the margin
        ([(1.6, 0.5), (0.4, 0.3)], [1, 0]),
        ([(1.6, 0.5), (1.6, 2.0)], [1, 1]),  # better, but not by the hysteresis
        ([(1.6, 0.5), (1.6, 2.2)], [1, 2]),
        ([(3.0, 5.0), (np.nan, 5.0), (np.nan, np.nan)], [2, 0, 0]),
    ],
)
def test_margin_and_hysteresis(gains: list[tuple[float, float]], choices: list[int]) -> None:
    one = policy()
    one.reset(1)
    settings = [pacing.off(), pacing.off(), pacing.off()]
    for place, candidate in enumerate(CANDIDATES, 1):
        for mechanism, pair in candidate.items():
            settings[place][pacing.MECHANISMS.index(mechanism)] = pair
    for told, choice in zip(gains, choices, strict=True):
        np.testing.assert_array_equal(one.act(views(told))[0], settings[choice])


def test_a_rank_that_is_held_passive_starts_from_no_pacing() -> None:
    one = policy(calibrated_range={"wait_share": (0.0, 0.1)})
    one.reset(1)
    far, where = views((1.6, 0.0)), signals.NAMES.index("wait_share")
    assert one.act(far).any()
    far[0, where] = 1.0
    for _ in range(3):
        held = one.act(far)
    assert not held.any()
    assert one.choose(np.array([[1.2, 0.0]], np.float32)).tolist() == [0], "the hysteresis is with no pacing again"


def test_what_always_holds_is_set_beside_every_choice(tmp_path: Path) -> None:
    """No pacing included, and from its file, too."""
    one = policy(always={"defer": (0.02, 0.1)})
    save_policy(tmp_path / "a.safetensors", PolicyFile(one))
    for each in (one, load_policy(tmp_path / "a.safetensors").policy):
        settings = each.decide(views((0.0, 0.0), (3.0, 0.0), (0.0, 3.0)))
        assert settings[:, pacing.DEFER].tolist() == [[0.02, 0.1]] * 3
        assert settings[:, pacing.SLACK].tolist() == [[0.0, 0.0], [0.02, 0.4], [0.02, 0.2]]
        assert each.mechanisms == ("slack", "phase_shift", "defer")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("kind", "magic", "kind = 'magic'; allowed: one of network, distilled"),
        ("candidates", [{"slack": [0.02, 0.4]}], "outputs = 2; allowed: 1, 1 a candidate"),
        ("candidates", [{"slack": [0.02, 0.4]}, {"slack": 1}], "header: TypeError: cannot unpack non-iterable int"),
        ("candidates", [{"slack": [0.02, 0.4]}, {"slack": [9.0, 0.1]}], "threshold of slack = 9.0; allowed: 0 to 0.25"),
        ("candidates", [{"slack": [0.02, 0.4]}, {}], "candidate = '{}'; allowed: at least one mechanism"),
        ("always", {"slack": [0.02, 0.1]}, "always = 'slack'; allowed: mechanisms that no candidate names"),
        ("margin", -1.0, "margin = -1.0; allowed: at least 0"),
        ("margin", "1", "header: TypeError"),
        ("preference", {"range": [0, 1], "default": 0.5}, "outputs = 2; allowed: 4, 2 a candidate"),
        ("preference", {"range": [0.0, 2.0]}, "header: KeyError: 'default'; allowed: as paceenv train writes it"),
    ],
)
def test_files_that_are_not_one(tmp_path: Path, key: str, value: Any, expected: str) -> None:
    path = tmp_path / "a.safetensors"
    save_policy(path, PolicyFile(random_policy()))
    with safe_open(path, framework="numpy") as file:
        header = json.loads(file.metadata()["paceenv"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    assert expected in refused(path, save(tensors, {"paceenv": json.dumps(header | {key: value})}))


def test_the_preference_weighs_what_the_network_says(tmp_path: Path) -> None:
    """Outputs are the first four signals: gain and less of variation of two candidates."""
    weight = np.zeros((4, signals.SIGNALS), np.float32)
    weight[range(4), range(4)] = 1.0
    layers = [(weight, np.zeros(4, np.float32))]
    one = Distilled(layers, CANDIDATES, margin=0.0, hysteresis=0.0, preference=0.5, preference_range=(0.0, 1.0))
    view = np.zeros((1, signals.SIGNALS), np.float32)
    view[0, :4] = 1.0, 0.8, 0.0, 0.6
    assert one.choose(one.outputs(view)).tolist() == [2], "0.8 + 0.5 x 0.6 is more than 1.0"
    assert (one.outputs(view) == view[:, :4]).all(), "the preference is no input"
    save_policy(tmp_path / "a.safetensors", PolicyFile(one))
    same = load_policy(tmp_path / "a.safetensors").policy
    assert (same.preference, same.preference_range) == (0.5, (0.0, 1.0))
    for preference, choice in ((0.0, 1), (0.3, 1), (0.5, 2), (1.0, 2)):
        other = same.with_preference(preference)
        assert isinstance(other, Distilled)
        assert other.choose(other.outputs(view)).tolist() == [choice]
    with pytest.raises(InputError, match=r"preference = 1\.5; allowed: 0 to 1"):
        same.with_preference(1.5)
    with pytest.raises(InputError, match="outputs = 4; allowed: 2, 1 a candidate"):
        Distilled(layers, CANDIDATES, margin=0.0, hysteresis=0.0)


# A preference of variation against throughput, as a policy file is told it where it is named


def saved_at(path: Path, preference: float | None = 0.5) -> Path:
    outputs, known = (1, None) if preference is None else (2, (0.0, 2.0))
    layers = [(np.zeros((outputs, signals.SIGNALS), np.float32), np.zeros(outputs, np.float32))]
    told = {"preference": preference, "preference_range": known}
    mine = Distilled(layers, [{"slack": (0.02, 0.4)}], margin=0.1, hysteresis=0.1, **told)
    save_policy(path, PolicyFile(mine, {"step_cv": (-0.5, 0.5)}))
    return path


def test_a_file_is_told_its_preference_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cluster = saved_at(tmp_path / "mine.safetensors"), load_cluster("null-jitter")
    monkeypatch.setattr(names, "released", lambda: path)
    told = {str(path): 0.5, f"{path}:preference=1.5": 1.5, "learned": 0.5, "learned:preference=0": 0}
    for text, preference in told.items():
        simulated, live = select_policy(text, cluster), find_policy(text)
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
    old = saved_at(tmp_path / "old.safetensors", None)
    spelled = text.format(file=saved_at(tmp_path / "mine.safetensors"), old=old)
    with pytest.raises(InputError, match=re.escape(expected)):
        select_policy(spelled, load_cluster("null-jitter"))
    assert expected in find_policy(spelled).fault, "live observes for the same reason"
