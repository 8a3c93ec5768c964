"""One description of a step, two executors: the vector loop of the simple kind, and the event loop of all others."""

from __future__ import annotations

import numpy as np
import pytest

from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import derive, drawn
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.program_tables import tables
from paceenv.sim.cluster.transfers import use_of
from paceenv.sim.engine.simulator import JobBatch, Simulator, episode_keys
from paceenv.sim.reference.referee import one_collective

KEYS = episode_keys(range(4))


def event_loop(one: Cluster) -> Simulator:
    """A job of the simple kind, event by event on the same noise."""
    batch, has_tenants = derive(one, KEYS), bool(one.tenants)
    jobs = batch.jobs.copy()
    jobs["has_barrier"] = True
    if one.is_measured:
        plan, use = one_collective(jobs[0], batch.ranks, batch.groups)
    else:
        plan, use = one.plan(), use_of(one.fabric, one.job, has_tenants=has_tenants)
        jobs["compute_s"] = plan.compute_s
    program = tables(plan, use, has_tenants=has_tenants)
    return Simulator(JobBatch(jobs, batch.tenants_EK, batch.ranks, 1, program), KEYS)


@pytest.mark.parametrize(
    ("name", "of_a_step", "of_the_mean"),
    [
        ("null-jitter", 1e-12, 1e-12),
        ("null-jitter-64", 1e-12, 1e-12),
        ("equal-slack", 1e-12, 1e-12),
        ("nano-cluster", 1e-12, 1e-12),
        ("gpus-512-200g", 1e-12, 1e-12),
        ("sockets-two-jobs", 1e-12, 1e-12),
        ("two-jobs", 0.2, 2e-3),  # a tenant that pauses meets other steps
        ("h100-ndr", 3e-3, 2e-3),  # two transfers, a tail of its own, have two latencies
    ],
)
def test_both_loops_take_the_same_steps(name: str, of_a_step: float, of_the_mean: float) -> None:
    one = drawn(load_cluster(name), KEYS[0])
    assert not one.has_program
    vector, events = Simulator(derive(one, KEYS), KEYS), event_loop(one)
    a_ET, b_ET = (sim.run(sim.off(), 150) for sim in (vector, events))
    np.testing.assert_allclose(b_ET, a_ET, rtol=of_a_step)
    assert b_ET.mean() == pytest.approx(a_ET.mean(), rel=of_the_mean)


@pytest.mark.parametrize("name", ["equal-slack", "null-jitter"])
def test_the_ideal_step_is_the_step_without_noise(name: str) -> None:
    """With the job's own contention, described by times or as a program."""
    one = load_cluster(name).changed(["noise={}"])
    vector, events = Simulator(derive(one, KEYS), KEYS), event_loop(one)
    ideal_E = vector.batch.jobs["ideal_step_s"]
    for sim in (vector, events):
        np.testing.assert_allclose(sim.run(sim.off(), 2), np.tile(ideal_E[:, None], 2), rtol=1e-9)
