"""Whether the bandwidth that nccl-tests measured is normal for the NICs that its log names."""

from __future__ import annotations

from typing import Final

import numpy as np

from paceenv.importers.nccl_info import Network
from paceenv.importers.nccl_tests import Table

_NORMAL: Final = 0.7
"""Share of what NICs can carry that large collectives usually reach."""
_NIC_GBPS: Final = (10, 25, 40, 50, 100, 200, 400, 800)


def check_nics(table: Table, network: Network) -> str:
    """The answer in words; "" inside a node, or where no NIC is named."""
    from paceenv.calibration.bandwidth import bus_bandwidth  # SciPy, which takes a second to import

    nodes = table.nodes or network.nodes
    if nodes < 2 or not network.devices:
        return ""
    large = table.size_bytes >= 0.5 * table.size_bytes.max()
    rate_gbps = 8e-9 * float(np.median(bus_bandwidth(table, table.size_bytes[large], table.time_s[large])))
    said = f"{rate_gbps / 8:.3g} GB/s at the largest size is {rate_gbps:.0f} Gbit/s"
    if network.is_socket:
        return (
            f"{said} over {', '.join(network.devices)}: TCP sockets; RDMA over NICs of 100 Gbit/s and more gives more"
        )
    # A GPU alone reaches one NIC's share: its own bus carries no more.
    count = min(len(network.devices), table.members // nodes)
    named = f"{count} NIC{'s' * (count > 1)} of a node"
    if network.gbps:
        share = rate_gbps / count / network.gbps
        word = "normal" if share >= _NORMAL else "low"
        return f"{said}: {word}, {share:.0%} of what {named} of {network.gbps:.0f} Gbit/s carry"
    usual = next((gbps for gbps in _NIC_GBPS if 1.02 * gbps >= rate_gbps / count), _NIC_GBPS[-1])
    share = rate_gbps / count / usual
    word = "normal" if share >= _NORMAL else "low"
    return f"{said}: {word} for {named} if they are of {usual} Gbit/s ({share:.0%}), low if they are faster"
