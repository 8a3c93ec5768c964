"""How Numba compiles a function that only other compiled functions call: it is linked into them, and no more.

Numba optimises every function, with all that it calls, and translates it to machine code, though whoever calls it is
optimised with all of it once more. Of the engine's 180 functions four are called from Python. To leave the others at
their first form takes a third off the time of a first simulation on a machine.
"""

from __future__ import annotations

from typing import Any

from numba import _dynfunc  # type: ignore[attr-defined]
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering


class _Optimised(CPUCodeLibrary):
    """Code that is not translated by itself."""

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _AsWritten(_Optimised):
    """Code that is not even optimised by itself."""

    def _optimize_final_module(self) -> None:
        pass


@register_pass(mutates_CFG=True, analysis_only=False)
class _AsWrittenLowering(NativeLowering):
    """Lowers into a library that is linked only, and registers a function without an address for its callers."""

    _name = "as_written_lowering"
    _library: type[_Optimised] = _AsWritten

    def run_pass(self, state: Any) -> bool:
        codegen, name = state.targetctx.codegen(), state.func_id.func_qualname
        state.library = self._library(codegen, name)
        state.library.enable_object_caching()
        state.flags.no_compile = True
        super().run_pass(state)  # type: ignore[no-untyped-call]
        lowered = state["cr"]
        module = lowered.fndesc.lookup_module()
        function = _dynfunc.make_function(module, name, "", 0, lowered.env, (state.library,))
        state.targetctx.insert_user_function(function, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=function)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _OptimisedLowering(_AsWrittenLowering):
    _name, _library = "optimised_lowering", _Optimised


class LinkedCompiler(CompilerBase):
    """Numba's pipeline, for functions that are linked into others only."""

    lowering: type[NativeLowering] = _AsWrittenLowering

    def define_pipelines(self) -> list[Any]:
        """The one pipeline."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [(self.lowering if one is NativeLowering else one, why) for one, why in passes.passes]
        passes.finalize()
        return [passes]


class VectorCompiler(LinkedCompiler):
    """The same, for loops over ranks: optimised by themselves they stay vectors whatever is around them."""

    lowering = _OptimisedLowering
