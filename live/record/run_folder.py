"""The folder of a run: the paths of each rank's files, and reading them, hostile ones among them.

Which files there are is in ``docs/reference/live-folder.md``. Names of attempts sort by time. A file's path says of
which attempt and rank it is. What is no regular file, or holds something else, is passed over with a note.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write, open_regular
from paceenv.core.plain import plain
from paceenv.live.observe.locality import is_gone
from paceenv.live.record.snapshot import SCHEMA, Snapshot, number, text

SUMMARY: Final = "summary.txt"
NOT_YET: Final = (
    "a job makes it within a second of its process group and first optimizer; the launcher's log names a rank that "
    "died before, and py-spy dump --pid of its ranks shows where they are"
)
SILENT_S, SILENT_PERIODS = 30.0, 5.0
"""A rank without a new status for this long, and for so many of its periods, is called silent."""
STATUS_S: Final = 2.0
"""Shortest time between two writes of a rank's status."""
FILES_PER_S: Final = 15.0
"""Files that all ranks of a job may write together: at 1,000 ranks, 8 ranks of a host replace 432 files an hour."""
MAX_STATUS_BYTES: Final = 1 << 20
ATTEMPT: Final = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")
_STATUS_NAME = re.compile(r"rank(\d{5,9})\.json")
_SEGMENT_NAME = re.compile(r"rank(\d{5,9})-(\d{3,9})\.pace")


def status_period_s(world_size: int) -> float:
    """Seconds between two writes of a rank's status; it grows with the job, so that the load on the files does not."""
    return max(STATUS_S, world_size / FILES_PER_S)


def patience_s(world_size: int) -> float:
    """Seconds without a word after which a rank of such a job is called silent."""
    return max(SILENT_S, SILENT_PERIODS * status_period_s(world_size))


def age_s(snapshot: Snapshot, now_s: float) -> float | None:
    """Seconds since a rank wrote its status; None if it does not say when."""
    written_s = number(snapshot, "unix_time_s")
    return None if written_s is None else max(now_s - written_s, 0.0)


def is_silent(snapshot: Snapshot, now_s: float) -> bool:
    """Whether a rank that has not ended has been silent for too long."""
    age = age_s(snapshot, now_s)
    return not snapshot.get("final") and age is not None and age > patience_s(int(number(snapshot, "world_size") or 1))


def rank_file(folder: Path, attempt: str, rank: int, end: str) -> Path:
    """A rank's file with this end of its name."""
    return folder / attempt / f"rank{rank:05d}{end}"


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """Data as a file of JSON; numbers that are not finite, and what JSON does not know, become null."""
    return (json.dumps(plain(data), allow_nan=False, default=lambda value: None) + "\n").encode()


def read_json(path: Path, most_bytes: int) -> Any:
    """What a regular file of JSON holds. Raises InputError for any other file, and if it cannot be read."""
    with open_regular(path, most_bytes) as stream:
        try:
            return json.loads(stream.read(most_bytes))
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise InputError(f"{path}: not JSON") from None


def write_status(folder: Path, snapshot: Mapping[str, Any]) -> None:
    """Write a rank's snapshot completely or not at all. Raises InputError."""
    path = rank_file(folder, str(snapshot["attempt"]), int(snapshot["rank"]), ".json")
    atomic_write(path, json_bytes(snapshot))


class RunFolder:
    """Reads a run's folder while it is being written, or after. Raises InputError if it is not the folder of a run.

    ``notes`` collects one line for each file that could not be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.notes: list[str] = []
        if not self.path.is_dir():
            what = "not a folder" if self.path.exists() else f"no such folder; {NOT_YET}"
            raise InputError(f"{self.path}: {what}")
        if not self.attempts():
            raise InputError(f"{self.path}: not the folder of a run: holds no attempt (like 20261123T053000-3f2a91)")

    def attempts(self) -> list[str]:
        return [entry.name for entry in _entries(self.path) if ATTEMPT.fullmatch(entry.name) and entry.is_dir()]

    def latest(self) -> str:
        return self.attempts()[-1]

    def statuses(self, attempt: str) -> list[Snapshot]:
        """The snapshots of an attempt's ranks, ordered by rank."""
        read = [(int(match[1]), self._read_status(path)) for path, match in self._files(attempt, _STATUS_NAME)]
        found = {rank: status | {"rank": rank, "attempt": attempt} for rank, status in read if status is not None}
        return [found[rank] for rank in sorted(found)]

    def segments(self, attempt: str) -> dict[int, list[Path]]:
        """The segments of every rank in their order, by rank."""
        by_rank: dict[int, list[tuple[int, Path]]] = {}
        for path, match in self._files(attempt, _SEGMENT_NAME):
            by_rank.setdefault(int(match[1]), []).append((int(match[2]), path))
        return {rank: [path for _, path in sorted(by_rank[rank])] for rank in sorted(by_rank)}

    def note(self, text: str) -> None:
        """Keep a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def _files(self, attempt: str, name: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
        return [(path, match) for path in _entries(self.path / attempt) if (match := name.fullmatch(path.name))]

    def _read_status(self, path: Path, gone: bool = False) -> Snapshot | None:
        """A rank's last snapshot, and as ``gone`` whether its process is known to have ended before it was read."""
        try:
            data = read_json(path, MAX_STATUS_BYTES)
        except InputError as error:
            if path.exists():  # else replaced or removed meanwhile
                self.note(f"{error}; passed over")
            return None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            self.note(f"{path}: passed over: not a status of schema {SCHEMA}")
            return None
        if not (gone or data.get("final")) and is_gone(text(data, "locality", "process")):
            return self._read_status(path, gone=True)
        return data | {"gone": gone}


def _entries(folder: Path) -> list[Path]:
    """What a folder holds, by name; nothing if it cannot be listed."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
