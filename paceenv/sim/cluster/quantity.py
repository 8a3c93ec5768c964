"""A quantity of a cluster config: a number, a distribution from which each episode draws, or a law of growth with
nodes. The same episode key draws the same values, whatever else the config holds."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field
from scipy.special import ndtri

from paceenv.core.errors import InputError
from paceenv.sim.engine.simulator import episode_keys
from paceenv.ui.config_files import Config

_TINY = 1e-9
Array = NDArray[np.float64]
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


class Uniform(Config):
    """Drawn uniformly between two numbers each episode."""

    uniform: Pair

    def at(self, u_E: Array) -> Array:
        """Its values at probabilities."""
        low, high = self.uniform
        return low + (high - low) * u_E


class LogUniform(Config):
    """Drawn log-uniformly between two positive numbers each episode."""

    loguniform: Pair

    def at(self, u_E: Array) -> Array:
        """Its values at probabilities."""
        low, high = self.loguniform
        return np.asarray(low * (high / low) ** u_E)


class Normal(Config):
    """Drawn from a normal (mean, standard deviation) each episode, as from a calibration; kept within the bounds.

    ``within`` are the bounds of the quantity it stands for, set when it is checked.
    """

    normal: Pair
    within: tuple[float, float] = Field((-math.inf, math.inf), exclude=True)

    def at(self, u_E: Array) -> Array:
        """Its values at probabilities."""
        mean, sd = self.normal
        return np.asarray(np.clip(mean + sd * ndtri(u_E), *self.within))


class PowerLaw(Config):
    """``value * (nodes / at_nodes) ** exponent``: a quantity that grows with the job."""

    value: float
    at_nodes: float = Field(gt=0)
    exponent: float


class Scaled(Config):
    """Wrapper that names the power law in the file; what it gives at a size is held against the bounds, too.

    ``within`` are the bounds of the quantity it stands for, set when it is checked.
    """

    power_law: PowerLaw
    within: tuple[float, float] = Field((-math.inf, math.inf), exclude=True)

    def at(self, nodes: int) -> float:
        """Its value at a size."""
        law = self.power_law
        scaled, (low, high) = law.value * (nodes / law.at_nodes) ** law.exponent, self.within
        if not low <= scaled <= high:
            where = f"power_law of {law.value:g} at {law.at_nodes:g} nodes and exponent {law.exponent:g}"
            raise InputError(f"{where}: {scaled:g} at {nodes} nodes; allowed: {low:g} to {high:g}")
        return float(scaled)


Quantity = float | Uniform | LogUniform | Normal | Scaled


@dataclass(frozen=True)
class Within:
    """Checks that all that a quantity can be lies between two numbers.

    Attributes:
        low: the least value.
        high: the largest value.
        open_low: whether ``low`` itself is not allowed.
    """

    low: float
    high: float
    open_low: bool = False

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        least = f"{'greater than' if self.open_low else 'at least'} {self.low:g}"
        return least + (f", at most {self.high:g}" if self.high < math.inf else "")

    def __call__(self, quantity: Quantity) -> Quantity:
        for value in _ends(quantity):
            too_low = value < self.low or (self.open_low and value == self.low)
            if not math.isfinite(value) or too_low or value > self.high:
                raise ValueError(self.allowed)
        if isinstance(quantity, Normal | Scaled):
            low = self.low + (_TINY if self.open_low else 0.0)
            return quantity.model_copy(update={"within": (low, self.high)})
        return quantity


def _ends(quantity: Quantity) -> list[float]:
    """The values to hold against the bounds."""
    match quantity:
        case Uniform():
            ends = quantity.uniform
        case LogUniform():
            ends = quantity.loguniform
            if min(ends) <= 0:
                raise ValueError("two positive numbers for loguniform")
        case Normal():
            if not 0.0 <= quantity.normal[1] < math.inf:
                raise ValueError("a standard deviation of at least 0")
            return quantity.normal[:1]
        case Scaled():
            if not math.isfinite(quantity.power_law.exponent):
                raise ValueError("a finite exponent")
            return [quantity.power_law.value]
        case _:
            return [float(quantity)]
    if ends[0] > ends[1]:
        raise ValueError("lower end first")
    return ends


HIGHEST = 1e15
"""No quantity of a cluster is larger in its unit; beyond, sums and products would leave the numbers."""
Positive = Annotated[Quantity, AfterValidator(Within(0.0, HIGHEST, open_low=True))]
NonNegative = Annotated[Quantity, AfterValidator(Within(0.0, HIGHEST))]
Share = Annotated[Quantity, AfterValidator(Within(0.0, 0.99))]
Rare = Annotated[Quantity, AfterValidator(Within(0.0, 0.1))]
AtLeastOne = Annotated[Quantity, AfterValidator(Within(1.0, HIGHEST))]
Cv = Annotated[Quantity, AfterValidator(Within(0.0, 1.0))]
Fraction = Annotated[Quantity, AfterValidator(Within(0.0, 1.0, open_low=True))]
Part = Annotated[Quantity, AfterValidator(Within(0.0, 1.0))]

_NAMED = 1 << 33
"""Places of named quantities, clear of the counted ones."""


class Draw:
    """Values of quantities for many episodes: each quantity, by its place in the config, draws its own uniforms."""

    def __init__(self, keys_E: NDArray[np.uint64], nodes: int) -> None:
        self._keys_E, self._nodes, self._place = keys_E, nodes, 0
        self.drawn: dict[int, Array] = {}
        """``(E,)`` values of what was drawn so far, by the identity of the quantity."""

    def __call__(self, quantity: Quantity | None) -> Array | float:
        """The next quantity in the fixed order that makes up its place."""
        self._place += 1
        return self._value(quantity, self._place)

    def named(self, name: str, quantity: Quantity | None) -> Array | float:
        """A quantity whose place is its name, so that it can be added without moving the others."""
        return self._value(quantity, _NAMED + zlib.crc32(name.encode()))

    def _value(self, quantity: Quantity | None, place: int) -> Array | float:
        match quantity:
            case None:
                return math.nan
            case Scaled():
                return quantity.at(self._nodes)
            case Uniform() | LogUniform() | Normal():
                bits_E = episode_keys(self._keys_E, place) >> np.uint64(12)
                self.drawn[id(quantity)] = value_E = quantity.at((bits_E.astype(np.float64) + 0.5) * 2.0**-52)
                return value_E
            case _:
                return float(quantity)
