"""The findings of a run in one file: rank 0 writes it, every other rank reads only this file for its own verdict."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any, Final

from paceenv.core.files import atomic_write
from paceenv.live.record.findings import SCHEMA, Findings
from paceenv.live.record.snapshot import ARRIVALS, finite

FINDINGS: Final = "findings.json"
MIN_PERIOD_S: Final = 60.0
PERIOD_S_PER_RANK: Final = 0.6
MAX_BYTES: Final = 32 << 20


def findings_period_s(world_size: int) -> float:
    """Seconds between two writes, and between two reads: a minute, and ten minutes at 1,000 ranks."""
    return max(MIN_PERIOD_S, PERIOD_S_PER_RANK * world_size)


def write_findings(folder: Path, findings: Findings) -> None:
    """Write ``findings.json`` completely or not at all.

    Args:
        folder: the attempt's folder, ``DIR/<attempt>``.
        findings: what :func:`paceenv.live.record.findings.find` returned.

    Raises:
        InputError: it cannot be written.
    """
    atomic_write(folder / FINDINGS, (json.dumps(finite(findings), allow_nan=False) + "\n").encode())


def read_verdict(folder: Path, rank: int) -> dict[str, Any] | None:
    """The verdict on ``rank`` from ``findings.json``, with ``unix_time_s`` of the newest snapshot that it rests on.

    None where there is no such file, or none that can be read; never waits for another process.

    Args:
        folder: the attempt's folder, ``DIR/<attempt>``.
        rank: the rank.
    """
    try:
        descriptor = os.open(folder / FINDINGS, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            findings = json.loads(stream.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(findings, dict) or findings.get("schema") != SCHEMA:
        return None
    verdicts = findings.get("verdicts")
    verdict = verdicts.get(str(rank)) if isinstance(verdicts, dict) else None
    if not isinstance(verdict, dict) or verdict.get("verdict") not in ARRIVALS:
        return None
    return verdict | {"unix_time_s": findings.get("unix_time_s")}


def with_age(verdict: dict[str, Any]) -> dict[str, Any]:
    """A verdict with ``age_s``, the seconds since the snapshots it rests on."""
    made_s = verdict.get("unix_time_s")
    return verdict | {"age_s": max(time.time() - made_s, 0.0) if isinstance(made_s, float) else None}
