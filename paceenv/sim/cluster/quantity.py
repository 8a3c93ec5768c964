"""A quantity of a cluster config: a number, a distribution from which each episode draws, or a law of growth with
nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from paceenv.ui.config_files import Config

_TINY = 1e-9
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


class Uniform(Config):
    """Drawn uniformly between two numbers each episode."""

    uniform: Pair


class LogUniform(Config):
    """Drawn log-uniformly between two positive numbers each episode."""

    loguniform: Pair


class Normal(Config):
    """Drawn from a normal (mean, standard deviation) each episode, as from a calibration; kept within the bounds.

    ``within`` are the bounds of the quantity it stands for, set when it is checked.
    """

    normal: Pair
    within: tuple[float, float] = Field((-math.inf, math.inf), exclude=True)


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
