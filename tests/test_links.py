"""What a group's own links carry and what the uplink does: error bars hold the truth as often as they say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from probed_jobs import levels, simulated

from paceenv.calibration.links import LinkFit, fit_links
from paceenv.calibration.structure import JobStamps, read_job
from paceenv.cluster import load_cluster
from paceenv.cluster.derive import derive
from paceenv.engine.simulator import episode_keys
from paceenv.probing import HEAD_START_SHARE, Plan

Array = NDArray[np.float64]
Jobs = Callable[[float, int], list[JobStamps]]
PROBE_S, ITERATIONS, NORMAL_90 = 0.012, 300, 1.645
CLUSTER = load_cluster("unequal-slack")
RECORD = derive(CLUSTER, episode_keys([0])).jobs[0]
ALONE_S, WORK_S, LATENCY_S = (float(RECORD[key]) for key in ("transfer_alone_s", "uplink_work_s", "latency_s"))


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Jobs whose groups were delayed by a plan with the given share of head starts."""
    path = tmp_path_factory.mktemp("links") / "trace.parquet"

    def run(head_start_share: float, jobs: int) -> list[JobStamps]:
        return [_simulated(Plan(1000 + seed, PROBE_S, 20, head_start_share), seed, path) for seed in range(jobs)]

    return run


def _simulated(plan: Plan, seed: int, path: Path) -> JobStamps:
    def probes(ranks: int, per_group: int) -> Array:
        return plan.probe_s * levels(plan, ITERATIONS, ranks, per_group)

    return read_job(simulated("unequal-slack", probes, path, seed=seed, plan=plan)[0])


def fitted(stamps: JobStamps, memory: float, seed: int) -> LinkFit:
    """Payloads last 3 % longer or shorter by chance; ``memory`` of that goes on in the next iteration."""
    noise_TG = np.random.default_rng(seed).normal(0.0, 0.03, stamps.finish_TG.shape)
    for t in range(1, len(noise_TG)):
        noise_TG[t] = memory * noise_TG[t - 1] + np.sqrt(1.0 - memory**2) * noise_TG[t]
    finish_TG = stamps.finish_TG + stamps.duration_TG * noise_TG
    return fit_links(dataclasses.replace(stamps, finish_TG=finish_TG), LATENCY_S)


@pytest.mark.parametrize(("memory", "least"), [(0.0, 0.82), (0.9, 0.75)], ids=["white", "lasting"])
def test_error_bars_hold_the_truth(memory: float, least: float, probed: Jobs) -> None:
    """Of 90 %. Noise of some ten iterations leaves hardly thirty independent numbers in a trace."""
    found = [fitted(stamps, memory, seed) for seed, stamps in enumerate(probed(HEAD_START_SHARE, 40))]
    assert all(fit.probed for fit in found)
    alone = [abs(fit.alone_s - ALONE_S) <= NORMAL_90 * fit.alone_se for fit in found if np.isfinite(fit.alone_se)]
    work = [abs(fit.work_s - WORK_S) <= NORMAL_90 * fit.work_se for fit in found if np.isfinite(fit.work_se)]
    for told in (alone, work):
        assert len(told) > 0.9 * len(found)
        assert least <= np.mean(told) <= 0.98


def test_a_group_that_goes_first_shows_what_its_own_links_carry(probed: Jobs) -> None:
    """Where one in four is delayed three share the uplink, and none is limited by its own links."""
    single, head_start = (
        [fitted(stamps, 0.0, seed) for seed, stamps in enumerate(probed(share, 20))]
        for share in (0.0, HEAD_START_SHARE)
    )
    error_single, error_head_start = (np.median([fit.alone_se for fit in found]) for found in (single, head_start))
    assert error_single > 2.5 * error_head_start
    assert error_head_start < 0.05 * ALONE_S
