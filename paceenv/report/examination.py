"""What ``paceenv diagnose`` and ``report`` find: all that lies under some paths, and one verdict on it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceenv.core.errors import InputError
from paceenv.diagnosis.answer import MAX_ROWS, Answer, find_answer
from paceenv.diagnosis.causes import SLOW_RANK
from paceenv.diagnosis.verdict import Pacing, Verdict, conclude
from paceenv.importers.inputs import Inputs
from paceenv.report.answer_sections import answer_sections
from paceenv.report.recordings import find_recordings
from paceenv.report.section import Section
from paceenv.ui import output
from paceenv.ui.output import sentence

if TYPE_CHECKING:  # what few need brings libraries that take a second to import
    from paceenv.diagnosis.two_runs import Change
    from paceenv.whatif.baseline import Baseline

POLICIES = ("paper", "learned")
"""Always compared; others by option."""
NOT_ASKED = "not asked for"
PATTERN_HELP = (
    "For text logs of other programs: a regular expression with a named group for the step time, (?P<s>..) or "
    "(?P<ms>..); or for a speed, (?P<steps_per_s>..); or for a running clock, (?P<elapsed_s>..); beside it "
    "(?P<step>..)."
)


@dataclass(frozen=True)
class Examination:
    """All of it; None or empty where nothing of the kind lies there."""

    paths: Sequence[Path]
    inputs: Inputs
    answer: Answer
    runs: dict[str, str]  # the page of each live run
    links: dict[str, str]  # the law of each bandwidth table, in words
    verdict: Verdict | None  # on a trace that was diagnosed
    pacing: Pacing  # what policies gained on the cluster fitted to it
    baseline: Baseline | None  # the job on that cluster
    changes: tuple[Change, ...]  # against an earlier run, or between two logs
    compared: Section | None  # the same for people

    @property
    def notes(self) -> list[str]:
        """On the inputs, and on what was left out, a line each."""
        notes = [*self.answer.notes, *(self.answer.diagnosis.notes if self.answer.diagnosis else ())]
        return [*notes, *(note for one in self.answer.steps for note in one.log.notes)]

    def to_json(self) -> dict[str, Any]:
        data = self.answer.to_json()
        if self.verdict is not None:
            policies, why_not = self.pacing.policies, self.pacing.why_not or None
            data |= {"verdict": self.verdict.text, "headline": self.verdict.to_json()}
            data |= {"policies": policies, "not_simulated": why_not}
        data |= {"runs": self.runs, "links": self.links, "next": self.next}
        return data | {"changes": self.changes} if self.changes else data

    def sections(self) -> list[Section]:
        sections = answer_sections(self.answer, self.verdict, self.inputs.activity, str(self.paths[0]))
        sections += [self.compared] if self.compared is not None else []
        if self.links:
            sections.append(Section("Links", [f"{source}: {law}" for source, law in self.links.items()]))
        return sections

    @property
    def next(self) -> list[str]:
        """Commands that work when typed, the most useful first."""
        words, steps, answer = shlex.join(map(str, self.paths)), list[str](), self.answer
        if answer.diagnosis is not None and self.verdict is not None and self.baseline is not None:
            causes, late = answer.diagnosis.causes, answer.diagnosis.late
            late = late or tuple(one.rank for one in answer.diagnosis.arrivals.late)
            is_slow = late and late[0] in (self.baseline.slow or ())
            if is_slow and causes and causes[0].cause == SLOW_RANK and not self.baseline.unexplained_s:
                steps.append(f"paceenv whatif {words} --replace-rank {late[0]}")
            stands = answer.diagnosis.ended or answer.diagnosis.refused
            if self.verdict.claim in {"helps", "is open"} and not stands and len(self.paths) == 1:
                steps.append(f"paceenv train --job {words} -o runs/mine")
        if answer.matrix is not None:
            steps.append(f"paceenv report {words} -o report.html")
        for source, law in list(self.links.items())[:1]:
            if "law holds for neither" not in law:
                steps.append(f"paceenv calibrate {shlex.quote(source.partition(', table ')[0])} -o links.yaml")
        return steps


def examine(
    paths: Sequence[Path],
    *,
    pattern: str | None = None,
    against: Path | None = None,
    job: str | None = None,
    policies: Sequence[str] = POLICIES,
    on_page: Callable[[str], None] = lambda page: None,
) -> Examination:
    recordings = find_recordings(paths)
    runs = {str(path): page for path, page in recordings.pages().items()}
    for run, page in runs.items():
        on_page(f"{run}\n{page}" if len(runs) > 1 else page)  # at once, as all else may take minutes
    inputs = recordings.read(pattern, MAX_ROWS)
    pair = paths if len(paths) == 2 else () if inputs.steps or inputs.dumps else inputs.several_traces
    if inputs.apart and against is None and len(pair) == 2:
        against, paths = pair[0], pair[1:]
        inputs = find_recordings(paths).read(pattern, MAX_ROWS)
    if inputs.run is not None:
        paths = [inputs.run]
    if inputs.several_traces:
        one = shlex.quote(str(inputs.several_traces[0]))
        raise InputError(f"{inputs.say_several()}, or two, which are compared: paceenv diagnose {one}")
    earlier = None if against is None else find_recordings([against]).read(pattern, MAX_ROWS)
    links = _links(inputs, earlier)
    answer, compared = Answer(inputs.notes), _NOTHING
    if inputs.trace is not None or inputs.dumps or inputs.ended or inputs.steps or not (runs or links):
        with output.progress("diagnose"):
            answer = find_answer(inputs, job)
        compared = _changes(inputs, answer, earlier, (str(against), str(paths[0])))
    verdict, baseline, pacing = None, None, Pacing(why_not=NOT_ASKED)
    if answer.diagnosis is not None:
        if policies:
            from paceenv.report.fitted import try_policies  # the simulator, which a hang or a log does not need

            with output.progress("fit a cluster, simulate pacing", 1) as done:
                trace, source = inputs.require_trace(), str(paths[0])
                baseline, pacing = try_policies(trace, source, job, answer.diagnosis, policies, done)
        verdict = conclude(answer.diagnosis, pacing)
    return Examination(paths, inputs, answer, runs, links, verdict, pacing, baseline, *compared)


_Changes = tuple[tuple["Change", ...], Section | None]
_NOTHING: _Changes = ((), None)


def _changes(inputs: Inputs, answer: Answer, earlier: Inputs | None, names: tuple[str, str]) -> _Changes:
    """Against an earlier run, or between the two logs that were given."""
    if earlier is None and len(answer.steps) != 2:
        return _NOTHING
    from paceenv.diagnosis.two_runs import compare, headline, of_log, of_trace

    before = find_answer(earlier) if earlier is not None else None
    if before is not None and earlier is not None and before.matrix is not None and answer.matrix is not None:
        changes = compare(of_trace(before.matrix, earlier.activity), of_trace(answer.matrix, inputs.activity))
    else:
        logs = [one.log for one in answer.steps]
        if earlier is not None:
            logs = [log for log in (earlier.one_log(), inputs.one_log()) if log is not None]
        if len(logs) != 2:
            raise InputError("the runs are not of the same kind; allowed: two logs, or two traces")
        names = names if earlier is not None else (logs[0].name, logs[1].name)
        changes = compare(*map(of_log, logs))
    columns = ("what", "before", "after", "change", "")
    said, rows = sentence(headline(changes)), [one.row() for one in changes]
    return changes, Section(" and ".join(names), [said], columns, rows) if changes else None


def _links(inputs: Inputs, earlier: Inputs | None) -> dict[str, str]:
    """The law of each bandwidth table."""
    tables = (*(earlier.tables if earlier is not None else ()), *inputs.tables)
    if not tables:
        return {}
    from paceenv.calibration.bandwidth import fit_bandwidth  # SciPy, which takes a second to import

    return {table.source: fit_bandwidth(table).text for table in tables}
