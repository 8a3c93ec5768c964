"""Real traces, damaged at random: is the diagnosis right, or does it say that it cannot be?

Production traces and recorded jobs with known causes are damaged, and each is diagnosed. An answer is wrong if it
names another first cause than the true one with the trace as evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from paceenv.core.errors import InputError
from paceenv.core.trace import SCHEMA, Trace, TraceMetadata
from paceenv.diagnosis import causes as names
from paceenv.diagnosis.diagnose import UNDETERMINED, diagnose
from paceenv.diagnosis.verdict import INSUFFICIENT
from paceenv.importers.inputs import read_inputs

Rng = np.random.Generator
Columns = dict[str, Any]
RIGHT, OPEN, WRONG = "right", "open", "wrong"
TRUE_CAUSES: Final = {
    "bytedance-straggler/trace-AR.parquet": (names.SLOW_RANK, names.STAGE),
    "bytedance-straggler/trace-SE.parquet": (names.DATA,),
    "socket-runs/my-slack-static.parquet": (names.SLOW_RANK, names.CONTENTION),
    "socket-runs/incast-shallow-learned.parquet": (names.INCAST,),
    "socket-runs/two-jobs-learned.parquet": (names.TENANT, names.CONTENTION),
}
"""The causes that may come first. AR's slow workers are all stages of one replica or, of what is left of the trace, a
stage; a pair of my-slack has more work than the others, whose traffic contends with it; of a few steps
of two-jobs nobody can say whether the other traffic has a memory."""


def steps_cut(rng: Rng, c: Columns) -> Columns:
    """A stretch of the trace, whose last step ends in the middle."""
    low, high = int(c["iteration"].min()), int(c["iteration"].max())
    first = int(rng.integers(low, max(high - 2, low + 1)))
    last = int(rng.integers(first, high + 1))
    kept = (c["iteration"] >= first) & (c["iteration"] <= last)
    in_last = kept & (c["iteration"] == last)
    if in_last.any():
        kept &= ~(in_last & (c["start_s"] > rng.uniform(c["start_s"][in_last].min(), c["end_s"][in_last].max())))
    return _of(c, kept)


def steps_lost(rng: Rng, c: Columns) -> Columns:
    """Some steps are not there."""
    steps = np.unique(c["iteration"])
    return _of(c, np.isin(c["iteration"], rng.choice(steps, max(int(len(steps) * rng.uniform(0.2, 0.9)), 1), False)))


def ranks_dropped(rng: Rng, c: Columns) -> Columns:
    """Files of some ranks are missing."""
    ranks = np.unique(c["rank"])
    return _of(c, ~np.isin(c["rank"], rng.choice(ranks, int(rng.integers(1, len(ranks))), False)))


def rows_lost(rng: Rng, c: Columns) -> Columns:
    """Operations here and there were not recorded."""
    return _of(c, rng.random(len(c["rank"])) > rng.uniform(0.005, 0.3))


def groups_removed(rng: Rng, c: Columns) -> Columns:
    """Which collective belongs to which process group is not known, of all or of some operations."""
    lost = np.isin(c["op"], rng.permutation(np.unique(c["op"]))[: int(rng.integers(1, 9))])
    return c | {"group": np.where(lost, -1, c["group"])}


def micro_batches_removed(rng: Rng, c: Columns) -> Columns:
    """Micro-batches and chunks are not known."""
    return c | {"micro_batch": np.full_like(c["micro_batch"], -1), "chunk": np.full_like(c["chunk"], -1)}


def names_lost(rng: Rng, c: Columns) -> Columns:
    """Collectives have one name, as kernels without metadata do, or one kind of operation has none."""
    op = c["op"].astype(object)
    if rng.random() < 0.5:
        op[c["group"] >= 0] = "collective"
    else:
        op[op == rng.choice(np.unique(c["op"]))] = "unknown"
    return c | {"op": op.astype(str)}


def clocks_skewed(rng: Rng, c: Columns) -> Columns:
    """Clocks of some ranks are off by up to a second."""
    ranks = np.unique(c["rank"])
    skew_R = rng.uniform(-1.0, 1.0, len(ranks)) * (rng.random(len(ranks)) < rng.uniform(0.05, 1.0))
    skew_s = skew_R[np.searchsorted(ranks, c["rank"])]
    return c | {"start_s": c["start_s"] + skew_s, "end_s": c["end_s"] + skew_s}


def streams_merged(rng: Rng, c: Columns) -> Columns:
    """Two ranks are taken for one."""
    one, other = rng.choice(np.unique(c["rank"]), 2, False) if len(np.unique(c["rank"])) > 1 else (0, 0)
    rank = np.where(c["rank"] == one, other, c["rank"])
    order = np.lexsort((c["start_s"], c["iteration"], rank))
    first = np.ones(len(rank), np.bool_)
    first[1:] = (np.diff(rank[order]) != 0) | (np.diff(c["iteration"][order]) != 0)
    row, seq = np.arange(len(rank)), np.empty(len(rank), np.int64)
    seq[order] = row - np.maximum.accumulate(np.where(first, row, 0))
    return c | {"rank": rank, "seq": seq}


def stamps_coarse(rng: Rng, c: Columns) -> Columns:
    """Times are rounded."""
    unit_s = 10.0 ** rng.uniform(-4.0, -1.5)
    return c | {key: np.round(c[key] / unit_s) * unit_s for key in ("start_s", "end_s")}


DAMAGE: Final[tuple[Callable[[Rng, Columns], Columns], ...]] = (
    steps_cut, steps_lost, ranks_dropped, rows_lost, groups_removed, micro_batches_removed, names_lost, clocks_skewed,
    streams_merged, stamps_coarse,
)  # fmt: skip


def _of(c: Columns, kept: Any) -> Columns:
    return {key: column[kept] for key, column in c.items()}


def answer(rng: Rng, source: str, trace: Trace) -> tuple[str, str]:
    """Damage a trace in one to three ways and diagnose it: the kind of answer, and what was damaged and said."""
    chosen = [DAMAGE[i] for i in rng.choice(len(DAMAGE), int(rng.integers(1, 4)), replace=False)]
    columns: Columns = {name: trace.column(name) for name in SCHEMA.names}
    for damage in chosen:
        if len(columns["rank"]):
            columns = damage(rng, columns)
    said_ranks = trace.metadata.ranks if rng.random() < 0.5 else ()
    told = f"{source}: {[damage.__name__ for damage in chosen]}, {'with' if said_ranks else 'no'} metadata"
    about = TraceMetadata({"name": source}, said_ranks, trace.metadata.source)
    try:
        found = diagnose(Trace.from_columns(columns, about))
    except InputError as error:
        return OPEN, f"{told}: {error}"
    first = found.causes[0].cause if found.causes else "healthy"
    kind = RIGHT if first in TRUE_CAUSES[source] else WRONG
    return OPEN if found.verdict.startswith((UNDETERMINED, INSUFFICIENT)) else kind, f"{told}: {found.verdict}"


def answers(data: Path, count: int, seed: int) -> list[tuple[str, str]]:
    """What is said of ``count`` damaged traces of the folder ``data``."""
    traces = [(name, read_inputs([data / name]).require_trace()) for name in TRUE_CAUSES]
    return [answer(np.random.default_rng([seed, i]), *traces[i % len(traces)]) for i in range(count)]
