"""Scalars in the user's own MLflow run.

``mlflow.active_run()`` belongs to a thread. So the run is noted on the training thread, and written to through a
client with its id, from the sinks' thread.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from paceenv.live.record.snapshot import Snapshot, number
from paceenv.live.sinks.sink import scalars


class MlflowRun:
    """Adds scalars to the run that is active on the training thread at the first tick; never imports mlflow."""

    def __init__(self) -> None:
        self._run_id, self._uri = "", ""
        self._client: Any = None

    def begin(self) -> None:
        """Note the active run; ``MLFLOW_RUN_ID`` where there is none."""
        mlflow: Any = sys.modules.get("mlflow")
        if mlflow is None:
            return
        run = mlflow.active_run()
        self._run_id = run.info.run_id if run is not None else os.environ.get("MLFLOW_RUN_ID", "")
        self._uri = mlflow.get_tracking_uri()

    def write(self, snapshot: Snapshot, final: bool) -> None:
        """Add the scalars in one request. Raises ValueError if there was no active run.

        Args:
            snapshot: of this rank.
            final: whether it is the last one.
        """
        mlflow: Any = sys.modules.get("mlflow")
        if mlflow is None or not self._run_id:
            raise ValueError("no active run on the training thread at the first step")
        if self._client is None:
            self._client = mlflow.MlflowClient(tracking_uri=self._uri)
        step, time_ms = int(number(snapshot, "iterations") or 0), int(1e3 * (number(snapshot, "unix_time_s") or 0.0))
        metric = mlflow.entities.Metric
        values = [metric(f"paceenv/{name}", value, time_ms, step) for name, value in scalars(snapshot).items()]
        self._client.log_batch(self._run_id, metrics=values)
