"""What the agent adds to a job that has PyTorch already: no heavy import, little memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_samples import run_python, segment_files

HEAVY = {"pyarrow", "pandas", "prometheus_client", "typer", "rich", "yaml", "numba", "scipy", "matplotlib", "pydantic"}
MOST_MB = 10.0
CODE = """
import sys, threading
from pathlib import Path
import numpy as np, torch, torch.distributed
def resident_mb(): return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
torch.ones(8).sum()
torch.nn.parallel.DistributedDataParallel, torch.optim.SGD
loaded, before_mb = set(sys.modules), resident_mb()

from paceenv.live import attach
from paceenv.live.observe.batch import ITERATION, OPERATION, Batch, Kind
from paceenv.live.record.housekeeping import Housekeeping
from paceenv.live.record.recorder import TraceRecorder, rank_header
header = rank_header("job", rank=0, world_size=1, attempt="20261123T053000-3f2a91", locality={"host": "node0"})
target, done, enough = TraceRecorder(Path(sys.argv[1]), header, flush_s=0.0), [], threading.Event()
def trace(final):
    iterations_T, operations_N = np.zeros(100, ITERATION), np.zeros(2000, OPERATION)
    iterations_T["iteration"] = 100 * len(done) + np.arange(100)
    operations_N["place"] = np.repeat(np.arange(100), 20)
    target.add(Batch(iterations_T, operations_N, [Kind("all_reduce", 0, 8)], [""]))
    target.write(final)
    done.append(final)
    if len(done) > 50: enough.set()
house = Housekeeping(print)
house.add("the trace", 0.001, trace)
house.start()
enough.wait(60.0)
house.stop(60.0)
print(resident_mb() - before_mb)
print(*sorted({name.split(".")[0] for name in set(sys.modules) - loaded}))
"""


@pytest.mark.slow
def test_the_agent_adds_little(tmp_path: Path) -> None:
    done = run_python(CODE, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    grown_mb, added = done.stdout.splitlines()
    assert set(added.split()) & HEAVY == set()
    assert "paceenv" in added
    assert float(grown_mb) < MOST_MB
    assert segment_files(tmp_path)
