"""The referee beside the fast engine: the same draws, the same configs, the same times to rounding."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from paceenv.core import pacing
from paceenv.sim.cluster.derive import derive, drawn, start
from paceenv.sim.cluster.model import Cluster, load_cluster
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.simulator import episode_keys
from paceenv.sim.reference import Reference
from paceenv.sim.reference.flows import Flow, divide
from paceenv.ui import config_files

NIC_GBPS, NIC_BPS = 100.0, 12.5e9


def cluster(nodes: int, payload_bytes: float = 1e9, *, job: Any = (), fabric: Any = (), **rest: Any) -> Cluster:
    """A job that computes 1 s on 100 Gb/s NICs under one leaf, without noise, unless told otherwise."""
    link = {"nic_gbps": NIC_GBPS, "nodes_per_leaf": nodes, "uplink_gbps": 1e6, "latency_us": 0.0}
    of_job = {"nodes": nodes, "compute_s": 1.0, "gradient_bytes": payload_bytes}
    return Cluster.model_validate({"name": "test", "job": of_job | dict(job), "fabric": link | dict(fabric), **rest})


def tenant(**changes: Any) -> dict[str, Any]:
    """A tenant that transfers 40 % of its time at half the upper tier, without jitter."""
    return {"period_ratio": 1.0, "comm_share": 0.4, "rate_share": 0.5, "jitter_cv": 0.0} | changes


SHIPPED = sorted(path.stem for path in Path("configs/clusters").glob("*.yaml"))
WITHIN = 1e-6
"""The fast engine keeps some of its state in float32."""


def agree(config: Cluster, seed: int, iterations: int, pace: Any = None, within: float = WITHIN) -> Recording:
    """Hold all stamps of both engines against each other, and what ranks saw and spent; returns the stamps."""
    slow, fast = Reference(config, seed), start(config, [seed])
    given_settings = fast.off() if pace is None else pacing.settings({pace[0]: pace[1:]})[None, None]
    found, expected = slow.record(given_settings, iterations), fast.record(given_settings, iterations)
    atol = within * float(expected.step_ET.mean())
    for name, one, other in zip(Recording._fields, found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=within, atol=atol, err_msg=name)
    np.testing.assert_allclose(slow.observe(), fast.observe(every_rank=True), atol=0.01)
    for name in ("time_s", "energy_j", "failures", "useful_iterations", "rerun_iterations"):
        totals = [getattr(engine.outcome(), name) for engine in (slow, fast)]
        np.testing.assert_allclose(*totals, rtol=within, err_msg=name)
    if config.has_program:  # in others tenants are moved on only as far as the job's own traffic needs
        np.testing.assert_array_equal(*(engine.outcome().tenant_cycles_EK for engine in (slow, fast)))
    return found


# Every cluster that ships


@pytest.mark.parametrize(
    ("name", "iterations"),
    [
        (name, 30) if load_cluster(name).ranks <= 100 else pytest.param(name, 2, marks=pytest.mark.slow)
        for name in SHIPPED
    ],
)
def test_both_engines_agree_on_every_shipped_cluster(name: str, iterations: int) -> None:
    assert agree(load_cluster(name), 3, iterations).step_ET.shape == (1, iterations)


# Jobs with one collective a step

choose = st.sampled_from
NOISE = {"jitter_cv": 0.05, "common_cv": 0.01, "imbalance_cv": 0.05, "persistent_cv": 0.02, "slow_ranks": 1}
NOISE |= {"slow_factor": 1.3, "fail_slow_share": 0.05, "fail_slow_mean_iterations": 10.0, "fail_slow_factor": 1.3}
NOISE |= {"drift_cv": 0.02, "drift_iterations": 20.0, "stall_rate": 0.01, "stall_mean_s": 0.05, "transfer_cv": 0.1}
UNSURE = {"late_wake_s": 0.004, "stamp_noise_s": 0.001, "missing_share": 0.1}
POWER = {"compute_w": 400.0, "wait_w": 300.0, "delay_w": 100.0, "heat_slowdown": 0.1, "heat_iterations": 10.0}
RELIABILITY = {"checkpoint_iterations": 8, "checkpoint_s": 0.2, "mtbf_iterations": 60.0, "restart_s": 2.0}
RELIABILITY |= {"failure_heat": 0.5, "warmup_iterations": 3, "warmup_factor": 1.3}


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Two to twelve nodes in groups on leaves of all sizes, with any noise, any collective and any coupling."""
    groups, kind = draw(choose([1, 1, 2, 4])), draw(choose(["all_reduce", "all_reduce", "gather", "all_to_all"]))
    group_nodes = draw(st.integers(2, 12 // groups))
    barrier = groups > 1 or draw(st.booleans())
    job: dict[str, Any] = {
        "nodes_per_group": group_nodes,
        "ranks_per_node": draw(st.integers(1, 2)),
        "barrier": barrier,
    }
    fabric: dict[str, Any] = {"nodes_per_leaf": draw(choose([1, 2, 3, 4]))}
    fabric |= {"uplink_gbps": NIC_GBPS * draw(choose([0.5, 1.0, 2.0, 8.0])), "latency_us": draw(choose([0.0, 50.0]))}
    fabric |= {"late_share": draw(choose([1.0, 0.8])), "barrier_us": 100.0 * barrier}
    more: dict[str, Any] = {
        "noise": draw(choose([{}, NOISE, UNSURE, NOISE | UNSURE])),
        "power": draw(choose([{}, POWER])),
        "tenants": [],
    }
    payload_bytes = draw(st.floats(0.02, 0.25)) * NIC_BPS
    if kind != "all_reduce":
        job |= {"collective": kind}
        payload_bytes, fabric["buffer_kb"] = draw(choose([1e5, 1e6, 1e8])), draw(choose([16.0, 40.0, 64.0]))
    elif draw(st.booleans()):
        job |= {"overlap": draw(st.floats(0.1, 0.9)), "tail_bytes": 0.1 * payload_bytes}
        fabric["late_share"] = 1.0  # ranks' exits differ in single steps with both; the steps do not
    if barrier and draw(st.booleans()):
        work = {"groups": 1, "work_s": 0.05, "share": 0.1, "episode_s": 0.05, "episode_spread": 0.3}
        more["post_collective_work"] = work
    if kind == "all_reduce":
        # With a bursty tenant and overlap, exits of a step in 25 differ by 0.1 %.
        more["tenants"] = draw(st.lists(steady, max_size=1) if "overlap" in job else st.lists(tenants, max_size=2))
    if groups == 1 and not barrier and kind != "gather" and "overlap" not in job:
        more["synchronization"] = {"staleness": draw(st.integers(0, 3))}
    elif draw(st.booleans()):
        more["synchronization"] = {"sync_period": 4}
    more["reliability"] = draw(choose([{}, RELIABILITY]))
    return cluster(groups * group_nodes, payload_bytes, job=job, fabric=fabric, **more)


steady = st.builds(
    tenant,
    period_ratio=st.floats(0.6, 1.5),
    comm_share=st.floats(0.1, 0.5),
    rate_share=st.floats(0.3, 1.0),
    weight=choose([1.0, 2.0]),
    jitter_cv=choose([0.0, 0.05]),
    ranks=st.integers(1, 4),
    pause_rate=choose([0.0, 0.1]),
    pause_periods=choose([1.0, 10.0]),
)
tenants = st.one_of(steady, st.just(tenant(bursty=True, ranks=8)))
paces = choose([None, *((name, 0.0, 0.3) for name in pacing.MECHANISMS)])


@settings(derandomize=True, max_examples=30, phases=(Phase.explicit, Phase.generate))
@given(config=clusters(), pace=paces, seed=st.integers(0, 1000))
def test_random_clusters_agree(config: Cluster, pace: Any, seed: int) -> None:
    assert agree(config, seed, 25, pace, 1e-5).step_ET.shape == (1, 25)


@pytest.mark.parametrize(
    ("name", "mechanism", "threshold"),
    [
        ("unequal-slack", "slack", 0.0),
        ("unequal-slack", "paper", 0.0),
        ("unequal-slack", "mean_slack", 0.0),
        ("two-jobs", "phase_shift", 0.0),
        ("incast-shallow", "stagger", 0.2),
        ("expert-layers", "defer", 0.0),
    ],
)
def test_paced_runs_agree(name: str, mechanism: str, threshold: float) -> None:
    config = load_cluster(name)
    passive, paced = (agree(config, 1, 600 // config.ranks, pace, 1e-5) for pace in (None, (mechanism, threshold, 0.3)))
    assert not np.array_equal(passive.step_ET, paced.step_ET)


# Programs

KINDS = ("all_reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast")


def random_program(seed: int) -> Cluster:
    """A job of 2 to 8 ranks, 1 or 2 of them on a node, on one to three communicators of a fabric with tiers."""
    rng, tenants = random.Random(seed), seed % 4 == 1
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
    data = {"name": f"random {seed}", "job": {"nodes": nodes, "ranks_per_node": per_node, "algorithm": "ring"}}
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


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_agree(seed: int) -> None:
    """Every third one holds back, every fourth one has a tenant."""
    pace = None if seed % 3 else ("defer", 0.0, 0.1)
    assert agree(random_program(seed), seed, 6, pace).step_ET.shape == (1, 6)


# How links are shared


@settings(derandomize=True)
@given(data=st.data())
def test_nothing_can_be_given_to_a_flow_without_taking_it_from_a_poorer_one(data: st.DataObject) -> None:
    shares = st.dictionaries(st.integers(0, 3), st.floats(0.1, 1.0), min_size=1, max_size=3)
    rows = data.draw(st.lists(st.tuples(shares, st.floats(0.1, 5.0)), min_size=1, max_size=8))
    flows = [Flow(1.0, dict(share_of), lambda now_s: None, weight) for share_of, weight in rows]
    divide(flows)
    load = {link: sum(flow.rate * flow.share_of.get(link, 0.0) for flow in flows) for link in range(4)}
    assert max(load.values()) <= 1.0 + 1e-9
    for flow in flows:
        full = [link for link in flow.share_of if math.isclose(load[link], 1.0, rel_tol=1e-9)]
        level = flow.rate / flow.per_level * (1.0 + 1e-9)
        held = [all(f.rate / f.per_level <= level for f in flows if link in f.share_of) for link in full]
        assert any(held) or flow.rate == pytest.approx(1.0, rel=1e-9)


# How it is run


def test_runs_are_reproducible_and_may_be_cut() -> None:
    config = load_cluster("unequal-slack")
    settings_ = pacing.settings({"slack": (0.0, 0.3)})[None, None]
    whole, parts, own = (Reference(config, 5) for _ in range(3))
    step_T = whole.run(settings_, 30)
    np.testing.assert_array_equal(np.concatenate([parts.run(settings_, n) for n in (1, 20, 9)], axis=1), step_T)
    np.testing.assert_array_equal(own.run(np.repeat(settings_, config.ranks, axis=1), 30), step_T)


DRAWN: dict[str, Any] = {
    "job": {"compute_s": {"uniform": [0.5, 1.0]}, "gradient_bytes": {"loguniform": [1e8, 1e9]}},
    "fabric": {"nodes_per_leaf": 2, "uplink_gbps": NIC_GBPS, "nic_gbps": {"normal": [100.0, 10.0]}},
    "noise": {"jitter_cv": {"uniform": [0.01, 0.05]}, "imbalance_cv": 0.02, "imbalance_skew": {"uniform": [0.0, 1.0]}},
    "tenants": [tenant(comm_share={"uniform": [0.1, 0.5]}), tenant(comm_share={"uniform": [0.1, 0.5]})],
}


def test_a_cluster_as_drawn_derives_to_the_same_records() -> None:
    config, keys_E = cluster(6, **DRAWN), episode_keys([7])
    whole, fixed = derive(config, keys_E), derive(drawn(config, keys_E[0]), episode_keys([99]))
    np.testing.assert_array_equal(fixed.jobs, whole.jobs)
    np.testing.assert_array_equal(fixed.tenants_EK, whole.tenants_EK)
    assert drawn(config, keys_E[0]) != drawn(config, episode_keys([8])[0])
