"""What a group's own links carry and what the uplink does: error bars hold the truth as often as they say."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray
from traced_jobs import job_of, paced

from paceenv.calibration.job_stamps import JobStamps, read_job
from paceenv.calibration.link_replay import LinkFit, fit_links, share_uplink
from paceenv.calibration.step_stamps import read_rows
from paceenv.core.probing import Plan, unit_of
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import episode_keys

Array = NDArray[np.float64]
PROBE_S, ITERATIONS, NORMAL_90 = 0.012, 300, 1.645
UNCAPPED_S = 0.03
CLUSTER = load_cluster("unequal-slack")
RECORD = derive(CLUSTER, episode_keys([0])).jobs[0]
ALONE_S, WORK_S, LATENCY_S = (float(RECORD[key]) for key in ("transfer_alone_s", "uplink_work_s", "latency_s"))


def _simulated(plan: Plan, seed: int) -> JobStamps:
    """The unequal-slack job, whose ranks hold back by a plan."""
    ranks, groups = CLUSTER.ranks, CLUSTER.groups
    units = [unit_of(rank, rank * groups // ranks, ranks // groups, ranks) for rank in range(ranks)]
    level_TR = np.array([[plan.level(i, *unit) for unit in units] for i in range(ITERATIONS)])
    return read_job(read_rows(paced(CLUSTER, seed, PROBE_S * level_TR)))


def fitted(stamps: JobStamps, memory: float, seed: int) -> LinkFit:
    """Payloads last 3 % longer or shorter by chance; ``memory`` of that goes on in the next iteration."""
    noise_TG = np.random.default_rng(seed).normal(0.0, 0.03, stamps.finish_TG.shape)
    for t in range(1, len(noise_TG)):
        noise_TG[t] = memory * noise_TG[t - 1] + np.sqrt(1.0 - memory**2) * noise_TG[t]
    finish_TG = stamps.finish_TG + stamps.duration_TG * noise_TG
    return fit_links(dataclasses.replace(stamps, finish_TG=finish_TG), LATENCY_S)


@pytest.mark.slow
def test_error_bars_hold_the_truth() -> None:
    """Of 90 %. Noise of some ten iterations leaves hardly thirty independent numbers in a trace, and less to tell."""
    plans = [Plan(1000 + seed, 20) for seed in range(40)]
    found = [fitted(_simulated(plan, k), 0.9, k) for k, plan in enumerate(plans)]
    assert all(fit.probed for fit in found)
    alone = [abs(fit.alone_s - ALONE_S) <= NORMAL_90 * fit.alone_se for fit in found if np.isfinite(fit.alone_se)]
    work = [abs(fit.work_s - WORK_S) <= NORMAL_90 * fit.work_se for fit in found if np.isfinite(fit.work_se)]
    for told in (alone, work):
        assert len(told) > 0.6 * len(found)
        assert 0.75 <= np.mean(told) <= 0.98


def test_a_cap_that_is_not_there_is_not_told() -> None:
    """Alone a group has the whole uplink, its own links being twice as fast. In one of these jobs chance puts the cap
    two standard errors below 1, and a rate told from that would be half of the true one, 33 standard errors off."""
    for seed in range(26, 32):
        found = fit_links(_uncapped(seed), 0.0)
        assert np.isinf(found.alone_se)
        assert np.isfinite(found.work_se)
        assert found.alone_most_s is not None
        assert found.alone_most_s > UNCAPPED_S


def _uncapped(seed: int) -> JobStamps:
    """Three groups whose payloads last 2 % longer or shorter by chance."""
    rng = np.random.default_rng(seed)
    arrival_TG = 0.1 + 0.006 * rng.standard_normal((200, 3))
    lasts_TG = share_uplink(arrival_TG, UNCAPPED_S, 2.0 * UNCAPPED_S) - arrival_TG
    finish_TG = arrival_TG + lasts_TG * (1.0 + 0.02 * rng.standard_normal(arrival_TG.shape))
    groups = np.concatenate([np.full(603, -1), np.tile([0, 1, 2], 201)])
    stamps = read_job(read_rows(job_of(np.ones((201, 3)), group=groups)))  # from its second iteration on
    return dataclasses.replace(stamps, entry_TR=arrival_TG, finish_TG=finish_TG)
