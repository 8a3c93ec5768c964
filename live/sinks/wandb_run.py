"""Scalars in the user's own Weights & Biases run.

Every ``run.log`` of the script is a step of its charts. Ours must not be one. So the numbers go along with the
script's next row (``commit=False``), and have an axis of their own, ``paceenv/iteration``.
"""

from __future__ import annotations

import sys
from typing import Any

from paceenv.live.record.snapshot import Snapshot, number
from paceenv.live.sinks.sink import scalars

AXIS = "paceenv/iteration"


class WandbRun:
    """Adds scalars to ``wandb.run``, whichever that is at the moment; never imports wandb, never starts a run."""

    def __init__(self) -> None:
        self._defined = ""

    def begin(self) -> None:
        """Nothing to note: the run may begin later, and is the same on every thread."""

    def write(self, snapshot: Snapshot, final: bool) -> None:
        """Add the scalars. Raises ValueError while there is no run.

        Args:
            snapshot: of this rank.
            final: whether it is the last one.
        """
        run: Any = getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            if final:
                return  # the script has finished it before the agent's end
            raise ValueError("no active run (wandb.run)")
        if self._defined != run.id:
            run.define_metric(AXIS, hidden=True)
            run.define_metric("paceenv/*", step_metric=AXIS)
            self._defined = run.id
        values = {f"paceenv/{name}": value for name, value in scalars(snapshot).items()}
        run.log(values | {AXIS: int(number(snapshot, "iterations") or 0)}, commit=False)
