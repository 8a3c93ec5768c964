"""From a cluster config to the engine's parameters: closed forms of the collective, random quantities, mixes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from scipy import stats

from paceenv.core import pacing
from paceenv.core.errors import InputError
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.cluster.derive import ClusterMix, derive
from paceenv.sim.engine.simulator import Simulator, episode_keys
from paceenv.ui import config_files


def cluster(**sections: Any) -> Cluster:
    """A small cluster; sections are merged into these."""
    data: dict[str, Any] = {
        "name": "tiny",
        "job": {"nodes": 4, "compute_s": 0.5, "gradient_bytes": 1e9},
        "fabric": {"nic_gbps": 80.0, "nodes_per_leaf": 2, "uplink_gbps": 160.0},
    }
    for name, section in sections.items():
        data[name] = data.get(name, {}) | section if isinstance(section, dict) else section
    return config_files.parse(Cluster, data, "test")


def jobs_of(some: Cluster, seeds: range = range(1)) -> Any:
    return derive(some, episode_keys(list(seeds))).jobs


# From config to parameters


def test_noise_reaches_the_engine_under_its_own_name() -> None:
    noise = {
        "jitter_cv": 0.01, "common_cv": 0.02, "persistent_cv": 0.03, "slow_ranks": 2, "slow_factor": 1.5,
        "imbalance_cv": 0.04, "fail_slow_share": 0.05, "fail_slow_mean_iterations": 60.0, "fail_slow_factor": 1.7,
        "drift_cv": 0.08, "drift_iterations": 90.0, "stall_rate": 0.1, "stall_mean_s": 0.11,
        "transfer_cv": 0.12, "late_wake_s": 0.002, "stamp_noise_s": 2e-5, "missing_share": 0.01,
    }  # fmt: skip
    batch = derive(cluster(noise=noise | {"imbalance_skew": 1.3}), episode_keys([0]))
    assert {name: batch.jobs[name][0] for name in noise} == noise
    assert batch.jobs["imbalance_skew"].tolist() == [1.3]
    missing = set(Cluster.model_fields["noise"].annotation.model_fields) - set(noise) - {"imbalance_skew"}  # type: ignore[union-attr]
    assert not missing, "a new noise type must reach the engine"


def test_tenants_in_units_of_our_ideal_step() -> None:
    some = cluster(tenants=[{"period_ratio": 2.0, "comm_share": 0.25, "rate_share": 0.5, "weight": 3.0, "ranks": 6}])
    batch = derive(some, episode_keys([0]), tenants=2)
    ideal_s, tenant = batch.jobs["ideal_step_s"][0], batch.tenants_EK[0, 0]
    assert tenant["compute_s"] == pytest.approx(1.5 * ideal_s)
    assert tenant["uplink_work_s"] / tenant["rate_cap"] == pytest.approx(0.5 * ideal_s)
    assert (tenant["weight"], tenant["ranks"], tenant["rate_cap"]) == (3.0, 6.0, 0.5)
    assert batch.tenants_EK[0, 1]["weight"] == 0.0, "the second place stays empty"


# Random quantities


@pytest.mark.parametrize(
    ("quantity", "distribution"),
    [
        ({"uniform": [0.2, 0.6]}, stats.uniform(0.2, 0.4)),
        ({"loguniform": [0.01, 1.0]}, stats.loguniform(0.01, 1.0)),
        ({"normal": [0.5, 0.05]}, stats.norm(0.5, 0.05)),
    ],
    ids=["uniform", "loguniform", "normal"],
)
def test_quantities_follow_their_distribution(quantity: dict[str, list[float]], distribution: Any) -> None:
    drawn = jobs_of(cluster(job={"compute_s": quantity}), range(2000))["compute_s"]
    assert stats.kstest(drawn, distribution.cdf).pvalue > 1e-3


# Mixes


def test_mix_draws_by_weight_and_the_same_for_a_key() -> None:
    keys, mix = episode_keys(list(range(4000))), ClusterMix([cluster()] * 3, [1.0, 3.0, 0.0])
    which = mix.draw(keys)
    assert np.mean(which == 0) == pytest.approx(0.25, abs=0.03)
    assert not (which == 2).any()
    np.testing.assert_array_equal(mix.draw(keys[::-1]), which[::-1])


@pytest.mark.parametrize("other", ["one-job", "three jobs"])
def test_a_mixed_batch_equals_its_clusters_one_by_one(other: str) -> None:
    keys = episode_keys(list(range(30)))
    pausing = {"period_ratio": 0.7, "comm_share": 0.3, "pause_rate": 0.2, "pause_periods": 3.0}
    bursty = {"period_ratio": 0.5, "comm_share": 0.3, "bursty": True}
    two_jobs = load_cluster("two-jobs")
    three_jobs = config_files.parse(
        Cluster, two_jobs.model_dump(mode="json", exclude_unset=True) | {"tenants": [pausing, bursty]}, "test"
    )
    parts = [three_jobs if other == "three jobs" else load_cluster(other), two_jobs]
    mix = ClusterMix(parts)
    which = mix.draw(keys)
    mixed = mix.derive(keys, which)
    assert set(which) == {0, 1}
    step_ET = Simulator(mixed, keys).run(pacing.off(30, 1), 20)
    for c, part in enumerate(parts):
        at = np.flatnonzero(which == c)
        alone = Simulator(derive(part, keys[at]), keys[at])
        np.testing.assert_array_equal(alone.run(alone.off(), 20), step_ET[at])


@pytest.mark.parametrize(
    ("nodes", "weights", "said"),
    [
        *((4, w, r"weights = .* one non-negative number for each") for w in ([1.0], [-1.0, 2.0], [0.0, 0.0])),
        (8, None, "has 8 ranks in 1 groups, tiny has 4 in 1; allowed: the same"),
    ],
)
def test_a_mix_that_cannot_be_drawn_is_refused(nodes: int, weights: list[float] | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        ClusterMix([cluster(), cluster(job={"nodes": nodes})], weights)


# What ships


def test_changed_and_with_nodes_leave_the_original_alone() -> None:
    some = cluster()
    assert some.changed(["noise.jitter_cv=0.03", "job.compute_s=2"]).noise.jitter_cv == 0.03
    assert some.noise.jitter_cv == 0.0
    assert some.with_nodes(64).job.ranks == 64
    with pytest.raises(InputError, match=r"^tiny: job\.nodes = 0; allowed: .*1"):
        some.with_nodes(0)
    with pytest.raises(InputError, match=r"^--set: job\.nodes = -1"):
        some.changed(["job.nodes=-1"])


def test_a_power_law_may_not_leave_the_range_of_its_quantity_at_any_size() -> None:
    law = {"power_law": {"value": 0.5, "at_nodes": 8, "exponent": 0.5}}
    cluster = load_cluster("when-scaling-fails").changed([f"job.overlap={json.dumps(law)}"])
    derive(cluster.with_nodes(8), episode_keys([0]))
    with pytest.raises(InputError, match=r"0\.5 at 8 nodes and exponent 0\.5: 1\.41.* at 64 nodes; allowed: 0 to"):
        derive(cluster.with_nodes(64), episode_keys([0]))
