"""Logs of NCCL Inspector for jobs with a known late rank, as its versions write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

OPS = (("AllGather", 1 << 22), ("ReduceScatter", 1 << 24), ("AllReduce", 64))


def log_of(
    rank: int, ranks: int, *, late: dict[int, float], version: str = "v4.0", steps: int = 30, verbose: bool = False
) -> list[dict[str, Any]]:
    """Records of a rank: three collectives a step in one communicator; a late rank arrives that many seconds later.

    NCCL numbers each operation of a communicator apart.
    Every rank waits for the last one, then the collective takes 1 ms, and computes 10 ms.
    """
    found: list[dict[str, Any]] = []
    noise = np.random.default_rng(7).normal(0.0, 1e-5, (steps * len(OPS), ranks))
    at = 1_700_000_000.0
    header = {"id": "0xabc", "rank": rank, "n_ranks": ranks, "nnodes": 1} | (
        {"comm_name": "DP"} if version != "v4.0" else {}
    )
    about = {"inspector_output_format_version": version, "dump_timestamp_us": int(at * 1e6), "hostname": "n0"}
    about |= {"rec_mechanism": "nccl_profiler_interface", "git_rev": "", "pid": 1000 + rank}
    if version >= "v4.1":
        counts = {"coll_records": steps * len(OPS), "coll_dropped_total": 0, "coll_dropped_since_last_dump": 0}
        found.append({"header": header, "metadata": about, "dump_stats": counts})
    for n in range(steps * len(OPS)):
        op, size = OPS[n % len(OPS)]
        pause_s = 0.010 + (0.020 if n % len(OPS) == 0 else 0.0)
        arrive_R = at + pause_s + np.array([late.get(r, 0.0) for r in range(ranks)]) + np.abs(noise[n])
        at = float(arrive_R.max()) + 0.001
        time_s = at - float(arrive_R[rank])
        perf: dict[str, Any] = {
            "coll": op, "coll_sn": n // len(OPS) + 1, "coll_msg_size_bytes": size,
            "coll_exec_time_us": round(time_s * 1e6),
            "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": size / time_s / 1e9,
            "coll_busbw_gbs": 1.75 * size / time_s / 1e9,
        }  # fmt: skip
        if version >= "v4.2":
            perf |= {"coll_algo": "RING", "coll_proto": "LL"}
        if verbose:
            stamps = {"channel_id": 0, "kernel_start_ts": int(arrive_R[rank] * 1e6), "kernel_stop_ts": int(at * 1e6)}
            perf["event_trace_ts"] = {"coll_start_ts": 1, "coll_stop_ts": 2, "kernel_events": [stamps]}
        found.append(
            {"coll_perf": perf} if version >= "v4.3" else {"header": header, "metadata": about, "coll_perf": perf}
        )
    return found


def write_logs(folder: Path, ranks: int = 4, *, indent: int | None = None, **how: Any) -> Path:
    """A file per process."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        records = log_of(rank, ranks, **how)
        text = "\n".join(json.dumps(record, indent=indent) for record in records)
        (folder / f"n0-pid{1000 + rank}.log").write_text(text + "\n")
    return folder
