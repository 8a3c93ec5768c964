"""The only way by which the agent's code gets into the job's way: every entry is guarded here, by construction.

A source never registers a hook or replaces a function itself. It gives its functions to :class:`Hooks`, and PyTorch
gets guarded ones: an error in ours goes to ``fail`` and never into the training code, and once the agent is off, ours
are not called any more. ``tests/test_live_hooks.py`` checks that no other module does so, and makes each one raise.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean
from traceback import walk_stack
from types import ModuleType
from typing import Any

from paceenv.live.observe.log import Log

Function = Callable[..., Any]

CALL_S = 0.5e-6
"""What a call of one of ours takes before and after it can be measured, seconds."""
MEASURED_EVERY = 16
"""The agent's own cost is measured from one of so many visits of the housekeeping thread to the next after which an
iteration was watched."""
KEPT_COSTS = 4096


class Hooks:
    """Guarded functions in PyTorch, until :meth:`restore`.

    Args:
        fail: called with an error in one of our functions; raises only what belongs to the script itself.
    """

    def __init__(self, fail: Callable[[BaseException], None], clock: Callable[[], float] = time.thread_time) -> None:
        self._fail = fail
        self.active = False
        """Whether the agent is at work."""
        self.watching = True
        """Whether the iteration under way is watched; what only watches does nothing in any other."""
        self._clock, self._reading_s = clock, 0.0
        self._measures, self._calls, self._spent_s, self._visits, self._every = False, 0, 0.0, 0, 1
        self._since: tuple[int, float] | None = None
        """While the cost is measured: iterations watched and seconds waited for the device before."""
        self._costs_s = deque[float](maxlen=KEPT_COSTS)
        self._replaced: list[tuple[Any, str, Any, Function]] = []
        self._resting: dict[Function, tuple[Any, str, Any]] = {}
        """Of those, what is taken out in iterations that are not watched: passing calls on costs more than that."""
        self._handles: list[Any] = []
        self._sleeping: list[tuple[Function, Function, Any]] = []
        """Registered in watched iterations only: how, what, and the handle."""

    def watch(self, watching: bool) -> None:
        """Watch the iterations from now on, or none of them.

        What other code has replaced meanwhile is left alone.
        """
        self.watching = watching and self.active
        for ours, (owner, name, attribute) in list(self._resting.items()):
            now, then = (attribute, ours) if self.watching else (ours, attribute)
            if vars(owner).get(name) is now:
                setattr(owner, name, then)
        for place, (register, entry, handle) in enumerate(self._sleeping):
            if handle is not None:
                handle.remove()
            self._sleeping[place] = register, entry, register(entry) if self.watching else None

    def guarded(self, function: Function, *, always: bool = True, traced: bool = False) -> Function:
        """``function`` as a callback: it returns nothing, raises nothing, and does nothing while inactive.

        Args:
            always: whether it is called in iterations that are not watched, too.
            traced: whether ``torch.compile`` may trace the place: our code never becomes part of a graph.
        """
        is_compiling = _is_compiling(traced)
        if traced:
            import torch

            # PyTorch's own mark: ``torch.compiler.disable`` would load the compiler, 2 s of CPU in a job without one
            disable = getattr(torch, "_disable_dynamo", torch.compiler.disable)
            disabled: Function = disable(self.guarded(function, always=always))

        def entry(*args: Any) -> None:
            if traced and is_compiling():
                disabled(*args)
            elif self.active and (always or self.watching):
                try:
                    if self._measures:
                        self._measured(function, *args)
                    else:
                        function(*args)
                except Exception as error:
                    self.report(error)

        return entry

    def report(self, error: BaseException) -> None:
        """Hand an error to ``fail``; if that fails, too, nothing of ours runs any more."""
        try:
            self._fail(error)
        except BaseException as raised:
            if raised is error:  # it came from a signal handler of the script
                raise
            self.active = False

    @property
    def cost_s(self) -> float | None:
        """What our functions cost in an iteration, while as many are watched as now: CPU seconds of their threads.

        A delay's sleep takes none, and what waited for a GPU that took no more work is not ours.
        """
        costs_s = tuple(self._costs_s)
        return fmean(costs_s) if costs_s else None

    def visit(self, log: Log, watched: int) -> None:
        """The housekeeping thread comes by, ``watched`` iterations into the job; now and then it measures the cost."""
        self._visits += 1
        stamps = log.stamps
        if self._every != log.every:
            self._costs_s.clear()
            self._every, self._visits, self._since = log.every, 2, None
        if self._since is None and self._visits % MEASURED_EVERY == 2:
            self._calls, self._spent_s, self._since = 0, 0.0, (watched, stamps.waited_s)
            self._reading_s = min(-self._clock() + self._clock() for _ in range(9))
            self._measures = stamps.measures = True
        elif self._since is not None and watched > self._since[0]:
            self._measures = stamps.measures = False
            (before, waited_s), self._since = self._since, None
            spent_s = max(self._spent_s - (stamps.waited_s - waited_s), 0.0)
            spent_s += (CALL_S - self._reading_s) * self._calls
            self._costs_s.append(spent_s / (watched - before) / log.every)

    def _measured(self, function: Function, *args: Any) -> Any:
        start_s = self._clock()
        try:
            return function(*args)
        finally:
            self._spent_s += self._clock() - start_s
            self._calls += 1

    def register(
        self, register: Function, function: Function, *, traced: bool = False, kept: bool = True, always: bool = True
    ) -> None:
        """Register ``function``, guarded, by calling ``register``; :meth:`restore` removes the handle."""
        entry = self.guarded(function, always=always, traced=traced)
        handle = register(entry)
        if kept and not always:
            self._sleeping.append((register, entry, handle))
        elif kept:
            self._handles.append(handle)

    def around(
        self,
        owner: Any,
        name: str,
        before: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        after: Callable[[Any, Any], None],
        failed: Callable[[Any], None] = lambda token: None,
        *,
        traced: bool = False,
        always: bool = True,
    ) -> None:
        """Replace an attribute by a function that calls ours before and after the original.

        Args:
            owner: a class or a module; nothing happens unless it has the attribute itself.
            before: gets positional and keyword arguments; returns a token, or None to leave this call alone.
            always: whether ours are called in iterations that are not watched, too.
            traced: whether ``torch.compile`` may trace the function: then ours do nothing in a graph.
        """
        attribute = vars(owner).get(name)  # not getattr: a class of C++ would return something else than the method
        if attribute is None:
            return
        original, report, is_compiling = getattr(owner, name), self.report, _is_compiling(traced)
        rests = not (always or traced)  # a graph that was traced asks for the same function again

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not (self.active and (always or self.watching)) or (traced and is_compiling()):
                if rests:
                    self._resting[replacement] = owner, name, attribute
                return original(*args, **kwargs)
            try:
                token = self._measured(before, args, kwargs) if self._measures else before(args, kwargs)
            except Exception as error:
                report(error)
                token = None
            if token is None:
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                try:
                    failed(token)
                except Exception as error:
                    report(error)
                raise
            try:
                if self._measures:
                    self._measured(after, token, result)
                else:
                    after(token, result)
            except Exception as error:
                report(error)
            return result

        replacement = self._replace(owner, name, attribute, original, watched)

    def instead(
        self,
        owner: Any,
        name: str,
        divert: Callable[[Function, tuple[Any, ...], dict[str, Any]], Any],
        *,
        traced: bool = False,
    ) -> None:
        """Replace an attribute by a function that asks ours whether the original is to be called now.

        Ours is asked while inactive, too: what it has put off must go first. The rest is as in :meth:`around`.

        Args:
            divert: gets the original, positional and keyword arguments; returns what the caller gets, or None to call
                the original now.
        """
        attribute = vars(owner).get(name)
        if attribute is None:
            return
        original, report, is_compiling = getattr(owner, name), self.report, _is_compiling(traced)

        def diverted(*args: Any, **kwargs: Any) -> Any:
            if traced and is_compiling():
                return original(*args, **kwargs)
            try:
                result = divert(original, args, kwargs)
            except Exception as error:
                report(error)
                result = None
            return original(*args, **kwargs) if result is None else result

        self._replace(owner, name, attribute, original, diverted)

    def _replace(self, owner: Any, name: str, attribute: Any, original: Function, ours: Function) -> Function:
        replacement = functools.wraps(original)(ours)
        if isinstance(owner, ModuleType):  # pickled by this name, so that another process finds its own plain function
            replacement.__module__, replacement.__qualname__ = owner.__name__, name
        setattr(owner, name, replacement)
        self._replaced.append((owner, name, attribute, replacement))
        return replacement

    def restore(self) -> None:
        """Leave PyTorch as it was. If other code has wrapped ours meanwhile, ours stays underneath and does nothing."""
        self.active = False
        while self._replaced:
            owner, name, attribute, ours = self._replaced.pop()
            if vars(owner).get(name) is ours:
                setattr(owner, name, attribute)
        self.watch(False)
        self._sleeping.clear()
        while self._handles and not _in_a_step():  # there PyTorch is walking through its hooks
            self._handles.pop().remove()


def _is_compiling(traced: bool) -> Callable[[], bool]:
    """Whether ``torch.compile`` runs what it traces; only asked at places that may be ``traced``."""
    if not traced:
        return bool
    import torch

    return torch.compiler.is_compiling


def _in_a_step() -> bool:
    """Whether an optimizer's step is on the stack of this thread."""
    frames = walk_stack(sys._getframe())
    return any(frame.f_globals.get("__name__") == "torch.optim.optimizer" for frame, _ in frames)
