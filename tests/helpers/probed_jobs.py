"""Traces of jobs under probes whose response is known: a linear one, made up, and the simulator's, moved by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import timing
from paceenv.core.probing import METADATA_KEY, Plan, unit_of
from paceenv.core.trace import Trace, TraceMetadata, read_trace
from paceenv.policies.rollout import start
from paceenv.sim.cluster import load_cluster
from paceenv.sim.engine.phases import joined
from paceenv.sim.engine.recording import RecordingWriter

Array = NDArray[np.float64]
STEP_S = 0.2


def metadata(plan: Plan | None, ranks: int) -> TraceMetadata:
    job: dict[str, Any] = {"name": "job", "ranks": ranks}
    if plan is not None:
        job[METADATA_KEY] = plan.to_json()
    return TraceMetadata(job, tuple({"rank": r} for r in range(ranks)), "test")


def levels(plan: Plan, iterations: int, ranks: int, per_group: int) -> Array:
    """The shares that are drawn for every rank, ``(T, R)``, where each ``per_group`` ranks are a process group."""
    units = [unit_of(rank, rank // per_group, per_group, ranks) for rank in range(ranks)]
    return np.array([[plan.level(i, *unit) for unit in units] for i in range(iterations)])


def linear_job(
    response_G: Sequence[float],
    *,
    seed: int = 0,
    iterations: int = 800,
    per_group: int = 2,
    bound_s: float = 0.01,
    noise: Callable[[np.random.Generator, int], Array] = lambda random, n: random.normal(0.0, 0.05, n),
    oversleep: float = 0.0,
    after: float = 0.0,
    collective: tuple[float, float] = (0.0, 0.0),
    plan: Plan | None = None,
    with_plan: bool = True,
) -> Trace:
    """A job of groups of ranks whose step grows by ``response_G[g]`` seconds per second of delay of group g.

    ``noise`` is relative to the step. ``oversleep``: how much longer a delay gets, relatively, per relative excess of
    the step. ``after`` is per second of all delays of the last hold, by way of the mean. ``collective``: seconds of a
    group's collective per second of its own delay, and of one of another group.
    """
    random, groups = np.random.default_rng(seed), len(response_G)
    ranks, plan = groups * per_group, plan or Plan(seed, bound_s, 50)
    drawn_TR = levels(plan, iterations, ranks, per_group)
    excess_T = noise(random, iterations)
    delay_TR = bound_s * drawn_TR * np.maximum(1.0 + oversleep * excess_T, 0.0)[:, None]
    delay_TG = delay_TR[:, ::per_group]
    held_TG = np.concatenate([np.zeros((5, groups)), delay_TG[:-5]])
    step_T = STEP_S * (1.0 + excess_T) + delay_TG @ np.array(response_G) + after * held_TG.mean(axis=1)
    start_T = np.cumsum(step_T) - step_T
    own, others = collective
    comm_TG = 0.05 + own * delay_TG + others * (delay_TG.sum(axis=1, keepdims=True) - delay_TG)
    begin = np.broadcast_to(start_T[:, None], delay_TR.shape)
    end = np.broadcast_to((start_T + step_T)[:, None], delay_TR.shape)
    entry = begin + delay_TR + 0.08
    done = entry + np.repeat(comm_TG, per_group, axis=1)
    rows = [("pace", -1, begin, begin + delay_TR), ("compute", -1, begin + delay_TR, entry)]
    rows += [("all_reduce", 1, entry, done), ("barrier", -1, done, np.maximum(end, done))]
    iteration, rank = np.indices(delay_TR.shape)
    columns: dict[str, list[Any]] = {
        name: [] for name in ("op", "group", "rank", "iteration", "seq", "start_s", "end_s")
    }
    for seq, (op, grouped, first, last) in enumerate(rows):
        keep = last > first
        group = rank // per_group if grouped == 1 else np.full_like(rank, -1)
        values = (np.full(keep.sum(), op, object), group[keep], rank[keep], iteration[keep], np.full(keep.sum(), seq))
        for name, value in zip(columns, (*values, first[keep], last[keep]), strict=True):
            columns[name].append(value)
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    return Trace.from_columns(joined | {"job": "job"}, metadata(plan if with_plan else None, ranks))


def simulated(
    name: str, delay_TR: Callable[[int, int], Array], path: Path, *, seed: int, plan: Plan | None = None, **changed: Any
) -> tuple[Trace, Array]:
    """A job of the simulator whose ranks hold back as ``delay_TR(R, per_group)`` says: its trace and step times."""
    cluster = load_cluster(name).changed([f"{key}={value}" for key, value in changed.items()], name)
    simulator = start(cluster, np.array([seed]))
    ranks, parts = simulator.batch.ranks, []
    delays_TR = delay_TR(ranks, ranks // simulator.batch.groups)
    for delay_R in delays_TR:
        simulator.state.rank_EFR[0, timing.DELAY_S, :ranks] = delay_R
        parts.append(simulator.record(simulator.off(), 1))
    whole = joined(parts)
    with RecordingWriter(path, simulator, name) as writer:
        writer.append(whole)
    found = read_trace(path)
    return Trace(found.table, metadata(plan, ranks)), whole.step_ET[0]
