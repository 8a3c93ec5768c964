"""From what was read to one verdict: the answer, the fitted cluster, the policies on it, the absolute checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceenv.core.errors import needs
from paceenv.core.trace import Trace
from paceenv.diagnosis.absolute import AbsoluteCheck, check_flops, check_links
from paceenv.diagnosis.answer import Answer
from paceenv.diagnosis.verdict import Pacing, Verdict, conclude
from paceenv.importers.nccl_tests import Table

if TYPE_CHECKING:
    from paceenv.trainers.report.fitted import Fitted, Paced

POLICIES = ("paper", "learned")
"""Always compared; others by option."""
NOT_ASKED = "not asked for"


@dataclass(frozen=True)
class Flops:
    """What the user says of the hardware: operations of a step of the whole job, and a device's peak a second."""

    per_step: float | None = None
    peak: float | None = None

    def check(self, ranks: int, step_s: float) -> list[AbsoluteCheck]:
        """The share of the peak, where it was asked for. Raises InputError.

        Args:
            ranks: number of ranks of the job.
            step_s: mean step, seconds.
        """
        if self.per_step is None and self.peak is None:
            return []
        return [check_flops(self.per_step, self.peak, ranks, step_s)]


NO_FLOPS = Flops()


@dataclass(frozen=True)
class Conclusion:
    """The verdict on a trace and what it rests on; a missing cluster or missing policies are the reason, in words."""

    verdict: Verdict
    fitted: Fitted | str
    policies: list[Paced] | str
    checks: tuple[AbsoluteCheck, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data: the headline, and what was simulated."""
        policies = [] if isinstance(self.policies, str) else [one.as_dict() for one in self.policies]
        return {
            "verdict": self.verdict.text,
            "headline": self.verdict.to_json() | {"checks": [check.to_json() for check in self.checks]},
            "policies": policies,
            "not_simulated": self.policies if isinstance(self.policies, str) else None,
        }


def conclude_answer(
    answer: Answer,
    trace: Trace,
    source: str,
    job: str | None = None,
    *,
    policies: Sequence[str] = POLICIES,
    tables: Sequence[Table] = (),
    flops: Flops = NO_FLOPS,
    on_done: Callable[[int], None] = lambda done: None,
) -> Conclusion:
    """Fit, simulate, check, conclude.

    Args:
        answer: of the trace; it has a diagnosis.
        trace: the trace.
        source: its name, for messages.
        job: which job, where the trace holds several.
        policies: to simulate; none of them: no simulation.
        tables: of nccl-tests, to compare collectives with.
        flops: for the share of the peak.
        on_done: called with the number of policies done.

    Raises:
        InputError: flops that cannot be.
    """
    diagnosis, matrix = answer.diagnosis, answer.matrix
    assert diagnosis is not None, "there is a trace"
    assert matrix is not None, "there is a trace"
    checks = (*flops.check(len(matrix.ranks), diagnosis.step_time_s), *check_links(matrix, tables))
    fitted: Fitted | str = NOT_ASKED
    if policies:
        from paceenv.trainers.report.fitted import fit  # the simulator, which a hang or a log does not need

        fitted = fit(trace, source, job, frozenset(cause.cause for cause in diagnosis.causes))
    paced = fitted if isinstance(fitted, str) else _compared(fitted, policies, on_done)
    if isinstance(paced, str) or isinstance(fitted, str):
        pacing = Pacing(why_not=str(paced))
    else:
        gains = tuple((one.policy, one.gain) for one in paced)
        pacing = Pacing(gains, doubt=fitted.short_doubt)
    return Conclusion(conclude(diagnosis, pacing, checks), fitted, paced, checks)


def _compared(fitted: Fitted, policies: Sequence[str], on_done: Callable[[int], None]) -> list[Paced] | str:
    from paceenv.trainers.report.fitted import compare

    try:
        return compare(fitted, policies, on_done)
    except ModuleNotFoundError as error:  # the released policy's file needs a library that the simulator does not
        return str(needs("the comparison", error.name, "train"))
