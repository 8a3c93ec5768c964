"""Traces of simulated jobs whose ranks hold back by a plan of probes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import timing
from paceenv.core.probing import METADATA_KEY, Plan, unit_of
from paceenv.core.trace import Trace, TraceMetadata, read_trace
from paceenv.policies.rollout import start
from paceenv.sim.cluster import load_cluster
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.recording import RecordingWriter

Array = NDArray[np.float64]


def metadata(plan: Plan | None, ranks: int) -> TraceMetadata:
    job: dict[str, Any] = {"name": "job", "ranks": ranks}
    if plan is not None:
        job[METADATA_KEY] = plan.to_json()
    return TraceMetadata(job, tuple({"rank": r} for r in range(ranks)), "test")


def levels(plan: Plan, iterations: int, ranks: int, per_group: int) -> Array:
    """The shares that are drawn for every rank, ``(T, R)``, where each ``per_group`` ranks are a process group."""
    units = [unit_of(rank, rank // per_group, per_group, ranks) for rank in range(ranks)]
    return np.array([[plan.level(i, *unit) for unit in units] for i in range(iterations)])


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
    whole = Recording(*(np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True)))
    with RecordingWriter(path, simulator, name) as writer:
        writer.append(whole)
    found = read_trace(path)
    return Trace(found.table, metadata(plan, ranks)), whole.step_ET[0]
