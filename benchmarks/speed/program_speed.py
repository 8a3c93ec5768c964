"""Steps as programs: rank-phases per CPU second by number of ranks, with links that nobody shares and with shared ones.

A phase is an instruction of a rank: it computes, hands a transfer over, or waits for one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks._common import Report, Table, Target, command, figure, measure
from paceenv.core import pacing
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.engine.simulator import Simulator, episode_keys
from paceenv.ui import config_files

RANKS, LAYERS, TARGET = (8, 64, 256), 8, 10e6
CALL_RANK_PHASES = 400_000
_PARTS: dict[str, list[dict[str, Any]]] = {
    "one communicator": [
        {"compute": {"seconds": 0.1}},
        {"all_reduce": {"bytes": 5e8, "communicator": "data", "background": True, "can_wait": True}},
    ],
    "two that meet on every NIC": [
        {"compute": {"seconds": 0.1}},
        {"all_reduce": {"bytes": 5e8, "communicator": "data", "background": True, "can_wait": True}},
        {"all_gather": {"bytes": 6e8, "communicator": "experts"}},
    ],
    "tensor-parallel pairs": [
        {"compute": {"seconds": 0.1}},
        {"all_reduce": {"bytes": 1e8, "communicator": "tensor"}},
        {"compute": {"seconds": 0.1}},
        {"all_reduce": {"bytes": 5e8, "communicator": "data", "background": True, "can_wait": True}},
    ],
}


def job(ranks: int, kind: str) -> Cluster:
    """A program of layers on ranks of a node each.

    Args:
        kind: a name of ``_PARTS``.
    """
    data = {
        "name": "benchmark",
        "job": {"nodes": ranks},
        "program": {
            "communicators": {"data": {}, "experts": {}, "tensor": {"size": 2}},
            "step": [{"repeat": LAYERS, "step": _PARTS[kind]}],
        },
        "fabric": {"nic_gbps": 100, "nodes_per_leaf": 8, "uplink_gbps": 12.5 * ranks},
        "noise": {"jitter_cv": 0.02},
    }
    return config_files.parse(Cluster, data, "benchmark")


def run() -> Report:
    """Rank-phases per CPU second of programs."""
    calls, units = {}, {}
    settings = pacing.one_mechanism("defer", 0.0, 0.02)[None, None]
    for kind in _PARTS:
        for ranks in RANKS:
            keys = episode_keys([0])
            one = Simulator(derive(job(ranks, kind), keys), keys)
            phases = len(one.batch.program.kind_I)
            iterations = max(CALL_RANK_PHASES // phases, 2)
            calls[f"{kind}, {ranks}"] = partial(one.run, settings, iterations)
            units[f"{kind}, {ranks}"] = phases * iterations
    times = measure(calls, units, turns=7)
    rates = {kind: {str(ranks): times.rate(f"{kind}, {ranks}") for ranks in RANKS} for kind in _PARTS}
    exponents = {
        kind: float(np.polyfit(np.log(RANKS), np.log([r / rates[kind][str(r)] for r in RANKS]), 1)[0])
        for kind in _PARTS
    }
    rows = [(kind, *(figure(rates[kind][str(ranks)]) for ranks in RANKS), f"{exponents[kind]:.2f}") for kind in _PARTS]
    table = Table("rank-phases per CPU second", ("program", *(f"{r} ranks" for r in RANKS), "exponent"), rows)
    slowest = min(rates[kind]["64"] for kind in _PARTS)
    worst = max(exponents.values())
    because = "A large group that meets many small ones finds its rate again more often."
    fast, linear = slowest >= TARGET, worst <= 1.15
    targets = (
        Target("programs at 64 ranks", f"at least {figure(TARGET)}/s", f"{figure(slowest)}/s", fast),
        Target("programs are linear in ranks", "an exponent of at most 1.15", f"{worst:.2f}", linear, because),
    )
    text = (
        f"Programs of {LAYERS} layers with jitter and rule `defer`. A phase is an instruction of a rank: it computes, "
        "hands a transfer over, or waits for one. The exponent is that of time over ranks."
    )
    return Report("Programs", text, {"rank_phases_per_cpu_s": rates, "exponents": exponents}, (table,), targets)


if __name__ == "__main__":
    command(run)
