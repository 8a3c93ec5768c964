"""Times how long the compute stream stands still for other streams, as it does for the collectives of FSDP.

Those run beside the compute; what they cost the step is only the time in which the compute has to wait for them.
"""

from __future__ import annotations

from typing import Any

from paceenv.live.observe.batch import STANDSTILL
from paceenv.live.observe.hooks import Hooks
from paceenv.live.observe.log import Log


class StreamWaits:
    """Wraps a CUDA stream's wait for an event; ``log`` gets one row per wait of the stream that is the current one."""

    def __init__(self, log: Log, hooks: Hooks) -> None:
        self._log, self._hooks = log, hooks

    def install(self) -> None:
        import torch

        around = self._hooks.around
        around(torch.cuda.Stream, "wait_event", self._waits, self._waited, self._log.release, always=False)

    def _waits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        log = self._log
        if not log.on_device:
            return None
        stamp = log.stamps.record()
        if stamp is None or stamp.stream != args[0].cuda_stream:  # a stream of the collectives waits for the compute
            log.release(stamp)
            return None
        return stamp

    def _waited(self, stamp: Any, result: Any) -> None:
        self._log.add(self._log.kind(STANDSTILL, -1, 0), stamp)
