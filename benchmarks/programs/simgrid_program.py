"""A step as a program with two communicators in SimGrid, a simulator that others wrote, beside both engines.

SimGrid runs it rank by rank and message by message: a ring in rounds, an all-to-all in pairwise rounds, every
communicator of a rank in order. One collective has one message on a port at a time, so that sharing by message is
sharing by collective. ``python -m benchmarks.speed.simgrid --install`` installs SimGrid (as root).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import Report, Table, Target, command
from benchmarks.speed._simgrid import ask, missing, version
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.program_tables import Compute, Start
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.simulator import Simulator, episode_keys
from paceenv.sim.reference import ProgramReference
from paceenv.ui import config_files

TOLERANCE = 0.02
SOURCE = Path(__file__).with_name("simgrid_program.cpp")
NIC_GBPS = 100.0
_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def layers(ranks: int, count: int, needed: str, *, cv: float, uplink_gbps: float | None = None) -> Cluster:
    """A backward pass: in each layer a gradient all-reduce in the background and a transfer that is needed at once.

    Args:
        ranks: of the job, each on a node.
        count: of layers.
        needed: the transfer in the foreground.
        cv: variation of compute.
        uplink_gbps: capacity of the tier above leaves of one node; empty: one leaf.
    """
    part: list[dict[str, Any]] = [
        {"compute": {"seconds": 0.1}},
        {"all_reduce": {"bytes": 5e8, "communicator": "data", "background": True, "can_wait": True}},
        {needed: {"bytes": 6e8, "communicator": "experts"}},
    ]
    data = {
        "name": f"{count} layers, {needed.replace('_', '-')}",
        "job": {"nodes": ranks},
        "program": {"communicators": {"data": {}, "experts": {}}, "step": [{"repeat": count, "step": part}]},
        "fabric": {
            "nic_gbps": NIC_GBPS,
            "nodes_per_leaf": ranks if uplink_gbps is None else 1,
            "uplink_gbps": uplink_gbps or 1e6,
            "latency_us": 20.0,
        },
        "noise": {"jitter_cv": cv, "imbalance_cv": cv},
    }
    return config_files.parse(Cluster, data, "benchmark")


def cases() -> list[Cluster]:
    """Two communicators on the same ports, alone and behind a full tier."""
    return [
        layers(4, 6, "all_to_all", cv=0.0),
        layers(4, 6, "all_to_all", cv=0.03),
        layers(8, 4, "reduce_scatter", cv=0.03),
        layers(8, 4, "all_to_all", cv=0.03, uplink_gbps=400.0),
    ]


def described(config: Cluster, recording: Recording, *, is_together: bool) -> dict[str, Any]:
    """A recorded program for SimGrid: its instructions, and the compute times that the engine drew.

    Args:
        config: with the same instructions on every rank, and communicators of all ranks.
        recording: by the engine.
        is_together: whether a collective waits for all of its members.
    """
    assert config.program is not None
    plan = config.program.plan(config.ranks)
    (row,) = plan.roles
    names = list(plan.communicators)
    communicators: list[list[dict[str, Any]]] = [[] for _ in names]
    step: list[dict[str, Any]] = []
    computes: list[int] = []
    for i, one in enumerate(row):
        if isinstance(one, Compute):
            step.append({"compute": len(computes)})
            computes.append(i)
        elif isinstance(one, Start):
            told = {"pairs": True} if one.op == "all_to_all" else {"passes": _PASSES[one.op]}
            communicators[names.index(one.communicator)].append({"bytes": one.payload_bytes} | told)
            step.append({"start": names.index(one.communicator)})
        else:
            step.append({"wait": names.index(one.communicator), "number": one.number})
    end_TRI = recording.end_ETI[0].reshape(-1, config.ranks, len(row))
    begin_TRI = np.concatenate([np.zeros_like(end_TRI[:, :, :1]), end_TRI[:, :, :-1]], axis=2)
    crosses = config.fabric.nodes_per_leaf == 1
    return {
        "ranks": config.ranks,
        "Bps": NIC_GBPS * 1e9 / 8.0,
        "hop_s": float(config.fabric.latency_us) * 1e-6,  # type: ignore[arg-type]
        "uplink_Bps": float(config.fabric.uplink_gbps) * 1e9 / 8.0 if crosses else 0.0,  # type: ignore[arg-type]
        "together": is_together,
        "communicators": communicators,
        "step": step,
        "compute_s": (end_TRI - begin_TRI)[:, :, computes].tolist(),
    }


def run() -> Report:
    """Mean steps of a program with two communicators in SimGrid, in the fast engine and in the reference."""
    title, why = "SimGrid and programs", missing()
    if why:
        return Report(title, f"Not measured here. {why}", {"missing": why}, ())
    rows: list[tuple[str, ...]] = []
    errors: dict[bool, list[float]] = {True: [], False: []}
    for config in cases():
        keys, iterations = episode_keys([1]), 20
        fast = Simulator(derive(config, keys), keys)
        recording = fast.record(fast.off(), iterations)
        for is_together in (True, False):
            slow_s = ProgramReference(config, 1, is_together=is_together).run(fast.off(), iterations).mean()
            simgrid_T, _ = ask(described(config, recording, is_together=is_together), SOURCE)
            error, reference = recording.step_ET[0].mean() / simgrid_T.mean() - 1.0, slow_s / simgrid_T.mean() - 1.0
            errors[is_together].append(float(error))
            fabric = "one leaf" if config.fabric.nodes_per_leaf != 1 else "full top tier"
            rows.append(
                (
                    config.name,
                    str(config.ranks),
                    f"{config.noise.jitter_cv:g}",
                    fabric,
                    "all are there" if is_together else "both ends are there",
                    f"{1e3 * recording.step_ET[0].mean():.2f}",
                    f"{1e3 * simgrid_T.mean():.2f}",
                    f"{error:+.2%}",
                    f"{reference:+.2%}",
                )
            )
    columns = ("program", "ranks", "CV", "fabric", "messages start when", "engine, ms", "SimGrid, ms", "error")
    targets = [
        Target(
            f"mean step of a program with two communicators against SimGrid, messages {when}",
            f"within {TOLERANCE:.0%}",
            f"{max(errors[is_together], key=abs):+.2%}",
            max(map(abs, errors[is_together])) <= TOLERANCE,
            why,
        )
        for is_together, when, why in (
            (True, "once all are there", ""),
            (
                False,
                "at once",
                "Pairs of an all-to-all on a full tier begin early; so do they in the reference.",
            ),
        )
    ]
    text = (
        f"Programs with two communicators on the same ports in SimGrid {version()}, with the engine's own compute "
        "times. Every message is a flow there, and every communicator of a rank an actor. The last column is the "
        "reference engine against SimGrid, with messages that start as in SimGrid."
    )
    table = Table("programs with two communicators", (*columns, "reference"), rows)
    return Report(title, text, {"together": errors[True], "early": errors[False]}, (table,), targets)


if __name__ == "__main__":
    command(run)
