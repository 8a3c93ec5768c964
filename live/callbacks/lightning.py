"""The agent in a Lightning ``Trainer``: ``Trainer(..., callbacks=[PaceCallback(mode="observe")])``.

Works with the packages ``lightning`` and ``pytorch_lightning``: the imported one, otherwise an installed one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from paceenv.live.callbacks.attachment import Attachment

if TYPE_CHECKING or ("pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules):
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback


class PaceCallback(Attachment, Callback):  # type: ignore[misc]
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        optimizers = trainer.optimizers  # with several, the first that steps
        self.begin(optimizers[0] if len(optimizers) == 1 else None)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.mark("evaluation")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.mark("checkpoint")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end()
