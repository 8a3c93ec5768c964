"""An agent's ``.zip`` of Stable-Baselines3 or sb3-contrib, as data: its weights and its JSON, never its pickles."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

from paceenv.core.errors import InputError
from paceenv.policies.networks.actor_weights import WAY_ROUND, Actor, actor_of
from paceenv.policies.networks.forward import ACTIVATIONS

_DATA, _WEIGHTS = "data", "policy.pth"
_MAX_BYTES = 256 << 20
"""Of one part of the archive, unpacked."""


def read_actor(path: Path) -> Actor:
    """The network that acts in an agent's archive.

    The weights are read with ``torch.load(weights_only=True)``; of the JSON only plain values are, so that the pickles
    in it stay closed.

    Raises:
        InputError: for a file that is none, or whose network cannot be read so.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            parts = {name: _part(path, archive, name) for name in (_DATA, _WEIGHTS)}
        data = json.loads(parts[_DATA])
        if not isinstance(data, dict):
            raise ValueError(f"data is a {type(data).__name__}")
    except InputError:
        raise
    except Exception as error:  # a hostile file may raise anything
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path}: not an agent of Stable-Baselines3: {reason}; allowed: what model.save wrote"
        ) from None
    kwargs = data.get("policy_kwargs")
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    _check_space(path, data.get("action_space"))
    weights, activation = _weights(path, parts[_WEIGHTS]), _activation(path, kwargs)
    try:
        return actor_of(weights, activation, str(path), squashes=_squashes(kwargs))
    except InputError:
        raise
    except Exception as error:  # weights of other shapes than any algorithm's
        why = f"weights that fit no network ({type(error).__name__})"
        raise InputError(f"{path}: {why}; allowed: what model.save wrote") from None


def _part(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    size = archive.getinfo(name).file_size
    if size > _MAX_BYTES:
        raise InputError(f"{path}: {name} of {size} bytes; allowed: at most {_MAX_BYTES}")
    return archive.read(name)


def _weights(path: Path, blob: bytes) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        raise InputError(f"{path}: reading it needs torch; install paceenv[train]") from None
    try:
        state = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
        return {str(name): value.numpy() for name, value in dict(state).items()}
    except Exception as error:  # a hostile file may raise anything
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: {_WEIGHTS} is not weights alone: {reason}; {WAY_ROUND}") from None


def _activation(path: Path, kwargs: dict[str, Any]) -> str | None:
    """From the text that stands for the class beside its pickle: ``<class 'torch.nn.modules.activation.Tanh'>``."""
    given = kwargs.get("activation_fn")
    if given is None:
        return None
    name = str(given).rpartition(".")[2].rstrip("'>").lower()
    if name not in ACTIVATIONS:
        allowed = f"{', '.join(ACTIVATIONS)}, or {WAY_ROUND}"
        raise InputError(f"{path}: activation_fn = {str(given)[:80]}; allowed: {allowed}")
    return name


def _squashes(kwargs: dict[str, Any]) -> bool | None:
    given = kwargs.get("squash_output")
    return None if given is None else str(given) == "True"


def _check_space(path: Path, space: Any) -> None:
    """The action of our environment is a Box from -1 to 1; another one would be decoded wrongly."""
    for end, wanted in (("low_repr", "-1.0"), ("high_repr", "1.0")):
        found = space.get(end) if isinstance(space, dict) else None
        if found not in (None, wanted):  # a space says so only once it was printed
            raise InputError(f"{path}: actions with {end} = {str(found)[:60]}; allowed: {wanted}, as paceenv/Pacing-v0")
