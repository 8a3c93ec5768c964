"""Own work of ranks, step by step, from many places: simulated jobs, recorded ones, and what is put into them.

Suffixes: T steps, R ranks. Times are seconds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks._common import NOISE
from paceenv.core.lateness.watch import lateness_of
from paceenv.diagnosis.clocks import matrix_on_one_clock
from paceenv.diagnosis.lateness_over_time import alike, own_work
from paceenv.importers.inputs import read_inputs
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import start

Array = NDArray[np.float64]
DATA: Final = Path(os.environ.get("PACEENV_DATA_DIR") or Path(__file__).resolve().parents[3] / "shared" / "data")
"""Data recorded by others; see docs/evidence/detection.md for what it is."""
MEMORYLESS: Final = ("jitter_cv", "imbalance_cv", "stall_rate", "common_cv")
"""Noise of single steps; without it only what lasts is left."""
MOST_STEPS: Final = 4000
"""Recorded at once by the simulator."""

NOISES: Final[dict[str, dict[str, float]]] = {
    "jitter 1 %": {"jitter_cv": 0.01},
    "jitter 5 %": {"jitter_cv": 0.05},
    "jitter 10 %": {"jitter_cv": 0.10},
    "jitter 20 %": {"jitter_cv": 0.20},
    "data imbalance 15 %": {"jitter_cv": 0.02, "imbalance_cv": 0.15, "imbalance_skew": 2.0},
    "stalls of a step": {"jitter_cv": 0.03, "stall_rate": 0.002, "stall_mean_s": 1.0},
    "drift 2 %": {"jitter_cv": 0.05, "drift_cv": 0.02},
    "all of it": {k: float(v) for k, v in NOISE.model_dump(exclude_defaults=True).items()},
}
"""Settings of the simulator's noise by name; a step computes for a second."""


@dataclass(frozen=True)
class Series:
    """A job: own work of its ranks, whole steps, ranks that do the same work, and how late each rank truly is."""

    name: str
    own_TR: Array
    step_s_T: Array
    alike: tuple[tuple[int, ...], ...]
    true_late_TR: Array

    @property
    def steps(self) -> int:
        return len(self.own_TR)

    @property
    def hours(self) -> float:
        return float(self.step_s_T.sum()) / 3600.0

    def slowed(self, rank: int, steps: slice | NDArray[np.bool_], slow: float) -> Series:
        """The job with one rank's work longer by the share ``slow`` in some steps; the step grows by as much."""
        extra_T = np.zeros(self.steps)
        extra_T[steps] = slow * self.own_TR[steps, rank]
        own_TR, late_TR = self.own_TR.copy(), self.true_late_TR.copy()
        own_TR[:, rank] += extra_T
        late_TR[:, rank] += extra_T
        return replace(self, own_TR=own_TR, true_late_TR=late_TR, step_s_T=self.step_s_T + extra_T)

    def at(self, steps: slice | NDArray[np.int64]) -> Series:
        """Some of its steps."""
        return Series(self.name, self.own_TR[steps], self.step_s_T[steps], self.alike, self.true_late_TR[steps])


def simulated(name: str, ranks: int, steps: int, seed: int) -> Series:
    """A healthy job of the simulator with a noise of :data:`NOISES`; a second of work, an all-reduce of 40 ms.

    What each rank is truly late is its work in the same job without memoryless noise: the simulator draws each kind of
    noise from counters of its own, so drift and lasting differences of ranks are the same there.
    """
    noise = NOISES[name]
    own_TR, step_s_T = _simulate(noise, ranks, steps, seed)
    lasting = {key: value for key, value in noise.items() if key not in MEMORYLESS}
    lasting_TR = _simulate(lasting, ranks, steps, seed)[0] if lasting.keys() - {"imbalance_skew"} else 0.0 * own_TR
    true_TR = lateness_of(lasting_TR)
    return Series(f"simulated, {name}, {ranks} ranks", own_TR, step_s_T, (tuple(range(ranks)),), true_TR)


def _simulate(noise: dict[str, float], ranks: int, steps: int, seed: int) -> tuple[Array, Array]:
    changed = [f"noise.{key}={value!r}" for key, value in ({"jitter_cv": 0.0} | noise).items()]
    cluster = load_cluster("null-jitter").changed([f"job.nodes={ranks}", "job.compute_s=1.0", *changed])
    simulator = start(cluster, [seed])
    own, step = [], []
    for first in range(0, steps, MOST_STEPS):
        recording = simulator.record(simulator.off(), min(MOST_STEPS, steps - first))
        own.append(recording.entry_ETR[0] - recording.start_ETR[0] - recording.delay_ETR[0])
        step.append(recording.step_ET[0])
    return np.concatenate(own).astype(np.float64), np.concatenate(step).astype(np.float64)


def recorded(path: Path) -> Series:
    """A recorded job as it is; no rank is supposed to be late."""
    matrix, _ = matrix_on_one_clock(read_inputs([path]).require_trace())
    own_TR, groups = own_work(matrix).T, tuple(map(tuple, alike(matrix)))
    return Series(path.stem, own_TR, matrix.step_s_T, groups, np.zeros_like(own_TR))


def evened(series: Series) -> Series:
    """The job with the lasting differences of its ranks removed: each has the median work of its like."""
    own_TR = series.own_TR.copy()
    for places in series.alike:
        mine = list(places)
        usual_R = np.median(own_TR[:, mine], axis=0)
        own_TR[:, mine] *= np.median(usual_R) / usual_R
    return replace(series, name=f"{series.name}, ranks evened", own_TR=own_TR)


def resampled(series: Series, steps: int, rng: np.random.Generator, block: int = 4) -> Series:
    """A longer job of the same steps: blocks of consecutive ones, drawn with replacement, all ranks together."""
    firsts = rng.integers(0, series.steps - block + 1, -(-steps // block))
    at = (firsts[:, None] + np.arange(block)).ravel()[:steps]
    return replace(series.at(at), name=f"{series.name}, resampled")


def production() -> list[Series]:
    """The two production traces, with lasting differences of ranks of the same stage removed."""
    found = [DATA / "bytedance-straggler" / f"trace-{name}.parquet" for name in ("AR", "SE")]
    return [evened(recorded(path)) for path in found if path.exists()]


def sockets() -> list[Series]:
    """The recorded jobs over sockets; two hosts of ``my-slack`` have work that the others do not, so it is removed."""
    paths = sorted((DATA / "socket-runs").glob("*.parquet"))
    return [evened(series) if series.name.startswith("my-slack") else series for series in map(recorded, paths)]
