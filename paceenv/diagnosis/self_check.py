"""Whether a diagnosis may name causes: only if the replayed step is the measured one, and the trace is whole.

Everything that follows from a replay, a slowdown, an ideal step, the share of a cause, is worth as much as the replay.
Axes: N operations, K tasks, T steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

import numpy as np

from paceenv.core.operation_matrix import BARRIER_OP, Array, OperationMatrix
from paceenv.core.trace import OTHER_OPS
from paceenv.core.wording import duration, name_ranks
from paceenv.diagnosis.attribution import TimeAttribution
from paceenv.diagnosis.dependency_graph import Graph, last_arrivals
from paceenv.importers.clocks import is_closed

REPLAY_FAILS: Final = "the replay of the traced operations does not reproduce the steps"
TOLERANCE: Final = 0.05
"""Share of a mean step by which the replay may miss the measured one, on average and in a typical step.

Lin et al. (OSDI 2025) leave out jobs beyond as well. Whole traces of real jobs are replayed within 0.02.
"""
IDEAL_TOLERANCE: Final = 0.02
"""Share by which a step of equal ranks may exceed the replayed one: medians of few values are no exact ideals."""
EARLY_SHARE: Final = 0.02
"""Share of a mean step by which a rank may seem to leave a collective before the last one has entered."""
MAX_EARLY: Final = 0.05
"""Share of such collectives that may; of more, clocks or the matching of collectives are wrong."""
MAX_RANKS: Final = 1 << 20
"""Of a job, that are looked for; a file may claim any number."""
MAX_LOST: Final = 0.02
"""Share of the usual step's collectives and transfers that steps may lack."""
MAX_DROPPED: Final = 0.5
"""Share of the steps that may be left out because not all ranks have them."""
MAX_UNMET: Final = 0.05
"""Share of the step that ranks may spend in collectives of which no other member is known."""
MAX_UNKNOWN: Final = 0.1
"""Share of the step that may be in operations whose kind is not known."""
MAX_BARRIER: Final = 0.05
"""Share of the step that a barrier, which moves nothing, may take once its last known member has entered."""
MAX_UNEXPLAINED: Final = 0.05
"""Share by which a step may exceed that of equal ranks without a cause for it."""
UNLIKE_SHARE: Final = 0.1
"""Share of all compute and communication that may be in operations that only some steps have."""


def why_not(matrix: OperationMatrix, graph: Graph, own_NT: Array, replayed_T: Array, ideal_s: float) -> Iterator[str]:
    """Why no cause can be named, nothing where nothing is wrong."""
    measured_s, replayed_s = float(matrix.step_s_T.mean()), float(replayed_T.mean())
    if not measured_s > 0.0:
        yield "steps that take no time"
        return
    yield from _missing(matrix)
    if matrix.dropped > MAX_DROPPED * matrix.recorded:
        yield (
            f"{matrix.dropped} of {matrix.recorded} steps are not of all ranks (allowed: {MAX_DROPPED:.0%}), and the "
            "others may be unlike them"
        )
    yield from _incomplete(matrix, graph, own_NT, measured_s)
    yield from _left_early(matrix, graph, EARLY_SHARE * measured_s)
    work_N = matrix.is_compute_N | matrix.is_collective_N | matrix.is_transfer_N
    unlike = float(own_NT[work_N & ~matrix.usual_N].sum()) / max(float(own_NT[work_N].sum()), 1e-300)
    if unlike > UNLIKE_SHARE:
        yield (
            f"{unlike:.0%} of the work is in operations that only some steps have (allowed: {UNLIKE_SHARE:.0%}), so no "
            "usual step can be compared with"
        )
    error = replayed_s / measured_s - 1.0
    typical = float(np.median(np.abs(replayed_T - matrix.step_s_T))) / measured_s
    if max(abs(error), typical) > TOLERANCE:
        ahead_s = -float(np.nanmin(matrix.start_NT, axis=0).mean())
        said = (
            f"; some rank begins the mean step {duration(ahead_s)} before another has ended the one before, and in the "
            "replay all begin together: profile while nothing else runs on the hosts"
        )
        yield (
            f"{REPLAY_FAILS}: {duration(replayed_s)} instead of {duration(measured_s)} "
            f"({error:+z.0%}; a typical step is off by {typical:.0%}; allowed: {TOLERANCE:.0%})"
            f"{said * (error > 0.0 and ahead_s > TOLERANCE * measured_s)}"
        )
    if ideal_s > (1.0 + IDEAL_TOLERANCE) * replayed_s:
        yield (
            f"with all ranks equal a step would be longer ({duration(ideal_s)}) than it is ({duration(replayed_s)}), "
            "so operations of one name may not be the same work"
        )


def why_no_sum(attribution: TimeAttribution, slowdown: float, *, are_causes: bool) -> str:
    """Why the causes that were found cannot be all, "" where nothing is wrong."""
    measured_s = attribution.measured_s
    if attribution.base_s > (1.0 + TOLERANCE) * measured_s:
        return (
            f"without the variation that was found a step would be longer ({duration(attribution.base_s)}) than it is "
            f"({duration(measured_s)}), so what is usual in this trace is not known"
        )
    if slowdown <= 1.0 + MAX_UNEXPLAINED or are_causes:
        return ""
    return f"a step takes {slowdown - 1.0:.0%} longer than one of equal ranks, and none of the known causes explains it"


def _missing(matrix: OperationMatrix) -> Iterator[str]:
    """Ranks that the trace lacks: whoever waits may wait for them."""
    ranks = matrix.ranks
    expected, known = range(ranks[0] % matrix.rank_step, matrix.world_size, matrix.rank_step), set(ranks)
    lost = [rank for rank in islice(expected, MAX_RANKS) if rank not in known]
    if lost:
        verb = "is" if len(lost) == 1 else "are"
        yield f"{name_ranks(lost)} {verb} missing, and the others may wait for them"
    stages = int(matrix.stage_N.max()) + 1
    places = set(zip(matrix.dp_rank_N.tolist(), matrix.stage_N.tolist(), strict=True))
    whole = len({dp_rank for dp_rank, _ in places}) * stages
    if stages > 1 and len(places) < whole:
        yield f"{whole - len(places)} of {whole} places of a pipeline are missing, and the others may wait for them"


def _incomplete(matrix: OperationMatrix, graph: Graph, own_NT: Array, step_s: float) -> Iterator[str]:
    """What the trace does not tell of its own operations."""
    communicates_N, usual_N = matrix.is_collective_N | matrix.is_transfer_N, matrix.usual_N
    wanted_N = communicates_N & usual_N
    lost = float(np.isnan(matrix.start_NT[wanted_N]).mean()) if wanted_N.any() else 0.0
    if lost > MAX_LOST:
        yield f"{lost:.0%} of the usual collectives and transfers were not recorded (allowed: {MAX_LOST:.0%})"
    of_step_N = own_NT.mean(axis=1) / (step_s * len(matrix.ranks))
    strange_N = usual_N & ~(communicates_N | matrix.is_compute_N | matrix.is_pace_N | matrix.is_op(*OTHER_OPS))
    unmet = " whose other members are not known, so waiting cannot be told from work"
    for which_N, most, what, so in (
        (communicates_N & ~graph.meets_N, MAX_UNMET, "collectives or transfers", unmet),
        (strange_N, MAX_UNKNOWN, "operations of unknown kind", ", which may be work or waiting"),
    ):
        share = float(of_step_N[which_N].sum())
        if share > most:
            named = matrix.ops[matrix.op_N[np.flatnonzero(which_N)[np.argmax(of_step_N[which_N])]]]
            yield f"{share:.0%} of the step is in {what} ({named}){so}"
    barriers = np.flatnonzero(matrix.is_op(BARRIER_OP) & graph.meets_N)
    held = float(np.median(own_NT[barriers], axis=1).max(initial=0.0)) / step_s
    if held > MAX_BARRIER and not matrix.counted:  # else :func:`_missing` knows; a barrier may be slow by itself
        yield (
            f"a barrier takes {held:.0%} of the step after the last known rank has entered it, so somebody who is not "
            "in the trace may hold it up"
        )


def _left_early(matrix: OperationMatrix, graph: Graph, least_s: float) -> Iterator[str]:
    """Collectives that a rank left before another had entered: impossible on one clock."""
    meets = np.flatnonzero(graph.meets_N & is_closed(matrix))
    last_NT = last_arrivals(matrix, graph)[graph.task_of_N[meets]]
    early_NT = np.nan_to_num(last_NT - matrix.end_NT[meets], nan=-np.inf)
    share = float((early_NT > least_s).sum()) / max(float(np.isfinite(matrix.end_NT[meets]).sum()), 1.0)
    if share > MAX_EARLY:
        rank = matrix.ranks[int(matrix.rank_N[meets][np.unravel_index(np.argmax(early_NT), early_NT.shape)[0]])]
        yield (
            f"in {share:.0%} of collectives a rank leaves before the last one has entered (rank {rank} by up to "
            f"{duration(float(early_NT.max()))}): clocks differ, collectives are matched wrongly, or some were handed "
            "over in the background before their rows begin, as in traces of paceenv live"
        )
