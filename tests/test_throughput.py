"""Described clusters held against published throughputs: two nodes on 1 GbE; large systems as pure predictions."""

from __future__ import annotations

import pytest
from described_steps import Prediction, predict, step_of

from paceenv.calibration.published_tables import ThroughputTarget, fit_table
from paceenv.core.errors import InputError
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import episode_keys
from paceenv.ui import config_files

NANO = load_cluster("nano-cluster")
TARGET = config_files.load(ThroughputTarget, "targets", "nano-cluster")


@pytest.fixture(scope="module")
def rows() -> dict[str, Prediction]:
    return {p.row.name: p for p in predict(TARGET, NANO)}


# The two-node cluster


def test_fit_sees_four_rows_and_its_result_is_what_ships() -> None:
    assert [r.name for r in TARGET.rows if r.fit] == ["1x2 data", "1x2 tensor", "1x2 pipeline", "2x1 tensor"]
    fitted = fit_table(TARGET, NANO)
    record, data = NANO.calibration["fitted"], NANO.model_dump()
    assert set(fitted.calibration["fitted"]) == set(record)
    for path, numbers in fitted.calibration["fitted"].items():
        section, key = path.split(".")
        assert fitted.model_dump()[section][key] == numbers["value"]
        assert data[section][key] == record[path]["value"]
        assert record[path] == pytest.approx(numbers, rel=0.005), path


def test_fit_finds_the_parameters_that_made_the_throughputs() -> None:
    true = {"gpu.achievable_tflops": 40.0, "workload.host_overhead_s": 1.2e-3, "fabric.intra_node_gbps": 80.0}
    true |= {"fabric.nic_gbps": 0.6}
    made = [
        row.model_copy(update={"throughput": p.throughput})
        for row, p in zip(TARGET.rows, predict(TARGET, NANO, true), strict=True)
    ]
    target = TARGET.model_copy(update={"rows": made})
    fitted = fit_table(target, NANO)
    assert {key: found["value"] for key, found in fitted.calibration["fitted"].items()} == pytest.approx(true, rel=1e-3)
    assert all(p.throughput == pytest.approx(p.row.throughput, rel=1e-3) for p in predict(target, fitted))


def test_the_engine_takes_the_steps_that_the_description_predicts(rows: dict[str, Prediction]) -> None:
    assert rows
    for p in rows.values():
        some = NANO.changed([f"{key}={value}" for key, value in p.row.set.items()])
        ideal_s = derive(some, episode_keys([0])).jobs["ideal_step_s"]
        assert ideal_s == pytest.approx(p.step.step_s, rel=0.01), p.row.name
        assert some.samples_per_step == p.step.samples


def test_a_target_needs_as_many_rows_as_parameters() -> None:
    data = TARGET.model_dump()
    data["rows"] = [row | {"fit": False} for row in data["rows"]]
    with pytest.raises(InputError, match=r"free = 4 keys; allowed: 1 to 0, as many numbers as are marked"):
        fit_table(config_files.parse(ThroughputTarget, data, "test"), NANO)
    data = TARGET.model_dump()
    data["free"]["fabric.latency_us"] = [1, 100]
    with pytest.raises(InputError, match="free = 5 keys; allowed: 1 to 4"):
        fit_table(config_files.parse(ThroughputTarget, data, "test"), NANO)


def test_a_setting_that_cannot_run_names_the_row() -> None:
    with pytest.raises(InputError, match=r"--set workload\.tensor_parallel=5: .*tensor_parallel to divide"):
        step_of(NANO, {"workload.tensor_parallel": 5})
