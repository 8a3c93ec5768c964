"""The time law of a link from a table of ``nccl-tests``: latency + size / bandwidth + sqrt(size), with standard errors.

Fits :class:`paceenv.sim.cluster.collectives.Law` to a table (``paceenv.importers.nccl_tests``) by non-negative least
squares on relative errors, so that 8 bytes count as much as 8 GB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from paceenv.calibration.parameters import Parameter, identified
from paceenv.core.errors import InputError
from paceenv.importers.nccl_tests import Table
from paceenv.sim.cluster import STAND_INS, Cluster
from paceenv.sim.cluster.collectives import BYTES_PER_GBIT, Law, volume
from paceenv.ui import config_files

FEWEST_SIZES: Final = 4
"""A law of three terms needs one size more than that to have a residual."""
POOR: Final = 0.1
"""Misfit beyond which a law is no description of its table."""
NO_LAW: Final = 0.4
"""Misfit beyond which nothing is written: the table has a cliff, and the law holds on neither side of it."""
_CLIFF: Final = 2.0
"""Times by which the bandwidth falls between two sizes and stays below, where larger sizes should be faster."""
_NO_LIMIT_INSIDE: Final = {"fabric.intra_node_gbps": 1e6, "fabric.intra_node_latency_us": 0.0}
"""Links inside a node that take no time: that of a table across nodes is all in its law."""
LARGEST_NODE: Final = 8
"""Ranks that usual nodes have at most: where a table lists no hosts, more are taken to be on several nodes."""


@dataclass(frozen=True)
class BandwidthFit:
    """A fitted law, its standard errors, and how far off it is."""

    table: Table
    law: Law
    se: Law
    """Not a number where the table has too few sizes to tell latency from bandwidth; then the law has none."""
    residual: NDArray[np.float64]
    """(law - measured) / measured, for each size."""

    @property
    def is_bandwidth_only(self) -> bool:
        """Whether the table has too few sizes for anything else."""
        return len(np.unique(self.table.size_bytes)) < FEWEST_SIZES

    @property
    def misfit(self) -> float:
        """Root mean square of the relative residuals."""
        return float(np.sqrt(np.mean(self.residual**2)))

    @property
    def text(self) -> str:
        law, table = self.law, self.table
        if self.refused:
            return f"{table.op} among {table.members} ranks: {self.refused}."
        said = f"{table.op} among {table.members} ranks: {law.bandwidth_Bps / 1e9:.4g} GB/s"
        if self.is_bandwidth_only:
            said += "; with so few sizes latency cannot be identified"
        else:
            said += f", {law.hop_s * 1e6:.4g} us a round; the law misses the table by {self.misfit:.1%}"
        if self.misfit > POOR:
            worst = int(np.argmax(np.abs(self.residual)))
            times = 1.0 / max(1.0 + float(self.residual[worst]), 1e-9)
            said += f", most at {mib(table.size_bytes[worst])}, which takes {times:.2g} times as long as it says"
        return said + "."

    @property
    def refused(self) -> str:
        """Why no law describes the table, "" if one does: the cliff, where there is one."""
        if self.misfit <= POOR:
            return ""
        size_S = np.unique(self.table.size_bytes)
        time_S = np.array([np.median(self.table.time_s[self.table.size_bytes == size]) for size in size_S])
        rate_S = np.asarray(volume(self.table.op, "ring", self.table.members, size_S).sent_bytes / time_S)
        at = int(np.argmax(rate_S[:-1] / rate_S[1:]))
        is_cliff = at + 2 < len(rate_S) and rate_S[: at + 1].max() >= _CLIFF * rate_S[at + 1 :].max()
        if not is_cliff:  # but a dip at some sizes, or noise
            return f"no law describes the table: it misses by {self.misfit:.0%}" if self.misfit > NO_LAW else ""
        after = rate_S[at + 1 :] / 1e9
        return (
            f"bus bandwidth falls from {rate_S[: at + 1].max() / 1e9:.3g} GB/s up to {mib(size_S[at])} to "
            f"{after.min():.3g} to {after.max():.3g} GB/s from {mib(size_S[at + 1])} on; a law holds for neither"
        )

    @property
    def nodes(self) -> int:
        """Nodes that the table ran on, 0 for several of unknown number."""
        return self.table.nodes or (1 if self.table.members <= LARGEST_NODE else 0)

    def to_cluster(self, name: str, base: Cluster | None) -> Cluster:
        """``base`` with the measured links, or without one a job that all-reduces the table's largest payload on them.

        Compute is a stand-in then. Across nodes the law is that of a ring through all ranks.
        """
        if self.refused:
            raise InputError(f"{self.table.source}: {self.refused}, so no config is written")
        parameters, members, inside = self.parameters(), self.table.members, self.nodes == 1
        source = f"{self.table.source}: {self.table.op} among {members} ranks"
        record: dict[str, Any] = {"source": source, "fitted": {p.key: p.to_record() for p in parameters}}
        if base is not None:
            linked = base.changed([f"{p.key}={p.value!r}" for p in parameters], name)
            return linked.model_copy(update={"calibration": record})
        nodes = self.nodes if self.nodes and members % self.nodes == 0 else members
        stand_ins: dict[str, float] = {"job.compute_s": 1.0}
        if inside:
            stand_ins["fabric.nic_gbps"] = 100.0
        else:
            stand_ins |= {"fabric.latency_us": 0.0} if self.is_bandwidth_only else {}
            stand_ins |= _NO_LIMIT_INSIDE if nodes < members else {}
        links: dict[str, float | None] = {**stand_ins, **{p.key: p.value for p in parameters}}
        data = {
            "name": name,
            "description": (
                f"Links fitted to {source} on {nodes} {'node' if nodes == 1 else 'nodes'}. A stand-in for the job; "
                f"the table does not have {', '.join(stand_ins)}."
            ),
            "job": {"nodes": nodes, "ranks_per_node": members // nodes, "compute_s": 1.0}
            | {"gradient_bytes": float(self.table.size_bytes.max()), "algorithm": "ring"},
            "fabric": {"nodes_per_leaf": nodes, "oversubscription": 1.0}
            | {key.removeprefix("fabric."): value for key, value in links.items() if key.startswith("fabric.")},
            "calibration": record | {STAND_INS: stand_ins},
        }
        return config_files.parse(Cluster, data, f"calibration of {self.table.source}")

    def parameters(self) -> list[Parameter]:
        """The law as the ``fabric`` keys of a cluster: of the links inside a node, or of its NICs."""
        prefix, rate = ("intra_node_", "intra_node_gbps") if self.nodes == 1 else ("", "nic_gbps")
        terms = [(rate, self.law.bandwidth_Bps, self.se.bandwidth_Bps, 1.0 / BYTES_PER_GBIT)]
        if not self.is_bandwidth_only:
            terms.append((f"{prefix}latency_us", self.law.hop_s, self.se.hop_s, 1e6))
            terms.append((f"{prefix}sqrt_us_per_sqrt_mb", self.law.sqrt_s, self.se.sqrt_s, 1e9))
        said = f"{self.table.op} among {self.table.members} ranks; the law misses the table by {self.misfit:.1%}"
        return [identified(f"fabric.{key}", float(f"{x * unit:.5g}"), se * unit, said) for key, x, se, unit in terms]


def mib(size_bytes: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.4g} {name}"
    return f"{size_bytes:.0f} B"


def fit_bandwidth(table: Table) -> BandwidthFit:
    """The law of a table, as a ring's volumes explain it; of few sizes the bandwidth at the largest alone."""
    ring = volume(table.op, "ring", table.members, table.size_bytes)
    if len(np.unique(table.size_bytes)) < FEWEST_SIZES:
        return _bandwidth_only(table, np.broadcast_to(ring.sent_bytes, table.time_s.shape))
    columns = np.stack([np.full_like(table.time_s, ring.rounds), ring.sent_bytes, np.sqrt(ring.sent_bytes)], axis=1)
    relative = columns / table.time_s[:, None]
    values, errors = _nnls(relative)
    (hop_s, s_per_byte, sqrt_s), (hop_se, byte_se, sqrt_se) = values.tolist(), errors.tolist()
    if s_per_byte <= 0.0:
        raise InputError(f"{table.source}: time does not grow with size; allowed: sizes large enough to fill the link")
    law, se = Law(hop_s, 1.0 / s_per_byte, sqrt_s), Law(hop_se, byte_se / s_per_byte**2, sqrt_se)
    return BandwidthFit(table, law, se, relative @ values - 1.0)


def fit_table(tables: Sequence[Table], base: Cluster | None, name: str) -> tuple[Cluster, list[str]]:
    """The cluster of the only table of some output, and what to say of it."""
    if len(tables) > 1:
        raise InputError(f"{len(tables)} tables ({', '.join(one.source for one in tables[:4])}); allowed: one")
    fit = fit_bandwidth(tables[0])
    notes = [fit.text]
    if not fit.table.nodes:
        where = "inside one node" if fit.nodes == 1 else "across nodes"
        notes.append(f"{fit.table.source}: lists no hosts; {fit.table.members} ranks are taken to be {where}")
    if base is None:
        notes.append("the table has no compute: job.compute_s is a stand-in; set yours with --set job.compute_s=...")
    return fit.to_cluster(name, base), notes


def _bandwidth_only(table: Table, sent_bytes: NDArray[np.float64]) -> BandwidthFit:
    """Bandwidth by the median time of the largest size, and its standard error by the median deviation."""
    largest = table.size_bytes == table.size_bytes.max()
    rate = sent_bytes[largest] / table.time_s[largest]
    bandwidth = float(np.median(rate))
    spread = 1.4826 * float(np.median(np.abs(rate - bandwidth)))
    residual = sent_bytes / bandwidth / table.time_s - 1.0
    se = spread / math.sqrt(len(rate)) if len(rate) > 1 else math.nan
    return BandwidthFit(table, Law(0.0, bandwidth, 0.0), Law(math.nan, se, math.nan), residual)


def _nnls(relative: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Non-negative coefficients that bring every row to 1, and their standard errors (not a number at the bound)."""
    scale = np.linalg.norm(relative, axis=0)
    values, norm = nnls(relative / scale, np.ones(len(relative)))
    free = values > 0.0
    used = (relative / scale)[:, free]
    variance = norm**2 / max(len(relative) - free.sum(), 1)
    errors = np.full(len(values), math.nan)
    errors[free] = np.sqrt(variance * np.diag(np.linalg.inv(used.T @ used)))
    return values / scale, errors / scale
