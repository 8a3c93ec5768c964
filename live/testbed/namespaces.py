"""Builds a scenario's network from namespaces, bridges and token buckets, inside the caller's own namespaces.

Racks and spine are bridges in the network namespace of the caller, hosts are named namespaces. The caller,
:mod:`paceenv.live.testbed.inside`, has its own network, mount and process namespace. So no other process sees the
names, bridges and queues, and the kernel removes them with the last process in the namespace, however it ends.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

from paceenv.core.errors import InputError

INTERFACE = "eth0"
"""A host's only interface to the network."""
SENDER_BUFFER_KB = 1000
"""Buffer in front of a host's own link: a sender waits there and loses nothing."""
_BURST_S = 0.5e-3
_BURST_BYTES = 16_384
"""A token bucket holds half a millisecond of traffic, and at least a few packets: less would wake it too often."""


def host_name(number: int) -> str:
    """The namespace of a host."""
    return f"h{number}"


def address(number: int) -> str:
    """A host's address, valid in its own network only."""
    return f"10.77.{number // 250}.{number % 250 + 1}"


def build(network: Mapping[str, Any]) -> None:
    """Set up everything; ``network`` is a ``testbed_scenario.Network`` as plain data. Raises InputError."""
    racks = network["racks"]
    for rack in range(racks):
        _bridge(f"rack{rack}")
    if racks > 1:
        _bridge("spine")
        for rack in range(racks):
            up, down = f"up{rack}", f"down{rack}"
            _run("ip", "link", "add", up, "type", "veth", "peer", "name", down)
            _run("ip", "link", "set", up, "master", f"rack{rack}", "up")
            _run("ip", "link", "set", down, "master", "spine", "up")
            for end in (up, down):
                _bucket(end, network["uplink_mbps"], network["uplink_buffer_kb"])
    for number in range(network["hosts"]):
        _host(number, network)


def _bridge(name: str) -> None:
    _run("ip", "link", "add", name, "type", "bridge")
    _run("ip", "link", "set", name, "up")


def _host(number: int, network: Mapping[str, Any]) -> None:
    name, port = host_name(number), f"port{number}"
    rate_mbps = network["host_mbps_of"].get(str(number), network["host_mbps"])  # JSON keys are strings
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    _run("ip", "link", "set", port, "master", f"rack{number % network['racks']}", "up")
    _run("ip", "-n", name, "addr", "add", f"{address(number)}/16", "dev", INTERFACE)
    for interface in ("lo", INTERFACE):
        _run("ip", "-n", name, "link", "set", interface, "up")
    _bucket(INTERFACE, rate_mbps, SENDER_BUFFER_KB, "-n", name)
    _bucket(port, rate_mbps, network["host_buffer_kb"])
    setting = f"echo {network['congestion_control']} > /proc/sys/net/ipv4/tcp_congestion_control"
    _run("ip", "netns", "exec", name, "sh", "-c", setting)  # sysctl would be one more package


def _bucket(interface: str, rate_mbps: float, buffer_kb: float, *where: str) -> None:
    burst = max(_BURST_BYTES, round(rate_mbps * 1e6 / 8 * _BURST_S))
    limit = max(round(1000 * buffer_kb), 4000)
    shape = ("rate", f"{round(1e3 * rate_mbps)}kbit", "burst", str(burst), "limit", str(limit))
    _run("tc", *where, "qdisc", "add", "dev", interface, "root", "tbf", *shape)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise InputError(f"testbed: {' '.join(command)}: {reason}")
