"""How fast traces are diagnosed, in how much memory: rows per CPU second of a long one, and a profile's events."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._common import figure
from paceenv.report.section import Section, print_sections
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import start
from paceenv.sim.engine.recording import RecordingWriter

RANKS, ITERATIONS, BATCH = 1000, 6000, 500
EVENTS = 1_000_000
_DIAGNOSE = """
from paceenv.diagnosis.diagnose import diagnose
from paceenv.importers.inputs import read_inputs
diagnose(read_inputs([Path(sys.argv[1])]).require_trace())
"""
_IMPORT = """
from paceenv.importers.profiler.kineto import import_kineto
import_kineto(sys.argv[1])
"""
_CHILD = """
import json, resource, sys, time
from pathlib import Path
{}
peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({{"cpu_s": time.process_time(), "memory_gb": peak_kib * 1024 / 1e9}}))
"""


def long_trace(path: Path) -> int:
    """Write a trace of a thousand ranks, one of them slow; returns its rows."""
    cluster = load_cluster("null-jitter").changed(
        [f"job.nodes={RANKS}", "fabric.uplink_gbps=200000", "noise.slow_ranks=1", "noise.slow_factor=1.4"]
    )
    simulator = start(cluster, [1])
    with RecordingWriter(path, simulator, "long") as writer:
        for _ in range(ITERATIONS // BATCH):
            writer.add(simulator.record(simulator.off(), BATCH))
    return 2 * RANKS * ITERATIONS


def profile(path: Path) -> None:
    """Write a profile as PyTorch writes it, in the mix of a GPU job's: operations of the CPU with what they launch."""
    kernel = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, at::detail::Array<char*> >"
    )
    launched = {"device": 0, "context": 1, "stream": 7, "registers per thread": 32, "grid": [16, 1, 1]}
    cpu, gpu = {"pid": 783658, "tid": 785244}, {"pid": 0, "tid": 7}
    with path.open("w") as file:
        file.write('{"distributedInfo": {"rank": 0}, "traceEvents": [\n{"ph": "M", "name": "process_name"}')
        for i in range(EVENTS // 5):
            at_us = 1_712_195_495_000_000 + 20.125 * i
            told = {"External id": i, "Record function id": 0, "Ev Idx": i}
            work, runtime = {"ph": "X", "ts": at_us, "dur": 18.5} | cpu, {"ph": "X", "ts": at_us + 5, "dur": 9.25} | cpu
            flow = {"cat": "ac2g", "name": "ac2g", "id": i}
            events: list[dict[str, Any]] = [
                work | {"cat": "cpu_op", "name": "aten::addmm", "args": told},
                runtime | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": told | {"cbid": 211}},
                {"ph": "s", "ts": at_us + 5} | cpu | flow,
                {"ph": "X", "ts": at_us + 12.25, "dur": 11.75, "cat": "kernel", "name": kernel, "args": told | launched}
                | gpu,
                {"ph": "f", "ts": at_us + 12.25, "bp": "e"} | gpu | flow,
            ]
            if i % 1000 == 0:
                events.append(work | {"cat": "user_annotation", "name": f"ProfilerStep#{i // 1000}"})
            file.write("".join(f",{json.dumps(event, indent=2)}" for event in events))
        file.write("]}")


def in_a_process(code: str, path: Path) -> dict[str, float]:
    """CPU seconds, the interpreter's start included, and peak memory of a process that does this with a file."""
    program = [sys.executable, "-c", _CHILD.format(code), str(path)]
    found: dict[str, float] = json.loads(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
    return found


def run() -> list[Section]:
    """Rows of a long trace and events of a profile per CPU second, and the memory that takes."""
    with tempfile.TemporaryDirectory() as folder:
        trace, events = Path(folder) / "long.parquet", Path(folder) / "rank0.json"
        rows = long_trace(trace)
        profile(events)
        start = in_a_process("import paceenv.importers.profiler.kineto", events)["cpu_s"]
        found = {
            "rows of a trace (Parquet)": (rows, in_a_process(_DIAGNOSE, trace), 0.0),
            "events of a PyTorch profile (JSON)": (EVENTS, in_a_process(_IMPORT, events), start),
        }
    text = (
        f"A trace of {RANKS} ranks and {figure(rows)} rows is diagnosed in a process of its own, its start included. "
        "The diagnosis samples blocks of consecutive steps of a long trace, so memory does not grow with its length. "
        f"A profile of {figure(EVENTS)} events is JSON, and is only read."
    )
    rates = [
        (what, figure(count / (child["cpu_s"] - start_s)), f"{child['memory_gb']:.2g} GB")
        for what, (count, child, start_s) in found.items()
    ]
    return [Section("Diagnosis: per CPU second", (text,), ("", "rate", "memory"), rates)]


if __name__ == "__main__":
    print_sections(run())
