"""Metrics as a file for the textfile collector of Prometheus' node exporter: no port, one file per rank."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from paceenv.core.files import atomic_write
from paceenv.live.record.prometheus import SnapshotCollector
from paceenv.live.record.snapshot import Snapshot, text


class Textfile:
    """Replaces ``FOLDER/paceenv_<job>_rank00003.prom`` as a whole; removes it at the end, else it is served for ever.

    Args:
        folder: the folder that ``--collector.textfile.directory`` names.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def begin(self) -> None:
        """Nothing to note."""

    def write(self, snapshot: Snapshot, final: bool) -> None:
        """Write the metrics. Raises InputError if they cannot be written.

        Args:
            snapshot: of this rank.
            final: whether it is the last one.
        """
        path = self._folder / f"paceenv_{_file_name(text(snapshot, 'job'))}_rank{int(snapshot['rank']):05d}.prom"
        if final:
            path.unlink(missing_ok=True)
            return
        registry = CollectorRegistry(auto_describe=False)
        registry.register(SnapshotCollector(lambda: snapshot))
        atomic_write(path, generate_latest(registry))


def _file_name(job: str) -> str:
    """A job's name in a file name: a changed one carries a checksum, so that two jobs stay apart."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", job)[:100] or "job"
    return safe if safe == job else f"{safe}-{zlib.crc32(job.encode(errors='replace')):08x}"
