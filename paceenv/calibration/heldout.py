"""How well a calibration predicts unseen steps: it is fitted to a trace's first part, and the rest is held out.

There is one cut, because a drift or an episode must not be known from neighbouring steps. For every few simulated runs,
as long as the held-out part, a cluster is drawn from the errors of the fit. So the interval over runs has both the
errors of the fit and the differences between runs. Axes: T iterations, E simulated runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.cluster_builder import GOOD_CV, GOOD_MEAN, Stamps
from paceenv.calibration.job_stamps import MIN_ITERATIONS
from paceenv.calibration.noise_fit import MIN_STEPS, ROUNDING
from paceenv.calibration.posterior import drawn_clusters
from paceenv.calibration.step_stamps import MIN_UNPACED
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import start

FITTED_SHARE: Final = 2.0 / 3.0
"""Of the iterations; the rest is held out."""
RUNS: Final = 12
"""Simulated runs of each cluster drawn from the errors of the fit."""
_MAX_CELLS = 1e8
"""Rank-iterations simulated at most, beyond one run a cluster."""
_LEAD_IN = 100
"""Iterations before a simulated run counts, as the held-out part does not begin a job either."""
MEAN, CV, P99 = "mean step", "CV of the step", "p99 of the step"
_TOLERANCES: Final = {MEAN: GOOD_MEAN, CV: GOOD_CV, P99: 0.1}
"""How far off still counts as close."""

Array = NDArray[np.float64]


def check_fit(stamps: Stamps, fit: Callable[[Stamps], Cluster]) -> dict[str, Any]:
    """Fit a job's first steps and compare the fitted cluster with the rest, or say in ``cannot_tell`` why not.

    Only steps without pacing are held out, as the fitted cluster is simulated without. Of each quantity: its value on
    held-out steps, mean and central 95 % of simulated runs, the error (of the CV the difference, else relative), and
    ``agrees`` inside the interval, ``close`` outside of it but within the tolerance, or ``off``.
    """
    T = len(stamps.step_T)
    cut = int(FITTED_SHARE * T)
    first, rest = stamps.part(np.arange(T) < cut), stamps.part((np.arange(T) >= cut) & stamps.unpaced_T)
    least = round(MIN_ITERATIONS / FITTED_SHARE)
    if cut < MIN_ITERATIONS or len(rest.step_T) < MIN_STEPS:
        why = f"{T} steps, {len(rest.step_T)} of them held out and without pacing; needed: {least} and {MIN_STEPS}"
        return {"cannot_tell": why}
    if first.unpaced_T.sum() < MIN_UNPACED:
        why = f"{int(first.unpaced_T.sum())} of the first {cut} steps are without pacing; needed: {MIN_UNPACED}"
        return {"cannot_tell": why}
    drawn, held_out = drawn_clusters(fit(first)), len(rest.step_T)
    runs = int(np.clip(_MAX_CELLS / (held_out * stamps.ranks * len(drawn)), 1, RUNS))
    simulated = list[dict[str, float]]()
    for d, one in enumerate(drawn):
        simulator = start(one, d * runs + np.arange(runs))
        simulator.run(simulator.off(), _LEAD_IN)
        simulated += map(_describe, simulator.run(simulator.off(), held_out))
    measured, lines = _describe(rest.step_T), list[dict[str, Any]]()
    for quantity, held_out_value in measured.items():
        values = np.array([one[quantity] for one in simulated])
        rounding = ROUNDING * (1.0 if quantity == CV else measured[MEAN])
        low, high = np.quantile(values, [0.025, 0.975]).tolist()
        value, low, high = float(values.mean()), low - rounding, high + rounding
        error = (value - held_out_value) / (1.0 if quantity == CV else held_out_value)
        verdict = "close" if abs(error) <= _TOLERANCES[quantity] else "off"
        numbers = {"held_out": held_out_value, "simulated": value, "low": low, "high": high, "error": error}
        lines.append(
            {"quantity": quantity, "unit": "" if quantity == CV else "s"}
            | {name: float(f"{x:.4g}") for name, x in numbers.items()}
            | {"verdict": "agrees" if low <= held_out_value <= high else verdict}
        )
    return {
        "split": "fitted to the first steps, held against the rest; the cluster itself is fitted to all steps",
        "fitted_steps": cut,
        "held_out_steps": held_out,
        "good": "off" not in [line["verdict"] for line in lines],
        "lines": lines,
    }


def _describe(step_T: Array) -> dict[str, float]:
    mean_s = float(step_T.mean())
    return {MEAN: mean_s, CV: float(step_T.std(ddof=1)) / mean_s, P99: float(np.quantile(step_T, 0.99))}
