"""The acting network within the weights of an agent of Stable-Baselines3 or sb3-contrib, as arrays by name.

Works on the names in a policy's ``state_dict``, so that an agent on disk needs no class of its library. Numpy only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.policies.networks.forward import GATES, Cell, Layer

Arrays = Mapping[str, NDArray[Any]]
WAY_ROUND = "load it in a script of yours, which may run its code, and call paceenv.policies.save_network"


class Actor(NamedTuple):
    """A network that acts; fields as of :class:`paceenv.policies.learned.Learned`."""

    layers: tuple[Layer, ...]
    activation: str
    squashes: bool = False
    cell: Cell | None = None

    @property
    def weights(self) -> list[Layer]:
        """The cell's two pairs, if there is one, then the layers."""
        return [*((self.cell.view, self.cell.memory) if self.cell else ()), *self.layers]


_NORMS = ("ra_mean", "ra_var", "scale", "bias")
"""Of CrossQ's batch renormalisation, as it is after its warm-up."""
_NORM_EPS = 1e-3
_EXTRACTORS = ("features_extractor.", "pi_features_extractor.", "actor.features_extractor.")


def actor_of(weights: Arrays, activation: str | None, where: str, *, squashes: bool | None = None) -> Actor:
    """The actor in a policy's weights.

    Args:
        weights: the policy's ``state_dict`` as arrays.
        activation: between its layers; None: the default of its library.
        where: origin of the weights, for the error.
        squashes: whether the mean action is a tanh; None: as its algorithm's default.

    Raises:
        InputError: for a network that no policy file can hold.
    """
    extra = [name for name in weights if name.startswith(_EXTRACTORS)]
    if extra:
        raise InputError(f"{where}: a features extractor with weights ({extra[0]}); allowed: none, or {WAY_ROUND}")
    if any(name.startswith("actor.mu.") for name in weights):  # SAC, TQC, CrossQ: a body before it; TD3, DDPG: none
        parts, usual, squashed = [*_sequence(weights, "actor.latent_pi"), *_sequence(weights, "actor.mu")], "relu", True
    elif "value_net.weight" in weights:  # PPO, A2C, TRPO, RecurrentPPO
        body, head = _sequence(weights, "mlp_extractor.policy_net"), _sequence(weights, "action_net")
        parts, usual, squashed = [*body, *head], "tanh", False
    else:  # ARS
        parts, usual, squashed = _sequence(weights, "action_net"), "relu", True
    if parts:
        squashed = squashed if squashes is None else squashes
        return Actor(tuple(_folded(parts)), activation or usual, squashed, _cell(weights, where))
    known = "an actor of PPO, A2C, RecurrentPPO, SAC, TQC, CrossQ, TD3, DDPG or ARS"
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


def _cell(weights: Arrays, where: str) -> Cell | None:
    """The LSTM of a RecurrentPPO; None for other algorithms."""
    names = [name for name in weights if name.startswith("lstm_actor.")]
    if not names:
        return None
    return cell_of({name.removeprefix("lstm_actor."): weights[name] for name in names}, "lstm", where)


def cell_of(weights: Arrays, kind: str, where: str) -> Cell:
    """One layer of LSTM or GRU from the ``state_dict`` of torch's module.

    Args:
        weights: as arrays.
        kind: ``lstm`` or ``gru``.
        where: origin of the weights, for the error.

    Raises:
        InputError: for several layers, both directions, a projection, or no biases.
    """
    wanted = [f"{what}_{part}_l0" for part in ("ih", "hh") for what in ("weight", "bias")]
    if set(weights) != set(wanted):
        others = ", ".join(sorted(set(weights) - set(wanted))[:2]) or "no biases"
        raise InputError(f"{where}: {kind} with {others}; allowed: one layer, one direction, biases, no projection")
    view, view_bias, memory, memory_bias = (np.asarray(weights[name], np.float32) for name in wanted)
    assert len(view) == GATES[kind] * memory.shape[1]
    return Cell(kind, (view, view_bias), (memory, memory_bias))
