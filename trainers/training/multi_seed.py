"""A training run over one seed or several: files of every seed, and the best policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from paceenv.core.errors import InputError
from paceenv.policies.policy_file import PolicyFile, save_policy
from paceenv.trainers.evaluation import result_plots
from paceenv.trainers.training import training_run
from paceenv.trainers.training.train_config import TrainConfig
from paceenv.trainers.training.training_run import POLICY
from paceenv.ui import config_files, output
from paceenv.ui.run_directory import prepare_folder

SUMMARY = "training.json"


def train_seeds(config: TrainConfig, seeds: int, out: Path, *, resume: bool = False) -> dict[str, Any]:
    """Train with several consecutive seeds and keep the policy of the best one.

    Args:
        config: of the training; its seed is the first.
        seeds: how many.
        out: run directory; several seeds have one of their own each, ``seed-N``.
        resume: go on from checkpoints.

    Returns:
        The policy's file, digest, decisions and CPU-seconds; with a selection also the validation score of every seed,
        their median and spread.
    """
    runs = range(config.seed, config.seed + seeds)
    folders = {seed: out if seeds == 1 else out / f"seed-{seed}" for seed in runs}
    for folder in () if resume else folders.values():
        if (folder / training_run.CHECKPOINT).exists() and not (folder / POLICY).exists():
            raise InputError(f"{folder}: holds a training that was interrupted; allowed: --resume, or another folder")
    found = [
        _train_one(config.model_copy(update={"seed": seed}), folder, resume=resume) for seed, folder in folders.items()
    ]
    scores = [trained.file.provenance.get("validation", {}).get("score") for trained in found]
    best = found[int(np.argmax([-np.inf if score is None else score for score in scores]))]
    summary: dict[str, Any] = {"policy": str(out / POLICY)}
    if seeds > 1:
        spread = {"median": float(np.median(scores)), "lowest": min(scores), "highest": max(scores)}
        record = {**best.file.provenance, "validation_of_seeds": {"scores": scores, **spread}}
        summary["sha256"] = save_policy(out / POLICY, PolicyFile(best.file.policy, best.file.calibrated_range, record))
        summary |= {f"validation score, {key}": round(value, 3) for key, value in spread.items()}
        curves = [trained.curve for trained in found]
        result_plots.learning_curves(curves, out / "learning-curve.png", paired=_paired(config))
    else:
        summary["sha256"] = save_policy(out / POLICY, best.file)
        if scores[0] is not None:
            summary |= {f"validation {k}": v for k, v in best.file.provenance["validation"].items()}
    summary["timesteps"] = best.curve[-1]["timesteps"]
    summary["final_reward"] = best.file.provenance["final_reward"]
    summary["cpu_s"] = [round(trained.cpu_s, 1) for trained in found] if seeds > 1 else round(best.cpu_s, 1)
    return summary


def _train_one(config: TrainConfig, folder: Path, *, resume: bool) -> training_run.Trained:
    prepare_folder(folder)
    with output.progress(f"train {config.name}, seed {config.seed}", config.total_timesteps) as done:
        trained = training_run.train(config, on_progress=done, folder=folder, resume=resume)
    # only now: a run that is refused, because its checkpoint is of another config, must not overwrite that config
    config_files.write_yaml(folder / "config.yaml", config.model_dump(mode="json"))
    config_files.write_text(folder / "curve.json", json.dumps(trained.curve))
    result_plots.learning_curves([trained.curve], folder / "learning-curve.png", paired=_paired(config))
    save_policy(folder / POLICY, trained.file)
    config_files.write_text(folder / SUMMARY, json.dumps({"seed": config.seed, "cpu_s": round(trained.cpu_s, 1)}))
    return trained


def _paired(config: TrainConfig) -> bool:
    return config.environment.paired
