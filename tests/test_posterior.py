"""Clusters drawn from a calibration's errors: from its config alone, jointly, and as training takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceenv.calibration.posterior import drawn_clusters, parameters_of
from paceenv.core.errors import InputError
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.cluster.derive import start
from paceenv.ui import config_files

ALONE, UPLINK, WORK = "fabric.nic_gbps", "fabric.uplink_gbps", "post_collective_work.work_s"


def mean_step_s(cluster: Cluster) -> float:
    simulator = start(cluster, np.array([1, 2]))
    return float(simulator.run(simulator.off(), 200).mean())


def calibrated(**more: Any) -> Cluster:
    """A cluster with two rates that have errors, and one number that is known to its last digit."""
    fitted = {
        ALONE: {"value": 0.15, "se": 0.01, "lo": 0.1304, "hi": 0.1696, "evidence": ""},
        UPLINK: {"value": 0.4, "se": 0.02, "lo": 0.3608, "hi": 0.4392, "evidence": ""},
        WORK: {"value": 0.12, "se": 1e-15, "lo": 0.12, "hi": 0.12, "evidence": ""},
    }
    record = {"source": "test", "fitted": fitted, **more}
    return load_cluster("unequal-slack").model_copy(update={"calibration": record})


def test_draws_have_the_errors_on_record() -> None:
    drawn = drawn_clusters(calibrated(), draws=300)
    rates = np.array([[c.fabric.nic_gbps, c.fabric.uplink_gbps] for c in drawn], np.float64)
    np.testing.assert_allclose(rates.mean(axis=0), [0.15, 0.4], atol=0.003)
    # cut off at the ends of their 95 % intervals, normals vary by an eighth less
    np.testing.assert_allclose(rates.std(axis=0), [0.0088, 0.0176], rtol=0.15)
    assert {c.post_collective_work.work_s for c in drawn} == {0.12}


def test_the_config_alone_is_enough_and_its_mean_step_is_kept(tmp_path: Path) -> None:
    """The measured mean step, on record with its error, narrows what vague rates would make of it."""
    free = drawn_clusters(calibrated(), draws=16)
    measured = {"step_mean_s": 0.344, "step_mean_se_s": 0.0005, "step_cv": 0.02}
    config_files.write_yaml(tmp_path / "c.yaml", calibrated(measured=measured).model_dump())
    kept = drawn_clusters(load_cluster(tmp_path / "c.yaml"))
    assert len(kept) == 16
    loose, tight = (np.std([c.fabric.uplink_gbps for c in some]) for some in (free, kept))
    assert tight < 0.5 * loose
    assert np.std([c.fabric.nic_gbps for c in kept]) > 0.003  # of which the step says little


@pytest.mark.slow
def test_a_rate_that_the_trace_leaves_open_is_drawn_and_not_chosen_by_the_step() -> None:
    """Whether groups hold each other up decides what pacing gains. By how much a fit misses the step does not tell."""
    opened = {"value": 0.13, "se": None, "lo": None, "hi": None, "top": 0.4, "evidence": "cannot be identified: test"}
    work = {"value": 0.12, "se": 0.02, "lo": 0.08, "hi": 0.16, "evidence": ""}
    measured = {"step_mean_s": 0.36, "step_mean_se_s": 0.001, "step_cv": 0.02}  # the fitted cluster's is less
    record = {"source": "test", "fitted": {WORK: work}, "cannot_tell": {ALONE: opened}, "measured": measured}
    cluster = load_cluster("unequal-slack").model_copy(update={"calibration": record})
    drawn = drawn_clusters(cluster, draws=48)
    rates = np.array([c.fabric.nic_gbps for c in drawn], np.float64)
    assert rates.min() >= 0.1, "four groups on one uplink"
    assert rates.max() <= 0.4
    assert [np.mean(rates < edge) for edge in (0.175, 0.25, 0.325)] == pytest.approx([0.25, 0.5, 0.75], abs=0.2)
    simulated = np.mean([mean_step_s(c) for c in drawn])
    assert simulated == pytest.approx(0.36, rel=0.01), "what else is vague still follows the measured step"


@pytest.mark.parametrize("name", ["when-scaling-fails", "straggler-se"])
def test_records_of_other_fits_can_be_drawn_from(name: str) -> None:
    """Of tables and of compute alone: without a mean step, by other names, without evidence."""
    cluster = load_cluster(name)
    assert cluster.calibration["fitted"]
    drawn = drawn_clusters(cluster, draws=4)
    assert len({repr(c) for c in drawn}) == 4
    assert all("." in p.key for p in parameters_of(cluster))


def test_a_record_that_is_not_whole_is_named() -> None:
    cluster = load_cluster("two-jobs").model_copy(update={"calibration": {"fitted": {"job.compute_s": {"value": 1.0}}}})
    with pytest.raises(InputError, match=r"calibration of job.compute_s has no se, lo, hi"):
        parameters_of(cluster)
