"""The learned policy at run time: a small network in numpy, microseconds a decision, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, signals
from paceenv.core.errors import InputError, out_of_range
from paceenv.policies.base import INTERVAL_ITERATIONS, Policy
from paceenv.policies.networks import ACTIVATIONS, MAX_INTERVALS, Layer, ObservationEMA, perceptron, time_scales
from paceenv.policies.ranges import Outside, RangeHold


class Learned(Policy):
    """A multilayer perceptron over one rank's signals; the action is decoded by the project's one codec.

    A rank is passive where its view has been outside the calibrated range for ``ranges.OUTSIDE_INTERVALS``, and for
    ``ranges.HOLD_INTERVALS`` after; :meth:`outside` says how often.

    Args:
        layers: weight ``(out, in)`` and bias ``(out,)`` in order, the last one linear. Inputs of the network are the
            signals, then their means if there is a memory.
        calibrated_range: for each signal the interval ``[low, high]`` met in training; other signals are not compared.
        memory_intervals: control intervals over which it averages its views, a number or several
            (:class:`paceenv.policies.networks.ObservationEMA`); 0: none.
        interval_iterations: iterations of the control interval that it was trained with, at least 1.
        change_intervals: control intervals over which it averages how much its view changes; 0: not.
        squashes: whether the action is the tanh of the last layer, as the actors of SAC, TQC and CrossQ have it.
        activation: between the layers, one of ``paceenv.policies.networks.ACTIVATIONS``.

    Raises:
        InputError: for an argument out of range, and where memory, mechanisms and the widths of the network do not fit
            together.
    """

    preference: float | None = None
    """Weight of variation against throughput that it follows; None for a network that knows only one."""
    preference_range: tuple[float, float] | None = None

    def __init__(
        self,
        layers: Sequence[Layer],
        mechanisms: Sequence[str],
        name: str = "learned",
        *,
        calibrated_range: Mapping[str, tuple[float, float]] | None = None,
        interval_iterations: int = INTERVAL_ITERATIONS,
        memory_intervals: int | Sequence[int] = 0,
        change_intervals: int = 0,
        squashes: bool = False,
        activation: str = "tanh",
    ) -> None:
        self.layers, self.mechanisms, self.name = tuple(layers), tuple(mechanisms), name
        self.interval_iterations = interval_iterations
        self.calibrated_range = dict(calibrated_range or {})
        self.squashes, self.activation = squashes, activation
        where, known = f"policy {name}", ", ".join(pacing.MECHANISMS)
        if not self.mechanisms or len(set(self.mechanisms) & set(pacing.MECHANISMS)) < len(self.mechanisms):
            raise out_of_range("mechanisms", list(self.mechanisms), f"different ones of {known}", where)
        if activation not in ACTIVATIONS:
            raise out_of_range("activation", activation, f"one of {', '.join(ACTIVATIONS)}", where)
        intervals = ("interval_iterations", interval_iterations, 1), ("change_intervals", change_intervals, 0)
        for key, value, least in intervals:
            if type(value) is not int or not least <= value <= MAX_INTERVALS:
                raise out_of_range(key, value, f"an integer from {least} to {MAX_INTERVALS}", where)
        self.memory_intervals, self.change_intervals = time_scales(memory_intervals, where), change_intervals
        remembers = bool(self.memory_intervals or change_intervals)
        self._memory = ObservationEMA(self.memory_intervals, change_intervals) if remembers else None
        inputs = self.layers[0][0].shape[-1]
        views = signals.SIGNALS + (self._memory.entries if self._memory is not None else 0)
        if inputs != views:
            raise out_of_range("inputs", inputs, f"{views}, the signals and their means", where)
        outputs, (expected, each) = len(self.layers[-1][1]), self._expected_outputs()
        if outputs != expected:
            raise out_of_range("outputs", outputs, f"{expected}, {each}", where)
        self._hold = RangeHold(self.calibrated_range, where)

    def _expected_outputs(self) -> tuple[int, str]:
        return 2 * len(self.mechanisms), "two a mechanism"

    def with_preference(self, preference: float) -> Self:
        """The same policy following another preference, with nothing seen yet.

        Raises InputError for a preference outside the range of its training, or for a policy that was trained for one.
        """
        raise InputError(
            f"policy {self.name}: preference = {preference:g}; allowed: no preference, as it was trained for one"
        )

    def memory_iterations(self) -> int:
        return max(*self.memory_intervals, self.change_intervals, 0) * self.interval_iterations

    def reset(self, rows: int) -> None:
        self._hold.reset(rows)
        if self._memory is not None:
            self._memory.reset(rows)

    def inputs(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float32]:
        """Inputs of the network ``(B, I)``: signals and their averages.

        It updates the averages, so call it once for each view.
        """
        x_BO = np.asarray(signals_BO, np.float32)
        return x_BO if self._memory is None else np.concatenate([x_BO, self._memory.update(x_BO)], axis=1)

    def outputs(self, inputs_BI: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the last layer says, ``(B, outputs)``."""
        return perceptron(np.asarray(inputs_BI, np.float32), self.layers, self.activation)

    def action(self, inputs_BI: NDArray[np.float32]) -> NDArray[np.float32]:
        """Normalised actions ``(B, 2 * len(mechanisms))`` of the network alone, not clipped."""
        x_BA = self.outputs(inputs_BI)
        return np.tanh(x_BA, out=x_BA) if self.squashes else x_BA

    def decide(self, inputs_BI: NDArray[np.float32]) -> NDArray[np.float64]:
        """Settings ``(B, M, 2)`` for the network's inputs."""
        return pacing.decode_action(self.action(inputs_BI), self.mechanisms)

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        settings = self.decide(self.inputs(signals_BO))
        passive_B = self._hold.passive(signals_BO)
        if np.count_nonzero(passive_B):
            settings[passive_B] = pacing.off()
            self.rest(passive_B)
        return settings

    def rest(self, rows_B: NDArray[np.bool_]) -> None:
        """Take notice that the rows ``(B,)`` do not pace in the coming interval, whatever was decided."""

    def outside(self) -> Outside | None:
        return self._hold.outside()
