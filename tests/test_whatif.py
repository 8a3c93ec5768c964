"""What-if: the simulator against itself, refusals of guesses, intervals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traced_jobs import job_of, json_of, mean_step_s

from benchmarks._common import recorded
from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.core.trace import write_trace
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.whatif.baseline import Baseline, of_config, of_trace
from paceenv.whatif.change import MAX_ROWS, Change, apply, combinations
from paceenv.whatif.predictions import of_runs
from paceenv.whatif.simulated import drawn, predict

QUICK: dict[str, Any] = {"seeds": 4, "iterations": 200}


def test_combinations_are_rows() -> None:
    rows = combinations("8,16", "1", "0,3+4", ["passive", "static:slack=0.1/0.2"], [])
    assert len(rows) == 2 * 1 * 2 * 2
    assert rows[0].label == "8 nodes, oversubscription 1, rank 0 replaced"
    assert rows[-1].label == "16 nodes, oversubscription 1, ranks 3-4 replaced, static:slack=0.1/0.2"


def test_changes_of_a_cluster() -> None:
    cluster = load_cluster("null-jitter").changed(["noise.slow_ranks=2", "job.nodes_per_group=8"])
    wider = apply(Change(nodes=32), cluster, None)
    assert (wider.job.nodes, wider.groups) == (32, 1), "a job of one process group keeps one"
    without = apply(Change(nodes=6, replaced=(4, 7)), cluster, {4, 7})
    assert (without.job.nodes, without.noise.slow_ranks, without.groups) == (6, 0, 1)
    assert apply(Change(replaced=(1, 4)), cluster, {4, 7}).noise.slow_ranks == 1, "one of the two was slow"
    fabric = apply(Change(oversubscription=2.0), cluster, None).fabric
    assert (fabric.oversubscription, fabric.uplink_gbps) == (2.0, None)
    groups = apply(Change(nodes=16), load_cluster("unequal-slack"), None)
    assert groups.groups == 8, "groups keep their two nodes"
    assert apply(Change(pacing="static"), cluster, None) is cluster
    with pytest.raises(InputError, match="drawn anew in every run; allowed: --set noise"):
        apply(Change(replaced=(0,)), cluster, None)


def test_a_prediction_is_what_rollouts_say() -> None:
    cluster = load_cluster("unequal-slack")
    answer = predict(of_config("unequal-slack"), [Change(nodes=16), Change(nodes=16, pacing="static")], **QUICK)
    plain, paced = answer.changed
    assert answer.today.job.step.value == pytest.approx(mean_step_s(cluster))
    assert plain.job.step.value == pytest.approx(mean_step_s(cluster.with_nodes(16)))
    assert paced.job.step.value == pytest.approx(mean_step_s(cluster.with_nodes(16), "static"))
    assert plain.against_today.step.value > 0.2
    assert paced.job.step.value < 0.95 * plain.job.step.value, "pacing pays here"
    assert plain.job.throughput.value == pytest.approx(256 * 16 / plain.job.step.value, rel=1e-3)


def test_energy_where_the_cluster_has_power() -> None:
    cluster = load_cluster("null-jitter").changed(["power.compute_w=400", "power.wait_w=200"])
    baseline = replace(of_config("null-jitter"), cluster=cluster)
    answer = predict(baseline, [Change(settings=("power.wait_w=0",))], **QUICK)
    (row,) = answer.changed
    assert answer.today.job.energy is not None
    assert answer.today.job.energy.value > 400 * 0.2 * 8 / (256 * 8)
    assert row.against_today.energy is not None
    assert row.against_today.energy.high < 0.0
    assert row.against_today.step.value == 0.0
    assert not any("energy" in line for line in baseline.cannot_tell)


@pytest.fixture(scope="module")
def one_group() -> tuple[Cluster, Baseline]:
    """A job whose nodes share nothing, and what its trace tells."""
    cluster = load_cluster("null-jitter").changed(
        ["fabric.oversubscription=1", "fabric.uplink_gbps=null", "noise.slow_ranks=1", "noise.slow_factor=1.5"]
    )
    return cluster, of_trace(recorded(cluster, 3, 300), "one group", None, None)


def test_a_trace_predicts_more_nodes_and_a_job_without_its_slow_rank(one_group: tuple[Cluster, Baseline]) -> None:
    truth, baseline = one_group
    assert baseline.slow is not None
    (slow,) = baseline.slow
    like = (slow + 1) % 8
    changes = [Change(nodes=32), Change(nodes=7, replaced=(slow,)), Change(replaced=(like,)), Change(replaced=(slow,))]
    answer = predict(baseline, changes, seeds=32, iterations=200)
    for row, changed in zip(answer.changed, (["job.nodes=32"], ["job.nodes=7", "noise.slow_ranks=0"]), strict=False):
        true_s = mean_step_s(truth.changed(changed), seeds=16, first=900, steps=400)
        assert row.job.step.value == pytest.approx(true_s, rel=0.02)
        assert row.job.step.low < true_s < row.job.step.high
    without, healthy, replaced = answer.changed[1:]
    assert without.against_today.step.high < -0.2
    assert healthy.against_today.step.value == pytest.approx(0.0, abs=0.01)
    assert replaced.ranks == 8
    assert replaced.job.step.value == pytest.approx(without.job.step.value, rel=0.02)
    assert any(f"rank {like} is a rank like the others" in line for line in answer.assumes)
    assert answer.unit == "batches of a rank"
    assert answer.today.job.throughput.value == pytest.approx(8 / answer.today.job.step.value, rel=0.01)


def test_what_a_fit_leaves_of_the_step_is_in_the_interval_or_nothing_is_predicted(
    one_group: tuple[Cluster, Baseline],
) -> None:
    _, good = one_group
    (slow,) = good.slow or ()
    changes = [Change(replaced=(slow,)), Change(pacing="static")]
    tight, paced = predict(good, changes, **QUICK).changed
    assert good.measured_step_s is not None
    left_s, step_s = 0.2 * good.measured_step_s.value, tight.job.step.value

    def off(sign: float) -> Baseline:
        simulated = {"simulated": {"step_mean_s": good.measured_step_s.value - sign * left_s}}
        cluster = good.cluster.model_copy(update={"calibration": good.cluster.calibration | simulated})
        return replace(good, cluster=cluster)

    for sign in (1.0, -1.0):
        wide, paced_wide = predict(off(sign), changes, **QUICK).changed
        assert wide.job.step.value == step_s
        end, tight_end = (one.high if sign > 0 else one.low for one in (wide.job.step, tight.job.step))
        assert sign * (end - tight_end) > 0.1 * left_s
        assert paced_wide.job.step == pytest.approx(paced.job.step, rel=0.01), "it changes little else"
    left_s = 0.6 * step_s
    with pytest.raises(InputError, match="of what it predicts; allowed: at most 50%"):
        predict(off(1.0), changes, **QUICK)


def test_questions_that_hang_on_a_guess_are_refused(one_group: tuple[Cluster, Baseline]) -> None:
    _, baseline = one_group
    with pytest.raises(InputError, match="one group has no rank 9; allowed: ranks 0-7"):
        baseline.check([Change(replaced=(9,))])
    baseline.check([Change(nodes=64, pacing="static")])
    still = load_cluster("equal-slack").changed(["noise.jitter_cv=0"])  # no start varies: nobody sees who shares what
    groups = of_trace(recorded(still, 0, 40), "groups", None, None)
    for change in (Change(nodes=16), Change(pacing="static"), Change(oversubscription=1.0)):
        with pytest.raises(
            InputError, match=r"depends on fabric\..*_gbps, which the calibration of groups cannot identify"
        ):
            groups.check([change])
    known = of_trace(recorded(still, 0, 40), "groups", "equal-slack", None)
    known.check([Change(nodes=16, pacing="static")])


def test_a_cluster_whose_runs_are_all_different_predicts_nothing(one_group: tuple[Cluster, Baseline]) -> None:
    _, baseline = one_group
    wide = replace(baseline, cluster=baseline.cluster.changed(["noise.persistent_cv=1"], "wide"))
    with pytest.raises(InputError, match="runs of the fitted cluster differ by"):
        drawn(wide)


def test_a_gather_of_more_senders_is_refused_while_nobody_saw_its_buffer() -> None:
    trace = recorded(load_cluster("incast-deep"), 0, 60)
    gather = of_trace(trace, "gather", None, None)
    gather.check([Change(nodes=4)])
    with pytest.raises(InputError, match=r"depends on fabric\.buffer_kb.* allowed: a trace with --base"):
        gather.check([Change(nodes=64)])
    of_trace(trace, "gather", "incast-deep", None).check([Change(nodes=64)])


def test_what_one_size_leaves_open_is_in_the_interval() -> None:
    """Rounds as long as they come: the truth is inside."""
    cluster = load_cluster("unequal-slack")
    baseline = of_trace(recorded(cluster, 0, 200), "groups", None, None)
    answer = predict(baseline, [Change(nodes=32), Change(oversubscription=1.0)], **QUICK)
    more, same_size = answer.changed
    assert more.job.step.low < mean_step_s(cluster.changed(["job.nodes=32"])) < more.job.step.high
    assert same_size.job.step.high < 1.02 * same_size.job.step.low
    assert any(line.startswith("round of messages, 2 to ") and "nccl-tests" in line for line in answer.left_open)
    assert not any("latency_us" in line for line in answer.cannot_tell), "it is in the interval"
    assert not of_trace(recorded(cluster, 0, 200), "groups", "unequal-slack", None).left_open


def test_intervals_hold_what_they_promise() -> None:
    rng = np.random.default_rng(1)
    inside = np.zeros(200)
    for n in range(len(inside)):
        levels_D1 = 1.0 + 0.1 * rng.standard_normal((16, 1))
        runs = of_runs(levels_D1 * (1.0 + 0.05 * rng.standard_normal((16, 2))))
        one_more = (1.0 + 0.1 * rng.standard_normal()) * (1.0 + 0.05 * rng.standard_normal())
        inside[n] = runs.low < one_more < runs.high
    assert 0.9 < inside.mean() < 0.985


def test_the_command_on_a_config_and_on_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "4,16", "-p", "passive", "-p", "static", "-i", "100"]
    found = json_of("whatif", "unequal-slack", *options)
    assert set(found) == {
        "source", "method", "unit", "today", "changed", "assumes", "cannot_tell", "left_open", "measured_step_s",
        "measured_cv",
    }  # fmt: skip
    assert [row["nodes"] for row in found["changed"]] == [4, 4, 16, 16]
    assert found["changed"][0]["job"]["energy"] is None
    assert any("energy" in line for line in found["cannot_tell"])
    path = tmp_path / "trace.parquet"
    compute_s_TR = np.random.default_rng(0).normal(1.0, 0.01, (60, 4)) * [1.0, 1.0, 1.0, 2.0]
    write_trace(job_of(compute_s_TR), path)
    like, slow = json_of("whatif", path, "--replace-rank", "0,3", "-i", "100")["changed"]
    assert like["against_today"]["step"]["value"] == pytest.approx(0.0, abs=0.01)
    assert slow["job"]["step"]["value"] == pytest.approx(1.5, rel=0.03)
    assert application.run(["whatif", str(path), "--replace-rank", "0,3", "-i", "100"]) == 0
    printed = capsys.readouterr()
    assert "rank 3 replaced" in printed.out
    assert "assumed: " in printed.err
    assert application.run(["whatif", "null-jitter", "-p", "passive", "-p", "static", "-i", "60"]) == 0
    assert "static" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["null-jitter"], "nothing to change"),
        (["null-jitter", "--nodes", "4", "--base", "one-job"], "allowed: only with a trace"),
        (["null-jitter", "--nodes", "4,,8"], "--nodes = '4,,8'; allowed: numbers from 1 to 1000000"),
        (["null-jitter", "--nodes", "1000001"], "--nodes = '1000001'; allowed: numbers from 1 to 1000000"),
        (["null-jitter", "--oversubscription", "-1"], "allowed: positive numbers"),
        (["null-jitter", "--replace-rank", "x"], "allowed: ranks, one row each"),
        (["null-jitter", "--nodes", ",".join(map(str, range(1, MAX_ROWS + 2)))], f"at most {MAX_ROWS}"),
        (["nowhere.parquet", "--nodes", "4"], "nowhere.parquet"),
        (["null-jitter", "--nodes", "1000000", "-i", "100000"], "allowed: at most 1e"),
    ],
)
def test_the_command_refuses_in_one_line(arguments: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        application.run(["whatif", *arguments])
