"""What ``NCCL_DEBUG=INFO`` lines say a job really uses: ranks, nodes, network, NICs.

A run that fell back from InfiniBand to sockets works, several times slower; only these lines say so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

MARK: Final = "NCCL INFO"
_PROCESS: Final = re.compile(r"([\w.-]+):(\d+):\d+ \[\d+\] NCCL INFO")
_COMM: Final = re.compile(r"\bn[Rr]anks (\d{1,7})(?: nNodes (\d{1,7}))?")
_NETWORK: Final = re.compile(r"(Using network| via NET/)\s*([A-Za-z][\w ]{1,30})")
_DEVICES: Final = re.compile(r"NET/(IB|Socket)\s?: Using (.{1,400})")
_NO_IB: Final = "NET/IB : No device found"
_NAMES: Final = re.compile(r"\[\d+\]([\w.]+)")


def describe_network(lines: Iterable[str]) -> str:
    """What the lines say of the network between nodes, in one sentence; "" if they name none."""
    seen, carrying, largest = dict[str, None](), dict[str, None](), dict[tuple[str, str], int]()
    devices: dict[str, dict[str, None]] = defaultdict(dict)
    ranks, nodes, no_ib = 0, 0, False
    for text in lines:
        comm, process = _COMM.search(text), _PROCESS.search(text)
        if process is not None:
            own = process[1], process[2]
            largest[own] = max(largest.get(own, 0), int(comm[1]) if comm is not None else 0)
        if comm is not None and int(comm[1]) >= ranks:
            ranks, nodes = int(comm[1]), int(comm[2] or nodes)
        if (network := _NETWORK.search(text)) is not None:
            transports = carrying if "via" in network[1] else seen
            transports.setdefault(network[2].strip().replace("socket", "Socket"))
        if (named := _DEVICES.search(text)) is not None:
            devices[named[1]] |= dict.fromkeys(_NAMES.findall(named[2])[:16])
        no_ib = no_ib or _NO_IB in text
    if not (seen or carrying):
        return ""
    hosts = [host for (host, _), size in largest.items() if size in (0, ranks)]  # others are of a smaller run
    if not nodes and ranks and len(hosts) >= ranks:
        nodes = len({*hosts})
    used = carrying or seen
    transport = "Socket" if "Socket" in used else next(iter(used))
    of_kind = devices["Socket" if transport == "Socket" else "IB"]
    of = f" of {ranks} ranks" if ranks else ""
    of += f" on {nodes} node{'s' * (nodes > 1)}" if nodes else ""
    on = f" on {', '.join(of_kind)}" if of_kind else ""
    if not carrying and nodes < 2:  # data goes over it where a line says so, or there are several nodes
        where = "its ranks are on one node, so that no data goes over it" if nodes == 1 else "if it has several"
        return f"the run{of} would use NET/{transport}{on} between nodes: {where}"
    said = f"the run{of} used NET/{transport}{on}"
    if transport == "Socket":
        why = ", as NCCL found no InfiniBand device (NET/IB : No device found)" if no_ib else ""
        said += f"{why}: TCP sockets instead of RDMA, several times slower than InfiniBand or RoCE"
    return said
