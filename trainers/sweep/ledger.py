"""The record of a sweep: a header, then a line of JSON for every trial that has ended, each on disk before the next.

A resumed sweep needs nothing else, and it is data only: Ray's own state is a pickle and is never read. A line that was
cut short by a kill does not count, and its trial runs again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.ui.run_directory import first_difference

FORMAT = "paceenv.sweep/1"
NAME = "ledger.jsonl"
Row = dict[str, Any]
"""``trial`` (its number), ``work``, ``status`` (done or failed), ``result`` or ``error``, and ``ran``: how it went."""


class Ledger:
    """The ledger of a run directory.

    Args:
        folder: the directory.
        header: config, inputs and versions of the sweep.
        rows: trials that have ended, by their number.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any], rows: Mapping[int, Row]) -> None:
        self.header, self.rows = dict(header), dict(rows)
        self.folder, self.path = folder, folder / NAME

    @classmethod
    def begin(cls, folder: Path, header: Mapping[str, Any]) -> Ledger:
        """A new ledger. Raises InputError where there is one, or where it cannot be written.

        Args:
            folder: of the sweep.
            header: what the sweep is about.
        """
        if (folder / NAME).exists():
            raise InputError(f"{folder}: holds a sweep; allowed: another folder, or --resume")
        plain = {"format": FORMAT, **header}
        atomic_write(folder / NAME, _line(plain))
        return cls(folder, json.loads(_line(plain)), {})

    @classmethod
    def read(cls, folder: Path) -> Ledger:
        """The ledger that is there; nothing is changed. Raises InputError."""
        header, rows, _ = _read(folder / NAME)
        return cls(folder, header, rows)

    @classmethod
    def resume(cls, folder: Path, header: Mapping[str, Any]) -> Ledger:
        """The ledger that is there, to be written on: of the same sweep, and without a line that was cut short.

        Raises InputError, which names the first thing that differs from ``header``.

        Args:
            folder: of the sweep.
            header: what the sweep is about.
        """
        theirs, rows, length = _read(folder / NAME)
        for part in ("config", "inputs"):
            known = theirs.get(part) if part == "inputs" else None
            if changed := first_difference(theirs.get(part), as_far_as(known, json.loads(_line(header[part])))):
                raise InputError(f"{folder}: begun with {changed}; allowed: the same, or another folder")
        if length < (folder / NAME).stat().st_size:
            os.truncate(folder / NAME, length)
        return cls(folder, theirs, rows)

    def add(self, row: Row) -> None:
        """Append a trial and sync it to the disk, whole or not at all. Raises InputError where that fails."""
        assert row["trial"] not in self.rows, f"trial {row['trial']} was recorded already"
        line = _line(row)
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            before = os.fstat(descriptor).st_size
            try:
                if (written := os.write(descriptor, line)) < len(line):
                    os.write(descriptor, line[written:])  # raises with the reason
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, before)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {error.strerror}") from None
        self.rows[row["trial"]] = json.loads(line)

    def result(self, number: int) -> dict[str, Any] | None:
        """The result of a recorded trial; None where it failed."""
        found: dict[str, Any] | None = self.rows[number].get("result")
        return found


def _line(data: Any) -> bytes:
    return (json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n").encode()


def _read(path: Path) -> tuple[dict[str, Any], dict[int, Row], int]:
    """Header, rows, and the length in bytes of all complete lines."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path.parent}: holds no sweep; allowed: the folder of one") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    length = content.rfind(b"\n") + 1
    lines = content[:length].splitlines()
    try:
        header, *rows = (json.loads(line) for line in lines)
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}; allowed: {FORMAT!r}")
        return header, {row["trial"]: row for row in rows}, length
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a sweep's ledger: {error}") from None


def as_far_as(known: Any, inputs: Any) -> Any:
    """The inputs of a sweep that a ledger has on record; older ledgers have fewer.

    Args:
        known: those on record; None: whatever there is.
        inputs: those of now.
    """
    return inputs if known is None else {key: value for key, value in inputs.items() if key in known}
