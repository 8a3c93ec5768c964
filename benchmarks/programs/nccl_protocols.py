"""All-reduces by NCCL's protocols as others measured them with nccl-tests, beside the simulated ones.

``python -m benchmarks.programs.nccl_protocols --write`` fills the tables of ``docs/evidence/protocols.md``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.program_run import choice_of, tiers_of, use_of
from paceenv.sim.cluster.program.program_tables import Start
from paceenv.ui import config_files, output
from paceenv.ui.config_files import write_text
from paceenv.ui.output import markdown_table

MET_WITHIN = 0.15
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "protocols.md"
BEGIN, END = "<!-- begin: python -m benchmarks.programs.nccl_protocols --write -->", "<!-- end -->"

PCIE = {"intra_node": "pcie", "intra_node_gbps": 116.9, "intra_node_latency_us": 5.7}
"""Four L40S: the rate of the largest message by Simple, the latency of NCCL's table."""
ACROSS = {"nic_gbps": 200.0, "nics_per_node": 8, "intra_node_gbps": 1880.0, "intra_node_latency_us": 3.4}
"""Two nodes of eight A100: the NICs' rate, and NCCL's cap for NVLink of an A100, 235 GB/s."""


class Series(NamedTuple):
    """Measured times of one all-reduce at several sizes."""

    name: str
    nodes: int
    per_node: int
    protocol: str
    fabric: dict[str, Any]
    measured_us: dict[int, float]


SERIES = [
    Series(
        "4 L40S, Simple", 1, 4, "simple", PCIE,
        {8: 39.42, 2**15: 51.48, 2**18: 64.87, 2**20: 131.74, 2**24: 1768.54, 2**27: 13780.1},
    ),
    Series(
        "4 L40S, LL128", 1, 4, "ll128", PCIE,
        {8: 24.03, 2**15: 36.22, 2**18: 65.60, 2**20: 185.86, 2**24: 2566.10, 2**27: 20282.0},
    ),
    Series(
        "4 L40S, LL", 1, 4, "ll", PCIE,
        {8: 17.31, 2**15: 17.53, 2**18: 66.09, 2**20: 247.71, 2**24: 3974.75, 2**27: 31835.2},
    ),
    Series(
        "4 L40S, auto", 1, 4, "auto", PCIE,
        {8: 17.73, 2**15: 18.26, 2**18: 67.69, 2**20: 126.98, 2**24: 1767.07, 2**27: 13730.5},
    ),
    Series(
        "2 x 8 A100, auto", 2, 8, "auto", ACROSS,
        {512: 38.83, 2**15: 51.15, 2**21: 124.0, 2**23: 199.0, 2**25: 618.8, 2**29: 5760.3, 2**33: 86026.0},
    ),
]  # fmt: skip


class Row(NamedTuple):
    """One size of a series."""

    size_bytes: int
    measured_s: float
    predicted_s: float
    sent_by: str

    @property
    def error(self) -> float:
        """Predicted over measured time, less 1."""
        return self.predicted_s / self.measured_s - 1.0


def predicted(one: Series) -> list[Row]:
    """A series with what the fast engine says of an operation alone.

    Args:
        one: the measurement.
    """
    data = {
        "name": "nccl-tests",
        "job": {"nodes": one.nodes, "ranks_per_node": one.per_node, "algorithm": "auto"},
        "fabric": {"nic_gbps": 100.0, "nodes_per_leaf": 8, "oversubscription": 1.0, "latency_us": 14.0}
        | {"operation_us": 8.4, "protocol": one.protocol}
        | one.fabric,
        "program": {"step": [{"all_reduce": {"bytes": 8.0}}]},
    }
    cluster = config_files.parse(Cluster, data, one.name)
    tiers, members = tiers_of(cluster.fabric, cluster.job), list(range(cluster.ranks))
    choose, alone = choice_of(cluster.fabric, cluster.job, tiers), use_of(cluster.fabric, cluster.job)
    rows = []
    for size_bytes, measured_us in one.measured_us.items():
        start = Start("world", "all_reduce", float(size_bytes))
        choice, use = choose(start, members), alone(start, members)
        rows.append(
            Row(size_bytes, measured_us * 1e-6, use.alone_s + use.latency_s, f"{choice.algorithm}, {choice.protocol}")
        )
    return rows


def table() -> tuple[list[str], list[list[str]]]:
    """All series, with the bus bandwidth of either time."""
    head = ["series", "bytes", "measured, us", "GB/s", "predicted, us", "GB/s", "error", "predicted by"]
    rows = []
    for one in SERIES:
        ranks = one.nodes * one.per_node
        for row in predicted(one):
            bus_GB = 2 * (ranks - 1) / ranks * row.size_bytes / 1e9
            missed = "" if abs(row.error) <= MET_WITHIN else " **missed**"
            rows.append(
                [
                    one.name,
                    f"{row.size_bytes:,}",
                    f"{row.measured_s * 1e6:,.1f}",
                    f"{bus_GB / row.measured_s:.2f}",
                    f"{row.predicted_s * 1e6:,.1f}",
                    f"{bus_GB / row.predicted_s:.2f}",
                    f"{row.error:+.0%}{missed}",
                    row.sent_by,
                ]
            )
    return head, rows


def main(
    write: Annotated[bool, typer.Option(help="Write the table into docs/evidence/protocols.md.")] = False,
) -> None:
    """Measured and predicted times of all-reduces by NCCL's protocols."""
    columns, rows = table()
    output.print_table("nccl-tests beside the simulator", columns, rows)
    if write:
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        lines = "\n".join(markdown_table(columns, rows))
        write_text(DOCUMENT, f"{before}{BEGIN}\n\n{lines}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    typer.run(main)
