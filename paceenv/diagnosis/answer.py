"""All that can be said of what was read: the diagnosis of a trace, who turned late when, hosts, hangs, step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from paceenv.core.errors import InputError
from paceenv.core.operation_matrix import OperationMatrix
from paceenv.core.plain import plain
from paceenv.diagnosis.causes import Cause
from paceenv.diagnosis.diagnose import diagnose_matrix, with_agent
from paceenv.diagnosis.hang import Hang, find_hangs
from paceenv.diagnosis.host_activity import LateHost, find_late_hosts, one_rank
from paceenv.diagnosis.lateness_over_time import LatenessOverTime, find_lateness
from paceenv.diagnosis.verdict import Diagnosis
from paceenv.importers.clocks import matrix_on_one_clock
from paceenv.importers.inputs import Inputs

if TYPE_CHECKING:
    from paceenv.diagnosis.step_times.step_diagnosis import StepDiagnosis


@dataclass(frozen=True)
class Answer:
    """Whatever the inputs allow; None or empty where they hold nothing of the kind."""

    notes: tuple[str, ...] = ()  # on the inputs and on clocks, a line each
    matrix: OperationMatrix | None = None  # the job's trace on one clock
    diagnosis: Diagnosis | None = None  # slowdown, causes, verdict, and who arrived last
    lateness: LatenessOverTime | None = None  # when ranks turned late; of a trace without an agent's word
    late_hosts: tuple[LateHost, ...] = ()  # what late ranks' hosts did; of profiles
    hangs: tuple[Hang, ...] = ()  # jobs that hang, or dumps of which nothing hangs
    ended: tuple[str, ...] = ()  # how the job died or stands still, as texts say it, a sentence each
    steps: tuple[StepDiagnosis, ...] = ()  # what step times alone allow; of text logs, one per job

    def to_json(self) -> dict[str, Any]:
        """Plain data, as ``paceenv diagnose --json`` prints it; that of a log alone is that of its step times."""
        if self.diagnosis is None and len(self.steps) == 1 and not (self.hangs or self.ended):
            return self.steps[0].to_json()
        data = plain(self.diagnosis) if self.diagnosis is not None else {}
        data["notes"] = [*self.notes, *data.get("notes", ())]
        more: dict[str, Any] = {
            "lateness": self.lateness,
            "late_hosts": self.late_hosts,
            "hang": self.hangs,
            "ended": self.ended,
            "step_times": self.steps,
        }
        return data | {name: one for name, one in more.items() if one}


def find_answer(inputs: Inputs, job: str | None = None) -> Answer:
    """Diagnose everything that was read; what cannot be diagnosed is named in a note beside what can."""
    hangs = find_hangs(inputs.dumps)
    steps: list[StepDiagnosis] = []
    failed: list[InputError] = []
    if inputs.steps:  # what few need brings libraries that take a second to import
        from paceenv.diagnosis.step_times.step_diagnosis import diagnose_steps

        for log in inputs.steps:
            try:
                steps.append(diagnose_steps(log))
            except InputError as error:
                failed.append(error)
    broke_off = bool(inputs.ended) or any(hang.hangs for hang in hangs)
    notes, matrix, diagnosis, lateness = inputs.notes, None, None, None
    late_hosts: tuple[LateHost, ...] = ()
    if inputs.trace is not None:
        try:
            matrix, clocks = matrix_on_one_clock(inputs.trace, job=job)
        except InputError as error:
            if job is not None:
                raise
            failed.append(error)
        else:
            notes = (*notes, clocks) if clocks else notes
            about = inputs.trace.metadata
            diagnosis = with_agent(diagnose_matrix(matrix), about.job)
            if matrix.steps > 1 and not diagnosis.agent:  # else the agent has said it, from all that it measured
                lateness = find_lateness(matrix, named=diagnosis.arrivals.named)
            error_s = about.job.get("clock_error_s", 0.0)
            late_hosts = find_late_hosts(matrix, diagnosis.arrivals, inputs.activity, clock_error_s=error_s)
            causes = tuple(_cured(cause, late_hosts) for cause in diagnosis.causes)
            alone = f"; {one_rank(inputs.activity)}" if len(matrix.ranks) < 2 and inputs.activity else ""
            died, refused = diagnosis.ended or broke_off, diagnosis.refused + alone
            diagnosis = replace(diagnosis, ended=died, refused=refused, causes=causes)
    elif inputs.why_no_trace and not any(hang.hangs for hang in hangs):
        notes = (*notes, f"no steps: {inputs.why_no_trace}")
    last = (f"the last step in {one.log.name} is {one.log.step_V.max()}" for one in steps if broke_off)
    ended = (*inputs.ended, *last)
    if not (hangs or steps or diagnosis or ended):
        if failed:
            raise failed[0]
        inputs.require_trace()
    notes = (*notes, *map(str, failed))
    return Answer(notes, matrix, diagnosis, lateness, late_hosts, hangs, ended, tuple(steps))


def _cured(cause: Cause, late_hosts: Sequence[LateHost]) -> Cause:
    """The cause of a late rank with the advice for its host or device, where a profile shows what these did."""
    cures = [f"{one.cure} (rank {one.rank})" for one in late_hosts if one.rank in cause.ranks and one.cure]
    return replace(cause, advice="; ".join(cures)) if cures else cause


MAX_ROWS: Final = 2_000_000
"""Rows of a trace in memory; with everything computed from them less than a gigabyte."""
