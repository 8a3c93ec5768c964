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
from types import FunctionType, ModuleType
from typing import Any

import numba
from numba.extending import register_jitable

from paceenv.core import limits, pacing, signals, slots, switchback, timing
from paceenv.sim.engine import (
    coupling,
    draws,
    fluid,
    incast,
    kernel,
    layout,
    link_fluid,
    measuring,
    noise,
    program,
    program_layout,
)
from paceenv.sim.engine.code_cache import base_directory, numba_cache

_CORE = (pacing, limits, slots, switchback, timing, signals)
_ENGINE = (coupling, draws, fluid, incast, kernel, layout, link_fluid, measuring, noise, program, program_layout)
_MODULES: tuple[ModuleType, ...] = _CORE + _ENGINE
_COMPILED = (kernel.reset, kernel.advance, kernel.observe)
"""What Python calls."""
_REGISTERED = tuple(
    function
    for module in _MODULES
    for function in vars(module).values()
    if isinstance(function, FunctionType) and function.__module__ == module.__name__ and function not in _COMPILED
)
"""What these call, and some more that nobody compiles."""
_INLINED = (
    kernel.run,
    kernel.reduce_once,
    kernel.arrive,
    kernel.finish_step,
    kernel.measure,
    measuring.take_in,
    timing.observe_step,
    timing.observe_ranks,
    timing.follow_comm,
    timing.decide,
    timing.follow_waits,
    timing.use_slack,
    timing.shift_phase,
    timing.take_places,
    timing.hold_transfers,
    timing.spend,
    noise.draw_compute,
    noise.start_post_work,
    fluid.share_uplink,
    fluid.vary_transfers,
    coupling.note_computed,
    coupling.slow_down,
    coupling.spend,
    coupling.interrupt,
    *(f for f in _REGISTERED if f.__module__ == link_fluid.__name__),
    *(f for f in _REGISTERED if f.__module__ == program.__name__ and f is not program.keep_program_stamps),
)
"""Called again and again with whole groups. A call would copy the header of every array to the stack, which made an
iteration of 8 ranks 30 % slower than single arguments, and programs three to eight times slower."""
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"nnan", "nsz"}, "_nrt": False}
"""Without Numba's runtime: nothing allocates, and callers keep arrays alive. The runtime counts references with locked
instructions, two for each slice: more than half the time of an iteration of 8 ranks.

No not-a-number and no sign of zero, so that comparisons become minima and maxima of vector registers; no
re-association, no contraction and no approximation, so that compiled and interpreted arithmetic agree."""

_KNOWN_NUMBA = (0, 68)
"""The newest Numba whose inner parts ``linking`` knows; a newer one compiles all functions in its own way."""
_VECTORS = (draws.bits_of_ranks, draws.quantiles)
"""Within all that calls them their loops would be no vectors: 6 % of an iteration of 512 ranks."""
_NO_WRAPPERS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Nobody calls them from Python or C; wrappers that unpack all their arrays were a tenth of the compilation."""


def cache_directory() -> Path:
    """Where machine code is kept: ``$PACEENV_CACHE_DIR`` or the user's cache, one folder a version of the sources."""
    digest = hashlib.sha256()
    here = Path(__file__)
    for path in (*(Path(str(module.__file__)) for module in _MODULES), here, here.with_name("linking.py")):
        digest.update(path.read_bytes())
    digest.update(f"{numba.__version__} {platform.python_version()}".encode())
    return base_directory() / digest.hexdigest()[:16]


def _options(function: Callable[..., Any]) -> dict[str, Any]:
    if function is measuring.total:  # may be re-associated
        return {**_OPTIONS, "fastmath": True}
    return {**_OPTIONS, "forceinline": function in _INLINED}


def _pipeline(function: Callable[..., Any]) -> dict[str, Any]:
    """How Numba compiles a function that only compiled ones call."""
    if numba.version_info.short > _KNOWN_NUMBA:
        return {}
    from paceenv.sim.engine.linking import LinkedCompiler, VectorCompiler

    return {"pipeline_class": VectorCompiler if function in _VECTORS else LinkedCompiler}


def _compile() -> tuple[Callable[..., None], ...]:
    for function in _REGISTERED:
        register_jitable(**_options(function), **_NO_WRAPPERS, **_pipeline(function))(function)
    programs = FunctionType(kernel.advance.__code__, vars(kernel))  # machine code is kept by a function's name
    programs.__name__ = programs.__qualname__ = "advance_programs"
    with numba_cache(cache_directory()) as writable:
        return tuple(numba.njit(nogil=True, cache=writable, **_options(f))(f) for f in (*_COMPILED, programs))


reset, advance, observe, advance_programs = _compile()


def is_ready(function: Callable[..., None]) -> bool:
    """Whether there is machine code of :data:`advance` or :data:`advance_programs`; else the next call compiles it."""
    if getattr(function, "overloads", True):  # a plain function where Numba is switched off
        return True
    place = function.stats.cache_path  # type: ignore[attr-defined]  # a folder for each checkout
    return place is not None and any(Path(place).glob(f"*.{function.__name__}-*.nbi"))
