"""The agent as a training script holds it: made by ``attach``, taken off by ``detach``, one at a time in a process."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from contextlib import AbstractContextManager
from typing import Any

from paceenv.core.errors import out_of_range
from paceenv.live.decide.live_policy import find_policy
from paceenv.live.loop import Loop
from paceenv.live.options import LAUNCHER_SETTINGS, make_options
from paceenv.live.reporting import Output
from paceenv.policies.base import Policy


class Agent:
    """The agent of this rank. Use :func:`live.attach`."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._output = loop, Output(loop)
        self._process = os.getpid()
        atexit.register(self._at_exit)
        _alive.add(self)
        loop.install()

    @property
    def state(self) -> str:
        """The mode in force: the one asked for, or what became of it."""
        return self._loop.state

    @property
    def reason(self) -> str:
        """Why :attr:`state` is not the mode that was asked for; empty if it is."""
        return self._loop.reason

    def summary(self, compare: bool = False) -> dict[str, Any]:
        """What this rank knows now, as a dictionary of plain data (fields: ``paceenv.live.record.snapshot``), times in
        seconds.

        To be called on the training thread. With ``compare`` it says who is early and late from the status files of all
        ranks, where there is a folder: it reads them all, and waits for the file system.
        """
        try:
            self._loop.catch_up()
        except Exception as error:
            self._loop.fail(error)
        return self._output.compared() if compare else self._output.snapshot()

    def mark(self, kind: str = "checkpoint") -> AbstractContextManager[None]:
        """``with agent.mark("evaluation"): ...``: nothing in it is measured, and nothing is delayed in or after it."""
        return self._loop.mark(kind)

    def tick(self) -> None:
        """The end of an iteration, for loops without a ``torch.optim`` optimizer; with one, it is called by itself."""
        self._loop.tick()

    def detach(self) -> None:
        """Take the agent off: PyTorch is as before, files are complete, rank 0 shows the summary. Idempotent."""
        atexit.unregister(self._at_exit)
        _alive.discard(self)
        try:
            self._loop.finish()
        finally:
            self._output.close()

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            with contextlib.suppress(Exception):
                self.detach()

    def _forget(self) -> None:
        """In a forked child (a data loader's worker): the agent belongs to the parent."""
        self._loop.detach("in a forked child")


_alive: weakref.WeakSet[Agent] = weakref.WeakSet()


def _after_fork() -> None:
    for agent in list(_alive):
        with contextlib.suppress(Exception):
            agent._forget()
    _alive.clear()


os.register_at_fork(after_in_child=_after_fork)


def attach(
    model_or_optimizer: Any = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    mode: str = "observe",
    **options: Any,
) -> Agent:
    """Attach the agent to this rank's training job; call it on every rank, before the training loop.

    Parameters
    ----------
    model_or_optimizer : the optimizer whose step ends an iteration; with a model, or None, it is the first that steps
    policy : a policy file, a name (passive, paper, adaptive, static:mechanism=slack,threshold=0.02,window=0.4, learned,
        learned:preference=0.3), or an object; without one the agent can only observe and probe
    mode : off, observe, probe, shadow, canary, active
    options : see :class:`paceenv.live.options.Options`

    Returns the agent; the one that is there already, if there is one. Raises InputError for options that are none,
    before anything is touched. Whatever is wrong with the policy is a reason to observe and not an error. Under
    ``-m paceenv.live`` the settings on its command line take the place of these.
    """
    import torch

    inner = getattr(model_or_optimizer, "optimizer", model_or_optimizer)  # what Lightning and Accelerate wrap
    optimizer = inner if isinstance(inner, torch.optim.Optimizer) else None
    if not (optimizer is not None or model_or_optimizer is None or isinstance(model_or_optimizer, torch.nn.Module)):
        kind = type(model_or_optimizer).__name__
        raise out_of_range("model_or_optimizer", kind, "a torch.nn.Module, a torch.optim.Optimizer or None", "live")
    chosen = make_options({"mode": mode} | options)
    agent = attached()
    if agent is not None:
        agent._loop.messages.log_once("is attached already; the second call of attach changes nothing")
        return agent
    settings = dict(LAUNCHER_SETTINGS)
    if settings:
        policy = settings.pop("policy")
        chosen = make_options(settings)
    return Agent(Loop(chosen, find_policy(policy), optimizer=optimizer))


def attached() -> Agent | None:
    """The agent of this process, if there is one."""
    return next(iter(_alive), None)
