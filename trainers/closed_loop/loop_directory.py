"""The run directory of a closed loop. A stage is done when its ``done.json`` exists, which is written last."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceenv.core.errors import InputError
from paceenv.trainers.closed_loop.paired_blocks import Found
from paceenv.ui import output
from paceenv.ui.run_directory import LOCK, first_difference

RECORD, DONE = "loop.json", "done.json"


class LoopDirectory:
    """The stages of a loop in order, each in a directory of its own."""

    def __init__(self, path: Path, stages: Sequence[str]) -> None:
        self.path, self._stages = path, stages

    def of(self, stage: str) -> Path:
        """Where a stage keeps what it made."""
        return self.path / f"{1 + self._stages.index(stage)}-{stage}"

    def is_done(self, stage: str) -> bool:
        """Whether a stage has finished."""
        return (self.of(stage) / DONE).is_file()

    def found(self, stage: str) -> Found:
        """The result of a finished stage. Raises InputError."""
        return _read(self.of(stage) / DONE)

    def begin(self, stage: str) -> Path:
        """An empty folder for a stage, without what a loop that was killed in it left there.

        Stages behind it rest on what it will find, so they are no longer done.
        """
        folder = self.of(stage)
        for later in reversed(self._stages[self._stages.index(stage) + 1 :]):
            (self.of(later) / DONE).unlink(missing_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder

    def finish(self, stage: str, result: Found) -> None:
        """A stage is done, and this is what it found."""
        output.write_json(result, str(self.of(stage) / DONE))

    def claim(self, record: Mapping[str, Any]) -> None:
        """Make a new folder this loop's, or make sure that it is. Raises InputError where it is another's.

        ``record`` is plain data that says what the loop is about; with another one its stages would not fit together.
        """
        path = self.path / RECORD
        if not path.exists():
            begun = (LOCK, f".{RECORD}.")  # and a record that a loop was killed over
            if any(not one.name.startswith(begun) for one in self.path.iterdir()):
                raise InputError(f"{self.path}: holds something else; allowed: a new folder, or one of a loop")
        elif changed := first_difference(_read(path), json.loads(json.dumps(record))):
            raise InputError(f"{self.path}: begun with {changed}; allowed: the same, or another folder")
        output.write_json(dict(record), str(path))


def _read(path: Path) -> Found:
    try:
        result: Found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}; allowed: remove it, and its stage runs again") from None
    return result
