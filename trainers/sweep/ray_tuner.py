"""The search is Ray Tune's: a ``tune.Tuner`` of a sweep's config, begun or restored, on a Ray cluster."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import random
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceenv.core.errors import InputError
from paceenv.ui import output

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to Ray's makers
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new output always prints a table of its own
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # no announcement of future behaviour
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # CSV would hold the same as our JSON
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")  # Tune's would end as if the sweep were over
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of Ray and its imports
    import optuna
    import ray
    from ray import tune
    from ray.tune.experiment import Trial
    from ray.tune.logger import LoggerCallback, TBXLoggerCallback
    from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining, TrialScheduler
    from ray.tune.search import BasicVariantGenerator
    from ray.tune.search.optuna import OptunaSearch
    from ray.tune.utils.util import SafeFallbackEncoder

import paceenv
from paceenv.trainers.sweep.sweep_config import Static, SweepConfig, TrainingSweep
from paceenv.trainers.sweep.sweep_results import DECISIONS, MODES, TUNE, last_line
from paceenv.trainers.sweep.trainables import (
    StaticTask,
    StaticTrial,
    TrainingTask,
    TrainingTrial,
    mutations,
    static_space,
    training_space,
    within,
)

MAX_FAILURES = 2
"""How often a trial begins again, from its last checkpoint, after an error or a lost worker."""
LOOPBACK, KNOCK_S = "127.0.0.1", 10.0
TEMPORARY, STATE = "paceenv-ray-", "state"
"""Beginning of the name of a temporary folder, and where an experiment keeps Tune's last whole state."""


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """A Ray cluster of this process's own, on the loopback interface, or an existing one.

    ``address`` is "auto", "HOST:PORT", or None for a cluster of its own, which ends with this process, however it ends.
    Code travels to an existing cluster. Raises InputError where there is no cluster.
    """
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    own = {"_node_ip_address": LOOPBACK, "dashboard_host": LOOPBACK, "num_cpus": len(os.sched_getaffinity(0))}
    package = str(Path(paceenv.__file__).parent)
    code = {"runtime_env": {"py_modules": [package], "excludes": ["__pycache__"]}}
    if address not in {None, "auto"}:
        _knock(str(address))
    with _temporary_folder() as logs:
        try:
            with output.progress("start Ray" if address is None else "reach Ray"):
                if address is None:
                    ray.init(address="local", include_dashboard=False, _temp_dir=logs, **own, **quiet)
                else:
                    ray.init(address=address, **code, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            said = str(error).partition("\n")[0]
            if address is None:
                raise InputError(f"Ray does not start here: {said}") from None
            raise InputError(f"--address {address}: {said}; allowed: auto, or HOST:PORT of a running cluster") from None
        try:
            yield
        finally:
            with output.progress("leave Ray"):
                ray.shutdown()


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """For Ray's own files, in ``/tmp`` as sockets need short paths; removes those of processes that were killed."""
    for left in Path("/tmp").glob(f"{TEMPORARY}*"):
        pid = left.name.removeprefix(TEMPORARY).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and left.lstat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)
    prefix = f"{TEMPORARY}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder


def _knock(address: str) -> None:
    """Fail at once where nothing listens; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.removeprefix("[").removesuffix("]"), int(port)), timeout=KNOCK_S).close()
    except (OSError, ValueError, OverflowError) as error:
        said = f"{error}; allowed: auto, or HOST:PORT of a running cluster"
        raise InputError(f"--address {address}: {said}") from None


def tune_all(config: SweepConfig, task: StaticTask | TrainingTask, folder: Path) -> None:
    """Search to the end on the cluster that is :func:`connected`; Tune's experiment is ``folder/tune/all``.

    Raises:
        InputError: where Tune cannot go on with what is in the folder.
    """
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # a lost worker would be pages
    experiment = (folder / TUNE).absolute()
    trainable = StaticTrial if isinstance(task, StaticTask) else TrainingTrial
    runnable = tune.with_resources(tune.with_parameters(trainable, task=task), {"cpu": 1})
    kept = experiment / STATE
    if not kept.is_dir() and (old := kept.with_suffix(".old")).is_dir():  # killed between two renames
        old.rename(kept)
    tuner = _restored(experiment, runnable) if kept.is_dir() else _tuner(config, task, runnable, experiment)
    tuner.fit()


def _restored(experiment: Path, trainable: Any) -> tune.Tuner:
    """What Tune saved is pickles, which run code: only those of this user."""
    if (owner := experiment.stat().st_uid) != os.getuid():
        raise InputError(f"{experiment}: belongs to user {owner}; allowed: to go on with a sweep of your own")
    shutil.copytree(experiment / STATE, experiment, dirs_exist_ok=True)
    try:
        return tune.Tuner.restore(str(experiment), trainable, resume_unfinished=True, resume_errored=True)
    except Exception as error:
        raise InputError(f"{experiment}: Tune cannot read it: {error}; allowed: another folder") from None


def _tuner(config: SweepConfig, task: StaticTask | TrainingTask, trainable: Any, experiment: Path) -> tune.Tuner:
    search: Any = BasicVariantGenerator(random_state=config.seed)
    scheduler: TrialScheduler | None = None
    checkpoints: dict[str, Any] = {"checkpoint_at_end": False}
    decisions = 1 if isinstance(task, StaticTask) else task.train.total_timesteps
    callbacks = [Recorder(), Progress(f"sweep {config.name}", decisions)]
    if isinstance(task, StaticTask):
        space, num_samples = static_space(task.static), 1  # of the whole grid
        if task.static.optuna is not None:
            search, num_samples = _optuna(task.static, config.seed), task.static.optuna.num_samples
    else:
        assert config.training is not None  # as the task is one
        space, num_samples = training_space(config.training.hyperparameters), config.training.num_samples
        scheduler = _scheduler(config.training, task.train.total_timesteps, config.seed)
        checkpoints["checkpoint_frequency"] = 1  # all are kept: a restored population may go on from an old one
        callbacks.append(TBXLoggerCallback())
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(
            search_alg=search,
            scheduler=scheduler,
            num_samples=num_samples,
            reuse_actors=True,
            trial_dirname_creator=_number,
        ),
        run_config=tune.RunConfig(
            name=experiment.name,
            storage_path=str(experiment.parent),
            failure_config=tune.FailureConfig(max_failures=MAX_FAILURES),
            checkpoint_config=tune.CheckpointConfig(**checkpoints),
            callbacks=callbacks,
            verbose=0,
        ),
    )


def _number(trial: Trial) -> str:
    """A trial's folder: the same one if a sweep that was killed begins that trial again."""
    return f"{int(str(trial.experiment_tag).partition('_')[0]):05d}"


def _optuna(static: Static, seed: int) -> OptunaSearch:
    assert static.optuna is not None  # as the caller has checked
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    startup = static.optuna.n_startup_trials
    if static.optuna.sampler == "nsga2":
        sampler: Any = optuna.samplers.NSGAIISampler(population_size=max(startup, 2), seed=seed)
    else:
        sampler = optuna.samplers.TPESampler(n_startup_trials=startup, multivariate=True, seed=seed)
    return OptunaSearch(
        metric=list(static.objectives),
        mode=[MODES[objective] for objective in static.objectives],
        points_to_evaluate=[dict.fromkeys(static_space(static), -1.0)],  # all off: no winner is worse than that
        sampler=sampler,
    )


def _scheduler(training: TrainingSweep, decisions: int, seed: int) -> TrialScheduler | None:
    if training.asha is not None:
        return ASHAScheduler("decisions", "score", "max", max_t=decisions, **training.asha.model_dump())
    if training.pbt is None:
        return None
    random.seed(seed)  # which the scheduler draws from
    return PopulationBasedTraining(
        "decisions",
        "latest",  # the best score is also that of the parent, however badly a child does
        "max",
        hyperparam_mutations=mutations(training.hyperparameters),
        custom_explore_fn=functools.partial(within, ranges=training.hyperparameters),
        **training.pbt.model_dump(),
    )


class Recorder(LoggerCallback):  # type: ignore[misc]
    """Puts results and Tune's state on the disk at once and whole.

    Tune copies both there file by file, every ten seconds: a kill meanwhile leaves files cut short, or of two moments.
    """

    _seen = ""

    def log_trial_start(self, trial: Trial) -> None:
        Path(trial.path).mkdir(parents=True, exist_ok=True)
        if not trial.has_reported_at_least_once:  # of a trial that is not on Tune's record
            Path(trial.path, "result.json").unlink(missing_ok=True)

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        with Path(trial.path, "result.json").open("a+b") as file:
            cut_short = file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"  # by a kill
            file.write(b"\n" * bool(cut_short) + json.dumps(result, cls=SafeFallbackEncoder).encode() + b"\n")

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        states = sorted(Path(trials[0].local_experiment_path).glob("experiment_state-*.json")) if trials else []
        if not states or (seen := f"{states[-1]} {states[-1].stat().st_mtime_ns}") == self._seen:
            return
        kept = Path(trials[0].path).parent / STATE
        shutil.rmtree(new := kept.with_suffix(".new"), ignore_errors=True)
        new.mkdir(parents=True)
        for path in states[-1].parent.glob(f"*{states[-1].stem.partition('-')[2]}*"):
            shutil.copy(path, new)
        shutil.rmtree(old := kept.with_suffix(".old"), ignore_errors=True)
        if kept.is_dir():
            kept.rename(old)
        new.rename(kept)
        self._seen = seen

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        self.on_step_end(0, trials)


class Progress(tune.Callback):  # type: ignore[misc]
    """One line of progress, by decisions; begun in :meth:`setup`, as Tune pickles callbacks before that."""

    def __init__(self, name: str, decisions: int) -> None:
        self._name, self._decisions, self._open = name, decisions, contextlib.ExitStack()

    def setup(self, *, total_num_samples: int | None = None, **info: Any) -> None:
        title = f"{self._name}, {total_num_samples} trials"
        self._done = self._open.enter_context(output.progress(title, total_num_samples))

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        self._done(sum(t.is_finished() or t.last_result.get(DECISIONS, 0) / self._decisions for t in trials))

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        output.say(f"trial {int(_number(trial))} begins again: {last_line(Path(trial.error_file))}")

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        self._open.close()
