"""From what was read to one verdict: the answer, the fitted cluster, the policies on it, the absolute checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceenv.core.errors import needs
from paceenv.diagnosis.absolute import AbsoluteCheck, check_links
from paceenv.diagnosis.answer import Answer
from paceenv.diagnosis.verdict import Pacing, Verdict, conclude
from paceenv.importers.inputs import Inputs

if TYPE_CHECKING:
    from paceenv.report.fitted import Fitted, Paced

POLICIES = ("paper", "learned")
"""Always compared; others by option."""
NOT_ASKED = "not asked for"


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
    inputs: Inputs,
    source: str,
    job: str | None = None,
    *,
    policies: Sequence[str] = POLICIES,
    on_done: Callable[[int], None] = lambda done: None,
) -> Conclusion:
    """Fit, simulate, check, conclude."""
    diagnosis, matrix, trace = answer.diagnosis, answer.matrix, inputs.require_trace()
    assert diagnosis is not None, "there is a trace"
    assert matrix is not None, "there is a trace"
    checks = check_links(matrix, inputs.tables)
    fitted: Fitted | str = NOT_ASKED
    if policies:
        from paceenv.report.fitted import fit  # the simulator, which a hang or a log does not need

        fitted = fit(trace, source, job, frozenset(cause.cause for cause in diagnosis.causes))
    paced = fitted if isinstance(fitted, str) else _compared(fitted, policies, on_done)
    if isinstance(paced, str) or isinstance(fitted, str):
        pacing = Pacing(why_not=str(paced))
    else:
        pacing = Pacing(tuple((one.policy, one.gain) for one in paced), doubt=fitted.doubt)
    return Conclusion(conclude(diagnosis, pacing, checks), fitted, paced, tuple(checks))


def _compared(fitted: Fitted, policies: Sequence[str], on_done: Callable[[int], None]) -> list[Paced] | str:
    from paceenv.report.fitted import compare

    try:
        return compare(fitted, policies, on_done)
    except ModuleNotFoundError as error:  # the released policy's file needs a library that the simulator does not
        return str(needs("the comparison", error.name, "train"))
