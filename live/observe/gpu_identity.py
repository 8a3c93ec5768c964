"""Which GPU a rank uses, and its properties: from CUDA if the job has started it, from NVML if available, else sysfs.

Starts no CUDA context. NVML is NVIDIA's management library, used through its binding ``pynvml`` if that is installed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

_NVIDIA: Final = "0x10de"
_DISPLAY_CLASS: Final = "0x03"


def describe_gpu(device: str, environ: Mapping[str, str], sysfs: Path) -> dict[str, Any]:
    """Known properties of a GPU: name, uuid, PCI address, link, memory in bytes, power limit in watts.

    Args:
        device: PyTorch's name of the GPU, such as ``cuda:1``.
        environ: environment variables; ``CUDA_VISIBLE_DEVICES`` is used.
        sysfs: the folder ``/sys``.
    """
    index = int(device.partition(":")[2] or 0)
    found = _from_torch(index)
    found |= {key: value for key, value in _from_nvml(_choose(index, environ, found)).items() if value is not None}
    if "pci" not in found:
        addresses, chosen = pci_addresses(sysfs), _choose(index, environ, {})
        if isinstance(chosen, int) and chosen < len(addresses):
            found["pci"] = addresses[chosen]
    return found


def pci_addresses(sysfs: Path) -> list[str]:
    """Addresses of NVIDIA's GPUs in the order of the bus."""
    found = []
    for entry in sorted((sysfs / "bus" / "pci" / "devices").glob("*")):
        vendor, kind = ((entry / name).read_text().strip() for name in ("vendor", "class"))
        if vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASS):
            found.append(entry.name)
    return found


def _choose(index: int, environ: Mapping[str, str], known: Mapping[str, Any]) -> int | str:
    """The device's name for NVML: PCI address if known, else the number or uuid in CUDA_VISIBLE_DEVICES."""
    if "pci" in known:
        return str(known["pci"])
    visible = [part.strip() for part in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if not visible:
        return index
    chosen = visible[index]
    return int(chosen) if chosen.isdecimal() else chosen


def _from_torch(index: int) -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    properties = torch.cuda.get_device_properties(index)
    found = {"name": properties.name, "memory_bytes": int(properties.total_memory)}
    place: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if all(isinstance(part, int) for part in place):
        found["pci"] = "{:04x}:{:02x}:{:02x}.0".format(*place)
    return found


def _from_nvml(chosen: int | str) -> dict[str, Any]:
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed, no driver, driver and library of different versions
        return {}
    try:
        handle = _handle(nvml, chosen)

        def ask(read: Callable[[], Any]) -> Any:
            try:
                value = read()
            except nvml.NVMLError:  # every generation of cards refuses something
                return None
            return value.decode() if isinstance(value, bytes) else value

        pci = ask(lambda: nvml.nvmlDeviceGetPciInfo(handle).busId)
        return {
            "name": ask(lambda: nvml.nvmlDeviceGetName(handle)),
            "uuid": ask(lambda: nvml.nvmlDeviceGetUUID(handle)),
            "pci": (pci.decode() if isinstance(pci, bytes) else pci),
            "memory_bytes": ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
            "pcie_generation": ask(lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
            "pcie_width": ask(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            "power_limit_w": ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000.0),
            "driver_version": ask(nvml.nvmlSystemGetDriverVersion),
        }
    except Exception:
        return {}
    finally:
        nvml.nvmlShutdown()


def _handle(nvml: Any, chosen: int | str) -> Any:
    if isinstance(chosen, int):
        return nvml.nvmlDeviceGetHandleByIndex(chosen)
    if ":" in chosen:
        return nvml.nvmlDeviceGetHandleByPciBusId(chosen.encode())
    return nvml.nvmlDeviceGetHandleByUUID(chosen.encode())
