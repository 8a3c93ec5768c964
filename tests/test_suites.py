"""Suites: split by cluster, every case a cluster that loads, some drawn by a seed; what the static sweep finds."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from paceenv.core.errors import InputError
from paceenv.policies import names
from paceenv.policies.names import spelled
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import derive, start
from paceenv.sim.engine.simulator import episode_keys
from paceenv.trainers.evaluation import suites
from paceenv.trainers.evaluation.evaluate import TUNED, evaluate, mean_share, share_of_best
from paceenv.trainers.evaluation.random_clusters import MAX_RANKS, random_cluster, relative
from paceenv.trainers.evaluation.static_search import search_static
from paceenv.trainers.evaluation.suites import Case, RandomCases, RelativeCases, Suite, load_suite, load_suites
from paceenv.ui import config_files

CASES = load_suite("all").cases


def test_every_case_is_a_cluster() -> None:
    for case in CASES:
        cluster = case.load()
        assert cluster.name == case.name
        assert case.suite in suites.REPORTED
        assert len(derive(cluster, episode_keys([0, 1]))) == 2


def test_no_cluster_is_in_two_splits() -> None:
    splits = "train", "validation", "held-out"
    by_split = {split: [c.load().model_dump(exclude={"name"}) for c in CASES if c.split == split] for split in splits}
    for one, other in itertools.combinations(splits, 2):
        assert not any(cluster in by_split[other] for cluster in by_split[one])
    for split in splits:
        assert {c.null_case for c in CASES if c.split == split} == {True, False}
    ranks = {c.load().ranks for c in CASES}
    assert min(ranks) <= 4
    assert max(ranks) == 512


@pytest.mark.parametrize("name", ["held-out", "random"])
def test_nobody_chose_the_held_out_clusters(name: str) -> None:
    """They come from the released policy's own bytes; after another release they are others."""
    seed = int(hashlib.sha256(names.released().read_bytes()).hexdigest()[:7], 16)
    config = config_files.load(Suite, "suites", name)
    drawn = [*config.relatives, *config.random]
    assert [one.seed for one in drawn if one.split == "held-out"] == [seed]
    assert len(load_suite(name).only(["held-out"]).cases) >= 40


def test_a_case_may_change_its_cluster_and_says_where_it_cannot() -> None:
    changed = Case(cluster="two-jobs", set={"noise.jitter_cv": 0.5, "tenants.0.comm_share": {"uniform": [0.1, 0.2]}})
    assert changed.load().noise.jitter_cv == 0.5
    with pytest.raises(InputError, match=r"two-jobs, set: unknown key noise\.jitter_cvv = 1\.0; did you mean jitter"):
        Case(cluster="two-jobs", set={"noise.jitter_cvv": 1.0}).load()
    with pytest.raises(InputError, match="no case in split train"):
        load_suite("demo").only(["train"])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name in ("superpod-a100", "opt-175b-992")))
        for case in load_suite("described").cases
    ],
)
def test_pacing_is_worth_nothing_on_any_described_gpu_cluster_that_ships(case: Case) -> None:
    """Not even to a policy that looks ahead: none has a tenant, post-collective work or incast."""
    suite = load_suite("described").model_copy(update={"cases": [case], "seeds": 1, "iterations": 40})
    assert np.abs(evaluate(["clairvoyant"], suite).gain_E("clairvoyant", case)).max() < 1e-5


def test_every_described_gpu_cluster_that_ships_is_in_their_suite() -> None:
    described = {name for name in config_files.names("clusters") if load_cluster(name).workload is not None}
    assert described <= {case.cluster for case in load_suite("described").cases}


def test_the_static_sweep_finds_each_mechanism_where_it_pays() -> None:
    cases = [Case(cluster=name) for name in ("unequal-slack", "sockets-two-jobs", "incast-shallow")]
    suite = Suite(name="three", cases=cases, seeds=8, iterations=300)
    found = search_static(suite)
    tuned = found.best_of_each()
    for case, mechanism in zip(cases, ("slack", "phase_shift", "stagger"), strict=True):
        assert f"{mechanism}=" in tuned[case.name]
    weights_gain = found.gain_SCE.mean(axis=(1, 2))
    assert weights_gain[[spelled(setting) for setting in found.settings].index(found.best())] == weights_gain.max()
    scores = evaluate([found.best(), "clairvoyant"], suite, tuned=tuned)
    assert scores.total(TUNED).gain > scores.total(found.best()).gain
    for case in cases:
        closed = {policy: scores.score(policy, case).gap_closed for policy in scores.policies}
        assert max(one.value for one in closed.values() if one) == 1.0, "the best known is the best in the table"
        assert all(one is not None and one.low <= one.value <= one.high <= 1.0 for one in closed.values())


# Gaps


def test_a_policy_that_exceeds_the_one_that_looks_ahead_is_the_best_known() -> None:
    ahead_E, better_E = np.full(8, 0.1), np.full(8, 0.125)
    gain_PE = np.stack([np.zeros(8), ahead_E, better_E])
    assert [share_of_best(gain_PE, p).value for p in range(3)] == pytest.approx([0.0, 0.8, 1.0])


def test_intervals_of_a_gap_hold_the_share_of_a_cluster_and_the_mean_of_all_clusters_that_there_could_be() -> None:
    """Shares of clusters vary by 0.2 around 0.6, gains of seeds by a fifth; seeds alone would be too sure."""
    rng, held, of_cluster, narrow = np.random.default_rng(0), 0, list[bool](), 0
    for _ in range(40):
        true_C, shares = rng.normal(0.6, 0.2, 12), []
        for share in true_C:
            best_E = rng.normal(0.2, 0.04, 4)
            gain_PE = np.stack([best_E, share * best_E + rng.normal(0.0, 0.01, 4)])
            shares.append(share_of_best(gain_PE, 1))
        of_cluster += [share in found for share, found in zip(true_C, shares, strict=True) if share < 0.9]
        found = mean_share(shares)
        held += 0.6 in found
        seeds_only = np.sqrt(sum((share.value - share.low) ** 2 for share in shares)) / len(shares)
        narrow += abs(found.value - 0.6) <= seeds_only
    assert 0.92 <= np.mean(of_cluster) <= 0.99
    assert held >= 36
    assert narrow < 32


# Clusters of calibrations


@pytest.mark.slow
def test_a_suite_draws_clusters_from_the_errors_of_calibrations() -> None:
    suite = load_suite("measured")
    train, validation = suite.only(["train"]).cases, suite.only(["validation"]).cases
    assert len({case.name for case in suite.cases}) == len(suite.cases) == 50
    assert {case.load().name.rpartition("-fit-")[0] for case in train if not case.null_case} == {
        "sockets-unequal-slack",
        "sockets-incast",
        "sockets-two-jobs",
    }
    steps = [case.load().model_dump(exclude={"name"}) for case in train]
    assert not any(case.load().model_dump(exclude={"name"}) in steps for case in validation)


def test_draws_of_a_calibration_need_its_errors_and_may_lie_beside_the_suite(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: bad\nposterior: [{cluster: two-jobs}]\n")
    with pytest.raises(InputError, match="two-jobs: no errors of a calibration on record"):
        load_suite(tmp_path / "bad.yaml")
    mine = load_cluster("sockets-unequal-slack-fit").model_dump(exclude_defaults=True) | {"name": "mine"}
    config_files.write_yaml(tmp_path / "mine.yaml", mine)
    (tmp_path / "own.yaml").write_text("name: own\nposterior: [{cluster: mine.yaml, draws: 3, seed: 4}]\n")
    cases = load_suite(tmp_path / "own.yaml").cases
    assert [case.name for case in cases] == ["mine-4-0", "mine-4-1", "mine-4-2"]
    assert {case.split for case in cases} == {"train"}
    assert load_suite(tmp_path / "own.yaml").cases == cases


@pytest.mark.parametrize("name", ["sockets-unequal-slack-fit", "sockets-two-jobs-fit"])
def test_a_fit_to_real_sockets_has_the_measured_mean_step(name: str) -> None:
    cluster = load_cluster(name)
    simulator = start(cluster, np.arange(8))
    step_s = simulator.run(simulator.off(), 300).mean()
    assert step_s == pytest.approx(cluster.calibration["measured"]["step_mean_s"], rel=0.08)


def test_two_clusters_of_a_suite_never_share_a_name(tmp_path: Path) -> None:
    """Results are kept by name; two draws may come to the same one, and two files may hold clusters of one name."""
    for folder in ("monday", "tuesday"):
        (tmp_path / folder).mkdir()
        given = {"name": "mine", "cases": [{"cluster": "two-jobs"}, {"cluster": "one-job", "name": "two-jobs-2"}]}
        (tmp_path / folder / "suite.yaml").write_text(json.dumps(given))
    both = load_suites([tmp_path / "monday" / "suite.yaml", tmp_path / "tuesday" / "suite.yaml"], "both")
    assert [case.name for case in both.cases] == ["two-jobs", "two-jobs-2", "two-jobs-3", "two-jobs-2-2"]
    assert [case.load().name for case in both.cases] == [case.name for case in both.cases]
    listed = [case.name for case in CASES]
    assert len(set(listed)) == len(listed)


# Clusters and relatives that a seed draws


def test_more_random_clusters_begin_with_the_same_and_other_seeds_share_none() -> None:
    first, drawn = RandomCases(seed=11, clusters=5).cases(), [random_cluster(11, n) for n in range(5)]
    assert [(case.cluster, case.null_case) for case in first] == drawn
    assert not any(random_cluster(12, n)[0].job == cluster.job for n, (cluster, _) in enumerate(drawn))
    suite = load_suite("random")
    cases = [case.name for case in suite.cases]
    assert len(set(cases)) == len(cases) == 336
    assert all(case.suite == "random" and case.load().name == case.name for case in suite.cases[::20])
    assert {case.load().ranks for case in suite.only(["train"]).cases} <= set(range(65))


def test_a_suite_may_hold_clusters_themselves_and_must_have_some(tmp_path: Path) -> None:
    cluster, _ = random_cluster(11, 3)
    own = {"name": "own", "cases": [{"cluster": cluster.model_dump(exclude_defaults=True)}]}
    config_files.write_yaml(tmp_path / "own.yaml", own)
    (case,) = load_suite(tmp_path / "own.yaml").cases
    assert (case.name, case.load()) == (cluster.name, cluster)
    wrong = {"": "cases, random ones, relatives or draws", "random: [{seed: -1}]": r"random\.0\.seed = -1"}
    for given, said in wrong.items():
        (tmp_path / "wrong.yaml").write_text(f"name: wrong\n{given}\n")
        with pytest.raises(InputError, match=said):
            load_suite(tmp_path / "wrong.yaml")


def test_the_same_seed_draws_the_same_relatives_and_another_draws_others() -> None:
    kinds = ["slack", "phase-shift", "stagger", "mixed", "scaling", "nulls"]
    first, again, other = (RelativeCases(seed=seed, clusters=10, suites=kinds).cases() for seed in (5, 5, 6))
    assert [case.load() for case in first] == [case.load() for case in again]
    assert not {str(case.load()) for case in first} & {str(case.load()) for case in other}
    assert len({case.name for case in first}) == 10


@pytest.mark.slow
def test_every_relative_runs_and_nulls_stay_nulls_of_their_size() -> None:
    suite = load_suite("relatives")
    sizes = {case.name: case.load().ranks for case in CASES}
    for case in suite.cases[::12]:
        cluster, size = case.load(), sizes.get(case.name.rpartition("-r")[0], 0)
        assert cluster.ranks <= max(MAX_RANKS, size)
        assert cluster.ranks == size or not case.null_case
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
        assert 1 / 1.61 < float(one.job.compute_s) / float(cluster.job.compute_s) < 1.61  # type: ignore[arg-type]
