"""The ceiling of real systems, from data that others recorded."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from traced_jobs import STRAGGLER_DIR

from benchmarks.evidence._mlperf import pooled, systems
from paceenv.diagnosis.step_times.step_diagnosis import diagnose_steps

DATA = Path(os.environ.get("PACEENV_DATA_DIR") or STRAGGLER_DIR.parent)
needs_mlperf = pytest.mark.skipif(
    not (DATA / "mlperf-v5.1").is_dir(), reason="set PACEENV_DATA_DIR to data recorded by others"
)


@pytest.mark.slow
@needs_mlperf
def test_tuned_clusters_have_little_to_win() -> None:
    gain = [
        one.ceiling.gain.value
        for one in (diagnose_steps(pooled(s)) for s in systems(DATA) if s.benchmark.startswith("llama31"))
        if one.ceiling is not None
    ]
    assert 0.008 < float(np.median(gain)) < 0.018
    assert max(gain) < 0.06
