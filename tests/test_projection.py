"""The projection policy: it paces where rollouts say so, rests where they do not, and every rank decides alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceenv.cli import application
from paceenv.core import pacing, signals
from paceenv.core.errors import InputError
from paceenv.live.decide.live_policy import find_policy
from paceenv.policies import look_ahead, projection
from paceenv.policies.clairvoyant import Clairvoyant
from paceenv.policies.networks import ObservationEMA
from paceenv.policies.projection import Projection
from paceenv.policies.rollout import run, start
from paceenv.policies.rules import passive
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import Cluster, load_cluster

SEEDS = np.arange(4)


@pytest.fixture(scope="module")
def unequal() -> Projection:
    return Projection(load_cluster("unequal-slack"), episodes=64)


@pytest.fixture(scope="module")
def twins() -> Projection:
    return Projection(load_cluster("two-jobs"), episodes=64)


def views(cluster: Cluster, intervals: int) -> NDArray[np.float32]:
    """What every rank sees in each interval of two episodes without pacing, ``(T, B, O)``."""
    simulator, seen = start(cluster, SEEDS[:2]), []
    for _ in range(intervals):
        simulator.run(simulator.off(), 20)
        seen.append(simulator.observe(every_rank=True).reshape(2 * cluster.ranks, -1))
    return np.stack(seen)


def decisions(policy: Projection, views_TBO: NDArray[np.float32]) -> NDArray[np.float64]:
    policy.reset(views_TBO.shape[1])
    return np.stack([policy.act(view_BO) for view_BO in views_TBO])


@pytest.mark.parametrize("name", ["null-jitter", "one-job", "equal-slack", "incast-deep"])
def test_it_is_exactly_passive_where_nothing_helps(name: str) -> None:
    policy = Projection(load_cluster(name).changed(["noise.transfer_cv=0.03"]), episodes=64)
    constant = policy.constant()
    assert constant is not None
    assert not constant.any()
    policy.reset(3)
    assert not policy.act(np.zeros((3, 12), np.float32)).any()


@pytest.mark.parametrize(("name", "share"), [("unequal-slack", 0.9), ("two-jobs", 0.6)])
def test_it_gains_most_of_the_plan(name: str, share: float, unequal: Projection, twins: Projection) -> None:
    cluster, policy = load_cluster(name), {"unequal-slack": unequal, "two-jobs": twins}[name]
    step_s = {
        p.name: run(p, start(cluster, SEEDS), 640).step_ET.mean(axis=1) for p in (passive(), policy, Clairvoyant())
    }
    gain, ahead = ((step_s["passive"] / step_s[p]).mean() - 1.0 for p in ("projection", "clairvoyant"))
    assert ahead > 0.05
    assert gain > share * ahead


def test_a_rank_decides_alone(twins: Projection) -> None:
    seen = views(load_cluster("two-jobs"), 12)
    together = decisions(twins, seen)
    assert together[:, :, :, pacing.WINDOW].any(), "it paces somewhere"
    order = np.random.default_rng(0).permutation(seen.shape[1])
    np.testing.assert_array_equal(decisions(twins, seen[:, order]), together[:, order])
    for b in range(0, seen.shape[1], 5):
        np.testing.assert_array_equal(decisions(twins, seen[:, b : b + 1]), together[:, b : b + 1])


def test_the_same_config_gives_the_same_decisions_whatever_the_threads(twins: Projection) -> None:
    seen = views(load_cluster("two-jobs"), 8)
    again = Projection(load_cluster("two-jobs"), episodes=64, threads=2)
    np.testing.assert_array_equal(again.candidates, twins.candidates)
    np.testing.assert_array_equal(decisions(again, seen), decisions(twins, seen))


def test_it_lets_go_of_what_it_has_never_seen(unequal: Projection) -> None:
    seen = views(load_cluster("unequal-slack"), 12)
    assert decisions(unequal, seen)[-1].any()
    assert not decisions(unequal, np.ones_like(seen)).any()
    unequal.reset(seen.shape[1])
    for view in seen:
        unequal.act(view)
    assert not unequal.act(np.ones_like(seen[0])).any(), "at once"


def test_a_projection_is_what_holding_the_candidate_brings() -> None:
    settings = np.stack([pacing.off(), pacing.one_mechanism("slack", 0.02, 0.25)])
    simulator = start(load_cluster("unequal-slack"), SEEDS)
    simulator.run(simulator.off(), 60)
    projected = projection.project(simulator, np.array([2]), settings)
    horizon = projection.HORIZON_INTERVALS * 20
    step_s = [simulator.fork(np.array([2])).run(s[None, None], horizon).mean() for s in settings]
    ideal_s = simulator.batch.jobs["ideal_step_s"][2]
    np.testing.assert_allclose(projected, [[0.0, ideal_s / step_s[1] - ideal_s / step_s[0]]], rtol=1e-12)


def test_only_candidates_that_add_something_are_compared() -> None:
    gain_SC = np.array([[0.0, 0.1, 0.09, -0.3, 0.0], [0.0, 0.1, 0.09, 0.2, 0.0]])
    assert look_ahead.select_candidates(gain_SC, 6) == [0, 1, 3]
    assert look_ahead.select_candidates(gain_SC, 1) == [0, 1]
    assert look_ahead.select_candidates(-np.abs(gain_SC), 6) == [0]


def test_situations_are_compared_by_the_view_and_a_mean_that_forgets() -> None:
    memory, view = ObservationEMA(projection.LONG_MEMORY_INTERVALS), np.full((1, signals.SIGNALS), 0.5, np.float32)
    np.testing.assert_array_equal(projection.features(memory, view), np.full((1, 2 * signals.SIGNALS), 0.5))
    weight = np.float32(1.0 / projection.LONG_MEMORY_INTERVALS)
    now, remembered = np.split(projection.features(memory, -view)[0], 2)
    np.testing.assert_array_equal(now, -0.5)
    np.testing.assert_allclose(remembered, 0.5 - weight, rtol=1e-6)
    for _ in range(100):
        feature = projection.features(memory, -view)
    np.testing.assert_allclose(feature, -0.5, atol=1e-3)


@pytest.mark.parametrize("episodes", [0, -3])
def test_bad_input(episodes: int) -> None:
    with pytest.raises(InputError, match=f"policy projection: episodes = {episodes}; allowed: at least 1"):
        Projection(load_cluster("two-jobs"), episodes=episodes)


def test_by_name_on_a_simulated_cluster_and_not_live(capsys: Any) -> None:
    assert isinstance(select_policy("projection", load_cluster("null-jitter")), Projection)
    with pytest.raises(InputError, match="did you mean projection"):
        select_policy("projecton", load_cluster("null-jitter"))
    application.run(["simulate", "null-jitter", "--policy", "projection", "-i", "60", "--seeds", "2", "--json", "-"])
    assert '"policy": "projection"' in capsys.readouterr().out
    fault = find_policy("projection").fault
    assert fault is not None
    assert fault.startswith("policy projection: needs the simulator; allowed live: passive, ")
