"""The diagnosis of a trace: slowdown, ranks and operations behind it, causes, and a verdict in one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from paceenv.core.trace import Trace
from paceenv.diagnosis.attribution import TimeAttribution, split
from paceenv.diagnosis.causes import PACING_MAY_HELP, Cause, name_causes
from paceenv.diagnosis.dependency_graph import build_graph
from paceenv.diagnosis.graph_replay import own_durations, replay
from paceenv.diagnosis.ideal_replay import SlowdownAttribution, attribute, ideal_durations
from paceenv.diagnosis.operation_matrix import OperationMatrix, read_matrix

MIN_STEPS: Final = 3
"""With fewer steps nothing that lasts or recurs is visible."""
MIN_OPERATIONS: Final = 8
"""Compute operations of a rank in all steps together; fewer do not show what is usual."""
INSUFFICIENT: Final = "insufficient evidence"
HEALTHY: Final = "healthy"


@dataclass(frozen=True)
class Diagnosis:
    """What the trace shows; times are seconds of a mean step.

    ``slowdown`` is that of the replay (``paceenv.diagnosis.ideal_replay``), ``step_time_s`` the measured mean step.
    ``bare_step_s`` is the mean step without any cause (``paceenv.diagnosis.attribution``); the difference to the
    measured one is the cost of all causes, including those too small to be named. None without sufficient evidence.
    """

    slowdown: float
    ideal_step_time_s: float
    step_time_s: float
    attribution: SlowdownAttribution
    causes: tuple[Cause, ...]
    verdict: str
    bare_step_s: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain data, as ``paceenv diagnose --json`` prints it."""
        return {
            "slowdown": self.slowdown,
            "ideal_step_time_s": self.ideal_step_time_s,
            "step_time_s": self.step_time_s,
            "attribution": {
                key: {str(k): v for k, v in values.items()} for key, values in vars(self.attribution).items()
            },
            "causes": [{k: v for k, v in vars(c).items() if k != "lost_s"} for c in self.causes],
            "verdict": self.verdict,
        }


def diagnose(trace: Trace, *, job: str | None = None) -> Diagnosis:
    """Diagnose one job of a trace; ``job`` must be named where it holds several. Raises InputError."""
    return diagnose_matrix(read_matrix(trace, job=job))


def diagnose_matrix(matrix: OperationMatrix) -> Diagnosis:
    """As :func:`diagnose`, for a trace that was read before."""
    graph = build_graph(matrix)
    own_NT = own_durations(matrix, graph)
    ideal_NT = ideal_durations(matrix, own_NT)
    ideal_s, replayed_s = (float(replay(graph, d).mean()) for d in (ideal_NT, own_NT))
    why_not = _insufficient(matrix)
    causes: tuple[Cause, ...] = ()
    bare_s = None
    if why_not:
        verdict = f"{INSUFFICIENT}: {why_not}"
    else:
        attribution = split(matrix, graph, own_NT)
        causes = name_causes(matrix, attribution)
        verdict, bare_s = _verdict(attribution, causes), attribution.base_s
    return Diagnosis(
        slowdown=replayed_s / ideal_s if ideal_s > 0.0 else 1.0,
        ideal_step_time_s=ideal_s,
        step_time_s=float(matrix.step_s_T.mean()),
        attribution=attribute(matrix, graph, own_NT, ideal_NT),
        causes=causes,
        verdict=verdict,
        bare_step_s=bare_s,
    )


def _insufficient(matrix: OperationMatrix) -> str:
    if matrix.steps < MIN_STEPS:
        return f"{matrix.steps} steps are too few to see anything lasting; at least {MIN_STEPS} are needed"
    computes = int((matrix.is_compute_N & matrix.usual_N).sum()) * matrix.steps // len(matrix.ranks)
    if 0 < computes < MIN_OPERATIONS:
        return f"{computes} compute operations of a rank in {matrix.steps} steps; at least {MIN_OPERATIONS} are needed"
    if len(matrix.ranks) < 2:
        return "one rank, without a peer to compare it with; give the traces of all ranks"
    if not (matrix.is_compute_N & matrix.usual_N & (matrix.duration_NT > 0.0).any(axis=1)).any():
        return "no compute operation takes any time, so no rank can be late"
    if not (matrix.is_collective_N | matrix.is_transfer_N).any():
        return "no collectives, so no rank waits for another"
    if not np.all(matrix.step_s_T > 0.0):
        return "steps that take no time"
    return ""


def _verdict(attribution: TimeAttribution, causes: tuple[Cause, ...]) -> str:
    open_ = [k for k in attribution.transfers.classes if k.contended is None and k.groups > 1]
    doubt = ""
    if open_:
        doubt = (
            f"; the trace does not identify whether the {open_[0].groups} groups of {open_[0].op} contend with each "
            "other (a probe does)"
        )
    if not causes:
        return f"{HEALTHY}: no cause costs as much as 2 % of a step{doubt}"
    first = causes[0]
    text = f"{first.cause} costs {first.lost_s / attribution.measured_s:.0%} of the step"
    if len(causes) > 1:
        text += (
            " (" + ", ".join(f"{c.cause} {c.lost_s / attribution.measured_s:.0%}" for c in causes[1:3]) + " besides)"
        )
    may = [c for c in causes if c.cause in PACING_MAY_HELP]
    pacing = "pacing may help against " + " and ".join(c.cause for c in may) if may else "pacing has nothing to exploit"
    return f"{text}: {first.advice.removeprefix('pacing will not help: ')}; {pacing}{doubt}"
