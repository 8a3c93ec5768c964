"""The compiled kernel: Numba builds functions of ``kernel`` from plain Python.

Every function they reach is registered for compilation as it is. A live rank runs the same source in Python that the
simulator runs as machine code. The machine code is cached per version of *all* these sources: Numba's own cache looks
only at the file of the compiled function and would miss a change of ``timing.py``.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
from numba.extending import register_jitable

from paceenv.core import limits, pacing, signals, timing
from paceenv.core.turns import defer_turns, slack_turns, stagger_turns
from paceenv.sim.engine import (
    coupling,
    draws,
    fluid,
    imperfections,
    incast,
    kernel,
    layout,
    noise,
    program,
    program_layout,
)
from paceenv.sim.engine.code_cache import base_directory, numba_cache
from paceenv.sim.engine.iteration import deciding, event_queue, link_sharing, program_job

_MODULES: tuple[ModuleType, ...] = (
    pacing,
    limits,
    slack_turns,
    stagger_turns,
    defer_turns,
    timing,
    signals,
    draws,
    noise,
    fluid,
    incast,
    coupling,
    imperfections,
    program,
    program_job,
    program_layout,
    deciding,
    event_queue,
    link_sharing,
    kernel,
    layout,
)
_REGISTERED = (
    (pacing.releases, program.release),
    (
        pacing.bounded,
        pacing.slack_delay_s,
        pacing.phase_shift_delay_s,
        pacing.paper_delay_s,
        pacing.stagger_delay_s,
        pacing.defer_hold_s,
    ),
    (timing.reset_rank, timing.reset_tick, timing.observe_step),
    (timing.use_slack, timing.least_delay_s),
    (
        stagger_turns.reset,
        stagger_turns.watch,
        stagger_turns.trial_costs,
        stagger_turns.judge_hold,
        stagger_turns.holds_cost,
        stagger_turns.hold,
    ),
    (defer_turns.reset, defer_turns.watch, defer_turns.clearly_hurts, defer_turns.end_hold, defer_turns.gain),
    (slack_turns.reset, slack_turns.watch, slack_turns.without_outlier_s, slack_turns.pauses, slack_turns.compare),
    (timing.block_ends, timing.pair_ends, timing.observe_ranks, timing.spread_s, timing.slack_low_s, timing.comm_low_s),
    (
        timing.hold_transfers,
        timing.window_s,
        timing.decide,
        timing.smallest,
        timing.follow_comm,
    ),
    (limits.capped_s, limits.refilled, timing.spend),
    (signals.squash, signals.write_signals, signals.start_interval),
    (draws.mix64, draws.key_of, draws.bits32, draws.uniform, draws.geometric),
    (draws.position, draws.look_up, draws.quantile, draws.uniform_bits, draws.bits_of_ranks, draws.quantiles),
    (
        noise.onset_rate,
        noise.running_share,
        noise.reset_noise,
        noise.reset_post_work,
        noise.start_post_work,
        noise.change_fail_slow,
    ),
    (noise.add_stalls, noise.draw_compute, noise.episode_s),
    (fluid.fair_level, fluid.reset_tenants, fluid._starts_away_s, fluid._next_compute_s, fluid._transfer_work_s),
    (fluid.share_uplink, fluid.tenant_goes_on, fluid.vary_transfers, fluid.rewind),
    (incast.receive_all, incast._receive),
    (coupling.reset_coupling, coupling.warm_nodes, coupling.note_computed, coupling.slow_down, coupling.spend),
    (coupling.interrupt, coupling.run_ahead),
    (imperfections.is_missing, imperfections.real_delay_s, imperfections.delay_imperfectly, imperfections.blur),
    (imperfections.keep_missing,),
    (
        program.run_program,
        program.happen,
        program.tenants_next_s,
        program.go_on,
        program.length_factor,
        program.work_s,
        program.timeout_s,
        program.hand_over,
        program.ready_s,
    ),
    (program.schedule, program.leave),
    (event_queue.clear, event_queue.first_s, event_queue.put, event_queue.take_first, event_queue._settle),
    (link_sharing.join_links, link_sharing.leave_links, link_sharing.share_links, link_sharing.look_again),
    (link_sharing._mark_all_on, link_sharing._disturbed, link_sharing._fill, link_sharing._fill_one),
    (link_sharing._free,),
    (link_sharing._begin_to_rise, link_sharing._rising_to, link_sharing._freeze, link_sharing._block),
    (program_layout.new_program_scratch, program_job.keep_program_stamps, program_job.advance_program),
    (deciding.take_in,),
    (kernel.arrive, kernel.start_early, kernel.sort_groups, kernel.finish_step),
    (kernel.exit_s, kernel.observe_and_decide),
    (
        kernel.observer_rank,
        kernel.keep_stamps,
        kernel.reduce_once,
        kernel.advance_job,
        kernel.advance_collectives,
        kernel.advance_steps,
        layout.new_scratch,
    ),
)
_ALLOCATE = (
    kernel.advance,
    kernel.advance_programs,
    kernel.sort_groups,
    incast.receive_all,
    layout.new_scratch,
    program_layout.new_program_scratch,
)
"""All others are compiled without Numba's runtime and must not allocate; their callers keep arrays alive. The runtime
counts references with locked instructions, two for each slice: more than half the time of an iteration of 8 ranks."""
_OF_STEPS = tuple(module.__name__ for module in (program, link_sharing, event_queue))
_INLINED = (
    kernel.reduce_once,
    kernel.advance_job,
    kernel.arrive,
    kernel.finish_step,
    kernel.observe_and_decide,
    deciding.take_in,
    noise.draw_compute,
    noise.start_post_work,
    fluid.vary_transfers,
    coupling.note_computed,
    coupling.slow_down,
    coupling.spend,
    coupling.interrupt,
    *(f for row in _REGISTERED for f in row if f.__module__ in _OF_STEPS),
)
"""Called again and again with whole groups. A call would copy the header of every array to the stack, which made an
iteration of 8 ranks 30 % slower than single arguments, and programs three to eight times slower."""
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"nnan", "nsz"}}
"""No not-a-number and no sign of zero, so that comparisons become minima and maxima of vector registers; no
re-association, no contraction and no approximation, so that compiled and interpreted arithmetic agree."""


def cache_directory() -> Path:
    """Where machine code is kept: ``$PACEENV_CACHE_DIR`` or the user's cache, one folder a version of the sources."""
    digest = hashlib.sha256()
    for module in _MODULES:
        digest.update(Path(str(module.__file__)).read_bytes())
    digest.update(Path(__file__).read_bytes())
    digest.update(f"{numba.__version__} {platform.python_version()}".encode())
    return base_directory() / digest.hexdigest()[:16]


def _options(function: Callable[..., Any]) -> dict[str, Any]:
    return {**_OPTIONS, "_nrt": function in _ALLOCATE, "forceinline": function in _INLINED}


def _compile() -> tuple[Callable[..., None], ...]:
    for function in (f for row in _REGISTERED for f in row):
        register_jitable(**_options(function))(function)
    register_jitable(error_model="numpy", fastmath=True, _nrt=False)(deciding.total)
    with numba_cache(cache_directory()) as writable:
        return tuple(
            numba.njit(nogil=True, cache=writable, **_options(f))(f)
            for f in (kernel.reset, kernel.advance, kernel.advance_programs, kernel.observe)
        )


reset, advance, advance_programs, observe = _compile()


def is_ready(function: Callable[..., None]) -> bool:
    """Whether there is machine code of :data:`advance` or :data:`advance_programs`; else the next call compiles it."""
    if getattr(function, "signatures", True):  # a plain function where Numba is switched off
        return True
    return any(cache_directory().rglob(f"*.{function.__name__}-*.nbi"))
