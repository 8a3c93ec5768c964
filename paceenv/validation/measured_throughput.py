"""Targets about described workloads: measured throughputs, volumes and network rates of one cluster."""

from __future__ import annotations

from collections.abc import Iterator

from paceenv.calibration.fits.throughput_fit import ThroughputTarget, predict
from paceenv.sim.cluster import load_cluster
from paceenv.validation.checks import Check, Expected, Kind

THROUGHPUT_TOLERANCE = 0.25
NETWORK_TOLERANCE = 0.10
"""Predicted is payload, measured are frames: headers alone are 4.6 %."""
SCALING_TOLERANCE = 0.02


def checks(target: ThroughputTarget, cluster: str | None = None) -> Iterator[Check]:
    """Every published number of every row beside what the cluster's description gives; volumes are never fitted."""
    for p in predict(target, load_cluster(cluster or target.cluster)):
        row = p.row
        kind: Kind = "fitted" if row.fit else "predicted"
        expected = Expected(value=row.throughput, tolerance=THROUGHPUT_TOLERANCE)
        yield Check(target.name, row.name, f"{target.unit} per s", expected, p.throughput, kind)
        if row.scaling is not None:
            expected = Expected(value=row.scaling, tolerance=SCALING_TOLERANCE, absolute=True)
            yield Check(target.name, row.name, "scaling factor", expected, p.scaling, kind)
        if row.net_gbps is not None:
            expected = Expected(value=row.net_gbps, tolerance=NETWORK_TOLERANCE)
            yield Check(target.name, row.name, "network, Gb/s both ways", expected, p.net_gbps, kind)
        if row.volume_GB is not None:
            expected = Expected(value=row.volume_GB, tolerance=NETWORK_TOLERANCE)
            yield Check(target.name, row.name, "volume, GB both ways", expected, p.volume_GB, "predicted")
