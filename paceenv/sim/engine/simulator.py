"""The engine's Python face: a batch of jobs that can be reset, run, observed, recorded and forked.

Talks to ``paceenv.sim.cluster`` (which fills the parameter records) below and to the environment, the policies and the
commands above. Legend: E environments, R ranks, G groups, K tenants, T iterations, M mechanisms, O signals.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, timing
from paceenv.core.signals import SIGNALS
from paceenv.sim.engine import compiled, layout
from paceenv.sim.engine.draws import TABLE_SIZE, gamma_table, normal_table

_CACHE_WAYS_BYTES = 4096
_LEAST_UPDATES = 100_000
"""Rank-iterations for a thread, about half a millisecond."""
_PADDING = 16
"""Unused columns of ``rank_EFR`` where rows a power of two of bytes apart would fall into the same cache sets."""
_STATE = ("clocks", "noise_ENR", "heat_EHN", "start_ER", "group_ENG", "tenant_ENK", "rank_EFR", "tick_EK")


@dataclass(frozen=True)
class JobBatch:
    """What is simulated: parameter records of E jobs that share a number of ranks, groups and tenants.

    ``jobs`` is ``(E,)`` of ``layout.JOB``, ``tenants_EK`` ``(E, K)`` of ``layout.TENANT``; ``skewness_E`` is the
    skewness of each job's data imbalance, from which the quantile tables are made.
    """

    jobs: NDArray[np.void]
    tenants_EK: NDArray[np.void]
    ranks: int
    groups: int
    skewness_E: NDArray[np.float64]

    def __post_init__(self) -> None:
        if self.ranks % self.groups:
            raise ValueError(f"{self.ranks} ranks cannot form {self.groups} equal groups")

    def __len__(self) -> int:
        return len(self.jobs)

    def take(self, which: NDArray[np.int64]) -> JobBatch:
        """The jobs ``which``, in that order, repeats allowed."""
        return JobBatch(self.jobs[which], self.tenants_EK[which], self.ranks, self.groups, self.skewness_E[which])


@dataclass(frozen=True)
class Recording:
    """Every stamp of a run, seconds from the end of the step before; ranks that run ahead start before that."""

    step_ET: NDArray[np.float64]
    start_ETR: NDArray[np.float64]
    entry_ETR: NDArray[np.float64]
    delay_ETR: NDArray[np.float64]
    finish_ETG: NDArray[np.float64]
    ready_ETG: NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """What episodes came to since their start, each ``(E,)``.

    Re-run iterations are those that failures undid, useful ones those that count; energy is in joules, 0 for a job
    without power figures.
    """

    time_s: NDArray[np.float64]
    energy_j: NDArray[np.float64]
    failures: NDArray[np.int64]
    rerun_iterations: NDArray[np.float64]
    useful_iterations: NDArray[np.float64]


def episode_keys(seeds_E: NDArray[np.uint64] | list[int], episode: int | NDArray[np.int64] = 0) -> NDArray[np.uint64]:
    """64-bit keys ``(E,)`` of the noise of an episode: a hash of the environment's seed and the episode's number."""
    x = np.asarray(seeds_E, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = _mix(x) ^ (np.asarray(episode, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95))
    return _mix(x + np.uint64(0x2545F4914F6CDD1D))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = np.atleast_1d(x)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass
class Simulator:
    """A batch of jobs in simulation.

    Parameters
    ----------
    batch : the E jobs
    keys_E : episode keys, from :func:`episode_keys`; the same keys give the same noise whatever the policy
    threads : how many threads share a batch at most; results do not depend on it
    """

    batch: JobBatch
    keys_E: NDArray[np.uint64]
    threads: int = 1
    clocks: NDArray[np.void] = field(init=False)
    noise_ENR: NDArray[np.float32] = field(init=False)
    heat_EHN: NDArray[np.float32] = field(init=False)
    start_ER: NDArray[np.float32] = field(init=False)
    group_ENG: NDArray[np.float64] = field(init=False)
    tenant_ENK: NDArray[np.float64] = field(init=False)
    rank_EFR: NDArray[np.float32] = field(init=False)
    tick_EK: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        E, R, G = len(self.batch), self.batch.ranks, self.batch.groups
        self.batch, self.keys_E = self.batch.take(np.arange(E)), self.keys_E.copy()  # both are written to by reset
        self.clocks = np.zeros(E, layout.CLOCK)
        self.noise_ENR = np.empty((E, layout.NOISE_FIELDS, R), np.float32)
        self.heat_EHN = np.zeros((E, layout.HEAT_FIELDS, 0), np.float32)
        self.start_ER = np.zeros((E, 0), np.float32)
        self._make_room()
        self.group_ENG = np.empty((E, layout.GROUP_FIELDS, G))
        self.tenant_ENK = np.empty((E, layout.TENANT_FIELDS, self.batch.tenants_EK.shape[1]))
        padding = 0 if R * 4 % _CACHE_WAYS_BYTES else _PADDING
        self.rank_EFR = np.zeros((E, timing.RANK_FIELDS, R + padding), np.float32)
        self.tick_EK = np.empty((E, timing.TICK_FIELDS))
        self._tables()
        self.reset(np.arange(E), self.keys_E)

    def _make_room(self) -> None:
        """Widen the state of what few jobs have, heat and staleness; it has no columns where none has it."""
        jobs, E, R = self.batch.jobs, len(self.batch), self.batch.ranks
        is_warm = (jobs["compute_w"] > 0.0) & ((jobs["heat_slowdown"] > 0.0) | (jobs["failure_heat"] > 0.0))
        nodes = R // int(jobs["ranks_per_node"][is_warm].min()) if is_warm.any() else 0
        ahead = R if (jobs["staleness"] > 0).any() else 0
        if nodes > self.heat_EHN.shape[2]:
            before, self.heat_EHN = self.heat_EHN, np.zeros((E, layout.HEAT_FIELDS, nodes), np.float32)
            self.heat_EHN[:, :, : before.shape[2]] = before
        if ahead > self.start_ER.shape[1]:
            self.start_ER = np.zeros((E, ahead), np.float32)

    def _tables(self) -> None:
        skewness, index = np.unique(self.batch.skewness_E, return_inverse=True)
        self._imbalance = np.array([gamma_table(float(s)) for s in skewness]).reshape(-1, TABLE_SIZE)
        self.batch.jobs["imbalance_table"] = index

    def reset(self, which: NDArray[np.int64], keys: NDArray[np.uint64], batch: JobBatch | None = None) -> None:
        """Start new episodes in the environments ``which`` with ``keys``, and, if given, with new jobs ``batch``."""
        if batch is not None:
            tables = self.batch.jobs["imbalance_table"][which]
            self.batch.jobs[which] = batch.jobs
            self.batch.jobs["imbalance_table"][which] = tables
            self.batch.tenants_EK[which] = batch.tenants_EK
            self._make_room()
            if not np.array_equal(self.batch.skewness_E[which], batch.skewness_E):
                self.batch.skewness_E[which] = batch.skewness_E
                self._tables()
        self.keys_E[which] = keys
        self.clocks["key"][which] = keys
        compiled.reset(which, self.batch.jobs, self.batch.tenants_EK, *self._state(), normal_table())

    def run(
        self, settings_ESM2: NDArray[np.float64], iterations: int, which: NDArray[np.int64] | None = None
    ) -> NDArray[np.float64]:
        """Run jobs for ``iterations`` with pacing ``settings`` ``(E, 1 or R, M, 2)``; step times ``(E, T)``, seconds.

        ``which`` limits the run to some environments; the others keep their state and their rows are not written.
        """
        return self._advance(settings_ESM2, iterations, which, record=False).step_ET

    def record(self, settings_ESM2: NDArray[np.float64], iterations: int) -> Recording:
        """As :meth:`run`, keeping every stamp; memory grows with E x T x R."""
        return self._advance(settings_ESM2, iterations, None, record=True)

    def observe(self, *, every_rank: bool = False) -> NDArray[np.float32]:
        """Observations of the last :meth:`run`: ``(E, O)`` of the observer ranks, or ``(E, R, O)`` of every rank."""
        out = np.empty((len(self.batch), self.batch.ranks if every_rank else 1, SIGNALS), np.float32)
        arguments = (self.batch.ranks, every_rank, self.clocks, self.rank_EFR, self.tick_EK, out)
        self._spread(compiled.observe, None, self.batch.ranks, arguments)
        return out if every_rank else out[:, 0]

    def mean_delay_s(self) -> NDArray[np.float64]:
        """Mean delay over ranks and iterations of the last :meth:`run`, ``(E,)``, seconds."""
        return self.clocks["delay_s"].copy()

    def outcome(self) -> Outcome:
        """What the episodes came to so far."""
        c = self.clocks
        iterations, kept = c["iteration"].astype(np.float64), c["kept"].astype(np.float64)
        can_stop = (self.batch.jobs["checkpoint_iterations"] > 0) | (self.batch.jobs["failure_rate"] > 0.0)
        useful = np.where(can_stop, kept, iterations)
        return Outcome(c["time_s"].copy(), c["energy_j"].copy(), c["failures"].copy(), iterations - useful, useful)

    def fork(self, which: NDArray[np.int64]) -> Simulator:
        """An independent simulator of the environments ``which`` (repeats allowed) that goes on from this moment."""
        other = copy.copy(self)
        other.batch = self.batch.take(which)
        other.keys_E = self.keys_E[which]
        for name in _STATE:
            setattr(other, name, getattr(self, name)[which])
        return other

    def off(self) -> NDArray[np.float64]:
        """Settings for the batch with every mechanism off."""
        return pacing.off(len(self.batch), 1)

    def _state(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in _STATE)

    def _advance(
        self, settings: NDArray[np.float64], iterations: int, which: NDArray[np.int64] | None, *, record: bool
    ) -> Recording:
        E, R, G = len(self.batch), self.batch.ranks, self.batch.groups
        settings = np.ascontiguousarray(settings, dtype=np.float64)
        if settings.shape not in {(E, 1, *pacing.off().shape), (E, R, *pacing.off().shape)}:
            raise ValueError(
                f"settings have shape {settings.shape}, expected ({E}, 1 or {R}, {len(pacing.MECHANISMS)}, 2)"
            )
        T = iterations if record else 0
        out = Recording(
            np.empty((E, iterations)),
            np.empty((E, T, R)),
            np.empty((E, T, R)),
            np.empty((E, T, R)),
            np.empty((E, T, G)),
            np.empty((E, T, G)),
        )
        stamps = (out.start_ETR, out.entry_ETR, out.delay_ETR, out.finish_ETG, out.ready_ETG)
        parameters = (self.batch.jobs, self.batch.tenants_EK, *self._state(), normal_table(), self._imbalance)
        arguments = (iterations, *parameters, settings, out.step_ET, record, *stamps)
        self._spread(compiled.advance, which, R * iterations, arguments)
        return out

    def _spread(self, function: Any, which: NDArray[np.int64] | None, updates: int, arguments: tuple[Any, ...]) -> None:
        """Call ``function(which, *arguments)`` on slices of the environments, one slice a thread.

        ``updates``: rank-iterations of one environment; threads are started for what takes longer than that.
        """
        which = np.arange(len(self.batch)) if which is None else which
        threads = min(self.threads, len(which), len(which) * updates // _LEAST_UPDATES)
        if threads <= 1:
            function(which, *arguments)
            return
        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(function, part, *arguments) for part in np.array_split(which, threads)]:
                future.result()
