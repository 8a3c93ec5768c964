"""Scalars in the event file of the user's own TensorBoard ``SummaryWriter``.

The writer is searched among the objects of the process, once and then rarely, on the sinks' thread. Its queue is made
for several threads. A writer that was closed is left alone: a further scalar would open a new event file.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

from paceenv.live.record.snapshot import Snapshot, number
from paceenv.live.sinks.sink import scalars

MODULES = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
SEARCH_EVERY = 6
"""A search looks at every object of the process, so only one write in so many searches."""


class TensorboardWriter:
    """Finds the writer and adds scalars under ``paceenv/``, at the agent's number of iterations."""

    def __init__(self) -> None:
        self._writer: weakref.ref[Any] | None = None
        self._until_search = 0

    def begin(self) -> None:
        """Nothing to note."""

    def write(self, snapshot: Snapshot, final: bool) -> None:
        """Add the scalars. Raises ValueError while there is no open writer.

        Args:
            snapshot: of this rank.
            final: whether it is the last one.
        """
        writer = self._find()
        if writer is None:
            if final:
                return  # the script has closed it before the agent's end
            raise ValueError("no open SummaryWriter in this process")
        step = int(number(snapshot, "iterations") or 0)
        for name, value in scalars(snapshot).items():
            writer.add_scalar(f"paceenv/{name}", value, step)

    def _find(self) -> Any:
        known = self._writer() if self._writer is not None else None
        if known is not None and _is_open(known):
            return known
        self._writer = None
        if self._until_search > 0:
            self._until_search -= 1
            return None
        classes = [getattr(sys.modules[name], "SummaryWriter", None) for name in MODULES if name in sys.modules]
        for kind in classes:
            for found in gc.get_referrers(kind) if isinstance(kind, type) else ():
                if type(found) is kind and _is_open(found):
                    self._writer = weakref.ref(found)
                    return found
        self._until_search = SEARCH_EVERY if any(classes) else 0
        return None


def _is_open(writer: Any) -> bool:
    return getattr(writer, "file_writer", None) is not None
