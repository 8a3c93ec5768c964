"""The closed loop without a testbed: paired statistics, predictions in blocks, the report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import loop_doubles
import numpy as np
import pytest
from loop_doubles import QUICK, SimulatedTestbed, scenario

from paceenv.cli.application import run as paceenv
from paceenv.core.errors import InputError
from paceenv.core.intervals import Interval
from paceenv.core.limits import LIMITS
from paceenv.core.plain import plain
from paceenv.live.decide.blocks import BlockPlan, Plan
from paceenv.live.decide.experiment import Experiment
from paceenv.live.testbed.testbed_run import agent_options
from paceenv.live.testbed.testbed_scenario import Scenario
from paceenv.policies.rollout import run
from paceenv.policies.rules import Adaptive
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import start
from paceenv.trainers.closed_loop import sim_to_real_report
from paceenv.trainers.closed_loop.closed_loop import ClosedLoop, default_rule
from paceenv.trainers.closed_loop.paired_blocks import (
    Candidate,
    candidate_agents,
    compare,
    effect,
    log_ratios,
    paired_blocks,
    unheld,
)
from paceenv.trainers.closed_loop.predict import Predictor, run_in_blocks
from paceenv.trainers.closed_loop.scenario_cluster import known_cluster
from paceenv.ui import config_files

BLOCK, QUIET, PAIRS = 12, 5, 8
ITERATIONS = QUIET + BLOCK * (1 + 2 * PAIRS)
CONTEST = Plan(3, [BlockPlan(BLOCK, BLOCK // 3, 0)], begin=QUIET)
ON_T, BLOCKS = paired_blocks(CONTEST, ITERATIONS)


def test_the_measure_is_the_agents_own() -> None:
    """On the same steps the live comparison finds the same change; a stall is clipped by both alike."""
    tail = np.random.default_rng(1).standard_t(3, ITERATIONS)
    step_s_T = 0.2 * np.where(ON_T, 0.95, 1.0) * np.exp(0.05 * tail)
    step_s_T[QUIET + 2 * BLOCK - 1] = 30.0
    experiment = Experiment(["one"], CONTEST)
    for i, step_s in enumerate(step_s_T.tolist()):
        experiment.add(i, step_s)
    experiment.final()
    verdict, found = experiment.leading.verdict, effect(log_ratios(step_s_T[None], BLOCKS)[0])
    assert verdict.pairs == len(BLOCKS) == PAIRS
    assert verdict.gain == pytest.approx(-found.value)
    assert found.value < 0.5


def test_pairs_that_are_cut_off_do_not_count() -> None:
    assert len(paired_blocks(CONTEST, ITERATIONS - 1)[1]) == PAIRS - 1
    assert len(paired_blocks(CONTEST, QUIET + 2 * BLOCK)[1]) == 0
    assert paired_blocks(CONTEST, QUIET + BLOCK + 1)[1] == []  # ends before anything of its first pair counts
    assert math.isnan(effect(log_ratios(np.ones((1, QUIET)), [])[0]).value)


def test_a_policy_that_is_always_on_runs_as_in_every_other_rollout() -> None:

    cluster, on_T = load_cluster("unequal-slack"), np.arange(200) >= 20
    limits = replace(LIMITS, quiet_first=20)
    found, _ = run_in_blocks(Adaptive(), start(cluster, np.arange(3), limits=limits), on_T, 20)
    wanted = run(Adaptive(), start(cluster, np.arange(3), limits=limits), 180, interval_iterations=20)
    np.testing.assert_array_equal(found[:, 20:], wanted.step_ET)


def test_a_prediction_knows_what_pacing_does_and_how_well() -> None:
    plan = scenario().loop
    fitted = load_cluster("unequal-slack")
    rule = default_rule(scenario())
    schedule = plan.schedule([rule])
    iterations = schedule.after(plan.pairs)
    same = Predictor([fitted] * 4, plan, 2, 0, iterations)
    vague = Predictor(
        [fitted.changed([f"fabric.uplink_gbps={rate}"]) for rate in (0.3, 0.4, 0.5, 0.6)], plan, 2, 0, iterations
    )
    sharp, wide = same.predict(rule, schedule), vague.predict(rule, schedule)
    assert sharp.always.high < -0.1
    assert sharp.blocks.value == pytest.approx(sharp.always.value, abs=0.02)
    assert wide.always.high - wide.always.low > 3.0 * (sharp.always.high - sharp.always.low)
    many, few = vague.passive["step_s"], same.passive["step_s"]
    assert many.high - many.low > 3.0 * (few.high - few.low)
    nothing = same.predict("passive", schedule)
    assert nothing.always.value == 0.0
    assert nothing.blocks.low < 0.0 < nothing.blocks.high  # what blocks of nothing read


def test_the_best_policy_that_surely_helps_is_chosen_and_else_none() -> None:
    def of(policy: str, mean: float, sd: float) -> Candidate:
        logs = mean + sd * np.array([-1.0, 1.0] * 8)
        return Candidate(policy, logs, logs, 0.0, 0.0, agents={"paced_pairs": None})

    several = [of("a", -0.10, 0.02), of("b", -0.20, 0.25), of("c", -0.12, 0.05), of("d", 0.1, 0.01)]
    for candidates, chosen in ((several, "c"), (several[1::2], "passive")):
        report = sim_to_real_report.build(scenario(), {}, candidates, {"unheld": ""}, [])
        assert report["chosen"]["policy"] == chosen


@pytest.mark.parametrize(
    ("predicted", "measured", "inside", "sign", "said"),
    [
        ((-0.182, -0.2, -0.16), (-0.175, -0.19, -0.16), True, True, "agrees"),
        ((-0.20, -0.22, -0.17), (-0.175, -0.19, -0.16), False, True, "agrees within the error of the prediction"),
        ((-0.30, -0.32, -0.28), (-0.175, -0.19, -0.16), False, True, "right in sign, predicted 12.5 points too much"),
        ((-0.05, -0.06, -0.04), (0.03, 0.02, 0.04), False, False, "predicted shorter steps, measured longer steps"),
        ((-0.003, -0.004, -0.002), (0.001, -0.002, 0.004), False, True, "agrees within"),
        ((-0.05, -0.06, -0.04), (0.001, -0.002, 0.004), False, False, "measured no difference"),
        ((-0.15, -0.16, -0.14), (0.01, -0.4, 0.7), True, True, "cannot tell: the measured interval holds both"),
        ((0.001, -0.002, 0.004), (0.01, -0.01, 0.03), True, True, "agrees"),
        ((-0.05, -0.06, -0.04), (math.nan, math.nan, math.nan), None, None, "too few pairs"),
    ],
)
def test_agreement_is_said_in_words(
    predicted: tuple[float, ...], measured: tuple[float, ...], inside: bool | None, sign: bool | None, said: str
) -> None:
    found = compare(Interval(*predicted), Interval(*measured))
    assert (found["inside"], found["sign"]) == (inside, sign)
    assert said in found["verdict"]


def _snapshot(state: str = "canary", reason: str = "", **candidate: Any) -> dict[str, Any]:
    other = {"name": "other", "verdict": "helps", "pairs": 8, "text": "u", "stopped": ""}
    mine = {"name": "mine", "verdict": "helps", "pairs": 8, "text": "t", "stopped": ""} | candidate
    return {"state": state, "reason": reason, "canary": {"candidates": [mine, other]}}


def test_a_run_in_which_no_transfer_was_held_says_so() -> None:
    why = "transfers of process group 1 are not held back: its backend is mpi"
    idle = {"pacing": {"holds": 7, "held": 0}, "events": [{"text": why}, {"text": "mode canary"}]}
    wanted = f"rule defer was on in 14 iterations of ranks and held no transfer back: {why}"
    assert unheld([idle, idle]) == wanted
    assert unheld([idle, {"pacing": {"holds": 7, "held": 3}}]) == ""


def test_blocks_after_a_rollback_do_not_count() -> None:
    paced = _snapshot()
    assert candidate_agents([paced, paced], 0, 2)["paced_pairs"] is None
    silent = candidate_agents([paced], 0, 2)
    assert (silent["paced_pairs"], silent["stopped"]) == (0, ["1 of 2 agents reported nothing"])
    stopped = _snapshot(verdict="hurts", pairs=4, stopped="rolled back")
    found = candidate_agents([paced, stopped], 0, 2)
    assert (found["paced_pairs"], found["stopped"], found["verdicts"]) == (4, ["rolled back"], {"helps": 1, "hurts": 1})
    assert candidate_agents([paced, stopped], 1, 2)["paced_pairs"] is None  # the other candidate goes on
    gone = _snapshot(state="observe", reason="no agent on every rank", pairs=3)
    assert candidate_agents([paced, gone], 1, 2)["paced_pairs"] == 8
    assert candidate_agents([paced, gone], 0, 2)["stopped"] == ["no agent on every rank"]


def test_candidates_are_compared_by_the_same_rounds() -> None:
    """Where noise is common to a round, the difference is known far better than either effect."""
    random = np.random.default_rng(1)
    common = random.normal(0.0, 0.05, 12)
    good, better = (common + math.log(1.0 - gain) + random.normal(0.0, 0.002, 12) for gain in (0.1, 0.2))
    one, other = (Candidate("", common, common, 0.0, 0.0, measured_P=logs_P) for logs_P in (better, good))
    found = one.against(other)["measured"]
    assert found.low < 0.8 / 0.9 - 1.0 < found.high
    assert found.high - found.low < 0.1 * (effect(good).high - effect(good).low)
    one.measured_P = better[:5]
    assert one.against(other)["rounds"] == 5


def _loop(folder: Path, testbed: SimulatedTestbed, candidates: Sequence[str] = QUICK, **plan: Any) -> ClosedLoop:
    return ClosedLoop(scenario(**plan), folder, testbed, loop_doubles.calibrate, candidates=candidates, seeds=1)


@pytest.mark.slow
def test_a_loop_reports_what_its_runs_say(tmp_path: Path) -> None:
    testbed = SimulatedTestbed()
    report = _loop(tmp_path / "loop", testbed).go()
    assert float(testbed.runs[1]["--probe-s"]) == 0.01
    names = testbed.runs[2]["--candidates"].split(";")
    rows = {role: one for one in report["policies"] for role in one.roles}
    assert set(rows) == {"constant", "default", "adaptive", "paper", "learned"}
    assert {one.policy for one in rows.values()} == set(names)
    simulated = report["simulated"]
    for real in (report["observed"], report["measured"]["unpaced"]):
        assert simulated["step_s"].value == pytest.approx(real["step_s"].value, rel=0.05)
    assert simulated["cv"] == pytest.approx(report["observed"]["cv"], abs=0.03)
    constant, paper = rows["constant"], rows["paper"]
    assert constant.measured.high < -0.1
    assert constant.agreement["sign"]
    assert constant.measured.value in constant.blocks
    assert paper.measured.value > constant.measured.high
    assert constant.agents["verdicts"] == {"helps": 8}
    assert report["reference"] in (constant.policy, rows["default"].policy)
    beaten = paper.against(constant)
    assert beaten["measured"].low > 0.0
    assert beaten["always"].low > 0.0
    text = (tmp_path / "loop" / "report.html").read_text()
    assert report["verdict"] in text
    assert "cannot be identified from this trace" in text
    assert "Against the best constant" in text
    for name in ("report.html", "effects.png"):
        assert (tmp_path / "loop" / name).stat().st_size > 500


def test_a_loop_needs_a_new_folder(tmp_path: Path) -> None:
    testbed = SimulatedTestbed()
    report = _loop(tmp_path / "loop", testbed, ["default"]).go()
    assert [run["--mode"] for run in testbed.runs] == ["observe", "probe", "canary"]
    assert json.loads((tmp_path / "loop" / "report.json").read_text()) == plain(report)
    with pytest.raises(InputError, match="loop: holds something; allowed: a new folder"):
        _loop(tmp_path / "loop", testbed, ["default"]).go()


def test_what_the_agent_would_refuse_is_refused_before_anything_runs(tmp_path: Path) -> None:
    testbed = SimulatedTestbed()
    odd = loop_doubles.SCENARIO["loop"] | {"block_iterations": 25}
    with pytest.raises(InputError, match="block_iterations = 25; allowed: input should be a multiple of 20"):
        config_files.parse(Scenario, loop_doubles.SCENARIO | {"loop": odd}, "test")
    with pytest.raises(InputError, match=r"unknown key fabric\.bufer_kb"):
        _loop(tmp_path / "loop", testbed, known={"fabric.bufer_kb": 32}).go()
    with pytest.raises(InputError, match=r"candidate nobody: .*allowed: constant, default, adaptive"):
        _loop(tmp_path / "loop", testbed, ["constant", "nobody"]).go()
    assert not testbed.runs
    assert known_cluster(scenario(known={})) is None
    assert "--block-iterations" in agent_options(scenario().loop, "canary")


def test_the_command_runs_the_loop_with_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(scenario: Scenario, *given: Any, **more: Any) -> None:
        assert (scenario.loop.pairs, scenario.loop.observe_iterations, scenario.seed) == (5, 40, 18)
        raise InputError("interrupted")

    monkeypatch.setattr("paceenv.live.testbed.testbed_run.run_scenario", interrupted)
    config_files.write_yaml(tmp_path / "double.yaml", scenario().model_dump(exclude_unset=True))
    command = ["testbed", str(tmp_path / "double.yaml"), "--loop", "-o", str(tmp_path / "loop")]
    command += ["--iterations", "40", "--pairs", "5", "--seed", "3", "--candidates"]
    for candidates, said in (("default; paper", "interrupted"), ("paper; nobody", "candidate nobody")):
        with pytest.raises(InputError, match=said):
            paceenv([*command, candidates])
