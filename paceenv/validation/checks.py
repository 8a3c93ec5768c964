"""One expected number beside the model's: the row that every validation target yields."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import model_validator

from paceenv.ui.config_files import Config

Kind = Literal["fitted", "looked at", "predicted", "closed form"]


class Expected(Config):
    """A number with a tolerance, or a range; ``absolute`` tolerances are in the quantity's own unit."""

    value: float | None = None
    tolerance: float | None = None
    absolute: bool = False
    at_least: float = -math.inf
    at_most: float = math.inf

    @model_validator(mode="after")
    def _one_form(self) -> Expected:
        if (self.value is None) != (self.tolerance is None):
            raise ValueError("value and tolerance together")
        if self.tolerance is not None and not self.tolerance >= 0.0:
            raise ValueError("a tolerance of at least 0")
        if self.value == 0.0 and not self.absolute:
            raise ValueError("absolute: true with a value of 0, to which nothing is relative")
        if self.value is None and not (math.isfinite(self.at_least) or math.isfinite(self.at_most)):
            raise ValueError("value and tolerance, or at_least, or at_most")
        return self


@dataclass(frozen=True)
class Check:
    """An expected number, the model's number, and whether that is within bounds."""

    target: str
    row: str
    quantity: str
    expected: Expected
    found: float
    kind: Kind
    remark: str = ""

    @property
    def error(self) -> float:
        """The error: relative unless the tolerance is absolute; for a range the distance to it, 0 inside."""
        e = self.expected
        if e.value is None:
            return max(e.at_least - self.found, 0.0) - max(self.found - e.at_most, 0.0)
        off = self.found - e.value
        return off if e.absolute else off / abs(e.value)

    @property
    def within(self) -> bool:
        e = self.expected
        in_range = e.at_least <= self.found <= e.at_most
        return in_range and (e.tolerance is None or abs(self.error) <= e.tolerance)

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"expected": self.expected_text, "error": self.error, "within": self.within}

    @property
    def expected_text(self) -> str:
        """The expectation as text."""
        e = self.expected
        parts = [] if e.value is None else [f"{e.value:.5g}"]
        if math.isfinite(e.at_least) and math.isfinite(e.at_most):
            parts.append(f"{e.at_least:g} to {e.at_most:g}")
        elif math.isfinite(e.at_least):
            parts.append(f"at least {e.at_least:g}")
        elif math.isfinite(e.at_most):
            parts.append(f"at most {e.at_most:g}")
        return ", ".join(parts)

    @property
    def tolerance_text(self) -> str:
        e = self.expected
        if e.tolerance is None:
            return ""
        is_percentage = not e.absolute and e.tolerance >= 1e-3
        return f"{e.tolerance:.1%}".replace(".0%", "%") if is_percentage else f"{e.tolerance:g}"

    @property
    def error_text(self) -> str:
        e = self.expected
        if e.value is None:
            return "" if self.error == 0.0 else f"{self.error:+.3g} outside"
        return f"{self.error:+.3f}" if e.absolute else f"{self.error:+.1%}"
