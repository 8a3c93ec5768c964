"""Running a sweep's trials on Ray Tune; the only file that imports Ray.

Tune starts workers, hands them trials and starts those of a lost node again. It does not remember anything: the sweep
decides which trials there are, and the ledger records how they ended. Tune's own files are pickles and are deleted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceenv.core.errors import InputError
from paceenv.ui import output

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new output always prints a table of its own
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # no announcement of future behaviour
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "3600")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of Ray and its imports
    import ray
    from ray import tune
    from ray.tune.experiment import Trial as RayTrial
    from ray.tune.search import Searcher

import paceenv
from paceenv.trainers.sweep.searches import Trial
from paceenv.trainers.sweep.sweep_run import Sweep
from paceenv.trainers.sweep.trial import Row, Task, run_trial

RESTARTS = 5
"""How often a trial runs again after its worker or node was lost; an error of its own is its result.

As new trials of Tune's, whose own restarts (``max_failures``) leave out those that were just given a lost worker.
"""
LOOPBACK, KNOCK_S = "127.0.0.1", 10.0
UNKNOWN_CPUS = 16
"""Requested from a cluster without CPUs, which grows on request."""
STORAGE = ".tune"


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[int]:
    """A Ray cluster of this process's own, on the loopback interface, or an existing one; yields its CPUs.

    ``address`` is "auto", "HOST:PORT", or None for a cluster of its own, which ends with this process, however it ends.
    Code travels to an existing cluster. Sockets need short paths, hence ``/tmp``. Raises InputError where there is no
    cluster.
    """
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    own = {"_node_ip_address": LOOPBACK, "dashboard_host": LOOPBACK, "num_cpus": len(os.sched_getaffinity(0))}
    package = str(Path(paceenv.__file__).parent)
    code = {"runtime_env": {"py_modules": [package], "excludes": ["__pycache__"]}}
    if address not in {None, "auto"}:
        _knock(str(address))
    with tempfile.TemporaryDirectory(prefix="paceenv-", dir="/tmp", ignore_cleanup_errors=True) as logs:
        try:
            if address is None:
                ray.init(address="local", _temp_dir=logs, **own, **quiet)
            else:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **code)
        except (ConnectionError, ValueError, RuntimeError) as error:
            said = str(error).splitlines()[0]
            raise InputError(f"--address {address}: {said}; allowed: auto, or HOST:PORT of a running cluster") from None
        try:
            yield int(ray.cluster_resources().get("CPU", 0)) or UNKNOWN_CPUS
        finally:
            ray.shutdown()


def _knock(address: str) -> None:
    """Fail at once where nothing listens; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.removeprefix("[").removesuffix("]"), int(port)), timeout=KNOCK_S).close()
    except (OSError, ValueError, OverflowError) as error:
        said = f"{error}; allowed: auto, or HOST:PORT of a running cluster"
        raise InputError(f"--address {address}: {said}") from None


def run_on_ray(sweep: Sweep, cpus: int, on_row: Callable[[Row], None] = lambda row: None) -> None:
    """Run what is left of a sweep on the cluster that is :func:`connected`.

    Raises:
        InputError: where a trial needs more CPUs than there are, or the ledger cannot be written.
    """
    if sweep.is_over():
        return
    per_trial = sweep.config.cpus_per_trial
    if per_trial > cpus:
        raise InputError(f"cpus_per_trial = {per_trial}; allowed: at most {cpus}, which the Ray cluster has")
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(max(2, cpus // per_trial))
    storage = sweep.ledger.folder / STORAGE
    recorder = _Recorder(sweep, on_row)
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(_RayTrial, task=sweep.task, threads=per_trial), {"cpu": per_trial}),
        tune_config=tune.TuneConfig(search_alg=_Dealer(sweep), num_samples=-1, reuse_actors=True),
        run_config=tune.RunConfig(
            name=sweep.config.name,
            storage_path=str(storage.absolute()),
            verbose=0,
            callbacks=[recorder],
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # we print one line for a lost worker, Tune prints pages
    try:
        tuner.fit()
    except (tune.TuneError, OSError):
        if recorder.error is None:
            raise
    finally:
        shutil.rmtree(storage, ignore_errors=True)
    if recorder.error is not None:
        raise recorder.error


class _RayTrial(tune.Trainable):  # type: ignore[misc]
    """Runs one trial after the other in a worker process, which keeps loaded and compiled code."""

    def setup(self, config: dict[str, Any], task: Task, threads: int) -> None:
        self._task, self._threads = task, threads
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._trial = Trial(new_config["number"], json.loads(new_config["work"]))
        return True

    def step(self) -> dict[str, Any]:
        # as text, or Tune would flatten it
        return {"row": json.dumps(run_trial(self._task, self._trial, self._threads)), "done": True}


class _NotStored:
    """Tune pickles its arguments to resume later; this pickles as empty, as the ledger has everything."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _Dealer(_NotStored, Searcher):  # type: ignore[misc]
    """Hands the sweep's trials to Tune."""

    def __init__(self, sweep: Sweep) -> None:
        super().__init__()
        self._sweep = sweep

    def suggest(self, trial_id: str) -> Any:
        trial = self._sweep.next()
        if trial is not None:
            return {"number": trial.number, "work": json.dumps(trial.work)}
        return Searcher.FINISHED if self._sweep.is_over() else None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing: the recorder gets the same event with more detail."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger has everything."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: nothing is saved."""


class _Recorder(_NotStored, tune.Callback):  # type: ignore[misc]
    """Puts every trial that ends on record; ``error`` is why that was not possible."""

    def __init__(self, sweep: Sweep, on_row: Callable[[Row], None]) -> None:
        self._sweep, self._on_row, self._lost = sweep, on_row, Counter[int]()
        self.error: Exception | None = None

    def on_trial_complete(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        self._record(json.loads(trial.last_result["row"]))

    def on_trial_error(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        """Only for trials that lost their worker or never had one; an exception of the trial itself is a result."""
        if self.error is not None:  # Tune takes a ledger that cannot be written for an error of the trial
            raise self.error
        number, why = trial.config["number"], _last_line(trial.error_file)
        self._lost[number] += 1
        if self._lost[number] <= RESTARTS:
            output.say(f"trial {number} lost its worker and begins again{why}")
            self._sweep.give_back(number)
            return
        row = {"trial": number, "work": json.loads(trial.config["work"]), "seeds": list(self._sweep.task.seeds())}
        said = f"lost its worker {self._lost[number]} times{why}"
        self._record(row | {"status": "failed", "error": said, "ran": {}})

    def _record(self, row: Row) -> None:
        try:
            self._sweep.record(row)
            self._on_row(row)
        except Exception as error:
            self.error = error
            raise


def _last_line(path: str | None) -> str:
    """What Tune wrote last about a lost trial, after a colon; empty where it wrote nothing."""
    try:
        lines = Path(path).read_text().split("\n") if path else []
    except OSError:
        lines = []
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {said[:300]}" if said else ""
