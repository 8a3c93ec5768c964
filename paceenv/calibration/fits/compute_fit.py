"""Noise of the compute before the payload: the fit of :mod:`paceenv.calibration.fits.noise_fit`, fail-slow taken out
first.

Axes: T iterations, R ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.fits.episodes import Episodes, find_episodes
from paceenv.calibration.fits.noise_fit import NoiseFit, fit_noise
from paceenv.calibration.fits.two_state_fit import fit_two_states
from paceenv.calibration.measurements import NoiseMeasurements, measure_stage
from paceenv.calibration.structure import JobStamps

MIN_FAIL_SLOW: Final = 0.1
"""An episode makes a rank slower by at least this share."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ComputeFit:
    """``noise`` of what is left when ``episodes`` are divided by ``factor``; None and 1 where no rank had any."""

    noise: NoiseFit
    episodes: Episodes | None
    factor: float
    factor_se: float


def fit_compute(stamps: JobStamps) -> ComputeFit:
    """Fit the compute of a job."""
    compute_s_TR = stamps.compute_TR
    on_TR = np.stack([fit_two_states(x, MIN_FAIL_SLOW * float(np.median(x))) for x in compute_s_TR.T], axis=1)
    episodes, factor, factor_se = find_episodes(on_TR), 1.0, 0.0
    if episodes is not None:
        compute_s_TR = compute_s_TR.copy()
        ratios = []
        for r in np.flatnonzero(on_TR.any(axis=0)):
            slow, healthy = compute_s_TR[on_TR[:, r], r], compute_s_TR[~on_TR[:, r], r]
            ratios.append((float(slow.mean() / healthy.mean()), slow.std() / slow.mean() / math.sqrt(len(slow))))
            compute_s_TR[on_TR[:, r], r] /= ratios[-1][0]
        factor = float(np.mean([ratio for ratio, _ in ratios]))
        between = np.std([r for r, _ in ratios], ddof=1) if len(ratios) > 1 else 0.0
        factor_se = float(np.hypot(between, factor * max(se for _, se in ratios)) / math.sqrt(len(ratios)))
    stage = measure_stage(compute_s_TR, step_T=stamps.iteration_T)
    mean_s = float(stamps.step_T.mean())
    source = f"{stamps.name} ({stamps.source})"
    cv = float(stamps.step_T.std(ddof=1)) / mean_s
    measured = NoiseMeasurements(source, len(compute_s_TR), mean_s, cv, (stage,))
    return ComputeFit(fit_noise(measured), episodes, factor, factor_se)
