"""Drawing a cluster's quantities: the same episode key gives the same values, whatever else the config holds."""

from __future__ import annotations

import math
import zlib

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from paceenv.core.errors import InputError
from paceenv.sim.cluster.quantity import LogUniform, Normal, Quantity, Scaled, Uniform
from paceenv.sim.engine.simulator import episode_keys

_NAMED = 1 << 33
"""Places of named quantities, clear of the counted ones."""


class Draw:
    """Values of quantities for many episodes: each quantity, by its place in the config, draws its own uniforms.

    Args:
        keys_E: of the episodes.
        nodes: of the job.
    """

    def __init__(self, keys_E: NDArray[np.uint64], nodes: int) -> None:
        self._keys_E, self._nodes, self._place = keys_E, nodes, 0
        self.random = False
        self.drawn: dict[int, NDArray[np.float64]] = {}
        """``(E,)`` values of what was drawn so far, by the identity of the quantity."""

    def __call__(self, quantity: Quantity | None) -> NDArray[np.float64] | float:
        """The next quantity in the fixed order that makes up its place."""
        self._place += 1
        return self._value(quantity, self._place)

    def named(self, name: str, quantity: Quantity | None) -> NDArray[np.float64] | float:
        """A quantity whose place is its name, so that it can be added without moving the others.

        Args:
            name: of the quantity.
            quantity: as the config gives it; None where it does not.
        """
        return self._value(quantity, _NAMED + zlib.crc32(name.encode()))

    def integers(self, name: str, below: int, count: int) -> NDArray[np.int64]:
        """``(E, count)`` uniform integers.

        Args:
            name: of the draw; other draws do not move when one is added.
            below: integers are from 0 to ``below - 1``.
            count: of each episode.
        """
        self.random = True
        keys_E = episode_keys(self._keys_E, _NAMED + zlib.crc32(name.encode()))
        E = len(keys_E)
        bits = episode_keys(np.repeat(keys_E, count), np.tile(np.arange(count), E)) >> np.uint64(12)
        return np.asarray(bits % np.uint64(below)).astype(np.int64).reshape(E, count)

    def _value(self, quantity: Quantity | None, place: int) -> NDArray[np.float64] | float:
        value = self._draw(quantity, place)
        if isinstance(value, np.ndarray):
            self.drawn[id(quantity)] = value
        return value

    def _draw(self, quantity: Quantity | None, place: int) -> NDArray[np.float64] | float:
        match quantity:
            case None:
                return math.nan
            case Uniform():
                low, high = quantity.uniform
                return np.asarray(low + (high - low) * self._uniform(place))
            case LogUniform():
                low, high = quantity.loguniform
                return np.asarray(low * (high / low) ** self._uniform(place))
            case Normal():
                mean, sd = quantity.normal
                return np.asarray(np.clip(mean + sd * ndtri(self._uniform(place)), *quantity.within))
            case Scaled():
                law = quantity.power_law
                scaled, (low, high) = law.value * (self._nodes / law.at_nodes) ** law.exponent, quantity.within
                if not low <= scaled <= high:
                    where = f"power_law of {law.value:g} at {law.at_nodes:g} nodes and exponent {law.exponent:g}"
                    raise InputError(f"{where}: {scaled:g} at {self._nodes} nodes; allowed: {low:g} to {high:g}")
                return float(scaled)
            case _:
                return float(quantity)

    def _uniform(self, place: int) -> NDArray[np.float64]:
        self.random = True
        bits = episode_keys(self._keys_E, place) >> np.uint64(12)
        return (bits.astype(np.float64) + 0.5) * 2.0**-52
