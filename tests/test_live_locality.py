"""Locality from a made-up system tree, from NVML's answers, and on the machine the tests run on."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceenv.core.wording import format_list
from paceenv.live.observe import gpu_identity, locality

GPU_PATH = "pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:00.0"
PLACES = {
    "mlx5_0": "pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3d:00.0",
    "mlx5_1": "pci0000:3a/0000:3a:01.0/0000:40:00.0",
    "mlx5_2": "pci0000:5d/0000:5d:00.0/0000:5e:00.0",
    "mlx5_3": "pci0000:ba/0000:ba:00.0/0000:bb:00.0",
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")


def add_device(sysfs: Path, path: str, node: int, *, vendor: str = "0x15b3", kind: str = "0x020700") -> Path:
    """A PCI device at ``devices/<path>``, listed on the bus."""
    place = sysfs / "devices" / path
    facts = {"numa_node": str(node), "local_cpulist": "0-31", "vendor": vendor, "class": kind}
    write(place, facts | {"current_link_speed": "32.0 GT/s PCIe", "current_link_width": "16"})
    bus = sysfs / "bus" / "pci" / "devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / place.name).symlink_to(place)
    return place


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A server: one GPU; RDMA cards behind its switch, its root complex, its NUMA node and the other one."""
    root = tmp_path / "sys"
    add_device(root, GPU_PATH, 0, vendor="0x10de", kind="0x030200")
    for name, path in PLACES.items():
        place = add_device(root, path, 1 if name == "mlx5_3" else 0)
        write(root / "class" / "infiniband" / name, {"ports/1/rate": "400 Gb/sec (4X NDR)"})
        (root / "class" / "infiniband" / name / "device").symlink_to(place)
    write(root / "class" / "net", {"eth0/operstate": "up", "eth0/speed": "25000", "lo/operstate": "unknown"})
    write(root / "class" / "net", {"eth1/operstate": "down", "docker0/operstate": "up", "docker0/speed": "-1"})
    (root / "class" / "net" / "eth0" / "device").symlink_to(add_device(root, "pci0000:ba/0000:ba:02.0", 1))
    write(root / "devices" / "system" / "node", {"node0/cpulist": "0-31", "node1/cpulist": "8192-8199"})
    return root


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    root = tmp_path / "proc"
    write(root, {"sys/kernel/random/boot_id": "b0-07", "self/cgroup": "0::/pod/worker"})
    (root / "self" / "ns").mkdir()
    (root / "self" / "ns" / "time").symlink_to("time:[4026531834]")
    return root


def test_a_server_is_described(sysfs: Path, proc: Path) -> None:
    write(sysfs / "fs" / "cgroup", {"pod/cpu.max": "800000 100000", "pod/worker/cpu.max": "max 100000"})
    environ = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "2", "NCCL_ALGO": "Ring", "SECRET": "x"}
    found = locality.describe(
        device="cuda:0", backend="nccl", rank=17, world_size=32, sysfs=sysfs, proc=proc, environ=environ
    )
    assert json.loads(json.dumps(found)) == found
    assert found["world"] == {"rank": 17, "size": 32, "local_rank": 1, "local_size": 8, "node": 2}
    assert (found["clock"], found["backend"], found["environment"]) == (
        "b0-07 time:[4026531834]",
        "nccl",
        {"NCCL_ALGO": "Ring"},
    )
    gpu = found["gpu"]
    assert (gpu["pci"], gpu["path"], gpu["numa_node"]) == ("0000:3c:00.0", GPU_PATH, 0)
    assert (gpu["cpus"], gpu["link"]) == ("0-31", "32.0 GT/s PCIe x16")
    assert found["cpus"]["quota"] == 8.0
    assert found["cpus"]["numa_nodes"] == [0]
    nics = {nic["name"]: nic for nic in found["nics"]}
    assert set(nics) == {"eth0", "docker0", *PLACES}
    assert {name: nics[name]["to_device"] for name in (*PLACES, "eth0")} == {
        "mlx5_0": locality.SAME_SWITCH,
        "mlx5_1": locality.SAME_ROOT,
        "mlx5_2": locality.SAME_NODE,
        "mlx5_3": locality.OTHER_NODE,
        "eth0": locality.OTHER_NODE,
    }
    assert (nics["mlx5_0"]["gbps"], nics["mlx5_0"]["rdma"], nics["eth0"]["gbps"]) == (400.0, True, 25.0)
    assert nics["docker0"] == {"name": "docker0", "gbps": None, "virtual": True}


def test_a_quota_of_the_older_control_groups_is_read(sysfs: Path, proc: Path) -> None:
    write(proc, {"self/cgroup": "4:memory:/pod\n3:cpu,cpuacct:/pod"})
    files = {"pod/cpu.cfs_quota_us": "250000", "pod/cpu.cfs_period_us": "100000"}
    write(sysfs / "fs" / "cgroup" / "cpu", files | {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"})
    assert locality.cpu_quota(sysfs, proc) == 2.5


def test_nothing_there_is_nothing_said(tmp_path: Path) -> None:
    found = locality.describe(device="cuda:3", sysfs=tmp_path / "sys", proc=tmp_path / "proc", environ={})
    assert {"host", "kernel", "python", "world", "device", "cpus"} <= set(found)
    assert "gpu" not in found
    assert "clock" not in found


def test_a_tree_of_nonsense_raises_nothing(tmp_path: Path) -> None:
    names = ("class/net/eth0/operstate", "class/net/eth0/speed", "class/infiniband/x/ports/1/rate", "fs/cgroup/cpu.max")
    for name in (*names, "devices/system/node/node0/cpulist", "self/cgroup", "sys/kernel/random/boot_id"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff\x00nonsense,9-,-")
    (tmp_path / "class" / "net" / "loop").symlink_to("loop")
    found = locality.describe(device="cuda", sysfs=tmp_path, proc=tmp_path, environ={"LOCAL_RANK": "one"})
    assert found["world"] == {"rank": 0, "size": 1}


def test_this_machine_is_described() -> None:
    found = locality.describe()
    assert found["clock"].startswith(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    assert locality.parse_list(found["cpus"]["allowed"]) == sorted(os.sched_getaffinity(0))


@given(st.sets(st.integers(0, 300)))
def test_lists_of_numbers_come_back(numbers: set[int]) -> None:
    assert locality.parse_list(format_list(sorted(numbers))) == sorted(numbers)


class Library(types.ModuleType):
    """Answers like NVML's binding: bytes here and there, and a card that refuses one of the questions."""

    NVMLError = OSError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.asked: list[Any] = []
        self.started = 0

    def nvmlInit(self) -> None:
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.started -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self.asked.append(index)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> int:
        self.asked.append(uuid)
        return 0

    def nvmlDeviceGetHandleByPciBusId(self, address: bytes) -> int:
        self.asked.append(address)
        return 0

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return "GPU-1"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(busId=b"00000000:3C:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(total=150_000_000_000)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        raise OSError("not supported")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


@pytest.mark.parametrize(
    ("device", "visible", "asked"),
    [("cuda:1", "", 1), ("cuda", "", 0), ("cuda:1", "6, 3", 3), ("cuda:0", "GPU-77,GPU-78", b"GPU-77")],
)
def test_nvml_is_asked_about_the_visible_device(
    library: Library, sysfs: Path, device: str, visible: str, asked: int | bytes
) -> None:
    found = gpu_identity.describe_gpu(device, {"CUDA_VISIBLE_DEVICES": visible}, sysfs)
    assert library.asked == [asked]
    assert library.started == 0
    assert found == {
        "name": "NVIDIA H200",
        "uuid": "GPU-1",
        "pci": "00000000:3C:00.0",
        "memory_bytes": 150_000_000_000,
        "pcie_generation": 5,
        "pcie_width": 16,
        "driver_version": "580.1",
    }


def test_nvml_and_sysfs_are_joined_by_the_address(library: Library, sysfs: Path, proc: Path) -> None:
    gpu = locality.describe(device="cuda:0", sysfs=sysfs, proc=proc, environ={})["gpu"]
    assert (gpu["name"], gpu["path"], gpu["numa_node"]) == ("NVIDIA H200", GPU_PATH, 0)


def test_a_driver_that_does_not_answer_leaves_sysfs(
    library: Library, sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError("Driver/library version mismatch")

    monkeypatch.setattr(library, "nvmlInit", refuse)
    assert gpu_identity.describe_gpu("cuda:0", {}, sysfs) == {"pci": "0000:3c:00.0"}


@pytest.mark.gpu
def test_the_gpu_of_this_machine_is_described() -> None:
    import torch

    torch.zeros(1, device="cuda")
    gpu = locality.describe(device="cuda:0")["gpu"]
    assert gpu["name"] == torch.cuda.get_device_name(0)
    assert gpu["pci"]
