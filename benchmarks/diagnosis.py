"""How fast traces are diagnosed, in how much memory: rows per CPU second of a long one, and a profile's events."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._common import Report, Table, Target, command, figure
from paceenv.cluster import load_cluster
from paceenv.cluster.derive import derive
from paceenv.engine.simulator import Simulator, episode_keys
from paceenv.engine.traces import RecordingWriter
from paceenv.importers.kineto import import_kineto

RANKS, ITERATIONS, BATCH = 1000, 6000, 500
EVENTS = 200_000
ROWS_TARGET = 1e6
_CHILD = """
import json, resource, sys, time
from pathlib import Path
from paceenv.diagnosis.diagnose import diagnose_cells
from paceenv.diagnosis.sources import read_sources
cells, _ = read_sources([Path(sys.argv[1])])
found = diagnose_cells(cells)
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"cpu_s": time.process_time(), "rss_kib": usage.ru_maxrss, "cause": found.causes[0].cause}))
"""


def long_trace(path: Path) -> int:
    """Write a trace of a thousand ranks, one of them slow; returns its rows."""
    cluster = load_cluster("null-jitter").changed(
        [f"job.nodes={RANKS}", "fabric.uplink_gbps=200000", "noise.slow_ranks=1", "noise.slow_factor=1.4"]
    )
    keys_E = episode_keys([1])
    simulator = Simulator(derive(cluster, keys_E), keys_E)
    with RecordingWriter(path, simulator, "long") as writer:
        for _ in range(ITERATIONS // BATCH):
            writer.append(simulator.record(simulator.off(), BATCH))
    return 2 * RANKS * ITERATIONS


def profile(path: Path) -> None:
    """Write a profile as PyTorch writes it: most events are of no interest here."""
    with path.open("w") as file:
        file.write('{"distributedInfo": {"rank": 0}, "traceEvents": [\n')
        for i in range(EVENTS):
            name, category = (f"ProfilerStep#{i}", "user_annotation") if i % 1000 == 0 else ("aten::addmm", "cpu_op")
            event: dict[str, Any] = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": 10.0 * i}
            event |= {"dur": 8.5, "args": {"External id": i, "Record function id": 0, "Ev Idx": i}}
            file.write(("," if i else "") + json.dumps(event, indent=2))
        file.write("]}")


def run() -> Report:
    """Rows of a long trace per CPU second, the interpreter's start included, and events of a profile."""
    with tempfile.TemporaryDirectory() as folder:
        trace, events = Path(folder) / "long.parquet", Path(folder) / "rank0.json"
        rows = long_trace(trace)
        out = subprocess.run([sys.executable, "-c", _CHILD, str(trace)], capture_output=True, text=True, check=True)
        child = json.loads(out.stdout)
        profile(events)
        start_s = time.process_time()
        import_kineto(events)
        events_s = time.process_time() - start_s
        megabytes = events.stat().st_size / 1e6
    data = {
        "rows": rows,
        "rows_per_cpu_s": rows / child["cpu_s"],
        "memory_gb": child["rss_kib"] / 1e6,
        "profile_events_per_cpu_s": EVENTS / events_s,
        "profile_mb_per_cpu_s": megabytes / events_s,
    }
    rate = data["rows_per_cpu_s"]
    targets = [Target("rows of a trace per CPU second", "at least 1 M", figure(rate), rate >= ROWS_TARGET)]
    text = (
        f"A trace of {RANKS} ranks and {figure(rows)} rows, diagnosed in a process of its own: of a long trace blocks "
        "of consecutive steps are looked at, so memory does not grow with its length. A profile is JSON, read event by "
        "event."
    )
    table = Table(
        "per CPU second",
        ("", "rate", "memory"),
        [
            ("rows of a trace (Parquet)", figure(rate), f"{data['memory_gb']:.2g} GB"),
            ("events of a PyTorch profile (JSON)", figure(data["profile_events_per_cpu_s"]), ""),
        ],
    )
    return Report("Diagnosis", text, data, (table,), targets)


if __name__ == "__main__":
    command(run)
