"""What is known of episodes that come again: their jobs, and their intervals without pacing.

An episode's key decides its cluster's draws and its noise, so its unpaced twin does the same every time. A training
whose seeds come again may keep both, and then runs the twin once for each episode. Results do not depend on it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paceenv.sim.engine.simulator import JobBatch

_FIRST_PLACES = 256


class KeptEpisodes:
    """Every episode met so far has a place in it, by key and cluster.

    Legend: N places, E environments (rows), T intervals, V values of an interval.
    """

    def __init__(self, environments: int, intervals: int, values: int) -> None:
        self._place = dict[tuple[int, int], int]()
        self._passive_NTV = np.zeros((_FIRST_PLACES, intervals, values))
        self._known_N = np.zeros(_FIRST_PLACES, np.int64)
        self.place_E, self._age_E = np.zeros((2, environments), np.int64)
        self._follows_E = np.zeros(environments, np.bool_)

    def start(self, rows: NDArray[np.int64], keys: NDArray[np.uint64], cluster: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Episodes start in some rows; which of these need their twin, ``(n,)``, because it is not known."""
        for row, key, c in zip(rows.tolist(), keys.tolist(), cluster.tolist(), strict=True):
            self.place_E[row] = self._place.setdefault((key, c), len(self._place))
        if len(self._place) > len(self._known_N):
            more = max(len(self._place), 2 * len(self._known_N)) - len(self._known_N)
            self._known_N = np.concatenate([self._known_N, np.zeros(more, np.int64)])
            grown = np.zeros((more, *self._passive_NTV.shape[1:]))
            self._passive_NTV = np.concatenate([self._passive_NTV, grown])
        self._age_E[rows] = 0
        self._follows_E[rows] = self._known_N[self.place_E[rows]] == 0
        return self._follows_E[rows]

    def missing(self, running: NDArray[np.bool_] | None) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Rows whose coming interval without pacing is not known, ``(E,)``, and those among them to bring up to it."""
        missing_E = self._age_E >= self._known_N[self.place_E]
        if running is not None:
            missing_E &= running
        return missing_E, np.flatnonzero(missing_E & ~self._follows_E)

    def bring_up(self, row: int) -> int:
        """The twin of a row is brought up to its present interval; how many of them there were."""
        self._follows_E[row] = True
        return int(self._age_E[row])

    def keep(self, rows_E: NDArray[np.bool_], values_EV: NDArray[np.float64]) -> None:
        """What some rows did without pacing in the coming interval."""
        rows = np.flatnonzero(rows_E)
        place, age = self.place_E[rows], self._age_E[rows]
        self._passive_NTV[place, age], self._known_N[place] = values_EV[rows], age + 1

    def passed(self, running: NDArray[np.bool_] | None) -> NDArray[np.float64]:
        """The interval is over in the rows that run: what each did without pacing in it, ``(E, V)``."""
        age_E = np.minimum(self._age_E, self._passive_NTV.shape[1] - 1)
        values_EV = self._passive_NTV[self.place_E, age_E]
        self._age_E += True if running is None else running
        return values_EV


class KeptJobs:
    """The jobs of episodes, by key and cluster."""

    def __init__(self) -> None:
        self._place = dict[tuple[int, int], int]()
        self._jobs: JobBatch | None = None

    def missing(self, keys: NDArray[np.uint64], cluster: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the episodes whose job is not known, each once."""
        pairs = zip(keys.tolist(), cluster.tolist(), strict=True)
        first = {pair: n for n, pair in reversed(list(enumerate(pairs))) if pair not in self._place}
        return np.array(sorted(first.values()), np.int64)

    def add(self, keys: NDArray[np.uint64], cluster: NDArray[np.int64], jobs: JobBatch) -> None:
        """Keep the jobs of episodes that are all missing, each once."""
        for pair in zip(keys.tolist(), cluster.tolist(), strict=True):
            self._place[pair] = len(self._place)
        if self._jobs is not None:
            both = [(getattr(self._jobs, name), getattr(jobs, name)) for name in ("jobs", "tenants_EK", "skewness_E")]
            all_jobs, tenants_EK, skewness_E = (np.concatenate(pair) for pair in both)
            jobs = replace(jobs, jobs=all_jobs, tenants_EK=tenants_EK, skewness_E=skewness_E)
        self._jobs = jobs

    def take(self, keys: NDArray[np.uint64], cluster: NDArray[np.int64]) -> JobBatch:
        """The jobs of episodes that are all known."""
        assert self._jobs is not None
        places = [self._place[pair] for pair in zip(keys.tolist(), cluster.tolist(), strict=True)]
        return self._jobs.take(np.array(places, np.int64))
