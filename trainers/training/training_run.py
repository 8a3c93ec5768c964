"""A training run: config in, policy file and learning curve out, whatever the algorithm.

A run is a sequence of segments of a few rollouts. Each segment starts new episodes and seeds every generator from the
run's seed and its own number. After each segment the policy is scored on the validation clusters, and a checkpoint is
written. What learns in a segment is a :class:`~paceenv.trainers.training.algorithms.learner.Learner`.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.logger import Logger, configure
from stable_baselines3.common.utils import set_random_seed

import paceenv
from paceenv.core.errors import InputError
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import PolicyFile
from paceenv.sim.cluster import Cluster
from paceenv.trainers.training.algorithms import families
from paceenv.trainers.training.algorithms.learner import Curve, Saved
from paceenv.trainers.training.checkpoint import load_checkpoint, save_checkpoint, unfit
from paceenv.trainers.training.selection import VALIDATION_METRICS, Validation
from paceenv.trainers.training.train_config import TrainConfig
from paceenv.ui.run_directory import first_difference

SEGMENT_ROLLOUTS = 10
"""Length of a segment without a selection."""
POLICY, CHECKPOINT, TENSORBOARD = "policy.safetensors", "checkpoint.safetensors", "tensorboard"


@dataclass(frozen=True)
class Trained:
    """A trained policy with what its file records, and its learning curve as rows of plain numbers."""

    file: PolicyFile
    curve: list[dict[str, float]]
    cpu_s: float


def train(
    config: TrainConfig,
    clusters: Mapping[str, Cluster] | None = None,
    on_progress: Callable[[float], None] = lambda timesteps: None,
    folder: Path | None = None,
    *,
    resume: bool = False,
) -> Trained:
    """Train on a config; the same config and seed give the same policy on one machine.

    Args:
        config: of the training.
        clusters: replaces configs by name, for example by a fresh calibration.
        on_progress: called with the decisions taken so far.
        folder: where checkpoints and TensorBoard's event files go; None: there are none.
        resume: go on from the folder's checkpoint, if there is one.

    Raises:
        InputError: for a checkpoint of another config.
    """
    # a finished training in the folder gives way to a new one, once that could be made
    old = [] if resume or folder is None else [folder / POLICY, folder / CHECKPOINT, *folder.glob(f"{TENSORBOARD}/*")]
    run = Run(config, clusters, on_progress, folder)
    for path in old:
        path.unlink(missing_ok=True)
    try:
        if resume and folder is not None and (folder / CHECKPOINT).exists():
            run.restore(folder / CHECKPOINT)
        while run.goes_on():
            run.advance()
        return run.result()
    finally:
        run.close()


class Run:
    """The state of a training run between its segments.

    ``best`` is the policy with the best validation score so far, ``best_score``.

    Args:
        config: of the training.
        clusters: as in :func:`train`.
        on_progress: as in :func:`train`.
        folder: as in :func:`train`.
        validation: of the config's selection, if it exists already; making it takes seconds.
    """

    def __init__(
        self,
        config: TrainConfig,
        clusters: Mapping[str, Cluster] | None = None,
        on_progress: Callable[[float], None] = lambda timesteps: None,
        folder: Path | None = None,
        validation: Validation | None = None,
    ) -> None:
        torch.set_num_threads(1)
        self.config, self.folder = config, folder
        # a logger of our own even without a folder: the default one leaves a folder in /tmp for every run
        logger = Logger(None, []) if folder is None else configure(str(folder / TENSORBOARD), ["tensorboard"])
        self.curve, self._logger = Curve(logger, on_progress), logger
        self.learner = families.make_learner(config, clusters, self.curve)
        self._validation = validation
        self.best: Learned | None = None
        self.best_score, self.evaluations_since = -np.inf, 0
        self.segment, self.cpu_s = 0, 0.0

    def close(self) -> None:
        """Close what it logs to."""
        self._logger.close()

    @property
    def timesteps(self) -> int:
        """Decisions taken so far."""
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

    def advance(self, until: float = math.inf) -> None:
        """One segment, an evaluation on the validation clusters, a checkpoint.

        Args:
            until: decisions at which the segment ends, if it has not ended before; rounded up to a rollout.
        """
        started = time.process_time()
        every = self.config.selection.every if self.config.selection else SEGMENT_ROLLOUTS
        end = min(self.config.total_timesteps, until)
        left = math.ceil((end - self.timesteps) / self.learner.rollout_timesteps)
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
            self._save(self.folder / CHECKPOINT)

    def _evaluate(self, validation: Validation) -> None:
        policy = self.learner.policy()
        found = validation.evaluate(policy)
        self.curve.rows[-1].update(found)
        for name, value in found.items():
            self.curve.logger.record(f"validation/{name}", value)
        self.curve.logger.dump(self.timesteps)
        self.evaluations_since += 1
        if found["score"] > self.best_score:
            self.best, self.best_score, self.evaluations_since = policy, found["score"], 0

    def result(self) -> Trained:
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
        return Trained(PolicyFile(policy, self.learner.calibrated_range(policy), record), self.curve.rows, self.cpu_s)

    def _save(self, path: Path) -> None:
        saved = self.learner.state()
        arrays = {f"learner.{name}": value for name, value in saved.arrays.items()}
        best = None
        if self.best is not None:
            arrays |= {f"best.{i}.{k}": a for i, pair in enumerate(self.best.weights) for k, a in enumerate(pair)}
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
        save_checkpoint(path, arrays, progress)

    def restore(self, path: Path, *, changed: bool = False) -> None:
        """Go on from a checkpoint; InputError if it is of another config, unless it may be ``changed``.

        What may change is what a run reads anew in each segment: hyperparameters but for the network's shape. Such a
        run has its whole patience again, and a checkpoint of its own from the start.

        Args:
            path: of the checkpoint.
            changed: whether the config may differ where that is allowed.
        """
        arrays, progress = load_checkpoint(path)
        differs = "" if changed else first_difference(progress["config"], self.config.model_dump(mode="json"))
        if differs:
            raise InputError(
                f"{path}: of another config ({differs}); allowed: the one it was started with, or another folder"
            )
        try:
            self.learner.restore(Saved(families.under(arrays, "learner."), progress["learner"]))
            self.segment, self.cpu_s = progress["segment"], progress["cpu_s"]
            self.evaluations_since, self.curve.rows = progress["evaluations_since"], list(progress["curve"])
            if progress["best"] is not None:
                self.best_score = progress["best"]["score"]
                self.best = self.learner.with_layers(families.pairs(arrays, "best"), progress["best"]["options"])
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise unfit(path, error) from None
        if changed:
            self.evaluations_since = 0
            if self.folder is not None:
                self._save(self.folder / CHECKPOINT)


def git_commit() -> str:
    """The commit of the source tree this runs from, "unknown" outside a checkout; "+" marks local changes."""
    root = Path(__file__).resolve().parents[2]
    try:
        run = {"cwd": root, "capture_output": True, "text": True, "timeout": 10, "check": True}
        top = subprocess.run(["git", "rev-parse", "--show-toplevel"], **run).stdout.strip()  # type: ignore[call-overload]
        if Path(top).resolve() != root:  # installed inside somebody else's checkout
            return "unknown"
        commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **run).stdout.strip()  # type: ignore[call-overload]
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], **run).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}{'+' if dirty else ''}"
