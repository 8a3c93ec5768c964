"""Networks of torch and of Stable-Baselines3 as policy files, which run in numpy wherever a policy does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.policies.base import INTERVAL_ITERATIONS
from paceenv.policies.learned import Learned
from paceenv.policies.networks.actor_weights import Actor, actor_of, cell_of
from paceenv.policies.networks.forward import ACTIVATIONS, GATES, Cell, Layer
from paceenv.policies.policy_file import PolicyFile, save_policy

TOLERANCE = 1e-5
"""By how much an action of the saved network may differ from the original's."""
_STEPS, _ROWS = 24, 16
"""Steps in a row, and rows, on which the two are compared."""
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

    Before anything is written, the file's network and the original act on the same random observations, step by step.

    Args:
        path: a ``.safetensors`` file.
        network: a torch module of linear layers with one kind of activation (tanh, ReLU or SiLU) between them, a last
            tanh included; ``[lstm, head]`` with a ``torch.nn.LSTM`` or ``GRU`` of one layer; or an agent, or its
            policy, of Stable-Baselines3 or sb3-contrib: PPO, A2C, RecurrentPPO, SAC, TQC, CrossQ, TD3, DDPG, ARS.
            Its mean action is saved, without exploration.
        mechanisms: those of the environment it was trained in, in their order.
        interval_iterations: iterations of the control interval of that environment, at least 1.
        preference: its default weight of variation, where that was an input; None: it was not.
        preference_range: lowest and highest weight of its training.
        memory_intervals: time scales of the means among its inputs (``paceenv.policies.networks.observation_average``).
        change_intervals: time scale of the mean change among its inputs.
        calibrated_range: for each signal the interval ``[low, high]`` met in training; a live rank that sees others
            stops pacing. None: nothing is known, and nothing is compared.
        provenance: what the file shall tell of its making; plain data.

    Returns:
        The file's SHA-256 digest.

    Raises:
        InputError: for a network that a policy file cannot represent, with the reason; nothing is written then.
    """
    actor, original = _taken_apart(network)
    policy = Learned(
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
        cell=actor.cell,
    )
    outputs = len(actor.layers[-1][1])
    if outputs != 2 * len(policy.mechanisms):
        named = f"{len(policy.mechanisms)} mechanisms, of two actions each"
        raise InputError(f"{_WHERE}: {outputs} actions; allowed: {2 * len(policy.mechanisms)} for {named}")
    _compare(policy, original)
    record = {"made_by": f"paceenv.policies.{_WHERE}", **(provenance or {})}
    return save_policy(path, PolicyFile(policy, dict(calibrated_range or {}), record))


Original = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""The original's actions ``(T, B, A)`` on observations ``(T, B, I)``, from its first step on."""


def _compare(policy: Learned, original: Original) -> None:
    inputs = policy.layers[0][0].shape[1] if policy.cell is None else policy.cell.inputs
    x_TBI = np.random.default_rng(0).uniform(-1.0, 1.0, (_STEPS, _ROWS, inputs)).astype(np.float32)
    policy.reset(_ROWS)
    ours_TBA = np.clip(np.stack([policy.action(x_BI) for x_BI in x_TBI]), -1.0, 1.0)
    theirs_TBA = np.clip(original(x_TBI), -1.0, 1.0)
    policy.reset(0)
    difference = float(np.abs(ours_TBA - theirs_TBA).max()) if ours_TBA.shape == theirs_TBA.shape else np.inf
    if not difference <= TOLERANCE:
        raise InputError(
            f"{_WHERE}: the saved network's actions differ from the original's by {difference:.2g}; "
            f"allowed: {TOLERANCE:g}; the original does something that its layers do not show"
        )


def _taken_apart(network: Any) -> tuple[Actor, Original]:
    """The network's parts, and what runs the original."""
    policy = getattr(network, "policy", network)
    if hasattr(policy, "predict") and hasattr(policy, "action_space"):
        return _of_agent(policy)
    modules = list(network) if isinstance(network, (list, tuple)) else [network]
    return _of_modules(modules)


def _of_agent(policy: Any) -> tuple[Actor, Original]:
    """A policy of Stable-Baselines3."""
    space = policy.action_space
    if not (hasattr(space, "low") and (space.low == -1.0).all() and (space.high == 1.0).all()):
        raise InputError(f"{_WHERE}: actions in {space}; allowed: a Box from -1 to 1, as of paceenv/Pacing-v0")
    usual = getattr(policy, "activation_fn", None)
    name = None if usual is None else str(usual.__name__).lower()
    if name is not None and name not in ACTIVATIONS:
        raise InputError(f"{_WHERE}: activation_fn = {name}; allowed: {', '.join(ACTIVATIONS)}")
    arrays = {key: value.detach().cpu().numpy() for key, value in policy.state_dict().items()}
    actor = actor_of(arrays, name, _WHERE, squashes=bool(policy.squash_output))

    def act(x_TBI: NDArray[np.float32]) -> NDArray[np.float32]:
        state, first, actions = None, np.ones(x_TBI.shape[1], np.bool_), []
        for x_BI in x_TBI:
            found, state = policy.predict(x_BI, state, first, deterministic=True)
            actions.append(found)
            first = np.zeros_like(first)
        return np.stack(actions)

    return actor, act


def _of_modules(modules: Sequence[Any]) -> tuple[Actor, Original]:
    """Modules of torch, one after the other."""
    import torch

    flat = [module for module in _flat(modules) if type(module).__name__ not in _PASSED]
    kinds = {torch.nn.LSTM: "lstm", torch.nn.GRU: "gru"}
    cell: Cell | None = None
    if flat and type(flat[0]) in kinds:
        kind = kinds[type(flat[0])]
        cell = cell_of({key: value.detach().cpu().numpy() for key, value in flat[0].state_dict().items()}, kind, _WHERE)
    layers, activations, after = list[Layer](), list[str](), ""
    for module in flat[cell is not None :]:
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
            allowed = f"linear layers with {', '.join(ACTIVATIONS)} between them, {' or '.join(GATES)} before them"
            raise InputError(f"{_WHERE}: module {name} at this place; allowed: {allowed}")
    if not layers or len(set(activations)) > 1 or after not in ("", "tanh"):
        found = ", ".join([*activations, *([f"{after} at the end"] if after else [])]) or "no layers"
        raise InputError(f"{_WHERE}: {found}; allowed: one kind of activation, and at the end tanh or none")
    actor = Actor(tuple(layers), activations[0] if activations else "tanh", after == "tanh", cell)

    def act(x_TBI: NDArray[np.float32]) -> NDArray[np.float32]:
        x: Any = torch.from_numpy(x_TBI)
        with torch.no_grad():
            for module in flat:
                if type(module) not in kinds:
                    x = module(x)
                elif module.batch_first:
                    x = module(x.transpose(0, 1))[0].transpose(0, 1)
                else:
                    x = module(x)[0]
        return np.asarray(x.numpy())

    return actor, act


def _flat(modules: Iterable[Any]) -> Iterable[Any]:
    """The modules, with those inside a Sequential in its place."""
    for module in modules:
        if type(module).__name__ == "Sequential":
            yield from _flat(module)
        else:
            yield module
