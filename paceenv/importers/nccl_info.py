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
_COMM: Final = re.compile(r"\bn[Rr]anks (\d{1,7})(?: nNodes (\d{1,7}))?")
_NETWORK: Final = re.compile(r"(?:Using network| via NET/)\s*([A-Za-z]\w{1,30})")
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

    @property
    def is_socket(self) -> bool:
        """Whether it is TCP."""
        return self.transport == "Socket"

    @property
    def text(self) -> str:
        """In one sentence."""
        of = f" of {self.ranks} ranks" + (f" on {self.nodes} nodes" if self.nodes else "") if self.ranks else ""
        on = f" on {', '.join(self.devices)}" if self.devices else ""
        said = f"the run{of} used NET/{self.transport}{on}"
        if self.is_socket:
            why = ", as NCCL found no InfiniBand device (NET/IB : No device found)" if self.no_ib else ""
            said += f"{why}: TCP sockets instead of RDMA, several times slower than InfiniBand or RoCE"
        return said


def read_network(lines: Iterable[str]) -> Network | None:
    """What the lines say, None if they name no network."""
    hca = dict[str, None]()
    used, devices, gbps, ranks, nodes, no_ib = (
        dict[str, None](),
        defaultdict[str, dict[str, None]](dict),
        0.0,
        0,
        0,
        False,
    )
    for text in lines:
        if (comm := _COMM.search(text)) is not None and int(comm[1]) >= ranks:
            ranks, nodes = int(comm[1]), int(comm[2] or nodes)
        if (network := _NETWORK.search(text)) is not None:
            used.setdefault(network[1].replace("socket", "Socket"))
        if (named := _DEVICES.search(text)) is not None:
            devices[named[1]] |= dict.fromkeys(_NAMES.findall(named[2])[:16])
        if (asked := _ASKED.search(text)) is not None:
            hca |= dict.fromkeys(name.partition(":")[0] for name in asked[1].strip(",").split(","))
        if (speed := _SPEED.search(text)) is not None:
            gbps = max(gbps, int(speed[1]) / 1e3)
        no_ib = no_ib or _NO_IB in text
    if not (used or hca):
        return None
    transport = "Socket" if "Socket" in used else next(iter(used), "IB (NCCL_IB_HCA)")
    of_kind = devices["Socket"] if transport == "Socket" else devices["IB"] or hca
    return Network(transport, tuple(of_kind), gbps, ranks, nodes, no_ib)
