"""Steps as programs in both engines: rank by rank and message by message against the fast one, on the same noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_programs import random_program

from paceenv.core import pacing, trace
from paceenv.core.errors import InputError
from paceenv.policies.rollout import start_engine
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.recording import RecordingWriter
from paceenv.sim.engine.simulator import Simulator, episode_keys
from paceenv.sim.reference import ProgramReference, check_size
from paceenv.ui import config_files

BYTES_PER_S = 12.5e9


def cluster(step: list[dict[str, Any]], nodes: int = 4, per_node: int = 1, **more: Any) -> Cluster:
    """Ranks on 100 Gb/s NICs under one leaf, without latency, unless told otherwise."""
    data: dict[str, Any] = {
        "name": "program",
        "job": {"nodes": nodes, "ranks_per_node": per_node},
        "program": {"communicators": {"a": {}, "b": {}}, "step": step},
        "fabric": {"nic_gbps": 100.0, "nodes_per_leaf": 64, "uplink_gbps": 1e5, "latency_us": 0},
    }
    for key, value in more.items():
        data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) else value
    return config_files.parse(Cluster, data, "test")


def both(config: Cluster, iterations: int = 1, hold: tuple[float, float] | None = None) -> tuple[Recording, Recording]:
    """Recordings of the reference and of the fast engine, with rule ``defer`` at (threshold, window) where given."""
    keys = episode_keys([0])
    slow, fast = ProgramReference(config, 0), Simulator(derive(config, keys), keys)
    settings = fast.off() if hold is None else pacing.one_mechanism("defer", *hold)[None, None]
    return slow.record(settings, iterations), fast.record(settings, iterations)


def transfer(kind: str, seconds: float = 0.1, **more: Any) -> dict[str, Any]:
    return {kind: {"bytes": seconds * BYTES_PER_S, **more}}


def compute(seconds: float, **more: Any) -> dict[str, Any]:
    return {"compute": {"seconds": seconds, **more}}


# Alone, every operation takes as long as the links that its bytes pass say


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"])
@pytest.mark.parametrize(
    ("nodes", "per_node", "fabric"),
    [
        (4, 1, {"nodes_per_leaf": 2, "uplink_gbps": 100.0}),
        (6, 1, {"nodes_per_leaf": 2, "uplink_gbps": None, "oversubscription": 4.0, "latency_us": 100.0}),
        (3, 2, {"nics_per_node": 2, "nodes_per_leaf": 1, "uplink_gbps": 200.0}),
        (1, 4, {"intra_node_gbps": 400.0}),
    ],
)
def test_alone_an_operation_takes_as_long_in_both(kind: str, nodes: int, per_node: int, fabric: Any) -> None:
    slow, fast = both(cluster([compute(0.1), transfer(kind)], nodes, per_node, fabric=fabric))
    fast_s, piecemeal = fast.step_ET[0, 0] - 0.1, 1e-4
    if kind == "broadcast":
        piecemeal = 0.03  # the first piece has to come to the last member
    elif kind == "all_to_all":  # the fast engine has its pairs one after the other in latency
        fast_s -= (nodes * per_node - 2) * fabric.get("latency_us", 0.0) * 1e-6
    assert slow.step_ET[0, 0] - 0.1 == pytest.approx(fast_s, rel=piecemeal)


# Who shares a link


def test_an_all_to_all_of_many_messages_is_one_share() -> None:
    """Both take 0.1 s alone; for seven messages of one and one of the other, each collective has half of a NIC."""
    n = 8
    step = [
        transfer("all_reduce", 0.1 * n / (2 * (n - 1)), communicator="a", background=True),
        transfer("all_to_all", 0.1 * n / (n - 1), communicator="b"),
    ]
    slow, fast = both(cluster(step, n))
    np.testing.assert_allclose(slow.through_ETO, 0.2, rtol=1e-3)
    np.testing.assert_allclose(fast.through_ETO, 0.2, rtol=1e-9)


@pytest.mark.parametrize("uplinks", [{"uplink_gbps": 200.0}, {"uplink_gbps": None, "oversubscription": 2.0}])
def test_a_tenant_has_its_share_of_the_top_tier(uplinks: dict[str, float | None]) -> None:
    """Leaves with uplinks of their own have a tier of all of them together."""
    other = {"period_ratio": 0.5, "comm_share": 0.5, "rate_share": 1.0, "ranks": 1, "jitter_cv": 0.0}
    fabric = {"nodes_per_leaf": 1, **uplinks}
    step = [compute(0.1), transfer("all_reduce", 0.3), transfer("all_to_all", 0.2, communicator="b")]
    slow, fast = both(cluster(step, fabric=fabric, tenants=[other]), 10)
    assert fast.step_ET.mean() > 1.1 * both(cluster(step, fabric=fabric))[1].step_ET.mean()
    assert slow.step_ET.mean() == pytest.approx(fast.step_ET.mean(), rel=0.01)


# The order on communicators, and what is held back


HELD = [
    compute(0.1),
    transfer("all_reduce", 0.1, communicator="a", background=True, can_wait=True, name="grads"),
    transfer("all_to_all", 0.05, communicator="b"),
]


@pytest.mark.parametrize(
    "step",
    [
        [*HELD, compute(0.2)],
        [*HELD, {"wait": "grads"}, compute(0.2)],
        [*HELD, transfer("all_gather", 0.05, communicator="a"), compute(0.2)],
        [{"repeat": 4, "step": HELD}, compute(0.05)],
    ],
)
@pytest.mark.parametrize("window", [0.02, 0.4])
def test_what_is_held_back_is_handed_over_at_the_same_time(step: Any, window: float) -> None:
    slow, fast = both(cluster(step), 4, (0.0, window))
    for name in ("step_ET", "end_ETI", "start_ETO", "through_ETO", "entry_ETR", "exit_ETR"):
        np.testing.assert_allclose(getattr(slow, name), getattr(fast, name), rtol=1e-4, err_msg=name)


def test_pairs_of_an_all_to_all_begin_before_the_last_member_is_there() -> None:
    """Where the fast engine ends: on an oversubscribed tier it is too slow by what early pairs have moved by then."""
    fabric = {"nodes_per_leaf": 1, "uplink_gbps": 100.0}
    config = cluster([compute(0.1), compute(0.2, ranks=[3]), transfer("all_to_all")], fabric=fabric)
    slow, fast = both(config)
    together = ProgramReference(config, 0, is_together=True)
    assert together.run(together.off(), 1)[0, 0] == pytest.approx(fast.step_ET[0, 0], rel=1e-6)
    assert slow.step_ET[0, 0] == pytest.approx(fast.step_ET[0, 0] - 0.15, rel=0.01), "6 of 12 pairs are through"
    free = cluster([compute(0.1), compute(0.2, ranks=[3]), transfer("all_to_all")])
    slow, fast = both(free)
    assert slow.step_ET[0, 0] == pytest.approx(fast.step_ET[0, 0], rel=1e-6), "its own NIC is the last member's limit"


# Random programs


def error(seed: int) -> float:
    """Between the engines on a random program: every third one holds back, every fourth one has a tenant."""
    config, keys = random_program(seed, tenants=seed % 4 == 1), episode_keys([seed])
    fast, slow = Simulator(derive(config, keys), keys), ProgramReference(config, seed, is_together=True)
    settings = fast.off() if seed % 3 else pacing.one_mechanism("defer", 0.0, 0.1)[None, None]
    return float(slow.run(settings, 6).mean() / fast.run(settings, 6).mean()) - 1.0


def test_random_programs_agree() -> None:
    """Nearly all of them; the rest is known, and small (``docs``)."""
    found = np.abs([error(seed) for seed in range(9)])
    assert found.max() < 0.02
    assert np.median(found) < 0.001


# How it is run


def test_runs_may_be_cut_and_ranks_may_have_settings_of_their_own() -> None:
    config = cluster([*HELD, compute(0.2)], noise={"jitter_cv": 0.02})
    settings = pacing.one_mechanism("defer", 0.0, 0.1)[None, None]
    whole, parts, own = (ProgramReference(config, 5) for _ in range(3))
    step_T = whole.run(settings, 12)
    np.testing.assert_array_equal(np.concatenate([parts.run(settings, n) for n in (1, 8, 3)], axis=1), step_T)
    np.testing.assert_array_equal(own.run(np.repeat(settings, config.ranks, axis=1), 12), step_T)


def test_the_engine_reference_gives_the_same_table_and_outcome(tmp_path: Path) -> None:
    config = cluster([*HELD, compute(0.2)], noise={"jitter_cv": 0.02}, power={"compute_w": 400.0, "wait_w": 300.0})
    tables, outcomes = [], []
    for name in ("reference", "fast"):
        engine = start_engine(name, config, np.array([0, 1]))  # type: ignore[arg-type]
        with RecordingWriter(tmp_path / name, engine, "job") as writer:
            writer.append(engine.record(engine.off(), 5))
        tables.append(trace.read_trace(tmp_path / name))
        outcomes.append(engine.outcome())
        assert engine.observe(every_rank=True).shape[:2] == (2, 4)
    slow, fast = tables
    for column in ("op", "rank", "iteration", "group"):
        assert slow.column(column).tolist() == fast.column(column).tolist()
    for column in ("start_s", "end_s"):
        np.testing.assert_allclose(slow.column(column), fast.column(column), rtol=0.01, atol=1e-3)
    for field in ("time_s", "energy_j", "useful_iterations"):
        np.testing.assert_allclose(getattr(outcomes[0], field), getattr(outcomes[1], field), rtol=0.01)


def test_sizes_that_take_hours_and_physics_that_it_does_not_know_are_refused() -> None:
    config = cluster([compute(0.1), transfer("all_to_all")], 64)
    check_size(config, 10, 1)
    with pytest.raises(InputError, match="allowed in the reference engine: at most"):
        check_size(config, 50_000, 8)
    with pytest.raises(InputError, match="allowed in the reference engine: not set"):
        ProgramReference(config.changed(["fabric.sqrt_us_per_sqrt_mb=10"]), 0)
