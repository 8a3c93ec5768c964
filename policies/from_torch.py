"""Networks of torch and of Stable-Baselines3 as policy files, which run in numpy wherever a policy does."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.policies.base import INTERVAL_ITERATIONS
from paceenv.policies.learned import Learned
from paceenv.policies.networks import ACTIVATIONS, Layer
from paceenv.policies.policy_file import PolicyFile, save_policy

TOLERANCE = 1e-5
"""By how much an action of the saved network may differ from the original's."""
_ROWS = 256
"""Observations on which the two are compared."""
_WHERE = "save_network"
_PASSED = {"Identity", "Flatten", "Dropout"}
"""Modules that change nothing in a network that acts."""


def save_network(
    path: str | os.PathLike[str],
    network: Any,
    *,
    mechanisms: Sequence[str],
    interval_iterations: int = INTERVAL_ITERATIONS,
    preference: float | None = None,
    preference_range: tuple[float, float] | None = None,
    memory_intervals: int | Sequence[int] = 0,
    change_intervals: int = 0,
    calibrated_range: Mapping[str, tuple[float, float]] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> str:
    """Save a network that acts in ``paceenv/Pacing-v0`` as a policy file, for every command and a live job.

    Before anything is written, the file's network and the original act on the same random observations.

    Args:
        path: a ``.safetensors`` file.
        network: a torch module of linear layers with one kind of activation (tanh, ReLU or SiLU) between them, a last
            tanh included; or an agent, or its policy, of Stable-Baselines3 or sb3-contrib: PPO, A2C, TRPO, SAC, TQC,
            CrossQ, TD3, DDPG. Its mean action is saved, without exploration.
        interval_iterations: iterations of the control interval of that environment, at least 1.
        preference: its default weight of variation, where that was an input; None: it was not.
        memory_intervals: time scales of the means among its inputs (:class:`paceenv.policies.networks.ObservationEMA`).
        calibrated_range: for each signal the interval ``[low, high]`` met in training; a live rank that sees others
            stops pacing. None: nothing is known, and nothing is compared.

    Returns:
        The file's SHA-256 digest.

    Raises:
        InputError: for a network that a policy file cannot represent, with the reason; nothing is written then.
    """
    policy = getattr(network, "policy", network)
    is_agent = hasattr(policy, "predict") and hasattr(policy, "action_space")
    actor, original = _of_agent(policy) if is_agent else _of_module(network)
    saved = Learned(
        actor.layers,
        mechanisms,
        _WHERE,
        preference,
        preference_range=preference_range,
        calibrated_range=calibrated_range,
        interval_iterations=interval_iterations,
        memory_intervals=memory_intervals,
        change_intervals=change_intervals,
        squashes=actor.squashes,
        activation=actor.activation,
    )
    outputs = len(actor.layers[-1][1])
    if outputs != 2 * len(saved.mechanisms):
        named = f"{len(saved.mechanisms)} mechanisms, of two actions each"
        raise InputError(f"{_WHERE}: {outputs} actions; allowed: {2 * len(saved.mechanisms)} for {named}")
    _compare(saved, original)
    record = {"made_by": f"paceenv.policies.{_WHERE}", **(provenance or {})}
    return save_policy(path, PolicyFile(saved, dict(calibrated_range or {}), record))


Original = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""The original's actions ``(B, A)`` on observations ``(B, I)``."""


def _compare(policy: Learned, original: Original) -> None:
    inputs = policy.layers[0][0].shape[1]
    x_BI = np.random.default_rng(0).uniform(-1.0, 1.0, (_ROWS, inputs)).astype(np.float32)
    ours_BA, theirs_BA = (np.clip(actions, -1.0, 1.0) for actions in (policy.action(x_BI), original(x_BI)))
    difference = float(np.abs(ours_BA - theirs_BA).max()) if ours_BA.shape == theirs_BA.shape else np.inf
    if not difference <= TOLERANCE:
        raise InputError(
            f"{_WHERE}: the saved network's actions differ from the original's by {difference:.2g}; "
            f"allowed: {TOLERANCE:g}; the original does something that its layers do not show"
        )


def _of_agent(policy: Any) -> tuple[Actor, Original]:
    """A policy of Stable-Baselines3."""
    space = policy.action_space
    if not (hasattr(space, "low") and (space.low == -1.0).all() and (space.high == 1.0).all()):
        raise InputError(f"{_WHERE}: actions in {space}; allowed: a Box from -1 to 1, as of paceenv/Pacing-v0")
    name = str(policy.activation_fn.__name__).lower()
    if name not in ACTIVATIONS:
        raise InputError(f"{_WHERE}: activation_fn = {name}; allowed: {', '.join(ACTIVATIONS)}")
    arrays = {key: value.detach().cpu().numpy() for key, value in policy.state_dict().items()}
    actor = Actor(actor_layers(arrays, _WHERE), name, bool(policy.squash_output))
    return actor, lambda x_BI: policy.predict(x_BI, deterministic=True)[0]


def _of_module(network: Any) -> tuple[Actor, Original]:
    """A module of torch, or several, one after the other."""
    import torch

    modules = [module for module in _flat(network) if type(module).__name__ not in _PASSED]
    layers, activations, after = list[Layer](), list[str](), ""
    for module in modules:
        name = type(module).__name__
        if isinstance(module, torch.nn.Linear) and (after or not layers):
            bias = torch.zeros(module.out_features) if module.bias is None else module.bias
            pair = (module.weight.detach().cpu().float().numpy().copy(), bias.detach().cpu().float().numpy().copy())
            activations += [after] if layers else []
            layers.append(pair)
            after = ""
        elif name.lower() in ACTIVATIONS and layers and not after:
            after = name.lower()
        else:
            allowed = f"linear layers with {', '.join(ACTIVATIONS)} between them"
            raise InputError(f"{_WHERE}: module {name} at this place; allowed: {allowed}")
    if not layers or len(set(activations)) > 1 or after not in ("", "tanh"):
        said = ", ".join([*activations, *([f"{after} at the end"] if after else [])]) or "no layers"
        raise InputError(f"{_WHERE}: {said}; allowed: one kind of activation, and at the end tanh or none")

    def act(x_BI: NDArray[np.float32]) -> NDArray[np.float32]:
        x = torch.from_numpy(x_BI)
        with torch.no_grad():
            for module in modules:
                x = module(x)
        return np.asarray(x.numpy())

    return Actor(tuple(layers), activations[0] if activations else "tanh", after == "tanh"), act


def _flat(network: Any) -> Iterable[Any]:
    """The modules in order, with those inside a list or a Sequential in its place."""
    if isinstance(network, (list, tuple)) or type(network).__name__ == "Sequential":
        for module in network:
            yield from _flat(module)
    else:
        yield network


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


def actor_layers(weights: Arrays, where: str) -> tuple[Layer, ...]:
    """The layers of the actor in a policy's ``state_dict``; InputError for a network that no policy file can hold."""
    for name in weights:
        if name.startswith((*_EXTRACTORS, "lstm_actor.")):
            kind = "a recurrent cell" if name.startswith("lstm") else "a features extractor"
            raise InputError(f"{where}: {kind} with weights ({name}); allowed: none")
    if any(name.startswith("actor.mu.") for name in weights):  # SAC, TQC, CrossQ: a body before it; TD3, DDPG: none
        parts = [*_sequence(weights, "actor.latent_pi"), *_sequence(weights, "actor.mu")]
    else:  # PPO, A2C, TRPO
        parts = [*_sequence(weights, "mlp_extractor.policy_net"), *_sequence(weights, "action_net")]
    if parts:
        return tuple(_folded(parts))
    known = "an actor of PPO, A2C, TRPO, SAC, TQC, CrossQ, TD3 or DDPG"
    raise InputError(f"{where}: weights {', '.join(sorted(weights)[:4])}; allowed: {known}")


def _sequence(weights: Arrays, place: str) -> list[dict[str, NDArray[Any]]]:
    """The modules with weights at a place, in order: ``place.weight``, or ``place.0.weight``, ``place.2.weight``."""
    modules: dict[int, dict[str, NDArray[Any]]] = {}
    for name, value in weights.items():
        match = re.fullmatch(re.escape(place) + r"(?:\.(\d{1,4}))?\.(\w+)", name)
        if match:
            modules.setdefault(int(match[1] or 0), {})[match[2]] = value
    return [modules[n] for n in sorted(modules)]


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
