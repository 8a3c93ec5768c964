"""The agent in a Hugging Face ``Trainer``: ``Trainer(..., callbacks=[PaceCallback(mode="observe")])``."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from paceenv.live.callbacks.attachment import Attachment
from paceenv.policies.base import Policy


class PaceCallback(TrainerCallback):  # type: ignore[misc]
    """Attaches the agent when training begins and detaches it when it ends; evaluations and saves are marked.

    An agent that is attached already, as under ``-m paceenv.live``, is kept.

    Raises:
        InputError: an unknown option or a value out of range.
    """

    def __init__(
        self, policy: Policy | str | os.PathLike[str] | None = None, mode: str = "observe", **options: Any
    ) -> None:
        self._attachment = Attachment(policy, mode, options)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self._attachment.begin(optimizer)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attachment.mark("evaluation")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attachment.mark("checkpoint")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attachment.end()
