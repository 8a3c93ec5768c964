"""Agents that paceenv did not train, as command lines spell them: ``module:Class`` and ``agent.zip``.

A class runs its module's code; nothing else here runs any. Of an archive of Stable-Baselines3 or sb3-contrib only the
weights and plain JSON are read, never its pickles, and it needs no class of those libraries. An archive names neither
the mechanisms that its actions set nor its control interval, so the text has options:
``agent.zip:mechanisms=slack/phase_shift,interval_iterations=20,preference=0.3``.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import re
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.core.errors import InputError, out_of_range, short_repr
from paceenv.policies.base import INTERVAL_ITERATIONS, Policy
from paceenv.policies.learned import Learned
from paceenv.policies.networks import ACTIVATIONS, Layer

FOREIGN_HELP = (
    "an agent of your own: module:Class (this runs its code), or agent.zip of Stable-Baselines3 (its weights only) "
    "with the mechanisms that its actions set: agent.zip:mechanisms=slack/phase_shift"
)
WAY_ROUND = "load it in a script of yours, which may run its code, and call paceenv.policies.save_network"
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_SUFFIX = ".zip"
_OPTIONS = ("mechanisms", "interval_iterations", "preference")
_DATA, _WEIGHTS = "data", "policy.pth"
_MAX_BYTES = 256 << 20
"""Of one part of an archive, unpacked."""


def foreign_policy(text: str) -> Policy | None:
    """The policy that ``text`` names, None where it names none of these; InputError where it cannot be had."""
    path = file_of(text)
    if path is None:
        return _load_class(text) if names_class(text) else None
    options = _options(text, path)
    if not path.is_file():
        raise InputError(f"policy {text}: no such file; allowed: a {_SUFFIX} file")
    actor, mechanisms = _read_actor(path), options.pop("mechanisms")
    actions = len(actor.layers[-1][1])
    if actions != 2 * len(mechanisms):
        named = f"{len(mechanisms)} mechanisms, of two actions each"
        raise InputError(f"policy {text}: {actions} actions; allowed: {2 * len(mechanisms)} for {named}")
    how = {"squashes": actor.squashes, "activation": actor.activation, **options}
    return Learned(actor.layers, mechanisms, path.stem, **how)


def names_class(text: str) -> bool:
    """Whether ``text`` is of the form ``module:Class``; ``static:NAME`` is the rule."""
    return _CLASS.fullmatch(text) is not None and not text.startswith("static:")


def file_of(text: str) -> Path | None:
    """The archive that ``text`` names, with or without options; None where it names none."""
    if text.endswith(_SUFFIX):
        return Path(text)
    name, separator, _ = text.partition(f"{_SUFFIX}:")
    return Path(name + _SUFFIX) if separator else None


def _options(text: str, path: Path) -> dict[str, Any]:
    """The options after the file's name; InputError for others, and without mechanisms."""
    given: dict[str, str] = {}
    for option in filter(None, text.removeprefix(str(path)).removeprefix(":").split(",")):
        key, separator, value = option.partition("=")
        if not separator or key not in _OPTIONS or key in given:
            raise InputError(f"policy {text}: option {option}; allowed: {'=, '.join(_OPTIONS)}=, each once")
        given[key] = value
    mechanisms = tuple(filter(None, given.get("mechanisms", "").split("/")))
    if not mechanisms or len(set(mechanisms)) < len(mechanisms) or not set(mechanisms) <= set(pacing.MECHANISMS):
        known = ", ".join(pacing.MECHANISMS)
        allowed = f"{path.name}:mechanisms=slack/phase_shift, in the order of its actions, of {known}"
        raise InputError(f"policy {text}: mechanisms = {given.get('mechanisms', '')!r}; allowed: {allowed}")
    try:
        interval = int(given.get("interval_iterations", INTERVAL_ITERATIONS))
        preference = float(given["preference"]) if "preference" in given else None
    except ValueError as error:
        raise InputError(f"policy {text}: {error}; allowed: numbers for interval_iterations and preference") from None
    if preference is not None and not 0.0 <= preference < math.inf:
        raise out_of_range("preference", preference, "at least 0", f"policy {text}")
    if interval < 1:
        raise out_of_range("interval_iterations", interval, "at least 1", f"policy {text}")
    return {"mechanisms": mechanisms, "interval_iterations": interval, "preference": preference}


# A class


class OwnPolicy(Policy):
    """A user's policy; what it returns is checked before the engine sees it.

    Args:
        inner: has ``act``, and whatever else of :class:`Policy` it wants to have.
    """

    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self.name = inner, name
        self.interval_iterations = int(getattr(inner, "interval_iterations", INTERVAL_ITERATIONS))
        self.mechanisms = tuple(getattr(inner, "mechanisms", pacing.MECHANISMS))

    def reset(self, rows: int) -> None:
        if hasattr(self._inner, "reset"):
            self._inner.reset(rows)

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        settings = np.asarray(self._inner.act(signals_BO.copy()))
        wanted = (len(signals_BO), len(pacing.MECHANISMS), 2)
        if settings.shape != wanted or settings.dtype.kind not in "fiu":
            found = f"{settings.dtype} of shape {settings.shape}"
            raise InputError(f"policy {self.name}: act returned {found}; allowed: numbers of shape {wanted}")
        for name, index, most in (
            ("threshold", pacing.THRESHOLD, max(pacing.MAX_THRESHOLD)),
            ("window", pacing.WINDOW, pacing.MAX_WINDOW),
        ):
            values = settings[..., index]
            wrong = values[~((values >= 0.0) & (values <= most))]
            if wrong.size:
                raise InputError(f"policy {self.name}: act returned a {name} of {wrong[0]:g}; allowed: 0 to {most:g}")
        return settings.astype(np.float64)


def _load_class(text: str) -> OwnPolicy:
    """Import ``module:Class``, as the working directory and the Python path have it, and make one."""
    module_name, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it; the command's own folder is where it is installed
    try:
        made = getattr(importlib.import_module(module_name), name)()
    except Exception as error:  # their code
        raise InputError(f"policy {text}: {type(error).__name__}: {error}; allowed: module:Class") from error
    if not callable(getattr(made, "act", None)):
        allowed = "a class with act(signals), such as one of paceenv.policies.base.Policy"
        raise InputError(f"policy {text}: {short_repr(made)}; allowed: {allowed}")
    return OwnPolicy(made, text)


# The acting network within an agent's weights


class Actor(NamedTuple):
    """A network that acts; fields as of :class:`paceenv.policies.learned.Learned`."""

    layers: tuple[Layer, ...]
    activation: str
    squashes: bool = False


Arrays = Mapping[str, NDArray[Any]]
_NORMS = ("ra_mean", "ra_var", "scale", "bias")
"""Of CrossQ's batch renormalisation, as it is after its warm-up."""
_NORM_EPS = 1e-3
_EXTRACTORS = ("features_extractor.", "pi_features_extractor.", "actor.features_extractor.")


def actor_of(weights: Arrays, activation: str | None, where: str, *, squashes: bool | None = None) -> Actor:
    """The actor in a policy's weights.

    Args:
        weights: the policy's ``state_dict`` as arrays.
        activation: between its layers; None: the default of its library.
        squashes: whether the mean action is a tanh; None: as its algorithm's default.

    Raises:
        InputError: for a network that no policy file can hold.
    """
    for name in weights:
        if name.startswith((*_EXTRACTORS, "lstm_actor.")):
            kind = "a recurrent cell" if name.startswith("lstm") else "a features extractor"
            raise InputError(f"{where}: {kind} with weights ({name}); allowed: none, or {WAY_ROUND}")
    if any(name.startswith("actor.mu.") for name in weights):  # SAC, TQC, CrossQ: a body before it; TD3, DDPG: none
        parts, usual, squashed = [*_sequence(weights, "actor.latent_pi"), *_sequence(weights, "actor.mu")], "relu", True
    else:  # PPO, A2C, TRPO
        body, head = _sequence(weights, "mlp_extractor.policy_net"), _sequence(weights, "action_net")
        parts, usual, squashed = [*body, *head], "tanh", False
    if parts:
        return Actor(tuple(_folded(parts)), activation or usual, squashed if squashes is None else squashes)
    known = "an actor of PPO, A2C, TRPO, SAC, TQC, CrossQ, TD3 or DDPG"
    raise InputError(f"{where}: weights {', '.join(sorted(weights)[:4])}; allowed: {known}, or {WAY_ROUND}")


def _sequence(weights: Arrays, place: str) -> list[dict[str, NDArray[Any]]]:
    """The modules with weights at a place, in order: ``place.weight``, or ``place.0.weight``, ``place.2.weight``."""
    found: dict[int, dict[str, NDArray[Any]]] = {}
    for name, value in weights.items():
        match = re.fullmatch(re.escape(place) + r"(?:\.(\d{1,4}))?\.(\w+)", name)
        if match:
            found.setdefault(int(match[1] or 0), {})[match[2]] = value
    return [found[n] for n in sorted(found)]


def _folded(parts: list[dict[str, NDArray[Any]]]) -> list[Layer]:
    """Linear layers, with the normalisation before each folded into it."""
    layers, norm = list[Layer](), None
    for part in parts:
        if "ra_mean" in part:
            mean, variance, scale, bias = (np.asarray(part[name], np.float64) for name in _NORMS)
            factor = scale / np.sqrt(variance + _NORM_EPS)
            norm = factor, bias - factor * mean
        elif "weight" in part:
            weight = np.asarray(part["weight"], np.float64)
            bias = np.asarray(part.get("bias", np.zeros(len(weight))), np.float64)
            if norm is not None:
                (factor, shift), norm = norm, None
                weight, bias = weight * factor, bias + weight @ shift
            layers.append((weight.astype(np.float32), bias.astype(np.float32)))
    return layers


# An archive


def _read_actor(path: Path) -> Actor:
    """The network that acts in an agent's archive; InputError for a file that is none, or a network that cannot be."""
    try:
        with zipfile.ZipFile(path) as archive:
            data, blob = (_part(path, archive, name) for name in (_DATA, _WEIGHTS))
        config = json.loads(data)
        if not isinstance(config, dict):
            raise ValueError(f"data is a {type(config).__name__}")
    except InputError:
        raise
    except Exception as error:  # a hostile file may raise anything
        raise InputError(
            f"{path}: not an agent of Stable-Baselines3: {error}; allowed: what model.save wrote"
        ) from None
    kwargs = config.get("policy_kwargs")
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    _check_space(path, config.get("action_space"))
    weights, squashes = _weights(path, blob), kwargs.get("squash_output")
    try:
        squashed = None if squashes is None else str(squashes) == "True"
        return actor_of(weights, _activation(path, kwargs.get("activation_fn")), str(path), squashes=squashed)
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
        raise InputError(f"{path}: {_WEIGHTS} is not weights alone: {str(error)[:200]}; {WAY_ROUND}") from None


def _activation(path: Path, given: Any) -> str | None:
    """From the text that stands for the class beside its pickle: ``<class 'torch.nn.modules.activation.Tanh'>``."""
    if given is None:
        return None
    name = str(given).rpartition(".")[2].rstrip("'>").lower()
    if name not in ACTIVATIONS:
        allowed = f"{', '.join(ACTIVATIONS)}, or {WAY_ROUND}"
        raise InputError(f"{path}: activation_fn = {str(given)[:80]}; allowed: {allowed}")
    return name


def _check_space(path: Path, space: Any) -> None:
    """The action of our environment is a Box from -1 to 1; another one would be decoded wrongly."""
    for end, wanted in (("low_repr", "-1.0"), ("high_repr", "1.0")):
        found = space.get(end) if isinstance(space, dict) else None
        if found not in (None, wanted):  # a space says so only once it was printed
            raise InputError(f"{path}: actions with {end} = {str(found)[:60]}; allowed: {wanted}, as paceenv/Pacing-v0")
