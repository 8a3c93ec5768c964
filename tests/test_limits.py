"""One set of limits: the simulator, its reference, the environment and a live job's guard allow the same delays."""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceenv.cli import application
from paceenv.core import pacing, timing
from paceenv.core.errors import InputError
from paceenv.core.limits import LIMITS, OPEN, Limits
from paceenv.live.decide.control import SLACK_MEMORY
from paceenv.live.decide.guard import Guard
from paceenv.live.options import Options
from paceenv.policies.rollout import run
from paceenv.policies.rules import Static
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import start

TIGHT = Limits(cap_s=0.02, cap_share=0.5, budget_s_per_minute=3.0, quiet_first=30)


def test_a_live_job_starts_from_the_limits_of_the_simulator() -> None:
    options = Options()
    assert Limits(options.cap_s, options.cap_share, options.budget_s_per_minute, options.quiet_first) == LIMITS


@given(
    asked=st.lists(st.floats(0.0, 2.0, width=32), min_size=1, max_size=200),
    step_s=st.floats(0.01, 30.0),
    budget_s=st.floats(0.0, 60.0),
)
def test_the_engine_spends_as_the_guard_does(asked: list[float], step_s: float, budget_s: float) -> None:
    """The guard by its clock, the engine by the steps of the job; float32 against float64."""
    limits = replace(OPEN, budget_s_per_minute=budget_s)
    guard, now_s = Guard(limits), 0.0
    left_R, delay_R = np.full(1, math.inf, np.float32), np.zeros(1, np.float32)
    for iteration, asked_s in enumerate(asked):
        now_s += step_s
        delay_R[0] = asked_s
        timing.spend(left_R, delay_R, 1, step_s, limits.burst_s, limits.fill)
        allowed_s = guard.allowed_s(asked_s, iteration=iteration, now_s=now_s, step_s=10.0)
        guard.taken(allowed_s, now_s)
        assert delay_R[0] == pytest.approx(allowed_s, rel=1e-4, abs=1e-4)


def test_no_delay_is_longer_than_the_limits() -> None:
    cluster = load_cluster("unequal-slack").with_nodes(8)
    simulator = start(cluster, np.array([0]), limits=TIGHT)
    parts: list[np.ndarray] = []
    run(Static({"slack": (0.0, 0.4)}), simulator, 200, on_recording=lambda r: parts.append(r.delay_ETR[0]))
    delay_s_TR = np.concatenate(parts)
    assert 0.0 < delay_s_TR.max() <= TIGHT.cap_s
    assert not delay_s_TR[:20].any(), "the first interval after the quiet start"
    open_ = start(cluster, np.array([0]), limits=replace(TIGHT, budget_s_per_minute=60.0))
    run(Static({"slack": (0.0, 0.4)}), open_, 200)
    seconds = 200 * 0.4
    assert delay_s_TR.sum(axis=0).max() <= TIGHT.burst_s + TIGHT.fill * seconds
    assert simulator.mean_delay_s() < open_.mean_delay_s(), "the budget is what cuts here"


@pytest.mark.parametrize(
    "wrong",
    [{"cap_s": -0.1}, {"cap_s": math.nan}, {"cap_share": 1.5}, {"budget_s_per_minute": 61.0}, {"quiet_first": -1}],
)
def test_impossible_limits_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        Limits(**wrong)  # type: ignore[arg-type]


def test_a_share_of_the_own_slack_limits_nothing_that_the_slack_rule_asks_for() -> None:
    """The guard's third limit protects from other policies; the rule keeps it by itself, so the engine has none."""
    simulator = start(load_cluster("unequal-slack"), np.arange(2))
    settings = np.broadcast_to(pacing.settings({"slack": (0.02, 0.25)}), (2, 1, *pacing.off().shape)).copy()
    simulator.run(simulator.off(), 60)
    ranks = range(0, simulator.batch.ranks, max(simulator.batch.ranks // 8, 1))
    slack_s: dict[tuple[int, int], deque[float]] = {}
    asked_s = beyond_s = 0.0
    for _ in range(300):
        simulator.run(settings, 1)
        for e, rank in enumerate(simulator.state.rank_EFR):
            for r in ranks:
                known = slack_s.setdefault((e, r), deque(maxlen=SLACK_MEMORY))
                known.append(timing.slack_low_s(rank, r))
                asked_s += float(rank[timing.DELAY_S, r])
                beyond_s += max(float(rank[timing.DELAY_S, r]) - pacing.SLACK_GAIN * max(known), 0.0)
    assert asked_s > 0.05
    assert beyond_s < 0.02 * asked_s


def test_a_suite_and_a_command_may_have_other_limits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def gain(*options: str) -> float:
        arguments = ["evaluate", "static", "--suite", str(tmp_path / "s.yaml"), *options, "--json", "-"]
        assert application.run(arguments) == 0
        [row] = [row for row in json.loads(capsys.readouterr().out)["rows"] if row["policy"] == "static"]
        return float(row["throughput_gain"])

    suite = "name: s\ncases: [{cluster: incast-shallow}]\nseeds: 2\niterations: 400\n"
    (tmp_path / "s.yaml").write_text(suite)
    wide, narrow = gain(), gain("--limit", "cap_share=0.1")
    assert narrow < 0.1 < wide
    (tmp_path / "s.yaml").write_text(suite + "limits: {cap_share: 0.1}\n")
    assert gain() == narrow
    for wrong in ("cap=0.1", "cap_s=x", "cap_share=2"):
        with pytest.raises(InputError, match="allowed"):
            application.run(["evaluate", "static", "--limit", wrong])
