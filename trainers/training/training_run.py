"""A training run: config in, policy file and learning curve out, whatever the algorithm.

A run is a sequence of segments of a few rollouts. Each segment starts new episodes and seeds every generator from the
run's seed and its own number, so that a run that was resumed between two segments equals one that never stopped, bit
for bit. After each segment the policy is scored on the validation clusters, and a checkpoint is written: weights,
optimizer and progress as one ``.safetensors``, which loads as data only (Stable-Baselines3's own are pickles).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from stable_baselines3.common.logger import Logger, configure
from stable_baselines3.common.utils import set_random_seed

import paceenv
from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import PolicyFile, save_policy
from paceenv.trainers.evaluation import result_plots
from paceenv.trainers.training.distill import DistillLearner
from paceenv.trainers.training.learner import Curve, Learner, Saved
from paceenv.trainers.training.sb3_learner import Sb3Learner, named, pairs, under
from paceenv.trainers.training.selection import VALIDATION_METRICS, Validation
from paceenv.trainers.training.train_config import DISTILL, TrainConfig
from paceenv.ui import config_files, output
from paceenv.ui.run_directory import first_difference, prepare_folder

SEGMENT_ROLLOUTS = 10
"""Length of a segment without a selection."""
CHECKPOINT_FORMAT = "paceenv.checkpoint/3"
POLICY, CHECKPOINT, TENSORBOARD = "policy.safetensors", "checkpoint.safetensors", "tensorboard"


def train(
    config: TrainConfig,
    on_progress: Callable[[float], None] = lambda timesteps: None,
    folder: Path | None = None,
    *,
    resume: bool = False,
) -> Run:
    """A run to its end; the same config and seed give the same policy on one machine.

    Args:
        folder: where checkpoints and TensorBoard's event files go; None: there are none.
        resume: go on from the folder's checkpoint, if there is one.

    Raises:
        InputError: for a checkpoint of another config.
    """
    run = Run(config, on_progress, folder)
    try:
        if resume and folder is not None and (folder / CHECKPOINT).exists():
            run.restore(folder / CHECKPOINT)
        while run.goes_on():
            run.advance()
        return run
    finally:
        run.close()


class Run:
    """The state of a training run between its segments; ``best`` is the policy with the best validation score so far.

    Making a ``validation`` of the config's selection takes up to a minute, so one that exists can be given.
    """

    def __init__(
        self,
        config: TrainConfig,
        on_progress: Callable[[float], None] = lambda timesteps: None,
        folder: Path | None = None,
        validation: Validation | None = None,
    ) -> None:
        torch.set_num_threads(1)
        self.config, self.folder = config, folder
        # a logger of our own even without a folder: the default one leaves a folder in /tmp for every run
        logger = Logger(None, []) if folder is None else configure(str(folder / TENSORBOARD), ["tensorboard"])
        self.curve, self._logger = Curve(logger, on_progress), logger
        kind = DistillLearner if config.algorithm == DISTILL else Sb3Learner
        self.learner: Learner = kind(config, self.curve)
        self._validation = validation
        self.best: Learned | None = None
        self.best_score, self.evaluations_since = -np.inf, 0
        self.segment, self.cpu_s = 0, 0.0

    def close(self) -> None:
        self._logger.close()

    @property
    def timesteps(self) -> int:
        return self.learner.timesteps

    @property
    def latest_score(self) -> float:
        """Of the last evaluation, which a worse policy than the best may have."""
        return next((row["score"] for row in reversed(self.curve.rows) if "score" in row), -np.inf)

    def goes_on(self) -> bool:
        """Whether there is more to train: decisions left, and patience."""
        selection = self.config.selection
        patient = selection is None or self.evaluations_since < selection.patience
        return patient and self.timesteps < self.config.total_timesteps

    def advance(self) -> None:
        """One segment, an evaluation on the validation clusters, a checkpoint."""
        started = time.process_time()
        every = self.config.selection.every if self.config.selection else SEGMENT_ROLLOUTS
        left = math.ceil((self.config.total_timesteps - self.timesteps) / self.learner.rollout_timesteps)
        set_random_seed((self.config.seed + 1_000_003 * self.segment) % 2**32)  # as many as NumPy takes
        self.learner.advance(self.segment, min(every, left))
        self.segment += 1
        if self.config.selection is not None:
            if self._validation is None:  # only now: a resumed run may have nothing left to evaluate
                self._validation = Validation(self.config.selection, self.config.environment.limits)
            self._evaluate(self._validation)
        self.cpu_s += time.process_time() - started
        if self.config.selection is not None:
            self.curve.rows[-1]["cpu_s"] = round(self.cpu_s, 3)
        if self.folder is not None:
            self.save(self.folder / CHECKPOINT)

    def _evaluate(self, validation: Validation) -> None:
        policy = self.learner.policy()
        scores = validation.evaluate(policy)
        self.curve.rows[-1].update(scores)
        for name, value in scores.items():
            self.curve.logger.record(f"validation/{name}", value)
        self.curve.logger.dump(self.timesteps)
        self.evaluations_since += 1
        if scores["score"] > self.best_score:
            self.best, self.best_score, self.evaluations_since = policy, scores["score"], 0

    def result(self) -> PolicyFile:
        """The selected policy, or the last one where nothing selects, with the record for its file."""
        config = self.config
        evaluations = [row for row in self.curve.rows if "score" in row]
        policy = self.best if evaluations and self.best is not None else self.learner.policy()
        record: dict[str, Any] = {
            "paceenv": paceenv.__version__,
            "git_commit": git_commit(),
            "config": config.model_dump(mode="json"),
            "seeds": {"first": config.seed, "rows": config.environment.environments},
            "algorithm": self.learner.label,
            "timesteps": self.timesteps,
            "final_reward": round(float(np.mean([row["reward"] for row in self.curve.rows[-10:]])), 4),
        }
        if evaluations:
            best = max(evaluations, key=lambda row: row["score"])  # the first of equals, as in _evaluate
            record["validation"] = {name: round(best[name], 4) for name in VALIDATION_METRICS}
        return PolicyFile(policy, self.learner.calibrated_range(policy), record)

    def save(self, path: Path) -> None:
        """Write a checkpoint, as :meth:`restore` reads it."""
        saved = self.learner.state()
        arrays = {f"learner.{name}": value for name, value in saved.arrays.items()}
        best = None
        if self.best is not None:
            arrays |= named("best", list(self.best.layers))
            best = {"score": self.best_score, "options": self.learner.options(self.best)}
        progress = {
            "config": self.config.model_dump(mode="json"),
            "segment": self.segment,
            "best": best,
            "evaluations_since": self.evaluations_since,
            "cpu_s": self.cpu_s,
            "curve": self.curve.rows,
            "learner": saved.plain,
        }
        header = {"paceenv": json.dumps({"format": CHECKPOINT_FORMAT, "progress": progress})}
        atomic_write(path, save({name: np.ascontiguousarray(value) for name, value in arrays.items()}, header))

    def restore(self, path: Path, *, may_differ: bool = False) -> None:
        """Go on from a checkpoint; InputError if it is of another config, unless it ``may_differ``.

        What may differ is what a run reads anew in each segment: hyperparameters but for the network's shape. Such a
        run has its whole patience again.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                header = json.loads((file.metadata() or {})["paceenv"])
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            if header["format"] != CHECKPOINT_FORMAT:
                raise ValueError(f"format {header['format']!r}; allowed: {CHECKPOINT_FORMAT!r}")
            progress = header["progress"]
            differs = first_difference(progress["config"], self.config.model_dump(mode="json"))
            if not differs or may_differ:
                self.learner.restore(Saved(under(arrays, "learner."), progress["learner"]))
                self.segment, self.cpu_s = progress["segment"], progress["cpu_s"]
                self.evaluations_since = 0 if differs else progress["evaluations_since"]
                self.curve.rows = list(progress["curve"])
                if progress["best"] is not None:
                    self.best_score = progress["best"]["score"]
                    self.best = self.learner.with_layers(pairs(arrays, "best"), progress["best"]["options"])
        except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
            said = " ".join(str(error).split())[:200]
            raise InputError(f"{path}: not a checkpoint of this training run: {said}") from None
        if differs and not may_differ:
            raise InputError(
                f"{path}: of another config ({differs}); allowed: the one it was started with, or another folder"
            )


def train_into(config: TrainConfig, folder: Path, *, resume: bool = False) -> dict[str, Any]:
    """Train, and write policy, curve and resolved config into a folder; returns what to print."""
    if (folder / POLICY).exists() and not (folder / CHECKPOINT).exists():
        raise InputError(f"{folder}: holds a policy, but no checkpoint to go on from; allowed: another folder")
    with output.progress(f"train {config.name}", config.total_timesteps) as done:
        run = train(config, on_progress=done, folder=prepare_folder(folder), resume=resume)
        file = run.result()
    # only now: a run that is refused, because its checkpoint is of another config, must not overwrite that config
    config_files.write_yaml(folder / "config.yaml", config.model_dump(mode="json"))
    atomic_write(folder / "curve.json", json.dumps(run.curve.rows))
    result_plots.learning_curve(run.curve.rows, folder / "learning-curve.png")
    return {
        "policy": str(folder / POLICY),
        "sha256": save_policy(folder / POLICY, file),
        **{f"validation {name}": value for name, value in file.provenance.get("validation", {}).items()},
        "timesteps": run.curve.rows[-1]["timesteps"],
        "cpu_s": round(run.cpu_s, 1),
    }


def git_commit() -> str:
    """The commit of the source tree this runs from, "unknown" outside a checkout; "+" marks local changes."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"]
    environ = os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)}  # not one in which we are only installed
    try:
        run = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run.stdout.strip()
