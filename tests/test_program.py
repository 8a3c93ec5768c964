"""Steps as programs: closed forms, what is conserved, the order on communicators, and holding back what can wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_live_steps import Shaped

from paceenv.core import pacing, timing
from paceenv.core.errors import InputError
from paceenv.core.trace import read_trace
from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.live.observe.step import LEARNING_ITERATIONS
from paceenv.sim.cluster.derive import ClusterMix, start
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.footprint import Tiers, use
from paceenv.sim.cluster.program.program_tables import payload_R
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.recording import RecordingWriter
from paceenv.sim.engine.simulator import Simulator
from paceenv.sim.reference import Reference
from paceenv.ui import config_files

GBPS = 100.0
BYTES_PER_S = GBPS * 1e9 / 8.0


def cluster(step: list[dict[str, Any]], nodes: int = 4, **more: Any) -> Cluster:
    """A job of a rank a node on fast leaves; ``step`` is its program."""
    data: dict[str, Any] = {
        "name": "program",
        "job": {"nodes": nodes},
        "program": {"communicators": {"a": {}, "b": {}, "pairs": {"size": 2}}, "step": step},
        "fabric": {"nic_gbps": GBPS, "nodes_per_leaf": 64, "uplink_gbps": 1e5, "latency_us": 0},
    }
    for key, value in more.items():
        data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) else value
    return config_files.parse(Cluster, data, "test")


def simulator(one: Cluster, seeds: int = 1) -> Simulator:
    return start(one, list(range(seeds)))


def record(one: Cluster, iterations: int = 1, hold: tuple[float, float] | None = None) -> Recording:
    """Stamps of a run, with rule ``defer`` at (threshold, window) where it is given."""
    job = simulator(one)
    settings = job.off() if hold is None else pacing.settings({"defer": hold})[None, None]
    return job.record(settings, iterations)


def all_reduce(seconds: float, members: int = 4, **more: Any) -> dict[str, Any]:
    """An all-reduce that takes so long alone on the NICs of its members."""
    return {"all_reduce": {"bytes": seconds * BYTES_PER_S * members / (2.0 * (members - 1)), **more}}


def all_to_all(seconds: float, members: int = 4, **more: Any) -> dict[str, Any]:
    return {"all_to_all": {"bytes": seconds * BYTES_PER_S * members / (members - 1), **more}}


def compute(seconds: float, **more: Any) -> dict[str, Any]:
    return {"compute": {"seconds": seconds, **more}}


def layers(count: int, gradients: float = 0.08) -> list[dict[str, Any]]:
    """A backward pass with experts: an all-to-all that is needed, an all-reduce that can wait, both on one NIC."""
    part = [
        compute(0.1),
        all_reduce(gradients, communicator="a", background=True, can_wait=True),
        all_to_all(0.05, communicator="b"),
    ]
    return [{"repeat": count, "step": part}]


def test_linas_arithmetic() -> None:
    """reality.md: shared fairly a layer takes 2.0 of its compute, with the bucket held back 1.5."""
    count = 10
    off = record(cluster(layers(count))).step_ET[0, 0]
    wanted = count * 0.15 + 0.08
    assert off == pytest.approx(count * 0.2 + 0.03, rel=1e-3)
    held = record(cluster(layers(count)), 40, (0.0, 0.0501 / wanted)).step_ET[0, -1]
    assert held == pytest.approx(wanted, rel=0.02)


ONLY_0, ONLY_1 = (all_reduce(0.1, 2, communicator="a", ranks=[rank]) for rank in (0, 1))
CROSSED = [ONLY_0, all_reduce(0.1, 2, communicator="b"), ONLY_1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"job": {"nodes": 4, "compute_s": 1.0}}, "job.compute_s by default with a program"),
        ({"job": {"nodes": 3}}, "size x stride that divides the 3 ranks"),
        ({"fabric": {"placement": "spread"}}, "fabric.placement by default with a program"),
        ({"post_collective_work": {"groups": 1, "work_s": 0.1}}, "post_collective_work.groups by default"),
        ({"program": {"step": [all_reduce(0.1, can_wait=True)]}}, "can_wait only with background"),
        (
            {"program": {"step": [compute(0.1), all_reduce(0.1, ranks=[0, 1])]}},
            "start different transfers on communicator",
        ),
        ({"job": {"nodes": 2}, "program": {"step": CROSSED}}, "wait for each other for ever"),
        (
            {"program": {"step": [all_reduce(0.1, background=True, name="gradients"), {"wait": "gradiants"}]}},
            "wait gradiants: the name of a transfer in the background: gradients",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulator(cluster([compute(0.1), all_reduce(0.1, 2, communicator="pairs")], **change))


@pytest.mark.parametrize(
    "changed",
    [
        {"tenants": [{"period_ratio": 1.0, "comm_share": 0.5}]},
        {"job": {"nodes": 2, "ranks_per_node": 2}},
        {"fabric": {"nodes_per_leaf": 2}},
    ],
)
def test_a_batch_has_one_program(changed: dict[str, Any]) -> None:
    """Tenants and the nodes of the ranks decide the tables as much as the program does."""
    step, fabric = [compute(0.1), all_reduce(0.1), all_to_all(0.1)], {"nodes_per_leaf": 1, "uplink_gbps": 200}
    one = cluster(step, fabric=fabric, name="one")
    other = cluster(step, name="other", **changed | {"fabric": fabric | changed.get("fabric", {})})
    with pytest.raises(InputError, match="other and one differ in program, nodes, fabric or whether there are tenants"):
        ClusterMix([one, other])


def test_a_batch_goes_on_when_its_programs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceenv.sim.cluster.program.program_run.MAX_TABLES", 1)
    monkeypatch.setattr("paceenv.sim.cluster.program.program_run._TABLES", {})
    noise = {"jitter_cv": {"uniform": [0.01, 0.02]}}  # drawn, so that every episode has a job of its own
    clusters = [cluster([compute(seconds), all_reduce(0.1)], name=f"{seconds}", noise=noise) for seconds in (0.1, 0.2)]
    envs = [PacingVectorEnv(2, one) for one in clusters]
    for seed in range(0, 12, 2):
        for env in envs:
            assert np.isfinite(env.reset(seed=seed)[0]).all()


def test_a_trace_has_every_instruction_and_operation(tmp_path: Path) -> None:
    step = [
        compute(0.1),
        all_reduce(0.2, communicator="a", background=True),
        compute(0.05, ranks=[3]),
        all_to_all(0.05, 2, communicator="pairs"),
        all_reduce(0.01, communicator="b", every=2),
    ]
    job = simulator(cluster(step))
    with RecordingWriter(tmp_path / "trace.parquet", job, "job") as writer:
        writer.add(job.record(job.off(), 1))
        writer.add(job.record(job.off(), 3))
    trace = read_trace(tmp_path / "trace.parquet")
    op, rank, iteration = trace.column("op"), trace.column("rank"), trace.column("iteration")
    assert op[(rank == 0) & (iteration == 0)].tolist() == ["compute", "all_reduce", "all_to_all", "barrier"]
    assert op[(rank == 3) & (iteration == 1)].tolist() == [
        *("compute", "all_reduce", "compute", "all_to_all", "all_reduce", "barrier")
    ]
    assert trace.column("start_s")[op == "all_to_all"][:4].tolist() == pytest.approx([0.1, 0.1, 0.1, 0.15])
    start_s, end_s = (trace.column(name)[op == "all_reduce"][0] for name in ("start_s", "end_s"))
    assert start_s == pytest.approx(0.1)
    assert end_s == pytest.approx(0.375), "0.2 s alone, and half as fast while either pair exchanges"
    of_pairs = op == "all_to_all"
    assert set(zip(rank[of_pairs].tolist(), trace.column("group")[of_pairs].tolist(), strict=True)) == {
        *((0, 2), (1, 2), (2, 3), (3, 3))
    }
    assert trace.column("bytes")[of_pairs].tolist() == [round(0.05 * BYTES_PER_S * 2)] * 16


@pytest.mark.parametrize("make", [lambda config: start(config, np.array([0])), lambda config: Reference(config, 0)])
def test_ranks_are_charged_what_they_compute_and_not_what_the_busiest_does(make: Callable[[Cluster], Any]) -> None:
    step = [{"compute": {"seconds": 1.0, "ranks": [0]}}, compute(0.1), all_reduce(0.1)]
    config = cluster(step, power={"compute_w": 300.0, "wait_w": 100.0})
    runner = make(config)
    step_s = runner.run(pacing.off(1, 1), 1)[0, 0]
    computed_s = 1.1 + 3 * 0.1
    energy_j = 300.0 * computed_s + 100.0 * (4 * step_s - computed_s)
    assert runner.outcome().energy_j[0] == pytest.approx(energy_j, rel=1e-4)


def test_a_rank_counts_the_payload_as_the_live_agent_does() -> None:
    """Collectives of the same ranks as the last one: not those of pairs, and no messages; they are waited for, too."""
    step = [
        compute(0.1),
        all_reduce(0.2, 2, communicator="pairs"),
        all_to_all(0.05, communicator="a"),
        {"send": {"bytes": 1e6}},
        all_reduce(0.08, communicator="b"),
    ]
    one = cluster(step)
    job = simulator(one)
    job.record(job.off(), 3)
    np.testing.assert_allclose(job.state.rank_EFR[0, timing.COMM_S, :4], 0.13, rtol=1e-5)
    plan = one.plan()
    assert payload_R(plan) == [frozenset(range(4))] * 4
    shaped = Shaped({number: (0, 2) for number in range(4)})
    for number, listed in enumerate(("0-1", "0-3", "0-3", "0-3")):
        shaped.groups[number].listed = listed
    parts = (
        ("all_reduce", 0, 0.1, 0.3),
        ("all_to_all", 1, 0.3, 0.35),
        ("send", 3, 0.35, 0.351),
        ("all_reduce", 2, 0.4, 0.48),
    )
    operations = shaped.operations(*((op, group, 1 << 20, start_s, end_s) for op, group, start_s, end_s in parts))
    for _ in range(LEARNING_ITERATIONS):
        shaped.shape.observe(operations, 0.48)
    assert shaped.shape.comm_s(operations) == pytest.approx(0.13)


# How operations share a link: efficiency, what it leaves for others, flows; by hand, in both engines


@pytest.mark.parametrize(
    ("fabric", "all_reduce_s", "all_to_all_s"),
    [
        ({}, 0.2, 0.2),
        # half of the link each, so neither slows the other
        ({"efficiency": {"all_reduce": 0.5, "all_to_all": 0.5}}, 0.2, 0.2),
        # the exchange has the half that the ring leaves: 0.2 s, as long as the ring
        ({"efficiency": {"all_reduce": 0.5}}, 0.2, 0.2),
        # it needs a quarter of the link: 0.4 s; the ring takes the rest, 0.1 / 0.75
        ({"efficiency": {"all_to_all": 0.25}}, 0.1 / 0.75, 0.4),
        # what it leaves is lost: both share the link, 0.1 s and 0.4 s of it
        ({"efficiency": {"all_to_all": 0.25}, "unused_rate": "lost"}, 0.2, 0.5),
        # three flows against one: the exchange is through after 0.1 / 0.75, and the link is full until the end
        ({"sharing": "flows"}, 0.2, 0.1 / 0.75),
        # as measured on sockets: 0.16 s of link at three quarters, then the rest of 0.26 s
        ({"sharing": "flows", "efficiency": {"all_to_all": 0.625}, "unused_rate": "lost"}, 0.26, 0.16 / 0.75),
        # each has all of the link it needs, or both share one that is full
        ({"efficiency": {"all_reduce": 0.01, "all_to_all": 0.01}}, 10.0, 10.0),
        ({"efficiency": {"all_reduce": 0.01, "all_to_all": 0.01}, "unused_rate": "lost"}, 20.0, 20.0),
    ],
)
def test_an_all_reduce_beside_an_all_to_all(fabric: dict[str, Any], all_reduce_s: float, all_to_all_s: float) -> None:
    """Both take 0.1 s alone and start together."""
    both = [all_reduce(0.1, communicator="a", background=True), all_to_all(0.1, communicator="b")]
    one = cluster(both, fabric=fabric)
    for engine in (simulator(one), Reference(one, 0)):
        through_O = engine.record(pacing.off(1, 1), 1).through_ETO[0, 0]
        assert through_O == pytest.approx([all_reduce_s, all_to_all_s], rel=0.02)


@pytest.mark.parametrize(
    ("op", "members", "expected"),
    [
        ("all_to_all", [0, 2, 4, 6], 3),  # one rank on each node: to three others
        ("all_to_all", [0, 1, 2, 3], 4),  # two on each of two nodes: 2 x 2 pairs
        ("all_to_all", [0, 1], 1),  # inside a node, on a rank's own link
        ("all_reduce", [0, 1, 2, 3], 1),  # a ring leaves each node once
        ("broadcast", [0, 2, 4, 6], 1),
    ],
)
def test_flows(op: Any, members: list[int], expected: int) -> None:
    tiers = Tiers(4, 2, 4, 1, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0)
    assert use(tiers, op, members, 1e6).flows == expected
