"""The agent's face to a training script: ``attach`` makes it, ``detach`` removes it, one at a time in a process."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from paceenv.core.errors import out_of_range
from paceenv.live.decide.live_policy import needed_policy
from paceenv.live.log_once import Messages, described
from paceenv.live.loop import Loop
from paceenv.live.options import IN_A_GROUP_ONLY, LAUNCHER_SETTINGS, make_options
from paceenv.live.reporting import Output
from paceenv.policies.base import Policy


class Agent:
    """The agent of this rank. Use :func:`live.attach`.

    Args:
        loop: what observes and decides.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop, self._output = loop, Output(loop)
        self._process, self._exit = os.getpid(), (SystemExit(), -1)
        atexit.register(self._at_exit)
        if multiprocessing.parent_process() is not None:  # such a process may end without running those
            multiprocessing.util.Finalize(None, self._at_exit, exitpriority=100)
        _alive.add(self)
        loop.install()
        if loop.hooks.active:
            loop.hooks.around(sys, "exit", self._exits, lambda token, result: None)

    @property
    def state(self) -> str:
        """The mode in force: the requested one, or the one it was downgraded to."""
        return str(self._quietly(lambda: self._loop.state, "off"))

    @property
    def reason(self) -> str:
        """Why :attr:`state` is not the requested mode; empty if it is."""
        return str(self._quietly(lambda: self._loop.reason, "an error of its own"))

    def summary(self) -> dict[str, Any]:
        """This rank's numbers as plain data, times in seconds (fields: ``paceenv.live.record.snapshot``).

        Call it on the training thread. It reads no file.
        """
        self._quietly(lambda: self._loop.catch_up())
        return dict(self._quietly(lambda: self._output.snapshot(), {}))

    @contextlib.contextmanager
    def mark(self, kind: str = "checkpoint") -> Iterator[None]:
        """``with agent.mark("evaluation"): ...``: no measurement inside, and no delay inside or shortly after.

        Args:
            kind: what goes on inside, such as ``evaluation`` or ``checkpoint``.
        """
        self._quietly(lambda: self._loop.log.mark(str(kind), 1))
        try:
            yield
        finally:
            self._quietly(lambda: self._loop.log.mark(str(kind), -1))

    def tick(self) -> None:
        """The end of an iteration. Only needed in loops without a ``torch.optim`` optimizer."""
        self._quietly(lambda: self._loop.tick())

    def detach(self) -> None:
        """Remove the agent: PyTorch is as before, files are complete, rank 0 prints the summary. Idempotent."""
        atexit.unregister(self._at_exit)
        _alive.discard(self)
        try:
            self._quietly(lambda: self._loop.finish())
        finally:
            self._quietly(lambda: self._output.close())

    def _quietly(self, function: Callable[[], Any], otherwise: Any = None) -> Any:
        """What ``function`` returns; an error in it is the agent's and not the job's."""
        try:
            return function()
        except Exception as error:
            self._loop.hooks.report(error)
            return otherwise

    def _exits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The script calls ``sys.exit``, of which the interpreter keeps nothing; it may catch that, and go on."""
        error, frame = SystemExit(*args), sys._getframe()
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("paceenv.live."):
            frame = frame.f_back
        error.__context__ = sys.exception()
        place = TracebackType(None, frame, frame.f_lasti, frame.f_lineno)
        self._exit = error.with_traceback(place), self._loop.log.count

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            with contextlib.suppress(Exception):
                exit_, ticks = self._exit
                error = _uncaught(exit_ if self._loop.log.count == ticks else None)
                self._output.end_with(error)
                self.detach()


class Absent(Agent):
    """In place of an agent that could not be made: it does nothing, and its reason says why.

    Args:
        error: why there is no agent.
    """

    def __init__(self, error: Exception) -> None:
        self._why = f"could not be attached: {described(error)}"
        Messages().log_once(f"{self._why}; the job goes on without it")

    @property
    def reason(self) -> str:
        return self._why

    def _quietly(self, function: Callable[[], Any], otherwise: Any = None) -> Any:
        return otherwise


def _uncaught(exit_: SystemExit | None) -> BaseException | None:
    """The exception that ends this process; None where it ends as it should, or nobody can know (``os._exit``)."""
    error = sys.exception() or getattr(sys, "last_value", None) or exit_  # in flight in a child of multiprocessing
    if isinstance(error, SystemExit):
        error = (error.__context__ or error) if error.code else None
    return None if hasattr(sys, "ps1") else error  # at a prompt, the last one may be long past


_alive: weakref.WeakSet[Agent] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child (a data loader's worker): the agent belongs to the parent."""
    for agent in list(_alive):
        with contextlib.suppress(Exception):
            agent._loop.deferral.forget()
            agent._loop.detach("in a forked child")
    _alive.clear()


os.register_at_fork(after_in_child=_after_fork)


def attach(
    model_or_optimizer: Any = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    mode: str = "observe",
    **options: Any,
) -> Agent:
    """Attach the agent to this rank's training job; call it on every rank, before the training loop.

    Under ``-m paceenv.live`` the settings on its command line replace all of these. An invalid policy is no error: the
    agent observes and reports the reason.

    Args:
        model_or_optimizer: the optimizer whose step ends an iteration; with a model or None, the first that steps.
        policy: a policy file; a name (passive, paper, adaptive, static:slack=0.02/0.4, static:my-cluster.yaml, learned,
            learned:preference=0.3); or a policy object. Without a policy the agent can only observe and probe.
        mode: off, observe, probe, shadow, canary (a switchback test: every rank alternates paired blocks with and
            without pacing) or active.
        options: fields of :class:`paceenv.live.options.Options`; the table is in ``docs/reference/live-options.md``.

    Returns:
        The agent; the attached one, if there is one already.

    Raises:
        InputError: an unknown option or a value out of range, before anything is touched.
    """
    import torch

    inner = getattr(model_or_optimizer, "optimizer", model_or_optimizer)  # Lightning and Accelerate wrap it
    optimizer = inner if isinstance(inner, torch.optim.Optimizer) else None
    if not (optimizer is not None or model_or_optimizer is None or isinstance(model_or_optimizer, torch.nn.Module)):
        kind = type(model_or_optimizer).__name__
        raise out_of_range("model_or_optimizer", kind, "a torch.nn.Module, a torch.optim.Optimizer or None", "live")
    chosen = make_options({"mode": mode} | options)
    agent = attached()
    if agent is not None:
        agent._loop.messages.log_once("is attached already; the second call of attach changes nothing")
        return agent
    settings, in_a_group_only = dict(LAUNCHER_SETTINGS), False
    if settings:
        policy, in_a_group_only = settings.pop("policy"), settings.pop(IN_A_GROUP_ONLY, False)
        chosen = make_options(settings)
    try:
        needed = needed_policy(chosen.mode, policy, chosen.candidates)
        return Agent(Loop(chosen, needed, optimizer=optimizer, in_a_group_only=in_a_group_only))
    except Exception as error:
        return Absent(error)


def attached() -> Agent | None:
    """The agent of this process, if there is one."""
    return next(iter(_alive), None)
