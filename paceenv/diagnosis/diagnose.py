"""The diagnosis of a trace: slowdown, ranks and operations behind it, causes, and a verdict in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from paceenv.core.operation_matrix import Integers, OperationMatrix
from paceenv.core.trace import Trace
from paceenv.core.wording import duration
from paceenv.diagnosis import self_check
from paceenv.diagnosis.arrivals import Arrivals, measure_arrivals
from paceenv.diagnosis.attribution import TimeAttribution
from paceenv.diagnosis.causes import OF_ONE_RANK, Cause, name_causes
from paceenv.diagnosis.dependency_graph import Graph, build_graph
from paceenv.diagnosis.paced_steps import MIN_SHARE, measure_pacing
from paceenv.diagnosis.replay import ideal_durations, own_durations, replay
from paceenv.diagnosis.verdict import INSUFFICIENT, Diagnosis
from paceenv.importers.clocks import matrix_on_one_clock

MIN_STEPS: Final = 3
"""With fewer steps nothing that lasts or recurs is visible."""
MIN_OPERATIONS: Final = 8
"""Compute operations of a rank in all steps together; fewer do not show what is usual."""
MAX_ASIDE: Final = 0.02
"""Share of a step in collectives beside it; with more, own work cannot be told from waiting."""
UNDETERMINED: Final = "cannot be determined"


def diagnose(trace: Trace) -> Diagnosis:
    """Diagnose the one job of a trace."""
    matrix, note = matrix_on_one_clock(trace)
    diagnosis = with_agent(diagnose_matrix(matrix), trace.metadata.job)
    return replace(diagnosis, notes=(note, *diagnosis.notes)) if note else diagnosis


def with_agent(diagnosis: Diagnosis, job: Mapping[str, Any]) -> Diagnosis:
    """The diagnosis of a live job's trace, led by what the job's own agent says of its end and of late ranks."""
    agent = job.get("agent")
    if not isinstance(agent, Mapping) or not isinstance(agent.get("text"), str):
        return diagnosis
    late = tuple(rank for rank in agent.get("late") or () if isinstance(rank, int))
    causes = sorted(diagnosis.causes, key=lambda one: bool(late) and one.cause not in OF_ONE_RANK)
    diagnosis = replace(diagnosis, agent=agent["text"], late=late, ended=bool(agent.get("ended")), causes=tuple(causes))
    aside_s = agent.get("aside_s")
    if not isinstance(aside_s, (int, float)) or not aside_s > MAX_ASIDE * diagnosis.step_time_s:
        return diagnosis
    why = f"collectives of {duration(aside_s)} a step run beside the compute, whose rows contain the waiting for them"
    return replace(
        diagnosis, refused=f"{UNDETERMINED}: {why}", causes=(), slowdown=None, ideal_step_time_s=None,
        bare_step_s=None, doubt="", arrivals=replace(diagnosis.arrivals, waiting_s=None, transfer_s=None),
    )  # fmt: skip


def diagnose_matrix(matrix: OperationMatrix) -> Diagnosis:
    """As :func:`diagnose`, for a trace that was read before.

    Of several kinds of steps it is the one that loses most; if one cannot be diagnosed, none is.

    Where delays were taken in some steps only, the causes are those of the others: delays change what a step loses.
    They are those of all steps where only the delays, as a probe, identify whether groups contend.
    """
    diagnosis, paced, of = _diagnose_kinds(matrix), measure_pacing(matrix), f"all {matrix.steps} steps"
    if paced is not None and paced.plain >= MIN_SHARE * matrix.steps:
        plain = _diagnose_kinds(matrix.of_steps(paced.plain_T))
        if diagnosis.refused or diagnosis.doubt or not plain.doubt:
            diagnosis, of = plain, f"the {paced.plain} steps without delays"
    said = f"causes are those of {of}; {paced.text}" if paced is not None else ""
    notes = (*filter(None, (matrix.lacking, said)), *diagnosis.notes)
    return replace(diagnosis, paced_steps=paced, notes=notes)


def _diagnose_kinds(matrix: OperationMatrix) -> Diagnosis:
    arrivals = measure_arrivals(matrix, build_graph(matrix))
    kinds = kinds_of_steps(matrix)
    if len(kinds) == 1:
        return _diagnose_kind(matrix, arrivals)
    parts = [_diagnose_kind(matrix.of_steps(at), arrivals, " of a kind") for at in kinds]
    listed = ", ".join(f"{len(at)} of {duration(one.step_time_s)}" for one, at in zip(parts, kinds, strict=True))
    note = f"{len(parts)} kinds of steps take turns: {listed}"
    if (open_one := next((one for one in parts if one.refused), None)) is not None:
        mean_s = float(matrix.step_s_T.mean())
        return replace(open_one, slowdown=None, ideal_step_time_s=None, step_time_s=mean_s, notes=(note,))
    lost_s = [len(at) * sum(cause.lost_s for cause in one.causes) for one, at in zip(parts, kinds, strict=True)]
    worst = parts[int(np.argmax(lost_s))]
    return replace(worst, notes=(f"{note}; causes are those of the steps of {duration(worst.step_time_s)}",))


def _diagnose_kind(matrix: OperationMatrix, arrivals: Arrivals, of: str = "") -> Diagnosis:
    graph = build_graph(matrix)
    own_NT = own_durations(matrix, graph)
    ideal_NT = ideal_durations(matrix, own_NT)
    replayed_T, ideal_s = replay(graph, own_NT), float(replay(graph, ideal_NT).mean())
    replayed_s, measured_s = float(replayed_T.mean()), float(matrix.step_s_T.mean())
    few = next(_insufficient(matrix, graph, of), "")
    refused = next(self_check.why_not(matrix, graph, own_NT, replayed_T, ideal_s), "")
    causes: tuple[Cause, ...] = ()
    bare_s, doubt = None, ""
    slowdown = max(replayed_s / ideal_s, 1.0) if ideal_s > 0.0 else 1.0
    if not (few or refused):
        parts = TimeAttribution(matrix, graph, own_NT)
        causes = name_causes(matrix, parts)
        refused = self_check.why_no_sum(parts, slowdown, are_causes=bool(causes))
    if not (few or refused):
        bare_s = parts.base_s
        one = next((one for one in parts.transfers.classes if one.contended is None and one.groups > 1), None)
        if one is not None:
            which = f"the {one.groups} groups of {one.op} contend with each other"
            doubt = f"; the trace does not identify whether {which} (a probe does)"
    return Diagnosis(
        slowdown=None if refused else slowdown,
        ideal_step_time_s=None if refused else min(ideal_s, replayed_s),
        step_time_s=measured_s,
        replay_error=replayed_s / measured_s - 1.0 if measured_s > 0.0 else 0.0,
        causes=causes if bare_s is not None else (),
        refused=f"{INSUFFICIENT}: {few}" if few else f"{UNDETERMINED}: {refused}" if refused else "",
        bare_step_s=bare_s,
        arrivals=arrivals,
        doubt=doubt,
    )


def _insufficient(matrix: OperationMatrix, graph: Graph, of: str) -> Iterator[str]:
    if len(matrix.ranks) < 2:
        yield "one rank, without a peer to compare it with; give the traces of all ranks"
    if matrix.steps == 1 and not of:
        yield "one step does not show whether it lasts"
    if matrix.steps < MIN_STEPS:
        yield f"{matrix.steps} steps{of} are too few to see anything lasting; at least {MIN_STEPS} are needed"
    computes = int((matrix.is_compute_N & matrix.usual_N).sum()) * matrix.steps // len(matrix.ranks)
    if 0 < computes < MIN_OPERATIONS:
        yield f"{computes} compute operations of a rank in {matrix.steps} steps; at least {MIN_OPERATIONS} are needed"
    if not (matrix.is_compute_N & matrix.usual_N & (matrix.duration_NT > 0.0).any(axis=1)).any():
        yield "no compute operation takes any time, so no rank can be late"
    if not (matrix.is_collective_N | matrix.is_transfer_N).any():
        yield "no collectives, so no rank waits for another"
    if not (graph.meets_N & matrix.usual_N).any():
        yield "no collective of the usual step is seen on two ranks, so nobody is seen to wait for another"
    if not np.all(matrix.step_s_T > 0.0):
        yield "steps that take no time"


MIN_KIND_SHARE: Final = 0.2
"""Share of steps; rarer ones are exceptions, such as one with a checkpoint, and belong to the kind most like them."""
MIN_KIND_STEPS: Final = 2


def kinds_of_steps(matrix: OperationMatrix) -> list[Integers]:
    """The steps of each kind, by place and in order, the most frequent kind first."""
    communicates_N = matrix.is_collective_N | matrix.is_transfer_N
    has_TN = np.isfinite(matrix.start_NT[communicates_N]).T
    signatures, of_T, counts = np.unique(has_TN, axis=0, return_inverse=True, return_counts=True)
    large = counts >= max(MIN_KIND_STEPS, MIN_KIND_SHARE * matrix.steps)
    if large.sum() < 2:
        return [np.arange(matrix.steps)]
    order = np.flatnonzero(large)[np.argsort(-counts[large], kind="stable")]
    unlike = (signatures[:, None, :] != signatures[order][None, :, :]).sum(axis=2)
    kind_T = np.argmin(unlike, axis=1)[of_T.ravel()]
    return [np.flatnonzero(kind_T == k) for k in range(len(order))]
