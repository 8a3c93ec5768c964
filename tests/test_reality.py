"""The ceiling of real systems, from data that others recorded."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
from traced_jobs import DATA

from paceenv.diagnosis.step_times.step_diagnosis import diagnose_steps
from paceenv.importers.log_text.conversion import StepLog

STEPS = DATA / "mlperf-v5.1" / "steps.parquet"


@pytest.mark.slow
@pytest.mark.skipif(not STEPS.is_file(), reason="set PACEENV_DATA_DIR to data recorded by others")
def test_tuned_clusters_have_little_to_win() -> None:
    """Runs of a system as one log, each relative to its own median: they are on nodes that a scheduler chose."""
    table = pq.read_table(STEPS).to_pandas()
    table = table[table.benchmark.isin(["llama31_8b", "llama31_405b"]) & table.step.notna()]
    gain = []
    for _, system in table.groupby(["submitter", "system", "benchmark"], observed=True):
        runs = system[system.groupby("run").step.transform("size") >= 10]
        if len(runs) < 30:
            continue
        usual_V = runs.groupby("run").step_time_s.transform("median")
        step_s_V = (runs.step_time_s / usual_V * usual_V.median()).to_numpy()
        step_V, one_V = runs.step.to_numpy(np.int64), np.ones(len(runs), np.int64)
        log = StepLog("log", "MLPerf", step_V, step_s_V, one_V, runs.run.to_numpy())
        if (ceiling := diagnose_steps(log).ceiling) is not None:
            gain.append(ceiling.value)
    assert len(gain) > 20
    assert 0.008 < float(np.median(gain)) < 0.018
    assert max(gain) < 0.06
