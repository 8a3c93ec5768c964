"""What ``paceenv diagnose`` prints about a trace: the headline, its causes, slowdowns."""

from __future__ import annotations

from typing import Final

from paceenv.diagnosis.diagnose import Diagnosis
from paceenv.diagnosis.verdict import Verdict
from paceenv.ui import output

_MAX_ROWS: Final = 8


def print_diagnosis(found: Diagnosis, verdict: Verdict, name: str) -> None:
    """Print causes with what to do, the headline, and slowdowns.

    Args:
        found: the diagnosis.
        verdict: the conclusion from it.
        name: of the trace.
    """
    rows = [(c.cause, f"{c.share:.0%}", f"{c.lost_s:.4g}", c.evidence, verdict.advice(c)) for c in found.causes]
    known = found.bare_step_s is not None and found.causes
    bare = f" ({found.bare_step_s:.4g} s without any cause)" if known else ""
    ideal = ""
    if found.ideal_step_time_s is not None:
        ideal = (
            f"{bare}, with all workers equal {found.ideal_step_time_s:.4g} s (slowdown {found.slowdown:.3f}; "
            f"replayed within {max(abs(found.replay_error), 1e-3):.1%})"
        )
    for note in found.notes:
        output.say(note)
    title = f"{name}: mean step {found.step_time_s:.4g} s{ideal}"
    output.print_table(title, ("cause", "of lost time", "s a step", "evidence", "advice"), rows, headline(verdict))
    a = found.attribution
    if a is None:
        return
    for what, values in (("rank", a.rank), ("stage", a.stage), ("operation", a.operation)):
        worst = sorted(values.items(), key=lambda item: -item[1])[:_MAX_ROWS]
        if len(values) > 1:
            output.print_table(
                f"Slowdown with only one {what}'s own durations",
                (what, "slowdown"),
                [(str(k), f"{v:.3f}") for k, v in worst],
            )


def headline(verdict: Verdict) -> str:
    """A verdict as sentences."""
    parts = (verdict.lost, verdict.said, *verdict.checks)
    return " ".join(f"{part[:1].upper()}{part[1:]}." for part in parts)
