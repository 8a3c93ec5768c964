"""The identity of a start of the job: one id for all ranks, over every store, and nobody waits for it."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from live_bodies import attach_and_train
from live_jobs import run_ranks
from torch import distributed
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.testing._internal.distributed.fake_pg import FakeStore

import paceenv
from paceenv import live
from paceenv.live.decide.live_policy import needed_policy
from paceenv.live.identity import Identity, Rendezvous, settings_digest
from paceenv.live.loop import Loop
from paceenv.live.options import make_options

DEADLINE_S = 30.0
ATTEMPT = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")


class Foreign(Store):
    """A store of somebody's own in Python, as torchft has one; it cannot be cloned."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, value: int) -> int:
        self._values[key] = b"%d" % (int(self._values.get(key, b"0")) + value)
        return int(self._values[key])


def meet(
    store: Store, settings: Sequence[str], ranks: Sequence[int], deadline_s: float = DEADLINE_S, place: str = "test"
) -> dict[int, Rendezvous]:
    """The agents of ``ranks`` of a job meet in ``store``; ``settings`` has one digest for every rank of the job."""
    agents = {rank: Rendezvous(rank, len(settings), settings[rank], lambda known: None, deadline_s) for rank in ranks}
    for agent in agents.values():
        agent.begin(store, place)
    return agents


def known(agents: dict[int, Rendezvous]) -> list[Identity]:
    until_s = time.monotonic() + DEADLINE_S
    while any(not a.identity.complete and not a.identity.why for a in agents.values()):
        assert time.monotonic() < until_s, [a.identity for a in agents.values()]
        time.sleep(0.005)
    return [agent.identity for agent in agents.values()]


STORES: dict[str, Callable[[Path], Store]] = {
    "hash": lambda folder: HashStore(),
    "file": lambda folder: FileStore(str(folder / "store"), 4),
    "tcp": lambda folder: TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=20), wait_for_workers=False),
    "foreign": lambda folder: Foreign(),
}


@pytest.mark.parametrize("kind", STORES)
def test_all_ranks_share_one_id_in_every_store_and_at_every_start(kind: str, tmp_path: Path) -> None:
    underlying = STORES[kind](tmp_path)  # PrefixStore does not hold it
    store, ids = PrefixStore("default_pg", underlying), []
    for _ in range(3):  # torchrun keeps one store for all its restarts: what is left in it belongs to dead ranks
        found = known(meet(store, ["a"] * 4, [3, 1, 2, 0]))
        assert len({identity.attempt for identity in found}) == 1
        assert all((identity.agents, identity.complete) == (4, True) for identity in found)
        ids.append(found[0].attempt)
        assert ATTEMPT.fullmatch(ids[-1])
    assert len(set(ids)) == 3


def test_a_start_without_its_rank_0_never_takes_the_id_of_an_earlier_one() -> None:
    store = HashStore()
    (first, *_) = known(meet(store, ["a"] * 2, [0, 1]))
    agents = meet(store, ["a"] * 2, [1], deadline_s=-9.9)
    (later,) = known(agents)
    assert later.attempt != first.attempt
    assert (later.agents, later.complete, later.why) == (None, False, "rank 0 has no agent that answers")


def test_missing_agents_and_other_settings_are_counted_and_named() -> None:
    missing = known(meet(HashStore(), ["a"] * 4, [0, 1, 3], deadline_s=0.3))
    assert len({identity.attempt for identity in missing}) == 1
    assert {(i.agents, i.complete, i.why) for i in missing} == {(3, False, "3 of 4 ranks have an agent")}
    others = known(meet(HashStore(), ["a", "a", "b", "a"], [0, 1, 2, 3]))
    which = "options, policy, version of paceenv or, without --seed, MASTER_ADDR"
    assert {i.why for i in others} == {f"1 of 4 ranks have other settings than rank 0: {which}"}
    assert not any(i.complete for i in others)


def test_a_store_that_fails_is_an_id_all_the_same() -> None:
    class Broken(Foreign):
        def add(self, key: str, value: int) -> int:
            raise ConnectionError("gone")

    (identity,) = known(meet(Broken(), ["a"] * 2, [1]))
    assert ATTEMPT.fullmatch(identity.attempt)
    assert "gone" in identity.why
    alone = Rendezvous(0, 1, "a", lambda known: None)
    alone.begin(None)
    assert alone.identity.complete
    assert ATTEMPT.fullmatch(alone.identity.attempt)


def test_a_job_that_is_over_at_once_has_one_id_and_is_not_held_up() -> None:
    for _ in range(10):
        agents = meet(HashStore(), ["a"] * 3, [2, 1, 0], place=secrets.token_hex(4))
        assert len({agent.settle().attempt for agent in agents.values()}) == 1
    begin_s = time.monotonic()
    (alone,) = meet(HashStore(), ["a"] * 3, [1]).values()
    assert ATTEMPT.fullmatch(alone.settle().attempt)
    assert time.monotonic() - begin_s < 2.0


def test_settings_that_change_a_decision_must_agree_and_others_may_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    file = tmp_path / "cluster.yaml"

    def digest(master: str = "localhost", threshold: float = 0.02, **options: Any) -> str:
        monkeypatch.setenv("MASTER_ADDR", master)
        file.write_text(f"pacing: {{mechanism: slack, threshold: {threshold}, window: 0.4}}\n")
        made = make_options({"mode": "canary", "job": "j"} | options)
        loop = Loop(made, needed_policy("canary", f"static:{file}", made.candidates))
        return settings_digest(loop.options, (loop.policy.source, loop.policy.sha256), loop.control.seed)

    before = digest()
    same: list[dict[str, Any]] = [{"out": tmp_path}, {"kill_file": file}, {"metrics_port": 9000}, {"job": "other"}]
    assert {digest(**options) for options in same} == {before}
    other: list[dict[str, Any]] = [{"mode": "active"}, {"cap_s": 0.2}, {"seed": 3}, {"quiet_first": 0}]
    other += [{"master": "job-master-0"}, {"threshold": 0.9}]
    assert len({before, *(digest(**options) for options in other)}) == 1 + len(other)
    assert digest(seed=3) == digest("job-master-0", seed=3)
    assert digest(candidates=f"static:{file};paper") != digest(threshold=0.9, candidates=f"static:{file};paper")
    monkeypatch.setattr(paceenv, "__version__", "0.0.1")
    assert digest() != before, "ranks with another version do not pace"


@pytest.mark.slow
def test_a_real_job_is_paced_only_with_an_agent_on_every_rank(tmp_path: Path) -> None:
    ranks = [rank for rank in run_ranks(attach_and_train, 3, tmp_path, without=[0]) if rank]
    assert len({rank["attempt"] for rank in ranks}) == 1
    assert all(ATTEMPT.fullmatch(rank["attempt"]) for rank in ranks)
    assert sum(rank["pacing"]["taken"] for rank in ranks) == 0
    assert not any(rank["agents"]["complete"] for rank in ranks)
    assert {rank["agents"]["count"] for rank in ranks if rank["agents"]["count"]} <= {2}


def test_a_group_before_the_first_step_does_not_vouch_for_a_later_one() -> None:
    agent = live.attach(mode="active", policy="paper")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    try:
        distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        assert agent._loop.identity.complete
        distributed.destroy_process_group()
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        optimizer.step()
        assert agent._loop.begun
        assert not agent._loop.identity.complete
    finally:
        agent.detach()
        distributed.destroy_process_group()
