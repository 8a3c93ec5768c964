"""The job of a testbed's scenario as a program: what its operator knows of the step, with nominal times and rates."""

from __future__ import annotations

import json
from typing import Any

from paceenv.core.errors import InputError
from paceenv.live.testbed.testbed_scenario import Compute, Job, Scenario, Transfer
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.program.step_program import WORLD
from paceenv.ui import config_files


def needs_program(job: Job) -> bool:
    """Whether one collective an iteration cannot describe the job: something runs in the background."""
    return any(phase.transfer is not None and phase.transfer.background for phase in job.iteration)


def left_out(scenario: Scenario) -> list[str]:
    """What of a scenario no prediction has, a line each."""
    job, lines = scenario.job(scenario.loop.job), list[str]()
    if not needs_program(job):
        return lines
    if len({host % scenario.network.racks for host in job.hosts}) > 1:
        lines.append("in the simulation every transfer between hosts leaves its rack")
    compute = [phase.compute for phase in job.iteration if phase.compute is not None]
    if any(one.pause or (one.slow and one.slow.every is not None) for one in compute):
        lines.append("pauses and ranks that are slow at times are not in the simulated program")
    return lines


def scenario_program(job: Job) -> dict[str, Any]:
    """Section ``program`` of a cluster config for a job of the testbed.

    Raises InputError for a gather, which a program has not.
    """
    communicators: dict[str, dict[str, int]] = {}
    named: dict[tuple[str | None, int], str] = {}
    step: list[dict[str, Any]] = []
    for phase in job.iteration:
        ((kind, given),) = ((name, getattr(phase, name)) for name in phase.model_fields_set)
        if isinstance(given, Compute):
            step += _compute(given, job.ranks)
        elif kind == "barrier":
            step.append({"all_reduce": {"bytes": 0.0, "communicator": WORLD}})
        elif isinstance(given, Transfer) and kind != "gather":
            label, groups = _communicator(given, job.ranks, named)
            communicators |= {label: groups} if label != WORLD else {}
            one: dict[str, Any] = {"bytes": given.bytes / given.buckets, "communicator": label}
            if given.background:
                one |= {"background": True, "can_wait": kind == "all_reduce"}
            step += [{kind: one}] * given.buckets
        else:
            raise InputError(f"job {job.name}: {kind} beside transfers in the background; allowed: none of it")
    return {"communicators": communicators, "step": step}


def known_cluster(scenario: Scenario) -> Cluster | None:
    """The operator's knowledge of the cluster: ``loop.known`` with nominal rates; None where the plan gives nothing.

    Where transfers run in the background it has the scenario's own program: a trace does not show its order.
    """
    plan, network, job = scenario.loop, scenario.network, scenario.job(scenario.loop.job)
    nic_gbps = 1e-3 * network.host_mbps
    if needs_program(job):
        nodes, racks = len(job.hosts), {host % network.racks for host in job.hosts}
        uplink_gbps = 1e-3 * network.uplink_mbps * len(racks) if network.uplink_mbps else 1e3 * nodes * nic_gbps
        base: dict[str, Any] = {"job": {"nodes": nodes, "ranks_per_node": 1}}
        base |= {"program": scenario_program(job), "fabric": {"nodes_per_leaf": nodes if len(racks) == 1 else 1}}
        # first-in, first-out queues divide a link between flows, and replies wait in them behind the data
        base["fabric"] |= {"sharing": "flows", "unused_rate": "lost"}
    elif plan.known:
        # what leaves all racks together
        uplink_gbps = 1e-3 * network.racks * (network.uplink_mbps or network.hosts * network.host_mbps)
        base = {"job": {"nodes": job.ranks, "compute_s": 1.0, "gradient_bytes": 1e6}, "fabric": {"nodes_per_leaf": 1}}
    else:
        return None
    base["name"] = f"{scenario.name}-known"
    base["fabric"] |= {"nic_gbps": nic_gbps, "uplink_gbps": uplink_gbps}
    for key, value in plan.known.items():
        config_files.set_value(base, f"{key}={json.dumps(value)}", "loop.known")
    return config_files.parse(Cluster, base, f"scenario {scenario.name}: loop.known")


def _compute(given: Compute, ranks: int) -> list[dict[str, Any]]:
    """Compute of all ranks, and what slow ones take beyond it."""
    some = given.ranks if given.ranks is not None else list(range(ranks))
    named = {} if given.ranks is None else {"ranks": some}
    phases: list[dict[str, Any]] = [{"compute": {"seconds": given.mean_s, **named}}]
    slow = [] if given.slow is None else [rank for rank in given.slow.ranks if rank in some]
    if given.slow is not None and given.slow.every is None and slow:
        phases.append({"compute": {"seconds": given.mean_s * (given.slow.factor - 1.0), "ranks": slow}})
    return phases


def _communicator(given: Transfer, ranks: int, named: dict[tuple[str | None, int], str]) -> tuple[str, dict[str, int]]:
    """The name and the groups of a transfer's communicator; ``named`` gets those that are new, each a name of its own.

    A program's names have at most 32 characters, and a scenario may use one name for groups of several sizes.
    """
    size = given.group_size or ranks
    if size == ranks and given.communicator is None:
        return WORLD, {}
    key = (given.communicator, size)
    named.setdefault(key, f"{(given.communicator or 'shared')[:24]}-{len(named)}")
    return named[key], {"size": size, "stride": 1}
