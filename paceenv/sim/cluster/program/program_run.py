"""A cluster's program on its fabric: the tables that the engine runs, and the step with nothing in its way."""

from __future__ import annotations

import numpy as np

from paceenv.core.errors import InputError
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.program_tables import tables
from paceenv.sim.cluster.transfers import use_of
from paceenv.sim.engine import layout
from paceenv.sim.engine.program_layout import Program
from paceenv.sim.engine.simulator import JobBatch, Simulator, episode_keys

MAX_TABLES = 64
"""Of so many programs the tables are kept."""
_TABLES: dict[str, Program] = {}


def program_key(cluster: Cluster) -> str:
    """What decides the tables of a cluster, as text; empty without a program."""
    job = cluster.job
    size = job.nodes, job.ranks_per_node, job.algorithm
    parts = cluster.program, cluster.workload, cluster.gpu, size, cluster.fabric, bool(cluster.tenants)
    return repr(parts) if cluster.has_program else ""


def program_of(cluster: Cluster) -> Program | None:
    """The engine's tables of a cluster; None of one without a program.

    Equal clusters get the same object, until so many other programs were asked for that it is forgotten.
    """
    if not cluster.has_program:
        return None
    key = program_key(cluster)
    if key not in _TABLES:
        if len(_TABLES) >= MAX_TABLES:
            del _TABLES[next(iter(_TABLES))]
        plan = cluster.plan()
        shared = {"has_tenants": bool(cluster.tenants)}
        _TABLES[key] = tables(plan, use_of(cluster.fabric, cluster.job, **shared), **shared)
    return _TABLES[key]


def program_alone_s(program: Program, compute_s: float) -> float:
    """The step of a program with every rank equal and no tenant, seconds; its own transfers still share links."""
    jobs = layout.default_job(1)
    jobs["compute_s"], jobs["has_barrier"] = compute_s, True
    batch = JobBatch(jobs, np.zeros((1, 0), layout.TENANT), len(program.first_R) - 1, 1, program)
    simulator = Simulator(batch, episode_keys([0]))
    recording = simulator.record(simulator.off(), 1)
    if not np.isfinite(recording.through_ETO).all():
        raise InputError(
            "program: ranks wait for each other for ever; allowed: an order of transfers in which some can always start"
        )
    return float(recording.step_ET[0, 0])
