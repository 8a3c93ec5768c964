"""A cluster's program on its fabric: the tables that the engine runs, and the step with nothing in its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paceenv.core.errors import InputError
from paceenv.sim.cluster.environment import Job
from paceenv.sim.cluster.fabric import Fabric
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.footprint import Tiers, Use, use
from paceenv.sim.cluster.program.program_tables import Start, tables
from paceenv.sim.cluster.protocols import Choice, choices
from paceenv.sim.cluster.quantity import Draw
from paceenv.sim.cluster.transfers import Layout, draw_links
from paceenv.sim.engine import layout
from paceenv.sim.engine.program_layout import NO_PROGRAM, Program
from paceenv.sim.engine.simulator import JobBatch, Simulator, episode_keys

MAX_TABLES = 64
"""Of so many programs the tables are kept."""
_TABLES: dict[str, Program] = {}


def tiers_of(fabric: Fabric, job: Job, *, has_tenants: bool = False) -> Tiers:
    """The links of a fabric without random quantities, for the nodes of a job.

    Where leaves have uplinks of their own, the top tier carries what all of them do. That alone limits no job, so it is
    left out unless tenants share it.
    """
    place = Layout(job.nodes, job.ranks_per_node, 1, job.nodes, job.ranks_per_node)
    links = draw_links(fabric, place, Draw(np.zeros(1, np.uint64), job.nodes))
    nic_Bps = float(np.ravel(links.rank_Bps)[0]) * job.ranks_per_node / fabric.nics_per_node
    return Tiers(
        job.nodes,
        job.ranks_per_node,
        fabric.nodes_per_leaf,
        fabric.nics_per_node,
        float(np.ravel(links.inside_Bps)[0]),
        nic_Bps,
        float(np.ravel(links.leaf_Bps)[0]),
        float(np.ravel(links.uplink_Bps)[0]) if fabric.uplink_gbps is not None or has_tenants else np.inf,
        float(np.ravel(links.inside_hop_s)[0]),
        float(np.ravel(links.hop_s)[0]),
        float(np.ravel(links.sqrt_s)[0]),
        float(np.ravel(links.inside_sqrt_s)[0]),
        fabric.ecmp_paths,
    )


def choice_of(fabric: Fabric, job: Job, tiers: Tiers) -> Callable[[Start, Sequence[int]], Choice]:
    """How a transfer of some ranks is sent: where NCCL may choose, what it expects to take least time alone."""

    def found(start: Start, members: Sequence[int]) -> Choice:
        size = start.payload_bytes / start.parts
        nodes = len({rank // tiers.ranks_per_node for rank in members})
        ways = choices(fabric, start.op, job.algorithm, size, nodes=nodes)

        def time_s(choice: Choice) -> float:
            one = use(tiers, start.op, members, size, choice)
            return one.alone_s / choice.expected + one.latency_s

        return min(ways, key=time_s) if len(ways) > 1 else ways[0]

    return found


def use_of(fabric: Fabric, job: Job, *, has_tenants: bool = False) -> Callable[[Start, list[int]], Use]:
    """What a transfer of some ranks of a job takes of the links of a fabric."""
    tiers = tiers_of(fabric, job, has_tenants=has_tenants)
    choose = choice_of(fabric, job, tiers)

    def found(start: Start, members: list[int]) -> Use:
        choice, size = choose(start, members), start.payload_bytes / start.parts
        efficiency, is_lost = fabric.efficiency.get(start.op, 1.0), fabric.unused_rate == "lost"
        groups = max(job.ranks // len(members), 1)
        one = use(tiers, start.op, members, size, choice, efficiency=efficiency, is_lost=is_lost, groups=groups)
        weight = float(one.flows) if fabric.sharing == "flows" else 1.0
        return one._replace(alone_s=one.alone_s * start.parts, latency_s=one.latency_s * start.parts, weight=weight)

    return found


def program_key(cluster: Cluster) -> str:
    """What decides the tables of a cluster, as text; empty without a program."""
    job = cluster.job
    size = job.nodes, job.ranks_per_node, job.algorithm
    parts = cluster.program, cluster.workload, cluster.gpu, size, cluster.fabric, bool(cluster.tenants)
    return repr(parts) if cluster.has_program else ""


def program_of(cluster: Cluster) -> Program:
    """The engine's tables of a cluster; of one without a program, ``NO_PROGRAM``.

    Equal clusters get the same object, until so many other programs were asked for that it is forgotten.
    """
    if not cluster.has_program:
        return NO_PROGRAM
    key = program_key(cluster)
    if key not in _TABLES:
        if len(_TABLES) >= MAX_TABLES:
            del _TABLES[next(iter(_TABLES))]
        plan = cluster.program_plan()
        assert plan is not None
        shared = {"has_tenants": bool(cluster.tenants)}
        _TABLES[key] = tables(plan, use_of(cluster.fabric, cluster.job, **shared), **shared)
    return _TABLES[key]


def program_alone_s(program: Program, compute_s: float) -> float:
    """The step of a program with every rank equal and no tenant, seconds; its own transfers still share links.

    Raises:
        InputError: where ranks wait for each other for ever.
    """
    jobs = layout.default_job(1)
    jobs["compute_s"], jobs["has_program"], jobs["has_barrier"] = compute_s, True, True
    ranks = len(program.replica_R)
    batch = JobBatch(jobs, np.zeros((1, 0), layout.TENANT), ranks, 1, np.zeros(1), program)
    simulator = Simulator(batch, episode_keys([0]))
    recording = simulator.record(simulator.off(), 1)
    if not np.isfinite(recording.through_ETO).all():
        raise InputError(
            "program: ranks wait for each other for ever; allowed: an order of transfers in which some can always start"
        )
    return float(recording.step_ET[0, 0])
