"""What ``NCCL_DEBUG=INFO`` lines say a job really uses: ranks, nodes, network, devices.

A run that fell back from InfiniBand to sockets works, several times slower; only these lines say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

MARK: Final = "NCCL INFO"
_COMM: Final = re.compile(r"\bn[Rr]anks (\d{1,7})(?: nNodes (\d{1,7}))?")
_NETWORK: Final = re.compile(r"Using network (\S{1,40})")
_DEVICES: Final = re.compile(r"NET/(IB|Socket)\s?: Using (.{1,200})")
_VIA: Final = re.compile(r" via NET/([A-Za-z]+)")
_NO_IB: Final = "NET/IB : No device found"
_NAMES: Final = re.compile(r"\[\d+\]([\w.]+)")


def say_network(lines: Iterable[str]) -> str:
    """What the lines say of the network in one sentence, "" if they say nothing."""
    networks, devices, ranks, nodes, no_ib = dict[str, None](), dict[str, None](), 0, 0, False
    for text in lines:
        if MARK not in text:
            continue
        if (comm := _COMM.search(text)) is not None and int(comm[1]) >= ranks:
            ranks, nodes = int(comm[1]), int(comm[2] or nodes)
        if (network := _NETWORK.search(text) or _VIA.search(text)) is not None:
            networks.setdefault(network[1])
        if (found := _DEVICES.search(text)) is not None:
            for name in _NAMES.findall(found[2])[:16]:
                devices.setdefault(f"{found[1]} {name}")
        no_ib = no_ib or _NO_IB in text
    if not networks:
        return ""
    is_socket = any(name.lower() == "socket" for name in networks)
    of = f" of {ranks} ranks" + (f" on {nodes} nodes" if nodes else "") if ranks else ""
    on = ", ".join(name.partition(" ")[2] for name in devices if name.startswith("Socket") == is_socket)
    said = f"the run{of} used NET/{'Socket' if is_socket else next(iter(networks))}{f' on {on}' if on else ''}"
    if is_socket:
        why = ", as NCCL found no InfiniBand device (NET/IB : No device found)" if no_ib else ""
        said += f"{why}: TCP sockets instead of RDMA, several times slower than InfiniBand or RoCE"
    return said
