"""Absolute checks: a job's speed against what its hardware can do, which no comparison of ranks can show.

Axes: N operations, K tasks of a step (one collective of one group), T steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceenv.diagnosis.dependency_graph import build_graph
from paceenv.diagnosis.operation_matrix import OperationMatrix
from paceenv.diagnosis.replay import own_durations
from paceenv.importers.nccl_info import Network
from paceenv.importers.nccl_tests import Table
from paceenv.sim.cluster.collectives import Op, volume

SLOW_LINK: Final = 1.25
"""Times as long as nccl-tests from which on collectives are slow."""
_LAWS: Final[dict[str, Op]] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "grads-reduce-scatter": "reduce_scatter",
    "params-all-gather": "all_gather",
}
_BEYOND: Final = 4.0
"""Factor by which a payload may lie outside of a table's sizes."""


@dataclass(frozen=True)
class AbsoluteCheck:
    """One check: a measured value, whether it is low, and both in words."""

    what: str
    value: float
    is_low: bool
    text: str


def check_links(matrix: OperationMatrix, tables: Sequence[Table]) -> list[AbsoluteCheck]:
    """The job's collectives, from the last arrival to the end, against those that nccl-tests measured.

    A table is used for collectives of its kind among as many ranks, with payloads near its sizes; empty if there are
    none.
    """
    from paceenv.calibration.bandwidth import fit_bandwidth  # SciPy, which takes a second to import

    if not tables:
        return []
    measured, checks = _measured(matrix), []
    for table in tables:
        low, high = table.size_bytes.min() / _BEYOND, table.size_bytes.max() * _BEYOND
        alike = [(b, s) for op, n, b, s in measured if (op, n) == (table.op, table.members) and low <= b <= high]
        if not alike:
            continue
        law = fit_bandwidth(table).law
        expected_s = sum(float(law.time_s(volume(table.op, "ring", table.members, b))) for b, _ in alike)
        times = sum(s for _, s in alike) / expected_s
        text = f"{table.op} among {table.members} takes {times:.2f} times as long as in nccl-tests ({table.source})"
        text += ": the fabric is slower in the job" if times > SLOW_LINK else ": the links do what they can"
        checks.append(AbsoluteCheck(f"{table.op} against nccl-tests", times, times > SLOW_LINK, text))
    return checks


def _measured(matrix: OperationMatrix) -> list[tuple[Op, int, float, float]]:
    """Collectives of the usual step: operation, members, bytes, and the median time once the last one is there."""
    graph, collectives = build_graph(matrix), []
    own_NT = own_durations(matrix, graph)
    for k, operations in enumerate(np.split(graph.member_N, graph.task_K[1:-1])):
        op = _LAWS.get(matrix.ops[matrix.op_N[operations[0]]])
        size_bytes = float(matrix.bytes_N[operations].max())
        whole_T = np.isfinite(matrix.start_NT[operations]).all(axis=0)
        if op is not None and len(operations) > 1 and size_bytes > 0.0 and not graph.queued_K[k] and whole_T.any():
            alone_s = float(np.median(own_NT[operations].max(axis=0)[whole_T]))
            collectives.append((op, len(operations), size_bytes, alone_s))
    return collectives


_NORMAL: Final = 0.7
"""Share of what NICs can carry that large collectives usually reach."""
_NIC_GBPS: Final = (10, 25, 40, 50, 100, 200, 400, 800)


def check_nics(table: Table, network: Network) -> str:
    """Whether a table's bandwidth is normal for the NICs its log names; "" inside a node, or where none is said."""
    from paceenv.calibration.bandwidth import bus_bandwidth

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
