"""The agent for the duration of a trainer's run: what the callbacks for all trainers have in common."""

from __future__ import annotations

import os
from typing import Any

from paceenv.core.errors import InputError
from paceenv.live.options import make_options
from paceenv.policies.base import Policy


class Attachment:
    """Attaches at the beginning of training and detaches at its end; an agent that was there before stays.

    Parameters are those of :func:`live.attach`. Raises InputError for options that are none, when it is made.
    """

    def __init__(self, policy: Policy | str | os.PathLike[str] | None, mode: str, options: dict[str, Any]) -> None:
        make_options({"mode": mode} | options)
        self._arguments = {"policy": policy, "mode": mode} | options
        self._ours = False

    def begin(self, optimizer: Any) -> None:
        """Training begins; its iterations end with a step of ``optimizer``, or, if that is none, of the first."""
        from paceenv.live.agent import attach, attached

        self._ours = self._ours or attached() is None
        try:
            attach(optimizer, **self._arguments)
        except InputError:  # not the options, so it is something of the trainer's that only looks like an optimizer
            attach(**self._arguments)

    def mark(self, kind: str) -> None:
        """A checkpoint or an evaluation has just ended, so this iteration is unlike the others."""
        from paceenv.live.agent import attached

        agent = attached()
        if agent is not None:
            with agent.mark(kind):
                pass

    def end(self) -> None:
        """Training has ended."""
        from paceenv.live.agent import attached

        agent = attached()
        if agent is not None and self._ours:
            agent.detach()
        self._ours = False
