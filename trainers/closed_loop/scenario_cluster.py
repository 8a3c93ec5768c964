"""What the operator of a scenario's fabric knows of the job's cluster, with nominal times and rates."""

from __future__ import annotations

import json
from typing import Any

from paceenv.live.testbed.testbed_scenario import Scenario
from paceenv.sim.cluster import Cluster
from paceenv.ui import config_files


def left_out(scenario: Scenario) -> list[str]:
    """What of a scenario no prediction has, a line each."""
    job, lines = scenario.job(scenario.loop.job), list[str]()
    if not job.overlaps:
        return lines
    if len({host % scenario.network.racks for host in job.hosts}) > 1:
        lines.append("in the simulation every transfer between hosts leaves its rack")
    if job.pause or job.slow:
        lines.append("pauses and ranks that are slow at times are not in the simulated program")
    return lines


def known_cluster(scenario: Scenario) -> Cluster | None:
    """The operator's knowledge of the cluster: ``loop.known`` with nominal rates; None where the plan gives nothing.

    Where transfers run in the background it has the scenario's own program, without noise: a trace does not show its
    order. Raises InputError for a gather beside them.
    """
    plan, network, job = scenario.loop, scenario.network, scenario.job(scenario.loop.job)
    nic_gbps = 1e-3 * network.host_mbps
    if job.overlaps:
        nodes, racks = len(job.hosts), {host % network.racks for host in job.hosts}
        uplink_gbps = 1e-3 * network.uplink_mbps * len(racks) if network.uplink_mbps else 1e3 * nodes * nic_gbps
        base: dict[str, Any] = {"job": {"nodes": nodes, "ranks_per_node": 1}}
        base |= {"program": job.program.model_dump(exclude={"length_cv"})}
        # first-in, first-out queues divide a link between flows, and replies wait in them behind the data
        base["fabric"] = {"sharing": "flows", "unused_rate": "lost", "nodes_per_leaf": nodes if len(racks) == 1 else 1}
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
