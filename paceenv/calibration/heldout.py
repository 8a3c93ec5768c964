"""How well a calibration predicts unseen steps: it is fitted to a trace's first part, and the rest is held out.

There is one cut, because a drift or an episode must not be known from neighbouring steps. For every few simulated runs,
as long as the held-out part, a cluster is drawn from the errors of the fit. So the interval over runs has both the
errors of the fit and the differences between runs. Axes: T iterations, R ranks, G process groups, E simulated runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.cluster_builder import GOOD_CV, GOOD_MEAN, Stamps
from paceenv.calibration.job_stamps import MIN_ITERATIONS, JobStamps
from paceenv.calibration.noise_fit import MIN_STEPS, ROUNDING, TOLERANCE, subset_max, widths
from paceenv.calibration.posterior import drawn_clusters
from paceenv.calibration.step_stamps import MIN_UNPACED
from paceenv.core import metrics
from paceenv.core.intervals import Interval
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
_TOLERANCES: Final = {"mean": GOOD_MEAN, "CV": GOOD_CV, "p99": 0.1, "E[": TOLERANCE, "arrival": 0.1}
"""How far off still counts as close, by how a quantity's name begins."""
CLOSE: Final = 0.1
"""A distance that exceeds what chance gives by no more is close."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """One quantity: its value on held-out steps, and the mean and the central 95 % of simulated runs.

    Of a distance between distributions chance takes the place of runs. ``tolerance`` is how far off still counts as
    close: relative, or for CV and distance absolute. ``unit`` is "s" or empty.
    """

    quantity: str
    unit: str
    held_out: float
    simulated: Interval
    tolerance: float

    @property
    def is_absolute(self) -> bool:
        """Whether error and tolerance are differences: a CV or a distance is relative already."""
        return self.quantity.startswith(("CV", "KS"))

    @property
    def error(self) -> float:
        """Relative, or for CV and distance absolute; 0 where both are 0."""
        difference = self.simulated.value - self.held_out
        if self.is_absolute or not difference:
            return difference
        return difference / self.held_out if self.held_out else math.inf

    @property
    def verdict(self) -> str:
        """``agrees`` inside the interval, ``close`` outside of it but within the tolerance, else ``off``."""
        if self.held_out in self.simulated:
            return "agrees"
        return "close" if abs(self.error) <= self.tolerance else "off"


@dataclass(frozen=True)
class HeldOutCheck:
    """The lines, and how many steps the fit behind them saw and did not see."""

    fitted_steps: int
    held_out_steps: int
    lines: tuple[Line, ...]

    @property
    def good(self) -> bool:
        """Whether nothing is off."""
        return "off" not in [line.verdict for line in self.lines]

    def to_record(self) -> dict[str, Any]:
        """As plain data, to four digits."""
        names = ("held_out", "simulated", "low", "high")
        lines = [
            {"quantity": line.quantity, "unit": line.unit}
            | {n: float(f"{x:.4g}") for n, x in zip(names, (line.held_out, *line.simulated), strict=True)}
            | {"verdict": line.verdict}
            for line in self.lines
        ]
        return {
            "split": "fitted to the first steps, held against the rest; the cluster itself is fitted to all steps",
            "fitted_steps": self.fitted_steps,
            "held_out_steps": self.held_out_steps,
            "good": self.good,
            "lines": lines,
        }


def check_fit(stamps: Stamps, fit: Callable[[Stamps], Cluster]) -> HeldOutCheck | str:
    """Fit a job's first steps and compare the fitted cluster with the rest, or say in words why not.

    Only steps without pacing are held out, as the fitted cluster is simulated without.
    """
    T = len(stamps.step_T)
    cut = int(FITTED_SHARE * T)
    first, rest = stamps.part(np.arange(T) < cut), stamps.part((np.arange(T) >= cut) & stamps.unpaced_T)
    least = round(MIN_ITERATIONS / FITTED_SHARE)
    if cut < MIN_ITERATIONS or len(rest.step_T) < MIN_STEPS:
        return f"{T} steps, {len(rest.step_T)} of them held out and without pacing; needed: {least} and {MIN_STEPS}"
    if first.unpaced_T.sum() < MIN_UNPACED:
        return f"{int(first.unpaced_T.sum())} of the first {cut} steps are without pacing; needed: {MIN_UNPACED}"
    if isinstance(rest, JobStamps):
        return _check(cut, rest.step_T, (rest.compute_TR, rest.entry_TR), fit(first), rest.groups)
    return _check(cut, rest.step_T, (rest.step_T[:, None],) * 2, fit(first))


def _describe(step_T: Array, compute_TR: Array, entry_TR: Array, groups: int) -> dict[str, float]:
    """Every quantity that is compared, by name."""
    mean_s = float(step_T.mean())
    quantities = {"mean step": mean_s, "CV of the step": float(step_T.std(ddof=1)) / mean_s}
    quantities["p99 of the step"] = float(np.quantile(step_T, 0.99))
    compute_s = float(compute_TR.mean())
    for width in widths(compute_TR.shape[1]):
        quantities[f"E[max]/mean of compute, {width} ranks"] = float(subset_max(compute_TR, width).mean()) / compute_s
    if entry_TR.shape[1] > groups:
        entry_TGM = entry_TR.reshape(len(entry_TR), groups, -1)
        skew_TG = entry_TGM.max(axis=2) - entry_TGM.min(axis=2)
        quantities["arrival skew, mean"] = float(skew_TG.mean())
        quantities["arrival skew, p95"] = float(np.quantile(skew_TG, 0.95))
    return quantities


def _check(
    fitted: int, held_out_T: Array, of_ranks: tuple[Array, Array], cluster: Cluster, groups: int = 1
) -> HeldOutCheck:
    """Every quantity of the held-out steps, and of what ranks computed and when they arrived in them ``(T, R)``.

    They are held against runs of drawn clusters without pacing. One column of ranks: only whole steps are known.
    """
    drawn, measured = drawn_clusters(cluster), _describe(held_out_T, *of_ranks, groups)
    runs = int(np.clip(_MAX_CELLS / (len(held_out_T) * cluster.ranks * len(drawn)), 1, RUNS))
    simulated, steps = list[dict[str, float]](), list[Array]()
    for d, one in enumerate(drawn):
        simulator = start(one, d * runs + np.arange(runs))
        simulator.run(simulator.off(), _LEAD_IN)
        recording = simulator.record(simulator.off(), len(held_out_T))
        steps.append(recording.step_ET)
        arrived_ETR = recording.step_ET[:, :, None] if of_ranks[0].shape[1] == 1 else recording.entry_ETR
        simulated += [_describe(*run, run[1], groups) for run in zip(recording.step_ET, arrived_ETR, strict=True)]
    lines, step_s = [], next(iter(measured.values()))
    for quantity, value in measured.items():
        values = np.array([one[quantity] for one in simulated])
        low, high = np.quantile(values, [0.025, 0.975]).tolist()
        unit = "" if quantity.startswith(("CV", "E[")) else "s"
        rounding = ROUNDING * (step_s if unit else 1.0)
        interval = Interval(float(values.mean()), low - rounding, high + rounding)
        tolerance = next(most for begin, most in _TOLERANCES.items() if quantity.startswith(begin))
        lines.append(Line(quantity, unit, value, interval, tolerance))
    return HeldOutCheck(fitted, len(held_out_T), (*lines, distance_of(held_out_T, steps)))


def distance_of(held_out_T: Array, simulated: Sequence[Array]) -> Line:
    """Kolmogorov-Smirnov distance of held-out values to all simulated ones together.

    Its interval is what chance gives so many values in 95 % of cases, of which neighbours may be alike.
    """
    distance = metrics.ks_distance(held_out_T, np.concatenate([values.ravel() for values in simulated]))
    is_constant = np.ptp(held_out_T) <= ROUNDING * abs(float(held_out_T.mean()))
    independent = 1.0 if is_constant else len(held_out_T) / metrics.correlation_length(held_out_T)
    chance = metrics.ks_chance(max(independent, 1.0))
    return Line("KS distance of the step", "", distance, Interval(chance, 0.0, chance), CLOSE)
