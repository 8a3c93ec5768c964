"""Networks of torch and of Stable-Baselines3 as policy files, which run in numpy wherever a policy does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError, short_repr
from paceenv.policies.base import INTERVAL_ITERATIONS
from paceenv.policies.learned import Learned
from paceenv.policies.networks import ACTIVATIONS, Layer
from paceenv.policies.policy_file import PolicyFile, save_policy

TOLERANCE = 1e-5
"""By how much an action of the saved network may differ from the original's."""
_ROWS = 256
"""Observations on which the two are compared."""
_WHERE = "save_network"
_PASSED = {"identity", "flatten", "dropout"}
"""Modules that change nothing in a network that acts."""
_NORMS = ("ra_mean", "ra_var", "scale", "bias")
"""Of CrossQ's batch renormalisation, as it is after its warm-up."""


def save_network(
    path: str | os.PathLike[str],
    network: Any,
    *,
    mechanisms: str | Sequence[str],
    interval_iterations: int = INTERVAL_ITERATIONS,
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
            CrossQ, TD3, DDPG. Its mean action is saved, without exploration. An agent trained in ``VecNormalize`` is
            refused where it is known to have normalised observations: one loaded without its environment is not.
        interval_iterations: iterations of the control interval of that environment, at least 1.
        memory_intervals: time scales of the means among its inputs (:class:`paceenv.policies.networks.ObservationEMA`).
        calibrated_range: for each signal the interval ``[low, high]`` met in training; a live rank that sees others
            stops pacing. None: nothing is known, and nothing is compared.

    Returns:
        The file's SHA-256 digest.

    Raises:
        InputError: for a network that a policy file cannot represent, with the reason; nothing is written then.
    """
    acting = actor(network)
    saved = Learned(
        acting.layers,
        [mechanisms] if isinstance(mechanisms, str) else mechanisms,
        _WHERE,
        calibrated_range=calibrated_range,
        interval_iterations=interval_iterations,
        memory_intervals=memory_intervals,
        change_intervals=change_intervals,
        squashes=acting.squashes,
        activation=acting.activation,
    )
    _compare(saved, acting.original)
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


class Actor(NamedTuple):
    """A network that acts; fields as of :class:`paceenv.policies.learned.Learned`."""

    layers: tuple[Layer, ...]
    activation: str
    squashes: bool
    original: Original


def actor(network: Any) -> Actor:
    """The acting network of torch modules, one after the other, or of an agent or policy of Stable-Baselines3.

    Raises InputError for one that no policy file can hold.
    """
    import torch

    policy = getattr(network, "policy", network)
    normalises = getattr(network, "get_vec_normalize_env", lambda: None)()
    if normalises is not None and normalises.norm_obs:
        allowed = "norm_obs=False, as observations already are on fixed scales"
        raise InputError(f"{_WHERE}: the agent acts on observations that VecNormalize scaled; allowed: {allowed}")
    is_agent = hasattr(policy, "predict") and hasattr(policy, "action_space")
    modules = [one for one in _flat(_of_agent(policy) if is_agent else network) if _name(one) not in _PASSED]
    layers, activations, after, norm = list[Layer](), list[str](), "", None
    for module in modules:
        if isinstance(module, torch.nn.Linear) and (after or not layers):
            weight, bias = _numbers(module.weight), np.zeros(module.out_features)
            bias = bias if module.bias is None else _numbers(module.bias)
            if norm is not None:  # folded into the layer
                (factor, shift), norm = norm, None
                weight, bias = weight * factor, bias + weight @ shift
            activations += [after] if layers else []
            layers.append((weight.astype(np.float32), bias.astype(np.float32)))
            after = ""
        elif all(hasattr(module, key) for key in _NORMS):
            mean, variance, scale, bias = (_numbers(getattr(module, key)) for key in _NORMS)
            factor = scale / np.sqrt(variance + module.eps)
            norm = factor, bias - factor * mean
        elif _name(module) in ACTIVATIONS and layers and not after:
            after = _name(module)
        else:
            is_module = isinstance(module, torch.nn.Module)
            said = f"module {type(module).__name__} at this place" if is_module else f"network = {short_repr(module)}"
            layered = f"linear layers of torch with {', '.join(ACTIVATIONS)} between them"
            raise InputError(f"{_WHERE}: {said}; allowed: an agent of Stable-Baselines3, or {layered}")
    if not layers or len(set(activations)) > 1 or after not in ("", "tanh"):
        said = ", ".join([*activations, *([f"{after} at the end"] if after else [])]) or "no layers"
        raise InputError(f"{_WHERE}: {said}; allowed: one kind of activation, and at the end tanh or none")

    def act(x_BI: NDArray[np.float32]) -> NDArray[np.float32]:
        if is_agent:
            return np.asarray(policy.predict(x_BI, deterministic=True)[0])
        with torch.no_grad():
            return np.asarray(torch.nn.Sequential(*modules)(torch.from_numpy(x_BI)).numpy())

    squashes = after == "tanh" or (is_agent and bool(policy.squash_output))
    return Actor(tuple(layers), activations[0] if activations else "tanh", squashes, act)


def _of_agent(policy: Any) -> list[Any]:
    """The acting modules of a policy of Stable-Baselines3 or sb3-contrib."""
    space, own = policy.action_space, getattr(policy, "actor", None)
    if not (hasattr(space, "low") and (space.low == -1.0).all() and (space.high == 1.0).all()):
        raise InputError(f"{_WHERE}: actions in {space}; allowed: a Box from -1 to 1, as of paceenv/Pacing-v0")
    if own is None:  # PPO, A2C, TRPO
        return [policy.mlp_extractor.policy_net, policy.action_net]
    return [getattr(own, "latent_pi", []), own.mu]  # SAC, TQC, CrossQ: a body before it; TD3, DDPG: none


def _flat(network: Any) -> Iterable[Any]:
    """The modules in order, with those inside a list or a Sequential in its place."""
    if isinstance(network, (list, tuple)) or type(network).__name__ == "Sequential":
        for module in network:
            yield from _flat(module)
    else:
        yield network


def _name(module: Any) -> str:
    return type(module).__name__.lower()


def _numbers(tensor: Any) -> NDArray[np.float64]:
    return np.asarray(tensor.detach().cpu().double().numpy())
