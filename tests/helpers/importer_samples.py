"""Small files of the formats that are imported, for tests and for the fuzzer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from gpu_profiles import Job, Kernel, Meeting, profiles
from hung_jobs import data_parallel

STEPS = 20
FORWARD_S, BACKWARD_S, REDUCE_S = 0.010, 0.020, 0.004


def profile_of(rank: int, compute: float = 1.0, clock_s: float = 0.0) -> dict[str, Any]:
    """A GPU's profile: kernels, two buckets of which the first overlaps the backward pass.

    Of three ranks the others compute for FORWARD_S and BACKWARD_S, this one ``compute`` times as long, on a clock that
    is ahead.
    """
    bucket_us, clock_us = 1e6 * REDUCE_S, [1e6 * clock_s] * 3
    program = [Kernel(1e6 * FORWARD_S), Meeting(took_us=bucket_us, beside=True), Kernel(1e6 * BACKWARD_S)]
    job = Job(
        steps=range(7, 7 + STEPS),
        program=lambda _: [*program, Meeting(took_us=bucket_us)],
        took_us=lambda of, step, place, us: us * (compute if of == rank else 1.0),
        clock_us=clock_us,
    )
    return profiles(job)[rank]


def written(folder: Path, profiles: dict[str, Any]) -> list[Path]:
    for name, profile in profiles.items():
        text = json.dumps(profile, indent=1).encode()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return [folder / name for name in profiles]


def dump_of(rank: int) -> dict[str, Any]:
    """A Flight Recorder dump: an all-gather and an all-reduce in each of twelve steps."""
    return data_parallel(2, 12).run().dump(rank, status=False)
