"""Relatives: by their seed the same, valid, of the same kind, and others for another seed."""

from __future__ import annotations

import numpy as np
import pytest

from paceenv.policies.rollout import start
from paceenv.sim.cluster import load_cluster
from paceenv.trainers.evaluation.relatives import MAX_RANKS, relative
from paceenv.trainers.evaluation.suites import RelativeCases, load_suite

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
