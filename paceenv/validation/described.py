"""Targets about described clusters, from workload, GPU and fabric alone, without noise; and measured throughputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from paceenv.calibration.fits.throughput_fit import Set, ThroughputTarget, efficiency, predict, step_of
from paceenv.core.errors import InputError
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.model import Cluster
from paceenv.ui.config_files import Config
from paceenv.validation.checks import Check, Expected, Kind

Quantity = Literal[
    "efficiency", "samples_per_s", "samples_per_s_and_gpu", "tflops_per_gpu", "share_of_peak", "volume_GB"
]


THROUGHPUT_TOLERANCE = 0.25
NETWORK_TOLERANCE = 0.10
"""Predicted is payload, measured are frames: headers alone are 4.6 %."""
SCALING_TOLERANCE = 0.02


class Row(Config):
    """One number of one cluster under some settings, or its ratio to the same number under others."""

    row: str
    quantity: Quantity = Field(
        description="efficiency: kernel time over step; tflops_per_gpu, share_of_peak: of kernels, also recomputed "
        "ones; volume_GB: payload a node sends and receives in a run"
    )
    cluster: str
    set: Set = {}
    against: Set | None = Field(None, description="settings of the denominator; empty: no ratio")
    run_samples: float = Field(0.0, ge=0, description="samples of a run, for volume_GB")
    kind: Kind = "predicted"
    expected: Expected
    remark: str = ""


class DescribedTarget(Config):
    """Rows about described clusters, and where their numbers come from."""

    name: str
    kind: Literal["described"]
    source: str
    rows: list[Row]


def checks(target: DescribedTarget) -> Iterator[Check]:
    """Every row of the target beside the number of the described cluster."""
    for row in target.rows:
        cluster = load_cluster(row.cluster)
        found = _value(row, cluster, row.set)
        if row.against is not None:
            found /= _value(row, cluster, row.against)
        quantity = row.quantity + (" ratio" if row.against is not None else "")
        yield Check(target.name, row.row, quantity, row.expected, found, row.kind, row.remark)


def throughput_checks(target: ThroughputTarget, cluster: str | None = None) -> Iterator[Check]:
    """Every published number beside that of the described cluster; volumes are never fitted.

    Args:
        target: published throughputs.
        cluster: a config in place of the target's own.
    """
    for p in predict(target, load_cluster(cluster or target.cluster)):
        row = p.row
        kind: Kind = "fitted" if row.fit else "predicted"
        expected = Expected(value=row.throughput, tolerance=THROUGHPUT_TOLERANCE)
        yield Check(target.name, row.name, f"{target.unit} per s", expected, p.throughput, kind)
        others: tuple[tuple[str, float | None, float, float, Kind], ...] = (
            ("scaling factor", row.scaling, SCALING_TOLERANCE, p.scaling, kind),
            ("network, Gb/s both ways", row.net_gbps, NETWORK_TOLERANCE, p.net_gbps, kind),
            ("volume, GB both ways", row.volume_GB, NETWORK_TOLERANCE, p.volume_GB, "predicted"),
        )
        for quantity, value, tolerance, found, how in others:
            if value is not None:
                expected = Expected(value=value, tolerance=tolerance, absolute=quantity == "scaling factor")
                yield Check(target.name, row.name, quantity, expected, found, how)


def _value(row: Row, cluster: Cluster, settings: Set) -> float:
    changed = cluster.changed([f"{key}={value}" for key, value in settings.items()])
    step, gpu = step_of(changed), changed.gpu
    if gpu is None:
        raise InputError(f"{cluster.name}: no gpu; allowed: a cluster that describes its workload and GPU")
    match row.quantity:
        case "efficiency":
            return efficiency(changed)
        case "samples_per_s":
            return step.samples_per_s
        case "samples_per_s_and_gpu":
            return step.samples_per_s / step.gpus
        case "tflops_per_gpu" | "share_of_peak":
            tflops = efficiency(changed) * step.kernel_flops / step.kernel_s / 1e12
            return tflops / (gpu.peak_tflops if row.quantity == "share_of_peak" else 1.0)
        case "volume_GB":
            return 2e-9 * step.traffic.total * row.run_samples / step.samples
