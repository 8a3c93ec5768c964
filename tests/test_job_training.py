"""A policy for one job: better than what it was compared with where pacing helps, and none where it does not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_program_calibration import typed
from traced_jobs import changed, job_of

from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.core.intervals import Interval
from paceenv.core.limits import Limits
from paceenv.core.trace import Trace, write_trace
from paceenv.policies.policy_file import load_policy, save_policy
from paceenv.policies.rollout import run
from paceenv.policies.rules import passive
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import start
from paceenv.trainers.training import job_training, train_command
from paceenv.trainers.training.job_training import train_for_job


@pytest.mark.slow
def test_incast_gets_a_policy_that_gains_what_it_says(tmp_path: Path) -> None:
    cluster = load_cluster("incast-shallow")
    found = train_for_job([cluster] * 4, seconds=5.0, mechanisms=["stagger"])
    assert found.best in {"tailored", "constant"}
    assert set(found.gains) == {"tailored", "constant", "learned"}
    assert found.file is not None
    save_policy(tmp_path / "mine.safetensors", found.file)
    policy, seeds = load_policy(tmp_path / "mine.safetensors").policy, np.arange(40, 48)
    plain_s, paced_s = (run(p, start(cluster, seeds), 800).useful_step_E for p in (passive(), policy))
    gain = float((plain_s / paced_s - 1.0).mean())
    assert gain > 0.3, "retransmission timeouts are most of the step"
    assert gain == pytest.approx(found.gains[found.best].value, abs=0.15)
    assert found.file.provenance["tailored"]["best"] == found.best


@pytest.mark.slow
def test_a_policy_for_a_job_learns_from_that_job_alone() -> None:
    clusters = [load_cluster("incast-shallow")] * 2
    learner, _ = job_training._train(clusters, ["stagger"], Limits(), until=0.0, seed=0, on_progress=lambda done: None)
    assert set(learner.answers[0].cluster_N) == {0, 1}


def test_a_job_that_pacing_cannot_help_gets_none() -> None:
    """On a null, and under limits that allow no delay, so that no setting gains anything."""
    none = Limits(cap_share=0.0)
    for cluster, options in (("null-jitter", {}), ("incast-shallow", {"mechanisms": ["stagger"], "limits": none})):
        found = train_for_job([load_cluster(cluster)] * 4, seconds=5.0, **options)  # type: ignore[arg-type]
        assert (found.best, found.file, found.student, found.constant) == (None, None, None, None)
        assert found.gains["learned"].value < job_training.MIN_GAIN
        assert found.pacing_helps is False


@pytest.mark.slow
def test_where_transfers_can_wait_holding_them_back_is_tried() -> None:
    part = [
        {"compute": {"seconds": 0.02}},
        {"all_reduce": {"bytes": 1.07e8, "communicator": "gradients", "background": True, "can_wait": True}},
        {"all_to_all": {"bytes": 1.43e8, "communicator": "experts"}},
    ]
    cluster = typed([{"repeat": 3, "step": part}], {"gradients": {}, "experts": {}}, nodes=4)
    assert cluster.rank_phases > cluster.ranks
    found = train_for_job([cluster] * 4, seconds=5.0)
    assert found.constant is not None
    assert set(found.constant) == {"defer"}
    assert found.gains["constant"].low > 0.02


def test_the_best_on_the_first_episodes_is_kept_and_the_second_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def gains(policies: dict[str, Any], clusters: Any, first: int, seeds: int, limits: Limits) -> dict[str, Interval]:
        asked.append(first)
        value = 0.05 if first == job_training.CHOICE_SEED else -0.01
        return {name: Interval(value, value - 0.01, value + 0.01) for name in policies}

    monkeypatch.setattr(job_training, "_gains", gains)
    found = train_for_job([load_cluster("null-jitter")] * 4, seconds=5.0)
    assert asked == [job_training.CHOICE_SEED, job_training.FINAL_SEED]
    assert found.best == "learned"
    assert found.gains["learned"].value == -0.01
    assert found.file is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--job", "nowhere"], "nowhere"),
        (["--job", "null-jitter", "--seconds", "1"], "--seconds"),
        (["--job", "null-jitter", "--algorithm", "SAC"], "--algorithm with --job; allowed: --seconds, --seed"),
        (["demo", "--job", "null-jitter"], "a config, or --job with a trace or cluster; allowed: one of the two"),
        ([], "a config, or --job with a trace or cluster; allowed: one of the two"),
    ],
)
def test_bad_requests_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        application.run(["train", "-o", str(tmp_path / "out"), *arguments])
    assert not (tmp_path / "out").exists()


def test_clusters_must_be_of_one_size() -> None:
    clusters = [load_cluster("null-jitter"), load_cluster("null-jitter-64")]
    with pytest.raises(InputError, match=r"clusters = .*; allowed: at least 4, of one number of ranks"):
        train_for_job(clusters)
    with pytest.raises(InputError, match=r"seconds = 1.0; allowed: at least 5"):
        train_for_job(clusters[:1] * 4, seconds=1.0)


def test_a_trace_is_read_as_a_what_if_question_reads_it(tmp_path: Path) -> None:
    """Clocks that differ are set right, and a pipeline, for which no cluster can be fitted, is refused."""
    trace = job_of(1.0 + 0.1 * np.random.default_rng(0).random((40, 2)))
    late = changed(
        trace, **{end: trace.column(end) + 5.0 * (trace.column("rank") == 1) for end in ("start_s", "end_s")}
    )
    for name, one in (("plain", trace), ("late", late)):
        write_trace(one, tmp_path / f"{name}.parquet")
    plain, shifted = (train_command._cluster(str(tmp_path / f"{name}.parquet")) for name in ("plain", "late"))
    assert (plain.name, shifted.name) == ("plain", "late")
    means = [cluster.calibration["simulated"]["step_mean_s"] for cluster in (plain, shifted)]
    assert means[1] == pytest.approx(means[0], rel=1e-6)
    stages = tuple({"rank": rank, "stage": rank} for rank in range(2))
    path = tmp_path / "stages.parquet"
    write_trace(Trace(trace.table, replace(trace.metadata, ranks=stages)), path)
    with pytest.raises(InputError, match="a pipeline of 2 stages"):
        application.run(["train", "--job", str(path), "-o", str(tmp_path / "out")])
