"""The agent in a Hugging Face ``Trainer``: ``Trainer(..., callbacks=[PaceCallback(mode="observe")])``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from paceenv.live.callbacks.attachment import Attachment


class PaceCallback(Attachment, TrainerCallback):  # type: ignore[misc]
    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.begin(optimizer)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.mark("evaluation")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.mark("checkpoint")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end()
