"""Small files of the formats that are imported, for tests and for the fuzzer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

STEPS = 20
FORWARD_S, BACKWARD_S, REDUCE_S = 0.010, 0.020, 0.004


def profile_of(rank: int, compute: float = 1.0, clock_s: float = 0.0, last_s: float = 0.030) -> dict[str, Any]:
    """A GPU's profile: kernels, two buckets of which the first overlaps the backward pass, a send that nobody matches.

    Every rank's second bucket ends ``last_s`` + REDUCE_S after the step's begin; its clock is off by ``clock_s``.
    """
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}]

    def add(category: str, name: str, tid: int, start_s: float, end_s: float, **arguments: Any) -> None:
        times = {"ts": (start_s + clock_s) * 1e6, "dur": (end_s - start_s) * 1e6}
        events.append({"ph": "X", "cat": category, "name": name, "pid": 0, "tid": tid, **times, "args": arguments})

    group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1, 2]", "dtype": "BFloat16"}
    for step in range(STEPS):
        at = 0.1 + step * (last_s + REDUCE_S)
        mid, done = at + FORWARD_S * compute, at + (FORWARD_S + BACKWARD_S) * compute
        add("user_annotation", f"ProfilerStep#{step + 7}", 1, at - 0.02, at - 0.01)  # the host runs ahead
        add("gpu_user_annotation", f"ProfilerStep#{step + 7}", 9, at, done)
        add("kernel", "ampere_bf16_s16816gemm", 7, at, mid)
        add("kernel", "sm90_gemm", 7, mid, done)
        bucket = {"Collective name": "allreduce", "In msg nelems": 1 << 20} | group
        add("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 20, mid, at + 0.6 * last_s + REDUCE_S, **bucket)
        add("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 20, done, at + last_s + REDUCE_S, **bucket)
        add("cpu_op", "aten::mm", 1, at, at + 0.001)
    about = {"backend": "nccl", "rank": rank, "world_size": 3}
    return {"schemaVersion": 1, "distributedInfo": about, "baseTimeNanoseconds": 0, "traceEvents": events}


def written(folder: Path, profiles: dict[str, Any]) -> list[Path]:
    for name, profile in profiles.items():
        text = json.dumps(profile, indent=1).encode()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return [folder / name for name in profiles]


def dump_of(rank: int, late_s: float, steps: int = 12, timing: bool = True) -> dict[str, Any]:
    """A Flight Recorder dump: an all-gather and an all-reduce a step, entered ``late_s`` after the first rank."""
    entries = []
    for i in range(2 * steps):
        step, gathers = divmod(i, 2)
        end_s = 1000.0 + step * 0.1 + (0.05 if gathers == 0 else 0.09)
        duration_s = (0.02 - late_s) if gathers == 0 else 0.01
        entry = {
            "record_id": i, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": i + 5,
            "profiling_name": ("nccl:_all_gather_base", "nccl:all_reduce")[gathers], "state": "completed",
            "input_sizes": [[256, 4]], "output_sizes": [[256 * (2 - gathers), 4]], "input_dtypes": ["Float"],
            "time_created_ns": int((end_s - 0.5) * 1e9),
            "time_discovered_started_ns": None, "time_discovered_completed_ns": int(end_s * 1e9), "is_p2p": False,
        }  # fmt: skip
        entries.append(entry | ({"duration_ms": duration_s * 1e3} if timing else {}))
    return {"entries": entries, "pg_config": {"0": {"name": "0", "ranks": "[0, 1]"}}, "version": "2.10"}


_PLACE = "    time   algbw   busbw #wrong"
_ROWS = (
    (1024, 256, 11.2, 0.09),
    (65536, 16384, 14.0, 4.68),
    (1 << 20, 1 << 18, 35.0, 29.96),
    (1 << 28, 1 << 26, 2345.0, 114.47),
)
TABLE = f"#       size         count      type   redop    root {_PLACE}{_PLACE}\n" + "".join(
    f"{size:12} {count:12}     float     sum      -1" + f"  {us}  {rate}  {1.75 * rate}      0" * 2 + "\n"
    for size, count, us, rate in _ROWS
)
"""Output of a program of nccl-tests."""
