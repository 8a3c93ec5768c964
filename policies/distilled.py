"""The distilled policy at run time: a small network estimates what each of some settings would gain; the best is set.

It was fitted to a teacher that knows the future (``paceenv.trainers.training.distill``). Whether its pacing pays in a
job is for the live agent to measure (``paceenv.live.decide.experiment``). Numpy only. Legend: B rows, C candidates,
M mechanisms.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, signals
from paceenv.core.errors import out_of_range
from paceenv.core.pacing import Candidate
from paceenv.policies.base import INTERVAL_ITERATIONS, checked
from paceenv.policies.learned import Learned

MAX_CANDIDATES = 256
SURE_GAIN = 1e6
"""What a constant's network says that it gains, % of the step: more than any hysteresis or margin."""


class Distilled(Learned):
    """Sets the candidate with the highest estimated gain over no pacing, as long as that gain is worth it.

    A candidate counts with its gain less ``margin``, no pacing counts with 0, and what is set already counts with
    ``hysteresis`` more, so that a rank does not flap between settings that are about as good.

    With a preference the network says of each candidate two things: what it gains in throughput, and how much less it
    makes step times vary. The gain is then the first plus preference times the second, so that one network serves all
    preferences.

    Args:
        layers: as in :class:`Learned`; the last layer gives the gain of each candidate, in % of the step, and with a
            preference after them the less of variation of each.
        hysteresis: gain by which another setting must be better than the present one, % of the step.
        preference: weight of variation against throughput, as in ``paceenv.core.metrics.reward``; None: only
            throughput counts, and the network gives nothing else.
        preference_range: lowest and highest weight of its training; None: this one only.
        always: settings that hold whatever it chooses, no pacing included, of mechanisms that no candidate names: such
            as defer, which judges itself and does nothing where no transfer can wait.
        network: the other arguments of :class:`Learned`.

    Raises:
        InputError: for candidates, margin, hysteresis or a network that do not fit.
    """

    def __init__(
        self,
        layers: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]],
        candidates: Sequence[Candidate],
        *,
        margin: float,
        hysteresis: float,
        name: str = "distilled",
        preference: float | None = None,
        preference_range: tuple[float, float] | None = None,
        always: Candidate = MappingProxyType({}),
        **network: Any,
    ) -> None:
        where = f"policy {name}"
        self.candidates, self.always = [plain(one) for one in candidates], plain(always)
        for candidate in self.candidates:
            if not candidate:
                raise out_of_range("candidate", "{}", "at least one mechanism", where)
            if both := self.always.keys() & candidate:
                raise out_of_range("always", ", ".join(sorted(both)), "mechanisms that no candidate names", where)
        if not 1 <= len(self.candidates) <= MAX_CANDIDATES:
            raise out_of_range("candidates", len(self.candidates), f"1 to {MAX_CANDIDATES} settings", where)
        limits, every = (pacing.MAX_THRESHOLD, pacing.MAX_WINDOW), ({}, *self.candidates)
        settings = [checked({**one, **self.always}, where, *limits) for one in every]
        for key, value in (("margin", margin), ("hysteresis", hysteresis)):
            if not 0.0 <= value < math.inf:
                raise out_of_range(key, value, "at least 0 (% of the step)", where)
        self._settings_CM2 = np.stack(settings)
        self.margin, self.hysteresis = float(margin), float(hysteresis)
        used = [m for m in pacing.MECHANISMS if any(m in one for one in (self.always, *self.candidates))]
        self.name = name
        self._follow(preference, preference_range)
        super().__init__(layers, used, name, **network)
        self._choice_B = np.zeros(0, np.int64)

    def _follow(self, preference: float | None, preference_range: tuple[float, float] | None) -> None:
        low, high = preference_range or (0.0, math.inf)
        if preference is not None and not (0.0 <= low <= preference <= high and preference < math.inf):
            raise out_of_range("preference", preference, f"{low:g} to {high:g}", f"policy {self.name}")
        self.preference = preference
        self.preference_range = preference_range or (None if preference is None else (preference, preference))

    def with_preference(self, preference: float) -> Self:
        if self.preference_range is None:
            return super().with_preference(preference)
        other = copy.deepcopy(self)
        other.name = f"{self.name.partition(':')[0]}:preference={preference:g}"
        other._follow(preference, self.preference_range)
        other.reset(0)
        return other

    def _expected_outputs(self) -> tuple[int, str]:
        each = 1 if self.preference is None else 2
        return each * len(self.candidates), f"{each} a candidate"

    def reset(self, rows: int) -> None:
        super().reset(rows)
        self._choice_B = np.zeros(rows, np.int64)

    def rest(self, rows_B: NDArray[np.bool_]) -> None:
        self._choice_B[rows_B] = 0

    def choose(self, output_BX: NDArray[np.float32]) -> NDArray[np.int64]:
        """Which setting each row takes from now on, ``(B,)``: 0 is no pacing, then the candidates."""
        gain_BC = output_BX
        if self.preference is not None:
            C = len(self.candidates)
            gain_BC = output_BX[:, :C] + np.float32(self.preference) * output_BX[:, C:]
        if len(gain_BC) != len(self._choice_B):
            self._choice_B = np.zeros(len(gain_BC), np.int64)
        worth_BC = np.zeros((len(gain_BC), 1 + len(self.candidates)), np.float32)
        np.subtract(gain_BC, np.float32(self.margin), out=worth_BC[:, 1:])
        worth_BC[np.arange(len(gain_BC)), self._choice_B] += np.float32(self.hysteresis)
        # not-a-number wins every comparison: such a row takes no pacing
        self._choice_B = np.where(np.isfinite(worth_BC).all(axis=1), worth_BC.argmax(axis=1), 0)
        return self._choice_B

    def decide(self, inputs_BI: NDArray[np.float32]) -> NDArray[np.float64]:
        return self._settings_CM2[self.choose(self.outputs(inputs_BI))]


def constant_policy(
    candidate: Candidate, name: str = "static", interval_iterations: int = INTERVAL_ITERATIONS
) -> Distilled:
    """A constant setting as a policy that a file can hold: a network that says the same of every view."""
    layers = [(np.zeros((1, signals.SIGNALS), np.float32), np.full(1, SURE_GAIN, np.float32))]
    return Distilled(
        layers, [candidate], margin=0.0, hysteresis=0.0, name=name, interval_iterations=interval_iterations
    )


def plain(candidate: Candidate) -> dict[str, tuple[float, float]]:
    """A candidate of its own, with floats."""
    return {m: (float(t), float(w)) for m, (t, w) in candidate.items()}
