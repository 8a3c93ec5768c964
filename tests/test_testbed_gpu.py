"""The testbed's jobs on NCCL: real GPUs, real sockets over limited links; where there is one card, all ranks on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from live_jobs import root_and, run_ranks
from live_testbed_bodies import TRANSFERS, transfers_of_every_kind

from paceenv.core.trace import read_trace
from paceenv.live.testbed.testbed_run import agent_options, run_scenario
from paceenv.live.testbed.testbed_scenario import Scenario
from paceenv.live.testbed.training_job import NCCL
from paceenv.ui import config_files

pytestmark = pytest.mark.gpu

RATE_MBPS, PAYLOAD_BYTES = 50.0, 1e6


def test_every_kind_of_transfer(tmp_path: Path) -> None:
    environ = NCCL | {"NCCL_SOCKET_IFNAME": "lo"}
    ended = run_ranks(transfers_of_every_kind, 4, tmp_path, backend="nccl", environ=environ)
    assert [rank.result for rank in ended] == [sorted(TRANSFERS)] * 4


def test_a_job_over_limited_links(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    root_and("ip", "tc", "unshare", "setpriv")
    iteration = [{"compute": {"mean_s": 0.05}}, {"all_reduce": {"bytes": PAYLOAD_BYTES}}, {"barrier": True}]
    plain = {"name": "on-nccl", "backend": "nccl", "network": {"hosts": 2, "host_mbps": RATE_MBPS}}
    plain |= {"jobs": [{"name": "pair", "hosts": [0, 1], "iteration": iteration}]}
    plain |= {"loop": {"job": "pair", "expect": "neutral"}}
    chosen = config_files.parse(Scenario, plain, "test")
    agents = {"pair": [*agent_options(chosen.loop, "canary"), "--policy", "static:slack=0.02/0.4"]}
    result = run_scenario(chosen, tmp_path / "run", agents=agents, iterations=60, deadline_s=120.0).jobs["pair"]
    assert [snapshot["state"] for snapshot in result.snapshots] == ["canary"] * 2
    least_s = 0.05 + PAYLOAD_BYTES * 8 / (RATE_MBPS * 1e6)  # two ranks reduce: each sends the payload once
    step_s = float(np.median(result.step_s_T[5:]))
    record_property("step", f"{1e3 * step_s:.0f} ms; compute and bytes over the link alone {1e3 * least_s:.0f} ms")
    assert 0.9 * least_s < step_s < 2.0 * least_s
    assert result.trace is not None
    trace = read_trace(result.trace)
    assert {"all_reduce", "barrier"} <= set(trace.column("op"))
    assert set(trace.column("rank")) == {0, 1}
