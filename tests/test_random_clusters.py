"""Clusters and relatives drawn by a seed: valid, reproducible, of every kind, null only where nothing can be won."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceenv.core.errors import InputError
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import start
from paceenv.trainers.evaluation.random_clusters import MAX_RANKS, random_cluster, relative
from paceenv.trainers.evaluation.suites import RandomCases, RelativeCases, load_suite
from paceenv.ui import config_files


def test_more_of_them_begin_with_the_same_and_other_seeds_share_none() -> None:
    first, drawn = RandomCases(seed=11, clusters=5).cases(), [random_cluster(11, n) for n in range(5)]
    assert [(case.cluster, case.null_case) for case in first] == drawn
    assert not any(random_cluster(12, n)[0].job == cluster.job for n, (cluster, _) in enumerate(drawn))
    suite = load_suite("random")
    names = [case.name for case in suite.cases]
    assert len(set(names)) == len(names) == 336
    assert all(case.suite == "random" and case.load().name == case.name for case in suite.cases[::20])
    assert {case.load().ranks for case in suite.only(["train"]).cases} <= set(range(65))


def test_a_suite_may_hold_clusters_themselves_and_must_have_some(tmp_path: Path) -> None:
    cluster, _ = random_cluster(11, 3)
    config_files.write_yaml(
        tmp_path / "own.yaml", {"name": "own", "cases": [{"cluster": cluster.model_dump(exclude_defaults=True)}]}
    )
    (case,) = load_suite(tmp_path / "own.yaml").cases
    assert case.name == cluster.name
    assert case.load() == cluster
    for given, said in (
        ("", "cases, random ones, relatives or draws"),
        ("random: [{seed: -1}]", r"random\.0\.seed = -1"),
    ):
        (tmp_path / "wrong.yaml").write_text(f"name: wrong\n{given}\n")
        with pytest.raises(InputError, match=said):
            load_suite(tmp_path / "wrong.yaml")


SUITES = ["slack", "phase-shift", "stagger", "mixed", "scaling", "nulls"]


def test_the_same_seed_draws_the_same_relatives_and_another_draws_others() -> None:
    first, again, other = (RelativeCases(seed=seed, clusters=10, suites=SUITES).cases() for seed in (5, 5, 6))
    assert [case.load() for case in first] == [case.load() for case in again]
    assert not {str(case.load()) for case in first} & {str(case.load()) for case in other}
    assert len({case.name for case in first}) == 10


@pytest.mark.slow
def test_every_relative_runs_and_nulls_stay_nulls_of_their_size() -> None:
    suite = load_suite("relatives")
    sizes = {case.name: case.load().ranks for case in load_suite("all").cases}
    for case in suite.cases[::12]:
        cluster = case.load()
        assert cluster.ranks <= max(MAX_RANKS, sizes.get(case.name.rpartition("-r")[0], 0))
        if case.null_case:
            assert cluster.ranks == sizes[case.name.rpartition("-r")[0]]
        simulator = start(cluster, np.array([1]))
        assert np.isfinite(simulator.run(simulator.off(), 5)).all()
    assert 0.15 < np.mean([case.null_case for case in suite.cases]) < 0.45


@pytest.mark.parametrize("name", ["two-jobs", "incast-shallow", "when-scaling-fails"])
def test_a_twin_stays_a_twin_and_nothing_is_drawn_twice(name: str) -> None:
    cluster = load_cluster(name)
    found = [relative(cluster, 3, n, f"{name}-{n}") for n in range(6)]
    assert len({one.job.compute_s for one in found}) == 6
    for one in found:
        assert [tenant.period_ratio for tenant in one.tenants] == [tenant.period_ratio for tenant in cluster.tenants]
        ratio = float(one.job.compute_s) / float(cluster.job.compute_s)  # type: ignore[arg-type]
        assert 1 / 1.61 < ratio < 1.61
