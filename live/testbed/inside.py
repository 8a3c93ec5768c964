"""The first process of a testbed's private namespaces: builds the network, and runs the jobs on it.

:mod:`paceenv.live.testbed.testbed_run` starts it with a request, a JSON file. It prints the exit codes, by job and
rank, or on the other stream why there are none. Racks and spine are bridges, hosts are named network namespaces, links
are token buckets. No other process sees them: when this process ends, or is killed, the kernel kills all others in its
namespaces and takes the network down.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INTERFACE = "eth0"
"""A host's only interface to the network."""
SENDER_BUFFER_KB = UPLINK_BUFFER_KB = 1000
"""Buffer in front of a host's own link: a sender waits there and loses nothing."""
_BURST_S = 0.5e-3
_BURST_BYTES = 16_384
"""A token bucket holds half a millisecond of traffic, and at least a few packets: less would wake it too often."""
NAMES = Path("/run/netns")
FIRST_PORT = 29_500
POLL_S = 0.2
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
STEP_FILE, FLOAT_BYTES = "rank{rank:05d}.f64", 8
"""The file of a rank's step ends, written by ``training_job``; defined here because reading needs no PyTorch."""
Ranks = list[subprocess.Popen[bytes]]
"""The processes of a job."""


def main(request_file: str) -> None:
    request = json.loads(Path(request_file).read_text())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(1))  # the first process of a namespace has no default action
    NAMES.mkdir(parents=True, exist_ok=True)
    _command(f"mount -t tmpfs tmpfs {NAMES}")  # the hosts' names: only this mount namespace sees them
    build(request["network"])
    print(json.dumps(_run_jobs(request)))


def _run_jobs(request: Mapping[str, Any]) -> dict[str, list[int | None]]:
    """Run the main job to its end with the others beside it; exit codes by job and rank, None for a running one."""
    others = {job["name"]: job for job in request["jobs"]}
    main_job = others.pop(request["main"])
    running = {name: _start(job, port) for port, (name, job) in enumerate(others.items(), start=FIRST_PORT + 1)}
    until_s = time.monotonic() + request["deadline_s"]
    while not all(steps_made(job["folder"]) for job in others.values()):
        if _failed(running) or time.monotonic() > until_s:
            return _exit_codes(running)
        time.sleep(POLL_S)
    running[request["main"]] = mine = _start(main_job, FIRST_PORT)
    until_s, before = time.monotonic() + request["deadline_s"], 0
    while any(process.poll() is None for process in mine):
        time.sleep(POLL_S)
        if (done := steps_made(main_job["folder"])) != before:
            until_s, before = time.monotonic() + request["deadline_s"], done
        if _failed(running) or time.monotonic() > until_s:
            break
    return _exit_codes(running)


def _start(job: Mapping[str, Any], port: int) -> Ranks:
    """A process for each rank, in its host's network."""
    hosts = job["hosts"]
    common: dict[str, Any] = {"WORLD_SIZE": len(hosts), "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port}
    common |= {"MASTER_ADDR": address(hosts[0]), "TMPDIR": f"{job['folder']}/tmp"}
    started: Ranks = []
    for rank, host in enumerate(hosts):
        own = common | {"RANK": rank, "GROUP_RANK": rank}
        with Path(job["folder"], "log", f"rank{rank}.txt").open("wb") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", host_name(host), sys.executable, *job["command"]],
                stdout=log,
                stderr=log,
                env=os.environ | _ENVIRONMENT | {name: str(value) for name, value in own.items()},
            )
        started.append(process)
    return started


def steps_made(folder: str | Path) -> int:
    """Steps that the first rank of a job has made."""
    try:
        return Path(folder, "steps", STEP_FILE.format(rank=0)).stat().st_size // FLOAT_BYTES
    except FileNotFoundError:
        return 0


def _failed(running: Mapping[str, Ranks]) -> bool:
    return any(process.poll() for processes in running.values() for process in processes)


def _exit_codes(running: Mapping[str, Ranks]) -> dict[str, list[int | None]]:
    return {name: [process.poll() for process in processes] for name, processes in running.items()}


def host_name(number: int) -> str:
    return f"h{number}"


def address(number: int) -> str:
    """A host's address, valid in its own network only."""
    return f"10.77.{number // 250}.{number % 250 + 1}"


def build(network: Mapping[str, Any]) -> None:
    """Set up everything; ``network`` is a ``testbed_scenario.Network`` as plain data."""
    racks, rate_mbps = network["racks"], network["host_mbps"]
    for bridge in [*(f"rack{rack}" for rack in range(racks)), *(["spine"] if racks > 1 else [])]:
        _command(f"ip link add {bridge} type bridge")
        _command(f"ip link set {bridge} up")
    for rack in range(racks if racks > 1 else 0):
        _command(f"ip link add up{rack} type veth peer name down{rack}")
        for end, bridge in ((f"up{rack}", f"rack{rack}"), (f"down{rack}", "spine")):
            _command(f"ip link set {end} master {bridge} up")
            _bucket("", end, network["uplink_mbps"], UPLINK_BUFFER_KB)
    for number in range(network["hosts"]):
        name, port = host_name(number), f"port{number}"
        _command(f"ip netns add {name}")
        _command(f"ip link add {port} type veth peer name {INTERFACE} netns {name}")
        _command(f"ip link set {port} master rack{number % racks} up")
        _command(f"ip -n {name} addr add {address(number)}/16 dev {INTERFACE}")
        for interface in ("lo", INTERFACE):
            _command(f"ip -n {name} link set {interface} up")
        _bucket(f"-n {name}", INTERFACE, rate_mbps, SENDER_BUFFER_KB)
        _bucket("", port, rate_mbps, network["host_buffer_kb"])
        reno = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
        _command(f"ip netns exec {name} sh -c", reno)  # sysctl would be one more package


def _bucket(where: str, interface: str, rate_mbps: float, buffer_kb: float) -> None:
    burst = max(_BURST_BYTES, round(rate_mbps * 1e6 / 8 * _BURST_S))
    shape = f"rate {round(1e3 * rate_mbps)}kbit burst {burst} limit {max(round(1000 * buffer_kb), 4000)}"
    _command(f"tc {where} qdisc add dev {interface} root tbf {shape}")


def _command(command: str, *more: str) -> None:
    words = [*command.split(), *more]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        sys.exit(f"{' '.join(words)}: {reason}")


if __name__ == "__main__":
    main(sys.argv[1])
