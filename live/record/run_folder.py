"""The folder of a run: the paths of each rank's files, and reading its status files.

::

    DIR/status/attempt0/rank00003.json             the rank's last snapshot
    DIR/trace/attempt0/rank00003-000012.parquet    segments of its trace
    DIR/summary.txt                                the page of rank 0 at exit

An attempt is one start of the job's processes (``TORCHELASTIC_RESTART_COUNT``). A folder holds one run: a later run in
the same folder replaces the files of each rank. Files whose names begin with a dot are unfinished and never read.
Imports neither pyarrow nor anything else that takes time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.live.record.snapshot import SCHEMA, Snapshot, finite

STATUS, TRACE, SUMMARY = "status", "trace", "summary.txt"
_ATTEMPT = re.compile(r"attempt(\d{1,9})")
_STATUS_NAME = re.compile(r"rank(\d{5,9})\.json")
_SEGMENT_NAME = re.compile(r"rank(\d{5,9})-(\d{6,9})\.parquet")
_MAX_STATUS_BYTES = 1 << 20


def status_path(folder: Path, attempt: int, rank: int) -> Path:
    """The path of a rank's status file.

    Args:
        folder: the run's folder.
        attempt: number of the start of the job's processes, from 0.
        rank: the rank.
    """
    return folder / STATUS / f"attempt{attempt}" / f"rank{rank:05d}.json"


def segment_path(folder: Path, attempt: int, rank: int, number: int) -> Path:
    """The path of a segment of a rank's trace.

    Args:
        folder: the run's folder.
        attempt: number of the start of the job's processes, from 0.
        rank: the rank.
        number: number of the segment, from 0.
    """
    return folder / TRACE / f"attempt{attempt}" / f"rank{rank:05d}-{number:06d}.parquet"


def remove_leftovers(folder: Path, attempt: int, rank: int, *, unfinished_only: bool = False) -> None:
    """Remove the files that an earlier run left of this rank.

    Args:
        folder: the run's folder.
        attempt: number of the start of the job's processes, from 0.
        rank: the rank.
        unfinished_only: keep the finished segments of its trace.

    Raises:
        OSError: a file cannot be removed.
    """
    for kind in (STATUS, TRACE):
        place = folder / kind / f"attempt{attempt}"
        stale = [*place.glob(f".rank{rank:05d}[.-]*")]
        stale += place.glob(f"rank{rank:05d}-*.parquet") if kind == TRACE and not unfinished_only else []
        for path in stale:
            path.unlink(missing_ok=True)


def write_status(folder: Path, snapshot: Mapping[str, Any]) -> None:
    """Write a rank's snapshot completely or not at all; numbers that are not finite become null. Raises InputError."""
    path = status_path(folder, int(snapshot["attempt"]), int(snapshot["rank"]))
    atomic_write(path, (json.dumps(finite(snapshot), allow_nan=False) + "\n").encode())


class RunFolder:
    """Reads a run's folder while it is being written, or after. Raises InputError if it is not the folder of a run.

    ``notes`` collects one line for each file that could not be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.notes: list[str] = []
        if not self.path.is_dir():
            raise InputError(f"{self.path}: {'not a folder' if self.path.exists() else 'no such folder'}")
        if not self.attempts():
            raise InputError(f"{self.path}: not the folder of a run: holds neither {STATUS} nor {TRACE} of any attempt")

    def attempts(self) -> list[int]:
        """The attempts with any files, in ascending order."""
        found = set()
        for kind in (STATUS, TRACE):
            place = self.path / kind
            for entry in place.iterdir() if place.is_dir() else ():
                match = _ATTEMPT.fullmatch(entry.name)
                if match and entry.is_dir():
                    found.add(int(match[1]))
        return sorted(found)

    def latest(self) -> int:
        """The attempt with the newest status; without any status, the highest number."""
        heard = {attempt: [s["unix_time_s"] or 0.0 for s in self.statuses(attempt)] for attempt in self.attempts()}
        return max(heard, key=lambda attempt: (max(heard[attempt], default=0.0), attempt))

    def chosen(self, attempt: int | None) -> int:
        """``attempt``, or the latest for None. Raises InputError if there is no such attempt."""
        if attempt is None:
            return self.latest()
        if attempt not in self.attempts():
            raise InputError(f"{self.path}: attempt = {attempt}; allowed: one of {self.attempts()}")
        return attempt

    def statuses(self, attempt: int) -> list[Snapshot]:
        """The ranks' snapshots, ordered by rank, without ranks that an earlier, larger job left here."""
        place, found = self.path / STATUS / f"attempt{attempt}", []
        for path, match in _files(place, _STATUS_NAME):
            snapshot = self._read_status(path)
            if snapshot is not None and snapshot["rank"] == int(match[1]):
                found.append(snapshot)
        newest = max(found, key=lambda snapshot: snapshot["unix_time_s"] or 0.0, default=None)
        size = newest["world_size"] if newest else None
        return sorted((s for s in found if not size or s["rank"] < size), key=lambda s: int(s["rank"]))

    def segments(self, attempt: int) -> dict[int, list[Path]]:
        """The segments of every rank in their order, by rank."""
        found: dict[int, list[tuple[int, Path]]] = {}
        for path, match in _files(self.path / TRACE / f"attempt{attempt}", _SEGMENT_NAME):
            found.setdefault(int(match[1]), []).append((int(match[2]), path))
        return {rank: [path for _, path in sorted(found[rank])] for rank in sorted(found)}

    def note(self, text: str) -> None:
        """Keep a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def _read_status(self, path: Path) -> Snapshot | None:
        try:
            with path.open("rb") as stream:
                data = json.loads(stream.read(_MAX_STATUS_BYTES))
        except FileNotFoundError:
            return None  # replaced or removed meanwhile
        except (OSError, ValueError, RecursionError) as error:
            self.note(f"{path}: passed over: {getattr(error, 'strerror', None) or 'not JSON'}")
            return None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or type(data.get("rank")) is not int:
            self.note(f"{path}: passed over: not a status of schema {SCHEMA}")
            return None
        for name, kinds in (("unix_time_s", (int, float)), ("world_size", (int,))):
            if not isinstance(data.get(name), kinds) or isinstance(data.get(name), bool):
                data[name] = None
        return data


def _files(place: Path, name: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in sorted(place.iterdir()) if place.is_dir() else ():
        match = name.fullmatch(path.name)
        if match:
            yield path, match
