"""Outside its calibrated range a learned policy is passive and says so, by one comparison in the simulator and live."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceenv.cli import application
from paceenv.core import pacing, signals
from paceenv.core.errors import InputError
from paceenv.live.decide.guard import GuardedPolicy, OutOfRange
from paceenv.live.decide.live_policy import find_policy
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import PolicyFile, save_policy
from paceenv.policies.ranges import HOLD_INTERVALS, OUTSIDE_INTERVALS, RangeWatch
from paceenv.policies.rollout import run
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import start

CALIBRATED = {"step_cv": (0.1, 0.3), "wait_share": (-0.5, 0.5)}
INSIDE, OUTSIDE = 0.2, 0.4


def views(*step_cv: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """One view a value of ``step_cv``, all else zero, ``(B, O)``."""
    view_BO = np.zeros((len(step_cv), signals.SIGNALS), np.float32)
    view_BO[:, signals.NAMES.index("step_cv")] = step_cv
    return view_BO


def always_on(calibrated_range: dict[str, tuple[float, float]]) -> Learned:
    """A network that asks for the widest window whatever it sees."""
    layers = [(np.zeros((2, signals.SIGNALS), np.float32), np.array([-1.0, 1.0], np.float32))]
    return Learned(layers, ("slack",), calibrated_range=calibrated_range)


def is_on(policy: Learned, *step_cv: float) -> list[bool]:
    window_B = policy.act(views(*step_cv))[:, pacing.SLACK, pacing.WINDOW]
    return [bool(window > 0.0) for window in window_B]


def test_a_rank_is_passive_while_outside_and_for_a_hold_after() -> None:
    policy = always_on(CALIBRATED)
    policy.reset(1)
    script = [OUTSIDE] * (OUTSIDE_INTERVALS - 1) + [INSIDE] + [OUTSIDE] * (OUTSIDE_INTERVALS + 4) + [INSIDE] * 30
    on = [is_on(policy, value)[0] for value in script]
    tolerated = 2 * OUTSIDE_INTERVALS - 1
    passive = 5 + HOLD_INTERVALS
    assert on == [True] * tolerated + [False] * passive + [True] * (len(script) - tolerated - passive)
    outside = policy.outside()
    assert outside is not None
    assert outside.share == passive / len(script)
    assert str(outside).startswith("outside its calibrated range in 6")
    assert str(outside).endswith(
        "% of decisions, first with step_cv = 0.4 (calibrated: 0.1 to 0.3); passive there, a live job drops it"
    )
    policy.reset(1)
    assert is_on(policy, OUTSIDE) == [True]
    assert policy.outside() is None


def test_only_the_rank_that_is_outside_is_passive() -> None:
    policy = always_on(CALIBRATED)
    policy.reset(3)
    on = [is_on(policy, INSIDE, OUTSIDE, INSIDE) for _ in range(OUTSIDE_INTERVALS)]
    assert on == [[True] * 3] * (OUTSIDE_INTERVALS - 1) + [[True, False, True]]


def test_without_a_range_only_what_is_not_a_number_is_outside() -> None:
    watch = RangeWatch({})
    wild = views(1e9, math.nan, -1.0)
    lost = [watch.lost(wild).tolist() for _ in range(OUTSIDE_INTERVALS)]
    assert lost[-1] == [False, True, False]
    assert not np.any(lost[:-1])
    with pytest.raises(InputError, match="here: calibrated_range = 'cv'; allowed: one of step_inflation"):
        RangeWatch({"cv": (0.0, 1.0)}, "here")


@given(st.lists(st.sampled_from([-0.9, 0.04, 0.06, 0.2, 0.34, 0.36]), min_size=1, max_size=40))
def test_live_gives_up_in_the_interval_in_which_the_simulated_rank_becomes_passive(seen: list[float]) -> None:
    simulated, live = always_on(CALIBRATED), find_policy(always_on(CALIBRATED))
    guarded = GuardedPolicy(live.policy)
    simulated.reset(1)
    guarded.reset(1)
    for value in seen:
        [on] = is_on(simulated, value)
        if not on:
            with pytest.raises(OutOfRange, match=r"policy learned is not calibrated for this job: step_cv = "):
                guarded.act(views(value))
            return
        assert guarded.act(views(value))[0, pacing.SLACK, pacing.WINDOW] > 0.0


def test_a_simulated_job_unlike_those_it_knows_is_left_alone() -> None:
    cluster = load_cluster("unequal-slack")
    known = run(always_on({}), start(cluster, np.arange(3)), 400)
    unknown = run(always_on({"comm_share": (-1.0, -0.9)}), start(cluster, np.arange(3)), 400)
    assert known.outside is None
    assert known.mean_delay_E.min() > 0.0
    assert unknown.outside is not None
    assert unknown.outside.view.startswith("comm_share = ")
    assert unknown.outside.share == 1.0 - (OUTSIDE_INTERVALS - 1) / (400 // 20 - 1)
    assert (unknown.mean_delay_E < 0.2 * known.mean_delay_E).all(), "but for the first intervals"


def test_the_commands_say_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.safetensors"
    save_policy(file, PolicyFile(always_on({}), {"comm_share": (-1.0, -0.9)}))
    short = ["--iterations", "200", "--seeds", "2"]
    assert application.run(["simulate", "two-jobs", "-p", str(file), *short, "--json", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"policy {file}: outside its calibrated range in 77.8 % of decisions, first with comm_sh")
    assert said.endswith("(calibrated: -1 to -0.9); passive there, a live job drops it\n")
    assert said.count("\n") == 1
    assert json.loads((tmp_path / "out.json").read_text())["outside_calibrated_range"]["share"] == 7 / 9
    assert application.run(["whatif", "two-jobs", "-p", str(file), *short[:2], "--nodes", "4,8"]) == 0
    said = capsys.readouterr().err
    for nodes in (4, 8):
        assert f"{nodes} nodes, {file}: policy {file}: outside its calibrated range" in said
    assert application.run(["evaluate", str(file), "passive", "--suite", "demo", *short]) == 0
    said = capsys.readouterr().err
    assert f"policy {file}: on 3 of 3 clusters, most on two-jobs: outside its calibrated range" in said
    assert said.count("\n") == 1
    assert application.run(["simulate", "two-jobs", *short, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["outside_calibrated_range"] is None
