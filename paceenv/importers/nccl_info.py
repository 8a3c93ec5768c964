"""What ``NCCL_DEBUG=INFO`` lines say a job really uses: ranks, nodes, network, NICs.

A run that fell back from InfiniBand to sockets works, several times slower; only these lines say so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

MARK: Final = "NCCL INFO"
_PROCESS: Final = re.compile(r"([\w.-]+):(\d+):\d+ \[\d+\] NCCL INFO")
_COMM: Final = re.compile(r"\bn[Rr]anks (\d{1,7})(?: nNodes (\d{1,7}))?")
_NETWORK: Final = re.compile(r"(Using network| via NET/)\s*([A-Za-z][\w ]{1,30})")
_DEVICES: Final = re.compile(r"NET/(IB|Socket)\s?: Using (.{1,400})")
_ASKED: Final = re.compile(r"NCCL_IB_HCA(?:=| set (?:by environment )?to )=?((?:\w+(?::\d+)?,?)+)")
_SPEED: Final = re.compile(r"NET/IB\s?:.{0,80}\bspeed=(\d{4,7})\b")
_NO_IB: Final = "NET/IB : No device found"
_NAMES: Final = re.compile(r"\[\d+\]([\w.]+)")


@dataclass(frozen=True)
class Network:
    """What NCCL uses between nodes; 0 and "" where it does not say."""

    transport: str  # as NCCL names it, such as ``Socket`` or ``IB``
    devices: tuple[str, ...]  # NICs of a node
    gbps: float  # of a NIC
    ranks: int
    nodes: int
    no_ib: bool  # whether NCCL found no InfiniBand device
    carries: bool  # whether data is known to go over it: a line says so, or there are several nodes

    @property
    def is_socket(self) -> bool:
        """Whether data goes over TCP."""
        return self.carries and self.transport == "Socket"

    @property
    def text(self) -> str:
        """In one sentence."""
        of = f" of {self.ranks} ranks" if self.ranks else ""
        of += f" on {self.nodes} node{'s' * (self.nodes > 1)}" if self.nodes else ""
        on = f" on {', '.join(self.devices)}" if self.devices else ""
        if not self.carries:
            where = (
                "its ranks are on one node, so that no data goes over it" if self.nodes == 1 else "if it has several"
            )
            return f"the run{of} would use NET/{self.transport}{on} between nodes: {where}"
        said = f"the run{of} used NET/{self.transport}{on}"
        if self.is_socket:
            why = ", as NCCL found no InfiniBand device (NET/IB : No device found)" if self.no_ib else ""
            said += f"{why}: TCP sockets instead of RDMA, several times slower than InfiniBand or RoCE"
        return said


def read_network(lines: Iterable[str]) -> Network | None:
    """What the lines say, None if they name no network."""
    hca, seen, carrying, processes = dict[str, None](), dict[str, None](), dict[str, None](), set[tuple[str, str]]()
    devices: dict[str, dict[str, None]] = defaultdict(dict)
    gbps, ranks, nodes, no_ib = 0.0, 0, 0, False
    for text in lines:
        if (process := _PROCESS.search(text)) is not None:
            processes.add((process[1], process[2]))
        if (comm := _COMM.search(text)) is not None and int(comm[1]) >= ranks:
            ranks, nodes = int(comm[1]), int(comm[2] or nodes)
        if (network := _NETWORK.search(text)) is not None:
            transports = carrying if "via" in network[1] else seen
            transports.setdefault(network[2].strip().replace("socket", "Socket"))
        if (named := _DEVICES.search(text)) is not None:
            devices[named[1]] |= dict.fromkeys(_NAMES.findall(named[2])[:16])
        if (asked := _ASKED.search(text)) is not None:
            hca |= dict.fromkeys(name.partition(":")[0] for name in asked[1].strip(",").split(","))
        if (speed := _SPEED.search(text)) is not None:
            gbps = max(gbps, int(speed[1]) / 1e3)
        no_ib = no_ib or _NO_IB in text
    if not (seen or carrying or hca):
        return None
    if not nodes and ranks and len(processes) >= ranks:
        nodes = len({host for host, _ in processes})
    used = carrying or seen
    transport = "Socket" if "Socket" in used else next(iter(used), "IB (NCCL_IB_HCA)")
    of_kind = devices["Socket"] if transport == "Socket" else devices["IB"] or hca
    return Network(transport, tuple(of_kind), gbps, ranks, nodes, no_ib, bool(carrying) or nodes > 1)
