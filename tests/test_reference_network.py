"""The reference engine by itself: closed forms of shares, collectives and tenants on its network of messages."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_jobs import NIC_BPS, NIC_GBPS, cluster, tenant

from paceenv.sim.reference import Reference, Setup, run
from paceenv.sim.reference.network import Flow, Network, Resource, share

# The network


def flows_on(*rows: tuple[list[Resource], float, float]) -> list[Flow]:
    flows = [Flow(1.0, tuple(resources), lambda: None, weight, cap) for resources, weight, cap in rows]
    for flow in flows:
        for resource in flow.resources:
            resource.flows[flow] = None
    share(flows)
    return flows


def test_max_min_of_a_line_of_two_links() -> None:
    # Bertsekas and Gallager: the long flow is held by the link it shares with two others, what it leaves is taken
    thin, wide = Resource("thin", 3.0), Resource("wide", 10.0)
    rates = [f.rate_Bps for f in flows_on(([thin, wide], 1, math.inf), ([thin], 2, math.inf), ([wide], 1, math.inf))]
    assert rates == pytest.approx([1.0, 2.0, 9.0], rel=1e-12)


@settings(derandomize=True)
@given(data=st.data())
def test_nothing_can_be_given_to_a_flow_without_taking_it_from_a_poorer_one(data: st.DataObject) -> None:
    links = [Resource(str(i), data.draw(st.floats(0.1, 10.0))) for i in range(4)]
    row = st.tuples(
        st.lists(st.sampled_from(links), min_size=1, max_size=3, unique=True),
        st.floats(0.1, 5.0),
        st.one_of(st.just(math.inf), st.floats(0.1, 5.0)),
    )
    flows = flows_on(*data.draw(st.lists(row, min_size=1, max_size=8)))
    for link in links:
        assert sum(f.rate_Bps for f in link.flows) <= link.capacity_Bps * (1 + 1e-12)
    for flow in flows:
        is_full = [math.isclose(sum(f.rate_Bps for f in r.flows), r.capacity_Bps, rel_tol=1e-9) for r in flow.resources]
        held = [
            full and all(f.rate_Bps / f.weight <= flow.rate_Bps / flow.weight * (1 + 1e-9) for f in r.flows)
            for full, r in zip(is_full, flow.resources, strict=True)
        ]
        assert any(held) or flow.rate_Bps == pytest.approx(flow.cap_Bps, rel=1e-12)


def test_two_transfers_share_a_link_while_they_overlap() -> None:
    network, link, ends = Network(), Resource("link", 2.0), []
    network.send(4.0, [link], lambda: ends.append(network.now_s))
    network.at(1.0, lambda: network.send(1.0, [link], lambda: ends.append(network.now_s)))
    network.run_until(lambda: len(ends) == 2)
    assert ends == pytest.approx([2.0, 2.5], rel=1e-12)  # the short one from 1 to 2 at half of the link


def test_a_member_that_waits_for_ever_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="waits for ever"):
        Network().run_until(lambda: False)


# One collective alone


@pytest.mark.parametrize("nodes", [1, 3, 16])
@pytest.mark.parametrize("per_node", [1, 4])
def test_a_ring_alone_takes_what_its_links_say(nodes: int, per_node: int) -> None:
    config = cluster(nodes, job={"ranks_per_node": per_node}, fabric={"latency_us": 20.0, "intra_node_gbps": 800.0})
    step_T = run(config, 0, 3).step_ET[0]
    across_s = 2 * (nodes - 1) / nodes * 1e9 / NIC_BPS
    inside_s = 2 * (per_node - 1) / per_node * 1e9 / 100e9
    assert step_T == pytest.approx(1.0 + across_s + inside_s + 20e-6 * 2 * (nodes - 1 + per_node - 1), rel=1e-9)


@pytest.mark.parametrize(("nodes_per_leaf", "crossing"), [(1, 6), (2, 3), (3, 2), (4, 2), (6, 0)])
def test_a_ring_is_as_slow_as_the_hops_between_leaves(nodes_per_leaf: int, crossing: int) -> None:
    config = cluster(6, fabric={"nodes_per_leaf": nodes_per_leaf, "uplink_gbps": NIC_GBPS})
    alone_s = 2 * 5 / 6 * 1e9 / NIC_BPS
    assert run(config, 0, 2).step_ET[0] == pytest.approx(1.0 + alone_s * max(crossing, 1), rel=1e-9)


@pytest.mark.parametrize("members", [3, 8])
def test_two_trees_keep_the_busiest_link_full_but_for_their_first_pieces(members: int) -> None:
    config, pieces = cluster(members), 64
    reference = Reference(config, 0, replace(Setup.of(config), algorithm="tree", pieces=pieces))
    busiest = min(members, 4) / 2 * 1e9 / NIC_BPS
    fill = 2 * math.ceil(math.log2(members)) / pieces
    assert busiest <= (reference.ideal_step_s - 1.0) * (1 + 1e-9) <= busiest * (1 + fill)


@pytest.mark.parametrize(("kind", "message_bytes"), [("gather", 1e9), ("all_to_all", 1e9 / 5)])
def test_a_port_takes_one_message_after_the_other(kind: Any, message_bytes: float) -> None:
    config = cluster(5)
    reference = Reference(config, 0, replace(Setup.of(config), collective=kind))
    assert reference.ideal_step_s == pytest.approx(1.0 + 4 * message_bytes / NIC_BPS, rel=1e-9)


# Sharing the upper tier


def test_two_groups_of_which_one_is_late_share_the_upper_tier() -> None:
    config = cluster(
        4, job={"nodes_per_group": 2, "barrier": True}, fabric={"nodes_per_leaf": 1, "uplink_gbps": NIC_GBPS},
        noise={"slow_ranks": 1, "slow_factor": 1.125},
    )  # fmt: skip
    finish_G = np.sort(run(config, 0, 1).finish_ETG[0, 0])
    work_s = 2 * 1e9 / NIC_BPS  # two hops of a pair, 2 (n-1)/n S each
    # the first alone for 0.125 s, both at half of it until the first is through, then the other alone
    assert finish_G == pytest.approx([1.125 + 2 * (work_s - 0.125), 1.0 + 2 * work_s], rel=1e-9)


def test_a_tenant_alone_keeps_its_period() -> None:
    reference = Reference(cluster(1, tenants=[tenant(period_ratio=0.7)]), 3)
    network, upper = reference.network, reference.links.upper
    edges: list[float] = []
    while network.now_s < 5.0:
        before = len(upper.flows)
        network.step()
        if len(upper.flows) != before:
            edges.append(network.now_s)
    lengths = np.diff(edges)
    assert np.diff(edges[::2]) == pytest.approx(0.7, rel=1e-9)
    assert sorted({round(x, 9) for x in lengths}) == pytest.approx([0.28, 0.42], rel=1e-9)


@pytest.mark.parametrize("crossing_leaves", [2, 4])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_group_weighs_the_same_however_many_of_its_hops_cross(crossing_leaves: int, weight: float) -> None:
    # a tenant that all but never pauses takes its weight's share of every one of our transfers
    config = cluster(
        8,
        fabric={"nodes_per_leaf": 8 // crossing_leaves, "uplink_gbps": NIC_GBPS},
        tenants=[tenant(period_ratio=1e4, comm_share=0.99, rate_share=1.0, weight=weight)],
    )
    step_T = run(config, 1, 3).step_ET[0]
    work_s = crossing_leaves * 2 * 7 / 8 * 1e9 / NIC_BPS
    assert step_T == pytest.approx(1.0 + work_s * (1.0 + weight), rel=1e-9)
