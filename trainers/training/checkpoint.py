"""Checkpoints of a training run: weights, optimizer and progress as one ``.safetensors``, which loads as data only.

Stable-Baselines3's own are pickles, which may run code. Randomness needs no place in them: a run is made of segments,
each of which starts new episodes and seeds every generator from its number, so that one that was resumed between two
segments equals one that never stopped, bit for bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write

FORMAT = "paceenv.checkpoint/2"


def save_checkpoint(
    path: str | os.PathLike[str], arrays: Mapping[str, NDArray[Any]], progress: Mapping[str, Any]
) -> None:
    """Write a checkpoint whole or not at all.

    Args:
        path: the file.
        arrays: by name.
        progress: plain data.
    """
    header = {"format": FORMAT, "progress": dict(progress)}
    blob = save({name: np.ascontiguousarray(value) for name, value in arrays.items()}, {"paceenv": json.dumps(header)})
    atomic_write(path, blob)


def load_checkpoint(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Arrays and progress of a checkpoint; InputError for a file that is none."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {})["paceenv"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}; allowed: {FORMAT!r}")
        return arrays, dict(header["progress"])
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise unfit(path, error) from None


def unfit(path: Path, error: Exception) -> InputError:
    """The error for a checkpoint that cannot be read or does not fit the run.

    Args:
        path: of the checkpoint.
        error: what went wrong.
    """
    return InputError(f"{path}: not a checkpoint of this training run: {' '.join(str(error).split())[:200]}")
