"""What lies under the paths that a user names: recordings of any format, and folders of live runs with their traces."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceenv.core.errors import InputError
from paceenv.core.trace import Trace
from paceenv.importers.formats import list_files
from paceenv.importers.inputs import Inputs, read_inputs
from paceenv.live.record.merge_segments import write_merged
from paceenv.live.record.run_folder import ATTEMPT, RunFolder
from paceenv.live.record.snapshot import Snapshot
from paceenv.live.record.summary import summarise
from paceenv.ui import output


@dataclass(frozen=True)
class Recordings:
    """Files whose formats ``read_inputs`` knows, and folders of live runs; of a run its latest attempt."""

    files: tuple[Path, ...]
    runs: tuple[Path, ...]

    def pages(self) -> dict[Path, str]:
        """The page of each live run: where the step went, which rank waits for which, what pacing did."""
        statuses = {path: _statuses(path) for path in self.runs}
        return {path: summarise(snapshots) for path, snapshots in statuses.items() if snapshots}

    def read(self, pattern: str | None = None, max_rows: int | None = None) -> Inputs:
        """All that is usable; the ranks' segments of a live run are merged into one trace."""
        if not self.runs:
            return read_inputs(self.files, pattern=pattern, max_rows=max_rows)
        notes: list[str] = []
        with tempfile.TemporaryDirectory() as folder:
            merged = dict[Path, Path]()
            for k, path in enumerate(self.runs):
                run, trace = RunFolder(path), Path(folder) / str(k) / f"{path.name or 'run'}.parquet"
                trace.parent.mkdir()
                try:
                    write_merged(run, trace)
                    merged[trace] = path
                except InputError as error:
                    notes.append(str(error))
                notes += run.notes
            try:
                inputs = read_inputs([*self.files, *merged], pattern=pattern, max_rows=max_rows)
            except InputError as error:
                why = str(error) if self.files or not notes else notes[0]
                if not any(map(_statuses, self.runs)):
                    raise InputError(why) from None
                inputs = Inputs(None, why_no_trace=why)
        several = tuple(merged.get(path, path) for path in inputs.several_traces)
        if len(self.runs) > 1 and len(merged) == 1 and not self.files:
            inputs.run = next(iter(merged.values()))
        return replace(inputs, notes=(*notes, *inputs.notes), several_traces=several)


def read_trace(paths: Sequence[str | Path]) -> Trace:
    """The trace that lies there; says what is to know of it. Raises InputError where there is none."""
    inputs = find_recordings(paths).read()
    for note in inputs.notes:
        output.say(note)
    return inputs.require_trace()


def find_recordings(paths: Sequence[str | Path]) -> Recordings:
    """Look at what lies there, unread. Raises InputError if there is no file."""
    files = list_files(paths)
    above = (
        next((one.parent for one in path.absolute().parents if ATTEMPT.fullmatch(one.name)), None) for path in files
    )
    runs = tuple(dict.fromkeys(run for run in above if run is not None))
    if not runs:
        return Recordings(tuple(map(Path, paths)), ())
    return Recordings(tuple(path for path in files if not set(runs) & set(path.absolute().parents)), runs)


def _statuses(path: Path) -> list[Snapshot]:
    run = RunFolder(path)
    return run.statuses(run.latest())
