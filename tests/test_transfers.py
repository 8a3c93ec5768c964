"""What a collective costs on a cluster's fabric: algorithms, leaves, incast, and time."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from test_cluster import cluster, jobs_of

from paceenv.core.errors import InputError
from paceenv.sim.cluster.collectives import BYTES_PER_GBIT, Law, tree_parents, volume
from paceenv.sim.cluster.derive import derive, start
from paceenv.sim.cluster.program.program_tables import Start
from paceenv.sim.cluster.transfers import use_of
from paceenv.sim.engine import layout
from paceenv.sim.engine.simulator import episode_keys

S, GBPS = 1e9, BYTES_PER_GBIT
EIGHT = {"nodes": 4, "ranks_per_node": 2, "compute_s": 0.5, "gradient_bytes": S}
NO_LATENCY = {"latency_us": 0.0, "intra_node_gbps": 1600.0, "uplink_gbps": 1e6}


# Closed forms


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 12, 31, 64, 100])
def test_double_tree_equals_two_trees_counted_edge_by_edge(n: int) -> None:
    sent: defaultdict[int, float] = defaultdict(float)
    depth, parents = 0, tree_parents(n)
    for mirrored in (False, True):
        name = (lambda i: i) if not mirrored else (lambda i: n - 1 - i) if n % 2 == 0 else (lambda i: (i + 1) % n)
        for child, parent in parents.items():
            sent[name(child)] += S / 2  # its sum goes up
            sent[name(parent)] += S / 2  # the result comes down
    for leaf in range(n):
        climbed, at = 0, leaf
        while at in parents:
            at, climbed = parents[at], climbed + 1
        depth = max(depth, climbed)
    found = volume("all_reduce", "tree", n, S)
    assert found.sent_bytes == pytest.approx(max(sent.values()), rel=1e-6)
    assert found.rounds == 2 * math.ceil(math.log2(n))
    assert depth <= found.rounds / 2
    assert sum(sent.values()) == pytest.approx(n * volume("all_reduce", "ring", n, S).sent_bytes), "no more in total"


def test_the_square_root_term_is_the_cost_of_cutting_into_chunks() -> None:
    """A pipeline of depth d with the best whole number of chunks, against the law with ``2 sqrt(d hop / B)``."""
    hop, B, d = 1e-5, 1e10, 16
    law = Law(hop, B, 2 * math.sqrt(d * hop / B))
    for size in (1e8, 1e9):
        best = min((d + chunks) * (hop + size / chunks / B) for chunks in range(1, 20000))
        assert law.time_s(volume("broadcast", "ring", d + 1, size)) == pytest.approx(best, rel=1e-2)


# Algorithms


@pytest.mark.parametrize(
    ("algorithm", "alone_s", "inside_s"),
    [
        ("hierarchical", 1.5 * S / (80 * GBPS), S / (1600 * GBPS)),
        ("ring", 2 * 7 / 8 * S / (80 * GBPS), 0.0),
        ("tree", 2 * S / (80 * GBPS), 0.0),
    ],
)
def test_all_reduce_of_four_nodes_with_two_gpus_by_hand(algorithm: str, alone_s: float, inside_s: float) -> None:
    jobs = jobs_of(cluster(job=EIGHT | {"algorithm": algorithm}, fabric=NO_LATENCY))
    assert jobs["transfer_alone_s"][0] == pytest.approx(alone_s, rel=1e-9)
    assert jobs["latency_s"][0] == pytest.approx(inside_s, rel=1e-9)


@pytest.mark.parametrize(("payload", "like"), [(20e6, "tree"), (30e6, "ring")])
def test_auto_is_a_tree_for_small_and_a_ring_for_large_messages(payload: float, like: str) -> None:
    def alone_s(algorithm: str) -> float:
        return float(jobs_of(cluster(job=EIGHT | {"gradient_bytes": payload, "algorithm": algorithm}))["latency_s"][0])

    assert alone_s("auto") == alone_s(like)
    assert alone_s("tree") != alone_s("ring")


@pytest.mark.parametrize("inside_gbps", [100.0, 2400.0])
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 8)])
def test_a_tree_takes_as_long_in_a_measured_step_as_in_a_program(nodes: int, per_node: int, inside_gbps: float) -> None:
    """By hand: bytes pass NICs and chains at once, an inner GPU sends S up and S down, and the latencies add."""
    rates = {"nic_gbps": 100.0, "nics_per_node": per_node, "intra_node_gbps": inside_gbps, "uplink_gbps": 1e6}
    one = cluster(
        job={"nodes": nodes, "ranks_per_node": per_node, "compute_s": 0.5, "gradient_bytes": S, "algorithm": "tree"},
        fabric=rates | {"latency_us": 100.0, "intra_node_latency_us": 30.0, "nodes_per_leaf": nodes},
    )
    across_s = min(nodes, 4) / 2 * S / (100 * per_node * GBPS)
    chain_s = (min(per_node, 3) - 1) * S / (inside_gbps * GBPS)
    by_hand_s = max(across_s, chain_s) + 2 * math.log2(nodes) * 100e-6 + 2 * (per_node - 1) * 30e-6
    jobs = jobs_of(one)
    assert jobs["transfer_alone_s"][0] + jobs["latency_s"][0] == pytest.approx(by_hand_s)
    used = use_of(one.fabric, one.job)(Start("world", "all_reduce", S), range(nodes * per_node))
    assert used.alone_s + used.latency_s == pytest.approx(by_hand_s)


def test_latency_and_square_root_by_hand() -> None:
    fabric = {"latency_us": 5.0, "intra_node_latency_us": 2.0, "sqrt_us_per_sqrt_mb": 50.0, "intra_node_gbps": 1e9}
    jobs = jobs_of(cluster(job=EIGHT, fabric=fabric))
    expected_s = 6 * 5e-6 + 2 * 2e-6 + 50e-6 * math.sqrt(1.5e9 / 2 / 1e6)
    assert jobs["latency_s"][0] == pytest.approx(expected_s, rel=1e-5)


@pytest.mark.parametrize("placement", ["packed", "spread"])
def test_bytes_above_the_leaves_by_hand(placement: str) -> None:
    fabric = NO_LATENCY | {"nodes_per_leaf": 2, "placement": placement, "uplink_gbps": 1.0}

    def above_bytes(key: str, times: float, **job: Any) -> float:
        one = cluster(job={"nodes": 4, "gradient_bytes": S, **job}, fabric=fabric)
        return float(jobs_of(one)[key][0]) * times * GBPS

    # two leaves of two: of two trees over four nodes, 0-2, 2-1, 2-3 and its mirror image, two edges each cross
    assert above_bytes("uplink_work_s", 1, algorithm="tree") == pytest.approx(4 * S)
    assert above_bytes("incast_flow_s", 3, collective="gather") == pytest.approx(2 * S)
    assert above_bytes("incast_flow_s", 3, collective="all_to_all") == pytest.approx(4 * 2 * S / 4)


# Leaves


def test_oversubscription_is_what_nodes_send_over_what_their_leaf_carries() -> None:
    job = {"nodes": 8, "gradient_bytes": S}
    fabric = {"nic_gbps": 100.0, "nodes_per_leaf": 4, "uplink_gbps": None, "latency_us": 0.0}
    alone_s = 2 * 7 / 8 * S / (100 * GBPS)
    for ratio, slower in ((1.0, 1.0), (4.0, 1.0), (8.0, 2.0)):  # one hop of a packed ring leaves each leaf
        jobs = jobs_of(cluster(job=job, fabric=fabric | {"oversubscription": ratio}))
        assert jobs["transfer_alone_s"][0] == pytest.approx(slower * alone_s)
        assert jobs["uplink_work_s"][0] == pytest.approx(alone_s * ratio / 4)


# Incast


def test_gather_and_all_to_all_by_hand() -> None:
    fabric = {"buffer_kb": 32.0, "timeout_ms": 100.0, "nodes_per_leaf": 4}
    gather = jobs_of(cluster(job={"collective": "gather", "gradient_bytes": 8e6}, fabric=fabric))[0]
    assert (gather["incast_kind"], gather["uplink_work_s"]) == (layout.GATHER, 0.0)
    assert gather["incast_flow_s"] == pytest.approx(8e6 / (80 * GBPS))
    assert gather["incast_fit"] == pytest.approx(32 / 14.48)
    assert gather["incast_timeout_s"] == pytest.approx(0.1)
    assert gather["ideal_step_s"] == pytest.approx(0.5 + 3 * gather["incast_flow_s"] + 1e-5)
    exchange = jobs_of(cluster(job={"collective": "all_to_all", "gradient_bytes": 8e6}, fabric=fabric))[0]
    assert exchange["incast_kind"] == layout.ALL_TO_ALL
    assert exchange["incast_flow_s"] == pytest.approx(2e6 / (80 * GBPS))
    lossless = jobs_of(cluster(job={"collective": "gather"}))[0]
    assert lossless["incast_fit"] == math.inf


# Overlap, synchronization, power, failures


@pytest.mark.parametrize("overlap", [0.0, 0.3, 1.0])
def test_overlap_hides_a_collective_but_for_its_tail(overlap: float) -> None:
    some = cluster(job={"overlap": overlap, "tail_bytes": 1e8}, fabric={"uplink_gbps": 1e6, "latency_us": 0.0})
    job = jobs_of(some)[0]
    alone_s = 1.5 * 1e9 / (80 * GBPS)
    assert job["tail_s"] == pytest.approx(alone_s / 10)
    expected_s = max(0.5 * (1 - overlap) + alone_s, 0.5 + alone_s / 10)
    assert job["ideal_step_s"] == pytest.approx(expected_s)
    sim = start(some, [0])
    np.testing.assert_allclose(sim.run(sim.off(), 5), expected_s, rtol=1e-6)


def test_local_sgd_equals_k_steps_with_one_collective() -> None:
    """Mean and spread of a rank's compute between two synchronizations, against the sum of K steps of it."""
    noise = {"jitter_cv": 0.04, "common_cv": 0.02, "imbalance_cv": 0.06, "imbalance_skew": 1.0, "stall_rate": 0.01,
             "stall_mean_s": 0.2, "drift_iterations": 90.0, "drift_cv": 0.01}  # fmt: skip
    keys = episode_keys([0])
    one, four = (derive(cluster(noise=noise, synchronization={"sync_period": k}), keys) for k in (1, 4))
    a, b = one.jobs[0], four.jobs[0]
    assert b["compute_s"] == 4 * a["compute_s"]
    for name in ("jitter_cv", "common_cv", "imbalance_cv"):
        assert b["compute_s"] * b[name] == pytest.approx(math.sqrt(4) * a["compute_s"] * a[name]), name
    assert (b["stall_rate"], b["drift_iterations"]) == (4 * a["stall_rate"], a["drift_iterations"] / 4)
    assert (one.jobs["imbalance_skew"][0], four.jobs["imbalance_skew"][0]) == (1.0, 0.5)
    assert b["transfer_alone_s"] == a["transfer_alone_s"]
    some = cluster(synchronization={"sync_period": 4})
    assert some.samples_per_step == 4 * cluster().samples_per_step


# Impossible clusters

TENANT = {"period_ratio": 1.0, "comm_share": 0.3}
DESCRIBED = {"workload": {"model": "gpt-10b", "batch": 2}, "gpu": {"achievable_tflops": 140}}
FREE = {"compute_s": None, "gradient_bytes": None}


@pytest.mark.parametrize(
    ("sections", "rule"),
    [
        ({"fabric": {"nics_per_node": 0}}, "fabric.nics_per_node = 0; allowed: input should be greater than or equal"),
        ({"fabric": {"oversubscription": 2.0}}, "one of uplink_gbps and oversubscription"),
        ({"fabric": {"uplink_gbps": None}}, "one of uplink_gbps and oversubscription"),
        ({"job": {"collective": "gather", "overlap": 0.5}}, "job.overlap and job.tail_bytes 0 for a gather"),
        ({"job": {"collective": "gather"}, "tenants": [TENANT]}, "no tenants with a gather or an all_to_all"),
        ({"job": {"collective": "all_to_all"}, "tenants": [TENANT]}, "no tenants with a gather or an all_to_all"),
        ({"fabric": {"sharing": "flows"}}, "fabric.sharing by default without a workload or a program"),
        ({"fabric": {"efficiency": {"send": 0.5}}}, "fabric.efficiency by default without a workload or a program"),
        ({"job": {"compute_s": None}}, "job.compute_s"),
        ({"job": {"gradient_bytes": None}}, "job.gradient_bytes"),
        ({"job": {"barrier": True}, "synchronization": {"staleness": 1}}, "synchronization.staleness 0 with a barrier"),
        ({"synchronization": {"staleness": 1, "sync_period": 2}}, "one of synchronization.sync_period and "),
        (
            {"synchronization": {"sync_period": 3}, "reliability": {"checkpoint_iterations": 100}},
            "a multiple of synchroniz",
        ),
        ({"power": {"heat_slowdown": 0.1}}, "power.compute_w greater than 0 where"),
        (DESCRIBED, "job.compute_s by default with a workload"),
        (DESCRIBED | {"job": FREE | {"nodes_per_group": 2, "barrier": True}}, "job.nodes_per_group by default with a"),
        (DESCRIBED | {"job": FREE | {"collective": "gather"}}, "job.collective by default with a workload"),
        (DESCRIBED | {"job": FREE, "gpu": None}, "workload and gpu together"),
        (DESCRIBED | {"job": FREE, "fabric": {"nic_gbps": {"uniform": [1, 2]}}}, "fabric.nic_gbps fixed, not drawn"),
    ],
)
def test_impossible_clusters_are_refused_by_the_rule_they_break(sections: dict[str, Any], rule: str) -> None:
    with pytest.raises(InputError) as caught:
        cluster(**sections)
    assert rule in str(caught.value)
