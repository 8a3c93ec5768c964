"""The agent for the duration of a trainer's run: the common part of the callbacks."""

from __future__ import annotations

import os
from typing import Any

from paceenv.core.errors import InputError
from paceenv.live.options import make_options
from paceenv.policies.base import Policy


class Attachment:
    """Attaches the agent when training begins and detaches it when it ends; evaluations and checkpoints are marked.

    An agent that is attached already, as under ``-m paceenv.live``, is kept.

    Raises:
        InputError: an unknown option or a value out of range.
    """

    def __init__(
        self, policy: Policy | str | os.PathLike[str] | None = None, mode: str = "observe", **options: Any
    ) -> None:
        make_options({"mode": mode} | {name: options[name] for name in options if name != "on_metrics"})
        self._arguments = {"policy": policy, "mode": mode} | options
        self._agent: Any = None
        self._ours = False

    def begin(self, optimizer: Any) -> None:
        """Training begins; an iteration ends with a step of ``optimizer``, or of the first one that steps for None."""
        from paceenv.live.agent import attach, attached

        self._ours = self._ours or attached() is None
        try:
            self._agent = attach(optimizer, **self._arguments)
        except InputError:  # the options are valid, so it is a trainer's own object that is no real optimizer
            self._agent = attach(**self._arguments)

    def mark(self, kind: str) -> None:
        """A checkpoint or an evaluation has just ended, so this iteration is irregular."""
        if self._agent is not None:
            with self._agent.mark(kind):
                pass

    def end(self) -> None:
        if self._ours:
            self._agent.detach()
        self._agent, self._ours = None, False
