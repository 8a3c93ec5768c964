"""The limits of every delay, one set for the simulator, training, evaluation and a live job.

A policy is worth what it gains within the limits that it will meet, so all of them start from the same defaults
(:class:`Limits`). The engine compiles :func:`refilled` and :func:`capped_s`; a live job calls them as Python. No
numpy: the agent reads this file before the script imports anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from paceenv.core.errors import out_of_range

MAX_CAP_S, MAX_BUDGET_S = 10.0, 60.0
BURST_SHARE = 1 / 6
"""Share of a minute's budget that may be spent at once; the rest trickles in, so that no minute exceeds the budget."""
CAP_S, CAP_SHARE, BURST_S, FILL = 0, 1, 2, 3
"""Index into :meth:`Limits.numbers`: the two caps, and the budget's bucket: its seconds, and what a second adds."""


@dataclass(frozen=True)
class Limits:
    """Limits of every delay. Raises InputError for a value out of range.

    Attributes:
        cap_s: the longest delay, seconds, 0 to 10.
        cap_share: the longest delay as a share of the job's baseline step, 0 to 1.
        budget_s_per_minute: the most delay of a rank in any minute, seconds, 0 to 60; 60 is no limit.
        quiet_first: first iterations of a job without any delay, at least 0.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # where it is a section of a config

    cap_s: float = 10.0
    cap_share: float = 0.5
    budget_s_per_minute: float = 20.0
    quiet_first: int = 50

    def __post_init__(self) -> None:
        ranges = (("cap_s", MAX_CAP_S), ("cap_share", 1.0), ("budget_s_per_minute", MAX_BUDGET_S))
        for name, high in ranges:
            if not 0.0 <= getattr(self, name) <= high:  # not-a-number fails too
                raise out_of_range(name, getattr(self, name), f"0 to {high:g}", "limits")
        if not self.quiet_first >= 0:
            raise out_of_range("quiet_first", self.quiet_first, "at least 0", "limits")

    @property
    def burst_s(self) -> float:
        """The most delay at once, seconds; infinite without a budget."""
        return BURST_SHARE * self.budget_s_per_minute if self.budget_s_per_minute < MAX_BUDGET_S else math.inf

    @property
    def fill(self) -> float:
        """Seconds of delay that a second adds to the budget."""
        return (1.0 - BURST_SHARE) * self.budget_s_per_minute / 60.0

    def __str__(self) -> str:
        budget = f", {self.budget_s_per_minute:g} s in any minute" if self.budget_s_per_minute < MAX_BUDGET_S else ""
        return (
            f"delays of at most {self.cap_share:g} of a step, {self.cap_s:g} s{budget}; "
            f"none in the first {self.quiet_first} iterations"
        )

    def changed(self, texts: Iterable[str]) -> Limits:
        """These limits with others in place, each as ``name=number``; raises InputError."""
        values: dict[str, Any] = asdict(self)
        for text in texts:
            name, _, value = text.partition("=")
            if name not in values:
                raise out_of_range("limit", text, f"NAME=NUMBER, NAME one of {', '.join(values)}", "limits")
            try:
                values[name] = type(values[name])(value)
            except ValueError:
                raise out_of_range(name, value, f"a number ({type(values[name]).__name__})", "limits") from None
        return Limits(**values)

    def numbers(self) -> tuple[float, ...]:
        """The limits as the engine reads them."""
        return self.cap_s, self.cap_share, self.burst_s, self.fill


LIMITS = Limits()
"""The defaults."""
LIMIT_HELP = "A limit of delays, such as cap_share=0.1; repeatable. Default: a live job's."
"""Help of an option whose texts :meth:`Limits.changed` takes."""
OPEN = Limits(MAX_CAP_S, 1.0, MAX_BUDGET_S, 0)
"""As good as none; for tests of what the rules themselves ask for."""


def capped_s(cap_s: float, cap_share: float, step_s: float) -> float:
    """The longest delay, seconds: the smaller cap."""
    return min(cap_s, cap_share * step_s)


def refilled(left_s: float, gain_s: float, burst_s: float) -> float:
    """What is left of a rank's budget after some time, seconds.

    The budget is a bucket of ``burst_s`` that fills steadily. So no minute exceeds the budget, wherever it starts.
    """
    return left_s + gain_s if left_s + gain_s < burst_s else burst_s
