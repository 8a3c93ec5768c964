"""The diagnosis of a trace: slowdown, whose it is, causes, and a verdict in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from paceenv.core.trace import Trace
from paceenv.diagnosis.attribution import Layers, split
from paceenv.diagnosis.causes import PACING_MAY_HELP, Cause, name_causes
from paceenv.diagnosis.dependency_graph import build_graph
from paceenv.diagnosis.graph_replay import own_durations, replay
from paceenv.diagnosis.ideal_replay import Attribution, attribute, ideal_durations
from paceenv.diagnosis.operation_matrix import Cells, read_cells

LEAST_STEPS: Final = 3
"""Fewer show nothing that lasts or recurs."""
LEAST_OPERATIONS: Final = 8
"""Compute operations of a rank in all steps together; fewer do not tell what is usual."""
INSUFFICIENT: Final = "insufficient evidence"
HEALTHY: Final = "healthy"


@dataclass(frozen=True)
class Diagnosis:
    """``slowdown`` is that of the replay (``paceenv.diagnosis.ideal_replay``), ``step_time_s`` the measured mean step.

    ``bare_step_s`` is the mean step without what any cause adds (``paceenv.diagnosis.attribution``): what causes cost,
    those too small to be named included, is the difference to the measured one. None without sufficient evidence.
    """

    slowdown: float
    ideal_step_time_s: float
    step_time_s: float
    attribution: Attribution
    causes: tuple[Cause, ...]
    verdict: str
    bare_step_s: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain data, as ``paceenv diagnose --json`` prints it."""
        a = self.attribution
        named: dict[str, Mapping[Any, float]] = {"rank": a.rank, "stage": a.stage, "operation": a.operation}
        named |= {"worker": a.worker, "step": a.step}
        return {
            "slowdown": self.slowdown,
            "ideal_step_time_s": self.ideal_step_time_s,
            "step_time_s": self.step_time_s,
            "attribution": {key: {str(k): v for k, v in values.items()} for key, values in named.items()},
            "causes": [
                {"cause": c.cause, "share": c.share, "evidence": c.evidence, "advice": c.advice} for c in self.causes
            ],
            "verdict": self.verdict,
        }


def diagnose(trace: Trace, *, job: str | None = None) -> Diagnosis:
    """Diagnose one job of a trace; ``job`` must be named where it holds several. Raises InputError."""
    return diagnose_cells(read_cells(trace, job=job))


def diagnose_cells(cells: Cells) -> Diagnosis:
    """As :func:`diagnose`, of a trace that has been read."""
    graph = build_graph(cells)
    own_NT = own_durations(cells, graph)
    ideal_NT = ideal_durations(cells, own_NT)
    ideal_s, replayed_s = (float(replay(graph, d).mean()) for d in (ideal_NT, own_NT))
    why_not = _insufficient(cells)
    causes: tuple[Cause, ...] = ()
    bare_s = None
    if why_not:
        verdict = f"{INSUFFICIENT}: {why_not}"
    else:
        layers = split(cells, graph, own_NT)
        causes = name_causes(cells, layers)
        verdict, bare_s = _verdict(layers, causes), layers.base_s
    return Diagnosis(
        slowdown=replayed_s / ideal_s if ideal_s > 0.0 else 1.0,
        ideal_step_time_s=ideal_s,
        step_time_s=float(cells.step_s_T.mean()),
        attribution=attribute(cells, graph, own_NT, ideal_NT),
        causes=causes,
        verdict=verdict,
        bare_step_s=bare_s,
    )


def _insufficient(cells: Cells) -> str:
    if cells.steps < LEAST_STEPS:
        return f"{cells.steps} steps, of which nothing lasting can be seen; at least {LEAST_STEPS} are needed"
    computes = int((cells.is_compute_N & cells.usual_N).sum()) * cells.steps // len(cells.ranks)
    if 0 < computes < LEAST_OPERATIONS:
        return f"{computes} compute operations of a rank in {cells.steps} steps; at least {LEAST_OPERATIONS} are needed"
    if len(cells.ranks) < 2:
        return "one rank, which has no peer to be compared with; give the traces of all ranks"
    if not (cells.is_compute_N & cells.usual_N & (cells.duration_NT > 0.0).any(axis=1)).any():
        return "no compute operations that take any time, so that nothing says who is late and why"
    if not (cells.is_collective_N | cells.is_transfer_N).any():
        return "no collectives, so that nothing says who waits for whom"
    if not np.all(cells.step_s_T > 0.0):
        return "steps that take no time"
    return ""


def _verdict(layers: Layers, causes: tuple[Cause, ...]) -> str:
    open_ = [k for k in layers.transfers.classes if k.contended is None and k.groups > 1]
    doubt = ""
    if open_:
        doubt = (
            f"; whether the {open_[0].groups} groups of {open_[0].op} contend with each other the trace cannot tell "
            "(a probe can)"
        )
    if not causes:
        return f"{HEALTHY}: no cause costs as much as 2 % of a step{doubt}"
    first = causes[0]
    text = f"{first.cause} costs {first.lost_s / layers.measured_s:.0%} of the step"
    if len(causes) > 1:
        text += " (" + ", ".join(f"{c.cause} {c.lost_s / layers.measured_s:.0%}" for c in causes[1:3]) + " besides)"
    may = [c for c in causes if c.cause in PACING_MAY_HELP]
    pacing = "pacing may help against " + " and ".join(c.cause for c in may) if may else "pacing has nothing to exploit"
    return f"{text}: {first.advice.removeprefix('pacing will not help: ')}; {pacing}{doubt}"
