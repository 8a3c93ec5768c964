"""Checkpoints of a training run: weights, optimizer and progress as one ``.safetensors``, which loads as data only.

Stable-Baselines3's own are pickles, which may run code. Randomness needs no place in them: a run is made of segments,
each of which starts new episodes and seeds every generator from its number, so that one that was resumed between two
segments equals one that never stopped, bit for bit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from stable_baselines3 import PPO

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write

FORMAT = "paceenv.checkpoint/1"


def save_checkpoint(path: str | os.PathLike[str], model: PPO, progress: dict[str, Any]) -> None:
    """Write a checkpoint whole or not at all.

    Args:
        path: the file.
        model: its weights and optimizer are saved.
        progress: plain data; arrays stand under ``arrays``.
    """
    tensors = {f"policy.{name}": value.numpy() for name, value in model.policy.state_dict().items()}
    for place, state in model.policy.optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{place}.{name}": np.asarray(value) for name, value in state.items()}
    plain = dict(progress)
    tensors |= {f"array.{name}": np.asarray(value) for name, value in plain.pop("arrays", {}).items()}
    header = {"format": FORMAT, "timesteps": model.num_timesteps, "progress": plain}
    blob = save({name: np.ascontiguousarray(value) for name, value in tensors.items()}, {"paceenv": json.dumps(header)})
    atomic_write(path, blob)


def load_checkpoint(path: Path, model: PPO) -> dict[str, Any]:
    """Put a checkpoint's state into ``model`` and return its progress; InputError for one that does not fit."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {})["paceenv"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}; allowed: {FORMAT!r}")
        policy = {name.removeprefix("policy."): torch.from_numpy(t) for name, t in _under(tensors, "policy.")}
        model.policy.load_state_dict(policy)
        optimizer = model.policy.optimizer.state_dict()
        optimizer["state"] = {}
        for name, value in _under(tensors, "adam."):
            _, place, key = name.split(".")
            optimizer["state"].setdefault(int(place), {})[key] = torch.from_numpy(np.array(value))
        model.policy.optimizer.load_state_dict(optimizer)
        model.num_timesteps = int(header["timesteps"])
        progress = dict(header["progress"])
        progress["arrays"] = {name.removeprefix("array."): value for name, value in _under(tensors, "array.")}
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        said = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: not a checkpoint of this training run: {said}") from None
    return progress


def _under(tensors: dict[str, np.ndarray[Any, Any]], prefix: str) -> list[tuple[str, np.ndarray[Any, Any]]]:
    return [(name, value) for name, value in tensors.items() if name.startswith(prefix)]
