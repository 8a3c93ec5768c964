"""What must hold whatever the job, the noise and the settings: pacing is bounded, honest, and only time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceenv.core import pacing, timing
from paceenv.sim.engine import layout
from paceenv.sim.engine.simulator import Simulator

Make = Callable[..., Simulator]
Floats = NDArray[np.float64]
MECHANISMS = len(pacing.MECHANISMS)

cv = st.one_of(st.just(0.0), st.floats(0.0, 0.3))
noises = st.fixed_dictionaries(
    {
        "jitter_cv": cv,
        "common_cv": cv,
        "imbalance_cv": cv,
        "skewness": st.sampled_from([0.0, 1.0, 2.0]),
        "persistent_cv": cv,
        "slow_ranks": st.integers(0, 1),
        "slow_factor": st.floats(1.0, 3.0),
        "fail_slow_share": cv,
        "fail_slow_mean_iterations": st.floats(1.0, 50.0),
        "fail_slow_factor": st.floats(1.0, 3.0),
        "drift_cv": cv,
        "drift_iterations": st.floats(1.0, 100.0),
        "stall_rate": st.floats(0.0, 0.05),
        "transfer_cv": st.floats(0.0, 0.5),
        "stall_mean_s": st.floats(0.0, 2.0),
    }
)
null_jobs = st.builds(
    lambda noise, rest: noise | rest,
    noises,
    st.fixed_dictionaries(
        {
            "ranks": st.integers(1, 9),
            "compute_s": st.floats(1e-3, 100.0),
            "transfer_alone_s": st.floats(0.0, 1.0),
            "uplink_work_s": st.floats(0.0, 1.0),
            "latency_s": st.floats(0.0, 0.01),
            "barrier_s": st.floats(0.0, 0.1),
            "has_barrier": st.booleans(),
            "cap_s": st.floats(0.0, 10.0),
            "post_work_groups": st.integers(0, 1),
            "post_work_s": st.floats(0.0, 0.5),
        }
    ),
)
tenants = st.fixed_dictionaries(
    {
        "compute_s": st.floats(0.1, 2.0),
        "uplink_work_s": st.floats(0.01, 1.0),
        "rate_cap": st.floats(0.1, 1.0),
        "weight": st.floats(0.1, 5.0),
        "jitter_cv": cv,
        "ranks": st.integers(1, 8),
    }
)
coupled_jobs = st.builds(
    lambda noise, rest, others: noise | rest | {"tenants": others},
    noises,
    st.fixed_dictionaries(
        {
            "ranks": st.just(6),
            "groups": st.sampled_from([1, 2, 3, 6]),
            "transfer_alone_s": st.floats(0.0, 0.5),
            "uplink_work_s": st.floats(0.0, 0.5),
            "has_barrier": st.just(True),
            "post_work_share": cv,
            "post_work_mean_iterations": st.floats(1.0, 50.0),
            "post_work_episode_s": st.floats(0.0, 1.0),
            "post_work_spread": st.floats(0.0, 1.0),
        }
    ),
    st.lists(tenants, max_size=2),
)
seeds = st.integers(0, 2**63)


def drawn_settings(plan: int, environments: int, ranks: int, intervals: int) -> list[Floats]:
    """Settings of several intervals: common or a rank's own, some off, some mechanisms together, some constant."""
    rng = np.random.default_rng(plan)
    rows = ranks if plan % 2 else 1

    def one() -> Floats:
        values = rng.uniform(0, 1, (environments, rows, MECHANISMS, 2))
        values[..., pacing.THRESHOLD] *= rng.choice([0.0, 0.05, 0.3])
        values[..., pacing.WINDOW] *= rng.random((environments, rows, MECHANISMS)) < 0.7
        return values

    constant = one()
    return [constant if plan % 3 == 0 else one() for _ in range(intervals)]


# transfers that end early leave the uplink free: their successors must not queue behind what is over
SHORT_COMPUTE = {"ranks": 1, "compute_s": 0.5, "uplink_work_s": 1.0, "transfer_cv": 0.5, "cap_s": 1.0}


@given(job=null_jobs, seed=seeds, plan=st.integers(0, 10**6))
@example(job=SHORT_COMPUTE, seed=0, plan=0)
def test_nothing_gains_in_a_plain_synchronous_job(simulator: Make, job: dict[str, Any], seed: int, plan: int) -> None:
    """One group, nothing shared: a step is a maximum over ranks, and no delay lowers a maximum."""
    passive, paced = (simulator([seed, seed + 1], **job) for _ in range(2))
    passive_ET = passive.run(passive.off(), 120)
    paced_ET = np.concatenate([paced.run(s, 15) for s in drawn_settings(plan, 2, job["ranks"], 8)], axis=1)
    assert (paced_ET >= passive_ET * (1 - 1e-9)).all(), "no iteration is faster"
    assert (paced_ET.cumsum(axis=1) >= passive_ET.cumsum(axis=1) * (1 - 1e-9)).all()


@given(job=coupled_jobs, seed=seeds, plan=st.integers(0, 10**6), cap_s=st.sampled_from([0.0, 0.02, 10.0]))
def test_delays_stay_within_window_and_cap(
    simulator: Make, job: dict[str, Any], seed: int, plan: int, cap_s: float
) -> None:
    sim = simulator([seed], cap_s=cap_s, **job)
    widest_s = np.zeros(1)
    for setting in drawn_settings(plan, 1, 6, 40):
        delay_R = sim.record(setting, 1).delay_ETR[0, 0]
        assert (delay_R >= 0.0).all()
        assert (delay_R <= widest_s).all()
        share_R = setting[0, :, :, pacing.WINDOW].max(axis=1)
        widest_s = np.minimum(share_R * sim.state.tick_EK[0, timing.STEP_BASELINE_S], cap_s)


@given(job=coupled_jobs, seed=seeds, plan=st.integers(0, 10**6))
def test_window_zero_is_bit_identical_to_passive(simulator: Make, job: dict[str, Any], seed: int, plan: int) -> None:
    passive, off = (simulator([seed, seed + 1], **job) for _ in range(2))
    for setting in drawn_settings(plan, 2, 6, 4):
        setting = setting.copy()
        setting[..., pacing.WINDOW] = 0.0
        np.testing.assert_array_equal(off.run(setting, 20), passive.run(passive.off(), 20))
        np.testing.assert_array_equal(off.observe(every_rank=True), passive.observe(every_rank=True))


def test_a_job_with_next_to_no_traffic_ends_beside_busy_tenants(simulator: Make) -> None:
    tenant = {"compute_s": 0.1, "uplink_work_s": 0.01, "rate_cap": 1.0, "weight": 1.0, "ranks": 1}
    tenants = [tenant, tenant | {"compute_s": 0.13}]
    sim = simulator([0], ranks=6, transfer_alone_s=0.4, uplink_work_s=5e-324, has_barrier=True, tenants=tenants)
    np.testing.assert_allclose(sim.run(sim.off(), 5), 1.4)


@given(job=coupled_jobs, seed=seeds, plan=st.integers(0, 10**6))
def test_noise_does_not_depend_on_pacing(simulator: Make, job: dict[str, Any], seed: int, plan: int) -> None:
    passive, paced = (simulator([seed, seed + 1], **job) for _ in range(2))
    for setting in drawn_settings(plan, 2, 6, 4):
        calm, rec = passive.record(passive.off(), 25), paced.record(setting, 25)
        np.testing.assert_allclose(rec.entry_ETR - rec.delay_ETR, calm.entry_ETR, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(rec.ready_ETG - rec.finish_ETG, calm.ready_ETG - calm.finish_ETG, atol=1e-12)
    np.testing.assert_array_equal(paced.state.noise_ENR, passive.state.noise_ENR)
    np.testing.assert_array_equal(paced.state.group_ENG, passive.state.group_ENG)
    for name in layout.CLOCK.names or ():
        if name not in {"link_s", "delay_s", "time_s", "energy_j", "steps_s"}:
            np.testing.assert_array_equal(paced.state.clocks[name], passive.state.clocks[name], err_msg=name)


@given(
    job=coupled_jobs,
    first=seeds,
    plan=st.integers(0, 10**6),
    threads=st.integers(1, 4),
    order=st.permutations(range(4)),
    cut=st.integers(1, 29),
)
def test_order_threads_length_and_forks_do_not_matter(
    simulator: Make, job: dict[str, Any], first: int, plan: int, threads: int, order: list[int], cut: int
) -> None:
    plain = simulator([first + n for n in range(4)], **job)
    other = simulator([first + n for n in order], threads=threads, **job)
    one, two = drawn_settings(plan, 4, 6, 2)
    step_ET = np.concatenate([plain.run(one, 30), plain.run(two, 30)], axis=1)
    pieces = [other.run(one[order], 30), other.run(two[order], cut)]
    fork = other.fork(np.array([3, 0]))
    other.run(np.zeros_like(two), 10)
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), step_ET[order, : 30 + cut])
    np.testing.assert_array_equal(fork.run(two[order][[3, 0]], 30 - cut), step_ET[[order[3], order[0]], 30 + cut :])


# Where pacing pays and where it must not matter


@pytest.mark.parametrize("post_work_s", [0.1, 0.3, 0.5])
def test_unequal_slack_in_closed_form(simulator: Make, post_work_s: float) -> None:
    """G groups share an uplink, one has work e after it: C + G m + e passive, at best max(C + m + e, C + G m)."""
    groups, alone_s = 4, 0.1
    job: dict[str, Any] = {"ranks": 8, "groups": groups, "uplink_work_s": alone_s, "has_barrier": True}
    exposed = {"post_work_groups": 1, "post_work_s": post_work_s}
    means_E = []
    for setting in (pacing.off(), pacing.settings({"slack": (0.0, 0.6)})):
        sim = simulator(range(3), **job, **exposed)
        means_E.append(sim.run(np.tile(setting, (3, 1, 1, 1)), 800)[:, 200:].mean(axis=1))
    passive, paced = means_E
    best_s = max(1.0 + alone_s + post_work_s, 1.0 + groups * alone_s)
    np.testing.assert_allclose(passive, 1.0 + groups * alone_s + post_work_s, rtol=1e-12)
    assert (paced >= best_s - 1e-12).all()
    assert (passive - paced > 0.6 * (passive - best_s)).all()
