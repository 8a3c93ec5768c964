"""Random steps as programs, for what holds one engine against the other."""

from __future__ import annotations

import random
from typing import Any

from paceenv.sim.cluster.model import Cluster
from paceenv.ui import config_files

NIC_GBPS, NIC_BPS = 100.0, 12.5e9
KINDS = ("all_reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast")


def random_program(seed: int, *, tenants: bool = False, algorithm: str = "ring") -> Cluster:
    """A job of 2 to 8 ranks, 1 or 2 of them on a node, on one to three communicators of a fabric with tiers."""
    rng = random.Random(seed)
    per_node = rng.choice([1, 1, 2])
    nodes = rng.choice([2, 3, 4] if per_node == 2 else [2, 3, 4, 6, 8])
    ranks = nodes * per_node
    parts: list[dict[str, Any]] = [{}, {}]
    if ranks % 2 == 0 and ranks > 2:
        parts += [{"size": 2}, {"size": ranks // 2, "stride": 2}]
    named = dict(zip("abc", rng.sample(parts, min(rng.randint(1, 3), len(parts))), strict=False))
    step: list[dict[str, Any]] = []
    for _ in range(rng.randint(3, 7)):
        step.append({"compute": _work(rng, ranks)})
        if rng.random() < 0.8:
            step.append(_transfer(rng, rng.choice(list(named)), in_background=True))
        if rng.random() < 0.6:
            step.append(_transfer(rng, rng.choice(list(named)), in_background=False))
    fabric: dict[str, Any] = {"nic_gbps": NIC_GBPS, "nics_per_node": rng.choice([1, per_node])}
    fabric |= {"nodes_per_leaf": rng.choice([1, 2, 4]), "latency_us": rng.choice([0.0, 5.0, 20.0])}
    if tenants or rng.random() < 0.5:
        fabric["uplink_gbps"] = NIC_GBPS * rng.choice([0.5, 1.0, 2.0, 8.0])
    else:
        fabric["oversubscription"] = rng.choice([1.0, 2.0, 4.0])
    noise = {"jitter_cv": rng.choice([0.0, 0.01, 0.03]), "transfer_cv": rng.choice([0.0, 0.1])}
    noise |= {"stall_rate": rng.choice([0.0, 0.02]), "stall_mean_s": 0.05, "persistent_cv": rng.choice([0.0, 0.02])}
    other = {"period_ratio": rng.uniform(0.6, 1.5), "comm_share": rng.uniform(0.1, 0.5), "rate_share": 0.7, "ranks": 4}
    data = {"name": f"random {seed}", "job": {"nodes": nodes, "ranks_per_node": per_node, "algorithm": algorithm}}
    data |= {"program": {"communicators": named, "step": step, "length_cv": rng.choice([0.0, 0.1])}, "fabric": fabric}
    data |= {"noise": noise, "tenants": [other] if tenants else []}
    return config_files.parse(Cluster, data, "test")


def _work(rng: random.Random, ranks: int) -> dict[str, Any]:
    work: dict[str, Any] = {"seconds": rng.uniform(0.01, 0.2)}
    if rng.random() < 0.3:
        work["micro_batch"] = rng.randint(0, 3)
    if rng.random() < 0.2:
        work["ranks"] = sorted(rng.sample(range(ranks), rng.randint(1, ranks)))
    return work


def _transfer(rng: random.Random, communicator: str, *, in_background: bool) -> dict[str, Any]:
    transfer: dict[str, Any] = {"bytes": rng.uniform(0.01, 0.2) * NIC_BPS, "communicator": communicator}
    if in_background:
        transfer |= {"background": True, "can_wait": rng.random() < 0.5}
    if rng.random() < 0.15:
        transfer["every"] = 2
    return {rng.choice(KINDS): transfer}
