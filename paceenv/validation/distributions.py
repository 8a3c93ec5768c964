"""Targets about distributions: fitted compute noise against the measured one, by Kolmogorov-Smirnov distance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from paceenv.calibration.fits.noise_fit import fit_noise
from paceenv.calibration.measurements import QUANTILES, NoiseMeasurements
from paceenv.core.metrics import ks_chance
from paceenv.ui import config_files
from paceenv.ui.config_files import Config
from paceenv.validation.checks import Check, Expected


class Row(Config):
    """One measurements file, all of its stages."""

    row: str
    measurements: str
    expected: Expected
    remark: str = ""


class DistributionTarget(Config):
    """Rows about measured distributions, and where they come from."""

    name: str
    kind: Literal["distribution"]
    source: str
    rows: list[Row]


def checks(target: DistributionTarget) -> Iterator[Check]:
    """The distance of every stage: a worker's compute over the mean of its step, at the stored percentiles.

    Raises InputError if a measurements file is missing or damaged.
    """
    for row in target.rows:
        measured = NoiseMeasurements.load(config_files.find("measurements", row.measurements))
        for stage in measured.stages:
            chance = ks_chance(stage.steps * (stage.workers - len(stage.slow_workers)))
            remark = f"at {len(QUANTILES)} percentiles; chance alone gives up to {chance:.1%}, with independent values"
            yield Check(
                target.name,
                f"{row.row}, stage {stage.stage}",
                "KS distance",
                row.expected,
                fit_noise(measured, stage=stage.stage).distance,
                "fitted",
                row.remark or remark,
            )
