"""How Numba compiles a function that only other compiled functions call: it is linked into them, and no more.

Numba optimises every function, with all that it calls, and translates it to machine code, though whoever calls it is
optimised with all of it once more. Of the engine's 180 functions four are called from Python; to leave the others at
their first form takes a third off the time of a first simulation on a machine.
"""

from __future__ import annotations

from typing import Any

from numba import _dynfunc  # type: ignore[attr-defined]
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering


class _Linked(CPUCodeLibrary):
    """Code that is neither optimised nor translated by itself."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _LinkedLowering(NativeLowering):
    """Lowers into a :class:`_Linked` library, and registers a function without an address for its callers."""

    _name = "linked_lowering"

    def run_pass(self, state: Any) -> bool:
        codegen, name = state.targetctx.codegen(), state.func_id.func_qualname
        state.library = _Linked(codegen, name)  # type: ignore[no-untyped-call]
        state.library.enable_object_caching()
        state.flags.no_compile = True
        super().run_pass(state)  # type: ignore[no-untyped-call]
        lowered = state["cr"]
        module = lowered.fndesc.lookup_module()
        function = _dynfunc.make_function(module, name, "", 0, lowered.env, (state.library,))
        state.targetctx.insert_user_function(function, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=function)
        return True


class LinkedCompiler(CompilerBase):
    """Numba's pipeline, for functions that are linked into others only."""

    def define_pipelines(self) -> list[Any]:
        """The one pipeline."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        replaced = [(_LinkedLowering if one is NativeLowering else one, why) for one, why in passes.passes]
        passes.passes = replaced
        passes.finalize()
        return [passes]
