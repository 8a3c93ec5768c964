"""A rank's place: host, process, CPUs, device, network cards and their distances; read once.

GPUs are queried through NVML where ``pynvml`` is installed. Everything else (and the GPU's place, if its PCI address is
known) is read from the system's own files. Nothing here raises, starts a CUDA context or waits for a device; unknown
fields are left out. Names of fields are the keys of the trace's metadata and of the snapshot.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from paceenv.core.wording import format_list
from paceenv.live.observe import gpu_identity

T = TypeVar("T")

SAME_DEVICE, SAME_SWITCH, SAME_ROOT = "same device", "same switch", "same root complex"
SAME_NODE, OTHER_NODE, UNKNOWN = "same NUMA node", "other NUMA node", "unknown"
ENVIRONMENT: Final = (
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NET",
)
"""Variables that influence the path of a collective; no others are recorded."""


def describe(
    *,
    device: str = "cpu",
    backend: str = "",
    rank: int = 0,
    world_size: int = 1,
    sysfs: Path = Path("/sys"),
    proc: Path = Path("/proc"),
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Everything about this rank's place, as plain JSON data.

    Args:
        device: PyTorch's name of the device, such as ``cuda:0``.
        backend: name of the communication backend.
        rank: this rank, 0 to ``world_size - 1``.
        world_size: ranks of the job.
        sysfs: the folder ``/sys``.
        proc: the folder ``/proc``.
        environ: environment variables; by default those of this process.
    """
    environ = os.environ if environ is None else environ
    gpu = _or_none(lambda: gpu_identity.describe_gpu(device, environ, sysfs)) if device.startswith("cuda") else None
    place = _or_none(lambda: pci_place((gpu or {}).get("pci"), sysfs)) or {}
    found: dict[str, Any] = {
        "host": _or_none(socket.gethostname),
        "clock": _or_none(lambda: clock_name(proc)),
        "pid_namespace": _or_none(lambda: os.readlink(proc / "self" / "ns" / "pid")),
        "kernel": _or_none(platform.release),
        "python": platform.python_version(),
        "torch": str(getattr(sys.modules.get("torch"), "__version__", "")) or None,
        "backend": backend or None,
        "world": _world(rank, world_size, environ),
        "device": device,
        "gpu": (gpu or {}) | place or None,
        "cpus": _or_none(lambda: describe_cpus(sysfs, proc)),
        "nics": _or_none(lambda: describe_nics(sysfs, place)),
        "environment": {name: environ[name] for name in ENVIRONMENT if name in environ} or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def clock_name(proc: Path) -> str:
    """A name of the monotonic clock: ranks of one boot and one time namespace read the same clock."""
    boot = (proc / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    namespace = _or_none(lambda: os.readlink(proc / "self" / "ns" / "time"))
    return f"{boot} {namespace}" if namespace else boot


def pci_place(address: str | None, sysfs: Path) -> dict[str, Any] | None:
    """A PCI device's path of bridges, NUMA node and nearby CPUs; None if there is no such device."""
    if not address:
        return None
    domain, _, rest = address.lower().partition(":")
    entry = sysfs / "bus" / "pci" / "devices" / f"{domain[-4:]:0>4}:{rest}"  # NVML writes the domain with 8 digits
    return _device_place(entry) if entry.exists() else None


def nearness(place: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """How near two devices of :func:`pci_place` are, in the steps of ``nvidia-smi topo``."""
    parts, others = (str(entry.get("path") or "").split("/") for entry in (place, other))
    shared = 0
    while shared < min(len(parts), len(others)) and parts[shared] == others[shared] != "":
        shared += 1
    if shared:
        # the first part is the root complex, further ones are bridges
        return SAME_DEVICE if parts == others else SAME_SWITCH if shared > 1 else SAME_ROOT
    nodes = place.get("numa_node"), other.get("numa_node")
    if None in nodes:
        return UNKNOWN
    return SAME_NODE if nodes[0] == nodes[1] else OTHER_NODE


def describe_cpus(sysfs: Path, proc: Path) -> dict[str, Any]:
    """The CPUs this process may run on, their NUMA nodes, and how many of them its control group grants."""
    allowed = sorted(os.sched_getaffinity(0))
    nodes = []
    for entry in sorted((sysfs / "devices" / "system" / "node").glob("node[0-9]*")):
        if set(parse_list(_text(entry / "cpulist") or "")) & set(allowed):
            nodes.append(int(entry.name[4:]))
    return {
        "allowed": format_list(allowed),
        "count": len(allowed),
        "machine": os.cpu_count(),
        "numa_nodes": nodes,
        "quota": _or_none(lambda: cpu_quota(sysfs, proc)),
    }


def cpu_quota(sysfs: Path, proc: Path) -> float | None:
    """CPU time that the control groups of this process grant, in CPUs; None without a limit."""
    found = []
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, files = sysfs / "fs" / "cgroup", ["cpu.max"]
        elif "cpu" in controllers.split(","):
            root, files = sysfs / "fs" / "cgroup" / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        place = root / path.lstrip("/")
        for group in (place, *place.parents):
            words = " ".join(_text(group / name) or "" for name in files).split()
            if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
                found.append(int(words[0]) / int(words[1]))
            if group == root:
                break
    return min(found, default=None)


def describe_nics(sysfs: Path, device: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The network cards that are up, with speed, driver, NUMA node and nearness to the device; RDMA cards too."""
    found = []
    for entry in sorted((sysfs / "class" / "net").glob("*")):
        if entry.name == "lo" or _text(entry / "operstate") not in {"up", "unknown"}:
            continue
        speed = _text(entry / "speed") or ""
        nic: dict[str, Any] = {"name": entry.name, "gbps": int(speed) / 1000.0 if speed.isdecimal() else None}
        found.append(nic | _nic_place(entry, device))
    for entry in sorted((sysfs / "class" / "infiniband").glob("*")):
        rate = (_text(entry / "ports" / "1" / "rate") or "").split()
        gbps = float(rate[0]) if rate and rate[0].replace(".", "", 1).isdecimal() else None
        found.append({"name": entry.name, "gbps": gbps, "rdma": True} | _nic_place(entry, device))
    return found


def parse_list(text: str) -> list[int]:
    """Numbers of a list as the kernel writes it: ``0-3,8`` is 0, 1, 2, 3, 8."""
    numbers: list[int] = []
    for part in text.replace("\n", "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal():
            numbers += range(int(first), (int(last) if last.isdecimal() else int(first)) + 1)
    return numbers


def _world(rank: int, world_size: int, environ: Mapping[str, str]) -> dict[str, int]:
    names = {"local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE", "node": "GROUP_RANK"}
    told = {key: environ[name] for key, name in names.items() if environ.get(name, "").isdecimal()}
    return {"rank": rank, "size": world_size} | {key: int(value) for key, value in told.items()}


def _nic_place(entry: Path, device: Mapping[str, Any]) -> dict[str, Any]:
    place = _or_none(lambda: _device_place(entry / "device")) if (entry / "device").exists() else None
    if place is None:
        return {"virtual": True}
    return place | {"to_device": nearness(device, place)} if device else place


def _device_place(entry: Path) -> dict[str, Any]:
    real = entry.resolve()
    parts = list(real.parts)
    start = next((i for i, part in enumerate(parts) if part.startswith("pci")), len(parts) - 1)
    node = _text(real / "numa_node") or ""
    driver = real / "driver"
    found = {
        "pci": real.name,
        "path": "/".join(parts[start:]),
        "numa_node": int(node) if node.isdecimal() else None,  # -1: unknown to the firmware
        "cpus": _text(real / "local_cpulist") or None,
        "link": " x".join(filter(None, (_text(real / "current_link_speed"), _text(real / "current_link_width")))),
        "driver": driver.resolve().name if driver.exists() else None,
    }
    return {name: value for name, value in found.items() if value not in (None, "")}


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):  # the speed of a card that is down cannot be read
        return None


def _or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except Exception:  # drivers and containers may raise anything; the place is optional
        return None
