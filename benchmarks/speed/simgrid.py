"""The fast engine beside SimGrid: the same jobs, with the same compute times, in a simulator that others wrote.

``python -m benchmarks.speed.simgrid --install`` installs SimGrid (as root). Its network is the plain fluid
model (``CM02``, no cost of acknowledgements, no window, no factors), in which a collective is either what it is to the
engine, one flow, or a ring of messages through every rank's own port, which starts when all its ranks are there, or
rank by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import typer

from benchmarks._common import NOISE, Report, Table, Target, tell
from benchmarks.speed._simgrid import FLOW_BPS, ask, install, missing, program, version
from paceenv.core.errors import InputError
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.environment import Noise, PostCollectiveWork, Tenant
from paceenv.sim.cluster.fabric import Fabric
from paceenv.sim.cluster.job import Job
from paceenv.sim.engine import fluid, layout
from paceenv.sim.engine.draws import normal_table
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.simulator import Simulator, episode_keys
from paceenv.ui import output

TOLERANCE = 0.02

Network = Literal["flow", "ring", "ring_together"]
NAMES: dict[Network, str] = {
    "flow": "one flow",
    "ring_together": "messages once all are there",
    "ring": "messages",
}
"""What a collective is in SimGrid."""


# The same job for both


def described(config: Cluster, network: Network, before: Simulator, recording: Recording) -> dict[str, Any]:
    """The description of environment 0 for SimGrid: compute times and work as recorded, tenants as they stood before.

    Args:
        config: its cluster.
        network: ``flow`` takes times and shares from the engine's parameter record; a ring takes sizes and bandwidths
            from the config.
        before: the simulator before the recording.
        recording: the recorded iterations.

    Raises:
        ValueError: for a ring in which some hops leave their leaf switch and others do not.
    """
    job = before.batch.jobs[0]
    told = {
        "ranks": config.job.ranks,
        "groups": config.job.groups,
        "compute_s": (recording.entry_ETR - recording.delay_ETR)[0].tolist(),
        "post_work_s": np.maximum(recording.ready_ETG - recording.finish_ETG, 0.0)[0].tolist(),
        "barrier_s": float(job["barrier_s"]),
    }
    if network == "flow":
        alone_s, work_s = float(job["transfer_alone_s"]), float(job["uplink_work_s"])
        longest_s, uplink_Bps = max(alone_s, work_s), FLOW_BPS if work_s > 0.0 else 0.0
        size_bytes = (work_s or alone_s) * FLOW_BPS
        flow = {"bytes": size_bytes, "Bps": size_bytes / longest_s, "after_s": float(job["latency_s"])}
        told |= {"flow": flow, "uplink_Bps": uplink_Bps}
    else:
        net, Bps = config.fabric, 1e9 / 8.0
        crosses = (net.nodes_per_leaf or 1) < config.job.nodes
        if config.job.ranks_per_node != 1 or (crosses and net.nodes_per_leaf != 1):
            raise ValueError("a ring of messages wants one rank a node, and one or all nodes under a leaf")
        ring = {
            "bytes": _number(config.job.gradient_bytes),
            "Bps": _number(net.nic_gbps) * net.nics_per_node * Bps,
            "hop_s": _number(net.latency_us) * 1e-6,
            "together": network == "ring_together",
        }
        uplink_Bps = _number(net.uplink_gbps) * Bps if crosses else 0.0
        told |= {"ring": ring, "uplink_Bps": uplink_Bps}
    ends_s = float(recording.step_ET[0].sum())
    flows = 1 if network == "flow" else config.job.ranks // config.job.groups
    tenants = [
        _tenant(before, k, uplink_Bps, ends_s) | {"flows": flows} for k in range(before.state.tenant_ENK.shape[2])
    ]
    return told | {"tenants": tenants}


def _number(quantity: Any) -> float:
    """A quantity that is a number and not drawn, which is what a comparison needs."""
    if not isinstance(quantity, int | float):
        raise ValueError(f"{quantity} is not a number")
    return float(quantity)


def _tenant(before: Simulator, k: int, uplink_Bps: float, ends_s: float) -> dict[str, Any]:
    """Tenant ``k`` of environment 0 from where it stands, with the compute times that it will draw until ``ends_s``."""
    tenants, clock = before.batch.tenants_EK[0], before.state.clocks[0]
    if tenants[k]["weight"] != 1.0 or tenants[k]["bursty"]:
        raise ValueError("only steady tenants of weight 1 can be described to SimGrid")
    state = before.state.tenant_ENK[0].copy()
    compute_s: list[float] = []
    # alone on the uplink it would be this far, so it needs no more of them
    shortest_s = float(tenants[k]["uplink_work_s"] / tenants[k]["rate_cap"])
    while sum(compute_s) + len(compute_s) * shortest_s <= ends_s + 1.0:
        with np.errstate(over="ignore"):  # 64-bit hashes
            compute_s.append(fluid._next_compute_s(clock, tenants, state, k, normal_table()))
    left_s, work_s = float(before.state.tenant_ENK[0, layout.LEFT_S, k]), float(tenants[k]["uplink_work_s"])
    return {
        "Bps": float(tenants[k]["rate_cap"]) * uplink_Bps,
        "bytes": work_s * uplink_Bps,
        "compute_s": compute_s,
        "first_s": 0.0 if left_s > 0.0 else float(before.state.tenant_ENK[0, layout.NEXT_S, k]),
        "first_bytes": (left_s or work_s) * uplink_Bps,
    }


# The cases


@dataclass(frozen=True)
class Case:
    what: str
    config: Cluster
    networks: Sequence[Network]
    iterations: int


@dataclass(frozen=True)
class Comparison:
    """Mean steps of one case, and the largest difference of any one step, relative to SimGrid's mean."""

    case: Case
    network: Network
    engine_s: float
    simgrid_s: float
    worst: float

    @property
    def error(self) -> float:
        return self.engine_s / self.simgrid_s - 1.0


def barrier(nodes: int, noise: Noise) -> Cluster:
    """One job under one leaf switch: nothing is shared."""
    job = Job(nodes=nodes, compute_s=0.2, gradient_bytes=256e6)
    return Cluster(
        name="barrier", job=job, fabric=Fabric(nic_gbps=200, nodes_per_leaf=nodes, uplink_gbps=1), noise=noise
    )


def shared(
    groups: int, members: int, *, cv: float = 0.1, post_work_s: float = 0.0, tenants: Sequence[Tenant] = ()
) -> Cluster:
    """Groups whose rings leave the leaf switch at every hop: ports limit a lone group, the uplink limits two.

    Args:
        groups: process groups of the job.
        members: ranks of each.
        cv: variation of compute; with 0.1 arrivals are as far apart as a transfer is long, so groups come and go while
            others transfer.
        post_work_s: post-collective work of the first group, in seconds.
        tenants: other jobs on the uplink.
    """
    return Cluster(
        name="shared",
        job=Job(nodes=groups * members, nodes_per_group=members, barrier=True, compute_s=0.4, gradient_bytes=1e6),
        fabric=Fabric(nic_gbps=0.1, nodes_per_leaf=1, uplink_gbps=0.15 * members, latency_us=200, barrier_us=1000),
        noise=Noise(jitter_cv=cv, imbalance_cv=cv),
        post_collective_work=PostCollectiveWork(groups=1 if post_work_s else 0, work_s=post_work_s),
        tenants=list(tenants),
    )


def cases() -> list[Case]:
    """Barrier jobs, shared uplinks, unequal slack."""
    tenants = [
        Tenant(period_ratio=ratio, comm_share=0.4, rate_share=rate, jitter_cv=0.05, ranks=4)
        for ratio, rate in ((0.7, 0.5), (1.3, 1.0), (0.41, 0.25))
    ]
    every: tuple[Network, ...] = ("flow", "ring_together", "ring")
    return [
        Case("barrier, every noise", barrier(8, NOISE), every, 2000),
        Case("barrier, every noise", barrier(64, NOISE), every, 200),
        Case("barrier, every noise", barrier(512, NOISE), ("flow",), 200),
        Case("shared uplink", shared(4, 2), every, 2000),
        Case("shared uplink", shared(8, 4), every, 500),
        Case("shared uplink, a third of the noise", shared(8, 4, cv=0.03), every, 500),
        Case("shared uplink, another job", shared(4, 2, tenants=tenants[:1]), every, 2000),
        Case("shared uplink, three other jobs", shared(8, 4, tenants=tenants), every, 500),
        Case("`two-jobs`", load_cluster("two-jobs"), ("flow",), 2000),
        Case("unequal slack", shared(4, 2, post_work_s=0.12), every, 2000),
        Case("`unequal-slack`", load_cluster("unequal-slack"), ("flow",), 2000),
    ]


def compare(case: Case, network: Network) -> Comparison:
    """Run a case, unpaced, in both."""
    keys = episode_keys([1])
    simulator = Simulator(derive(case.config, keys), keys)
    before = simulator.fork(np.arange(1))
    recording = simulator.record(simulator.off(), case.iterations)
    step_T, _ = ask(described(case.config, network, before, recording))
    mean_s = float(step_T.mean())
    worst = float(np.abs(recording.step_ET[0] - step_T).max()) / mean_s
    return Comparison(case, network, float(recording.step_ET[0].mean()), mean_s, worst)


def run() -> Report:
    """Mean steps of the engine against those of SimGrid on barrier, shared-uplink and unequal-slack jobs."""
    title, why = "SimGrid", missing()
    if why:
        return Report(title, f"Not measured here. {why}", {"missing": why}, ())
    found = [compare(case, network) for case in cases() for network in case.networks]
    rows = [
        (
            c.case.what,
            f"{c.case.config.job.ranks} in {c.case.config.job.groups}",
            str(len(c.case.config.tenants)),
            NAMES[c.network],
            f"{1e3 * c.engine_s:.3f}",
            f"{1e3 * c.simgrid_s:.3f}",
            f"{c.error:+.3%}",
            f"{c.worst:.3%}",
        )
        for c in found
    ]
    columns = (
        "job",
        "ranks, groups",
        "other jobs",
        "collective in SimGrid",
        "engine, ms",
        "SimGrid, ms",
        "error",
        "worst",
    )
    errors = {n: max(abs(c.error) for c in found if c.network == n) for n in NAMES}
    because = "Early ranks' messages are through before the last rank is there; that is all, as the line above shows."
    targets = [
        Target(
            f"mean step against SimGrid, {name}",
            f"within {TOLERANCE:.0%}",
            f"{errors[network]:.3%}",
            errors[network] <= TOLERANCE,
            because if network == "ring" else "",
        )
        for network, name in NAMES.items()
    ]
    text = (
        f"The same jobs in SimGrid {version()}, unpaced, with the engine's own compute times, post-collective work and "
        "other jobs. *One flow* is the engine's model in another program, so any error is one of arithmetic. "
        "*Messages* is a ring of 2 (n - 1) rounds through every rank's port, with latencies between the rounds. In "
        "*messages once all are there* the ring waits for its last rank. In *messages* early ranks have sent some of "
        "theirs by then. This error is the price of simulating phases. It grows with the size of a group and with the "
        "spread of its arrivals. *Worst* is the largest difference of one step, relative to the mean step."
    )
    data = {
        "error": [
            {
                "job": c.case.what,
                "ranks": c.case.config.job.ranks,
                "collective": c.network,
                "error": c.error,
                "worst": c.worst,
            }
            for c in found
        ]
    }
    return Report(title, text, data, (Table("mean steps", columns, rows),), targets)


def main(
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
    install_: Annotated[
        bool, typer.Option("--install", help="Install SimGrid with apt-get and stop; needs root.")
    ] = False,
) -> None:
    """Mean steps of the engine against those of SimGrid."""

    def wanted() -> Report:
        program()
        return run()

    if not install_:
        tell(wanted, json_)
        return
    try:
        install()
    except InputError as error:
        output.say(f"error: {error}")
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
