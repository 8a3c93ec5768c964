"""The engine's Python face: a batch of jobs that can be reset, run, observed, recorded and forked.

Talks to ``paceenv.sim.cluster`` (which fills the parameter records) below and to the environment, the policies and the
commands above. Legend: E environments, R ranks, G groups, K tenants, T iterations, M mechanisms, O signals.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, standing, timing
from paceenv.core.errors import out_of_range
from paceenv.core.limits import LIMITS, Limits
from paceenv.core.signals import SIGNALS
from paceenv.sim.engine import compiled, layout
from paceenv.sim.engine.draws import TABLE_SIZE, gamma_table, mix64, normal_table
from paceenv.sim.engine.layout import Recording, State, Tables, View
from paceenv.sim.engine.program_layout import Program, program_room

_LOGGER = logging.getLogger("paceenv.engine")
_CACHE_WAYS_BYTES = 4096
_MIN_UPDATES = 100_000
"""Rank-iterations for a thread, about half a millisecond."""
_NO_STAMPS = np.empty((0, 0, 0))
_PADDING = 16
"""Unused columns of ``rank_EFR`` where rows a power of two of bytes apart would fall into the same cache sets."""


@dataclass(frozen=True)
class JobBatch:
    """What is simulated: parameter records of E jobs that share a number of ranks, groups and tenants.

    ``jobs`` is ``(E,)`` of ``layout.JOB``, ``tenants_EK`` ``(E, K)`` of ``layout.TENANT``. ``program`` is the step of
    all of them; without one it is a collective of each group.
    """

    jobs: NDArray[np.void]
    tenants_EK: NDArray[np.void]
    ranks: int
    groups: int
    program: Program | None = None

    def __post_init__(self) -> None:
        if self.ranks % self.groups:
            raise ValueError(f"{self.ranks} ranks cannot form {self.groups} equal groups")

    def __len__(self) -> int:
        return len(self.jobs)

    def take(self, which: NDArray[np.int64]) -> JobBatch:
        """The jobs ``which``, in that order, repeats allowed."""
        return replace(self, jobs=self.jobs[which], tenants_EK=self.tenants_EK[which])


@dataclass(frozen=True)
class Outcome:
    """Totals of episodes since their start, each ``(E,)``.

    Re-run iterations are those that failures undid, useful ones those that count. Energy is in joules; 0 for a job
    without power figures. Of K co-tenants ``tenant_cycles_EK`` counts their own iterations, ``(E, K)``; not-a-number
    where a tenant is absent, K = 0 where an engine does not count them.
    """

    time_s: NDArray[np.float64]
    energy_j: NDArray[np.float64]
    failures: NDArray[np.int64]
    rerun_iterations: NDArray[np.float64]
    useful_iterations: NDArray[np.float64]
    tenant_cycles_EK: NDArray[np.float64]

    def since(self, before: Outcome) -> Outcome:
        """What has come to these totals since others of the same episodes."""
        return Outcome(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


def episode_keys(seeds_E: NDArray[np.uint64] | list[int], episode: int | NDArray[np.int64] = 0) -> NDArray[np.uint64]:
    """64-bit keys ``(E,)`` of the noise of an episode: a hash of the environment's seed and the episode's number."""
    x = np.asarray(seeds_E, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = mix64(np.atleast_1d(x)) ^ (np.asarray(episode, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95))
    return np.asarray(mix64(x + np.uint64(0x2545F4914F6CDD1D)))


TRAINING_SEEDS = 1 << 63
"""Seeds from here on are for training alone: suites, sweeps and commands take smaller ones only, so that a training,
however long, never meets an episode of an evaluation."""
SEEDS_OF_A_RUN = 1 << 32
MAX_RUN_SEED = TRAINING_SEEDS // SEEDS_OF_A_RUN - 1


def training_seed(run_seed: int, offset: int = 0) -> int:
    """The seed of an episode of training; two runs share none."""
    if not 0 <= run_seed <= MAX_RUN_SEED:
        raise out_of_range("seed", run_seed, f"0 to {MAX_RUN_SEED}", "training")
    if not 0 <= offset < SEEDS_OF_A_RUN:
        raise out_of_range("seeds drawn by a run", offset, f"0 to {SEEDS_OF_A_RUN - 1}", "training")
    return TRAINING_SEEDS + run_seed * SEEDS_OF_A_RUN + offset


def training_seeds(run_seed: int, offset: int, count: int) -> NDArray[np.uint64]:
    """So many of them one after the other, ``(count,)``; arguments as of :func:`training_seed`."""
    return np.uint64(training_seed(run_seed, offset)) + np.arange(count, dtype=np.uint64)


@dataclass
class Simulator:
    """A batch of jobs in simulation.

    Args:
        keys_E: episode keys, from :func:`episode_keys`; the same keys give the same noise whatever the policy.
        threads: most threads that share a batch; results do not depend on it.
        limits: of every delay; the quiet start is the caller's (:meth:`quiet_start`).
    """

    batch: JobBatch
    keys_E: NDArray[np.uint64]
    threads: int = 1
    limits: Limits = LIMITS
    state: State = field(init=False)
    tables: Tables = field(init=False)

    def __post_init__(self) -> None:
        E, R, G = len(self.batch), self.batch.ranks, self.batch.groups
        self.batch, self.keys_E = self.batch.take(np.arange(E)), self.keys_E.copy()  # both are written to by reset
        padding = 0 if R * 4 % _CACHE_WAYS_BYTES else _PADDING
        self.state = State(
            clocks=np.zeros(E, layout.CLOCK),
            noise_ENR=np.empty((E, layout.NOISE_FIELDS, R), np.float32),
            heat_EHN=np.zeros((E, layout.HEAT_FIELDS, R), np.float32),
            start_ER=np.zeros((E, R), np.float32),
            group_ENG=np.empty((E, layout.GROUP_FIELDS, G)),
            tenant_ENK=np.empty((E, layout.TENANT_FIELDS, self.batch.tenants_EK.shape[1])),
            rank_EFR=np.zeros((E, timing.RANK_FIELDS, R + padding), np.float32),
            tick_EK=np.empty((E, timing.TICK_FIELDS)),
        )
        self._make_tables()
        self._rooms: list[tuple[Any, ...]] = []
        self.reset(np.arange(E), self.keys_E)

    def _make_tables(self) -> None:
        skewness, index = np.unique(self.batch.jobs["imbalance_skew"], return_inverse=True)
        imbalance = np.array([gamma_table(float(s)) for s in skewness]).reshape(-1, TABLE_SIZE)
        self.batch.jobs["imbalance_table"] = index
        limits_4 = np.array(self.limits.numbers())
        self.tables = Tables(self.batch.jobs, self.batch.tenants_EK, normal_table(), imbalance, limits_4)

    def reset(self, which: NDArray[np.int64], keys: NDArray[np.uint64], batch: JobBatch | None = None) -> None:
        """Start new episodes."""
        if batch is not None:
            if batch.program is not self.batch.program:
                raise ValueError("new jobs with another program; allowed: the program of the simulator's jobs")
            before = self.batch.jobs[which]
            self.batch.jobs[which] = batch.jobs
            self.batch.jobs["imbalance_table"][which] = before["imbalance_table"]
            self.batch.tenants_EK[which] = batch.tenants_EK
            if not np.array_equal(before["imbalance_skew"], batch.jobs["imbalance_skew"]):
                self._make_tables()
        self.keys_E[which] = keys
        self.state.clocks["key"][which] = keys
        compiled.reset(which, self.tables, self.state)

    def run(
        self, settings_ESM2: NDArray[np.float64], iterations: int, which: NDArray[np.int64] | None = None
    ) -> NDArray[np.float64]:
        """Run jobs for some iterations.

        Args:
            settings_ESM2: (threshold, window) of each mechanism, for all ranks of a job (S = 1) or for each (S = R);
                ratios.
            which: numbers of the environments that run; the others keep their state and their rows are not written.
                Default: all.
        """
        return self._advance(settings_ESM2, iterations, which, stamps=False).step_ET

    def record(
        self, settings_ESM2: NDArray[np.float64], iterations: int, which: NDArray[np.int64] | None = None
    ) -> Recording:
        """As :meth:`run`, keeping every stamp; memory grows with E x T x R."""
        return self._advance(settings_ESM2, iterations, which, stamps=True)

    def quiet_start(self, which: NDArray[np.int64] | None = None) -> None:
        """Run the first iterations of jobs, in which their limits allow no delay; pacing begins after them."""
        if self.limits.quiet_first:
            self.run(self.off(), self.limits.quiet_first, which)
        rows = slice(None) if which is None else which
        self.state.tick_EK[rows] = standing.when_pacing_begins(self.state.tick_EK[rows])

    def observe(self, *, every_rank: bool = False) -> NDArray[np.float32]:
        """Observations of the last :meth:`run`: ``(E, O)`` of the observer ranks, or ``(E, R, O)`` of every rank."""
        out = np.empty((len(self.batch), self.batch.ranks if every_rank else 1, SIGNALS), np.float32)
        self._spread(compiled.observe, None, self.batch.ranks, (self.batch.ranks, every_rank, self.state, out))
        return out if every_rank else out[:, 0]

    def mean_delay_s(self) -> NDArray[np.float64]:
        """Mean delay over ranks and iterations of the last :meth:`run`, ``(E,)``, seconds."""
        return self.state.clocks["delay_s"].copy()

    def useful_iterations(self) -> NDArray[np.float64]:
        """Iterations of the episodes so far that no failure has undone, ``(E,)``."""
        c, jobs = self.state.clocks, self.batch.jobs
        can_stop_E = (jobs["checkpoint_iterations"] > 0) | (jobs["failure_per_s"] > 0.0)
        return np.where(can_stop_E, c["kept"], c["iteration"]).astype(np.float64)

    def outcome(self) -> Outcome:
        """Totals of the episodes so far."""
        c = self.state.clocks
        iterations, useful = c["iteration"].astype(np.float64), self.useful_iterations()
        present_EK = self.batch.tenants_EK["weight"] > 0.0
        cycles_EK = np.where(present_EK, self.state.tenant_ENK[:, layout.CYCLES], np.nan)
        time_s, failures = c["time_s"].copy(), c["failures"].copy()
        return Outcome(time_s, c["energy_j"].copy(), failures, iterations - useful, useful, cycles_EK)

    def fork(self, which: NDArray[np.int64]) -> Simulator:
        """An independent simulator of the environments ``which`` (repeats allowed) that goes on from this moment."""
        other = copy.copy(self)
        other.batch = self.batch.take(which)
        other.keys_E = self.keys_E[which]
        other.state = State._make(array[which] for array in self.state)
        other._make_tables()
        other._rooms = []
        return other

    def view(self, e: int) -> View:
        """One job, as functions of the kernel take it; what they write is in the state."""
        jobs, state = self.tables.jobs, self.state
        job, imbalance = jobs[e], self.tables.imbalance[jobs["imbalance_table"][e]]
        given = job, state.clocks[e], self.tables.tenants_EK[e], self.tables.normal, imbalance
        return View(*given, *(of_all[e] for of_all in state[1:]))

    def off(self) -> NDArray[np.float64]:
        """Settings for the batch with every mechanism off."""
        return pacing.off(len(self.batch), 1)

    def _advance(
        self, settings: NDArray[np.float64], iterations: int, which: NDArray[np.int64] | None, *, stamps: bool
    ) -> Recording:
        E, R, G = len(self.batch), self.batch.ranks, self.batch.groups
        settings = np.ascontiguousarray(settings, dtype=np.float64)
        if settings.shape not in {(E, 1, *pacing.off().shape), (E, R, *pacing.off().shape)}:
            raise ValueError(
                f"settings have shape {settings.shape}, expected ({E}, 1 or {R}, {len(pacing.MECHANISMS)}, 2)"
            )
        step_ET, program = np.empty((E, iterations)), self.batch.program
        instructions, operations = (len(program.kind_I), len(program.group_O)) if program is not None else (0, 0)
        columns = (R, R, R, R, G, G, instructions, operations, operations)
        kept = [np.empty((E, iterations, n)) for n in columns] if stamps else [_NO_STAMPS] * len(columns)
        out = Recording(step_ET, *kept)
        function = compiled.advance if program is None else compiled.advance_programs
        collects = gc.isenabled() and not compiled.is_ready(function)
        if collects:  # to search the compiler's many objects for garbage takes a sixth of its time
            _LOGGER.info("compiling the engine for this machine, which happens once and takes up to a minute")
            gc.disable()
        try:
            given = iterations, self.tables, self.state, settings, out
            self._spread(function, which, R * iterations, given, self._room)
        finally:
            if collects:
                gc.enable()
        return out

    def _room(self, part: int) -> tuple[Any, ...]:
        """What the thread of a part works in; kept, as allocating it costs a single row a quarter of its call."""
        while part >= len(self._rooms):
            program, tenants = self.batch.program, self.batch.tenants_EK.shape[1]
            scratch = layout.scratch(self.batch.ranks, self.batch.groups)
            more = (scratch, None, None) if program is None else (None, program, program_room(program, tenants))
            self._rooms.append((scratch, *more))
        return self._rooms[part]

    def _spread(
        self,
        function: Any,
        which: NDArray[np.int64] | None,
        updates: int,
        arguments: tuple[Any, ...],
        room: Callable[[int], tuple[Any, ...]] = lambda part: (),
    ) -> None:
        """Call ``function(which, *arguments, *room(part))`` on slices of the environments, one slice a thread.

        ``updates``: rank-iterations of one environment; short runs use fewer threads.
        """
        which = np.arange(len(self.batch)) if which is None else which
        threads = min(self.threads, len(which), len(which) * updates // _MIN_UPDATES)
        if threads <= 1:
            function(which, *arguments, *room(0))
            return
        with ThreadPoolExecutor(threads) as pool:
            parts = enumerate(np.array_split(which, threads))
            for future in [pool.submit(function, part, *arguments, *room(i)) for i, part in parts]:
                future.result()
