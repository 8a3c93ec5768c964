"""A job of four hosts, restarted elastically after a rank was killed: two starts in one folder, and nothing mixed.

Each host is a network namespace of its own with an address and a host name; they meet at a bridge.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pytest

from paceenv.live.testbed.private_namespaces import missing

TESTS = Path(__file__).parent
HOSTS = 4
DEADLINE_S = 240.0
TRAIN = """
    import os, sys, time, torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank, place = dist.get_rank(), sys.argv[1]
    again = os.path.exists(f"{place}/killed")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print("START", rank, os.environ["GROUP_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    for iteration in range(400 if again else 100000):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        time.sleep(0.03 if rank == 2 and again else 0.01)
        optimizer.step()
        if iteration == 60:
            open(f"{place}/pid{rank}{'again' if again else ''}", "w").write(str(os.getpid()))
    dist.barrier()
    dist.destroy_process_group()
"""


def statuses(run: Path) -> dict[str, list[dict[str, Any]]]:
    """The last status of every rank, by start of the job."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(run.rglob("rank*.json")):
        status = json.loads(path.read_text())
        assert status["attempt"] in path.parts
        found.setdefault(status["attempt"], []).append(status)
    return found


def until(true: Any, what: str, agents: list[subprocess.Popen[bytes]]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < until_s, what
        assert not any(agent.poll() for agent in agents), what
        time.sleep(0.1)


def address(host: int) -> str:
    return f"10.78.0.{host + 1}"


def ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of the namespaces."""
    if lacking := missing():
        pytest.skip(f"needs {lacking}")
    bridge, names = f"br{os.getpid()}", [f"elastic{os.getpid()}h{host}" for host in range(HOSTS)]
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for host, name in enumerate(names):
            port = f"p{os.getpid()}h{host}"
            ip("netns", "add", name)
            ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", port, "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{address(host)}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                ip("-n", name, "link", "set", interface, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True)


@pytest.mark.slow
@pytest.mark.alone
def test_a_restart_after_a_killed_rank_is_a_start_of_its_own(tmp_path: Path, hosts: list[str]) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    run, agents = tmp_path / "run", list[subprocess.Popen[bytes]]()
    environ = os.environ | {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else gloo may connect to ranks that are dead
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={address(0)}:29400", "--rdzv-id=elastic", "--max-restarts=3"]
    try:
        for host, namespace in enumerate(hosts):
            inside = ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"']
            named = [f"--rdzv-conf=is_host={host == 0}", f"--local-addr={address(host)}", "--monitor-interval=0.2"]
            launch = ["-m", "torch.distributed.run", f"--nnodes={HOSTS}", "--nproc-per-node=1", *rendezvous, *named]
            with (tmp_path / f"host{host}.log").open("wb") as log:
                command = [*inside, f"host{host}", sys.executable, *launch, "-m", "paceenv.live", "--out", str(run)]
                command += [str(tmp_path / "train.py"), str(tmp_path)]
                agents.append(subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT))
        until(lambda: len(list(tmp_path.glob("pid?"))) == HOSTS, "the first start", agents)
        until(lambda: [len(s) for s in statuses(run).values()] == [HOSTS], "its statuses", agents)
        (tmp_path / "killed").touch()
        os.kill(int((tmp_path / "pid3").read_text()), signal.SIGKILL)
        for agent in agents:
            assert agent.wait(DEADLINE_S) == 0, (tmp_path / "host0.log").read_text()[-3000:]
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait(30.0)
    found = statuses(run)
    assert len(found) == 2
    dead, alive = (found[attempt] for attempt in sorted(found))
    for start in (dead, alive):
        assert sorted(status["rank"] for status in start) == list(range(HOSTS))
        assert all(status["agents"] == {"count": HOSTS, "complete": True, "reason": ""} for status in start)
        assert len({status["pid"] for status in start}) == HOSTS
        assert {status["host"] for status in start} == {f"host{host}" for host in range(HOSTS)}
    assert not {s["pid"] for s in dead} & {s["pid"] for s in alive}
    assert all(status["final"] for status in alive)
    assert {status["iterations"] for status in alive} == {399}
    # the page is that of the living start
    paceenv = [sys.executable, "-c", "from paceenv.cli.application import main; main()", "live"]
    shown = commands.run([*paceenv, "summary", str(run)], env=environ)
    assert shown.returncode == 0, shown.stderr
    assert alive[0]["attempt"] in shown.stdout
    assert dead[0]["attempt"] not in shown.stdout
    assert "rank 2" in shown.stdout
    shutil.rmtree(run)
