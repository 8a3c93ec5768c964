"""The learned policy at run time: a small network in numpy, microseconds a decision, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, signals
from paceenv.core.errors import InputError, out_of_range
from paceenv.policies.base import INTERVAL_ITERATIONS, Policy
from paceenv.policies.networks.forward import Cell, Layer, perceptron
from paceenv.policies.networks.observation_average import ObservationEMA, time_scales
from paceenv.policies.ranges import Outside, RangeHold

HELD_VIEWS = 64
"""Views that a recurrent cell is shown to find how long it remembers."""


class Learned(Policy):
    """A network over one rank's signals; the action is decoded by the project's one codec.

    The network is a multilayer perceptron, with a recurrent cell before it or not. A cell's state is each rank's own:
    it begins with nothing at :meth:`reset`, moves on with every view, and stands still where no view is shown.

    A rank is passive where its view has been outside the calibrated range for ``ranges.OUTSIDE_INTERVALS``, and for
    ``ranges.HOLD_INTERVALS`` after; :meth:`outside` says how often.

    Args:
        layers: weight ``(out, in)`` and bias ``(out,)`` in order, the last one linear. Inputs of the network are the
            signals, then their means if there is a memory, then one number if there is a preference.
        mechanisms: those whose threshold and window the action sets, in its order.
        name: for messages.
        preference: weight of variation against throughput that it follows; None for a network without that input.
        preference_range: lowest and highest weight of its training; None: this one only.
        calibrated_range: for each signal the interval ``[low, high]`` met in training; other signals are not compared.
        memory_intervals: control intervals over which it averages its views, a number or several
            (``paceenv.policies.networks.observation_average``); 0: none.
        interval_iterations: iterations of the control interval that it was trained with, at least 1.
        change_intervals: control intervals over which it averages how much its view changes; 0: not.
        squashes: whether the action is the tanh of the last layer, as the actors of SAC, TQC and CrossQ have it.
        activation: between the layers, one of ``paceenv.policies.networks.forward.ACTIVATIONS``.
        cell: recurrent cell before the layers, which then take its output; None: without.

    Raises:
        InputError: where preference, its range, memory and width of the network do not fit together.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        mechanisms: Sequence[str],
        name: str = "learned",
        preference: float | None = None,
        *,
        preference_range: tuple[float, float] | None = None,
        calibrated_range: Mapping[str, tuple[float, float]] | None = None,
        interval_iterations: int = INTERVAL_ITERATIONS,
        memory_intervals: int | Sequence[int] = 0,
        change_intervals: int = 0,
        squashes: bool = False,
        activation: str = "tanh",
        cell: Cell | None = None,
    ) -> None:
        self.layers, self.mechanisms, self.name = tuple(layers), tuple(mechanisms), name
        self.preference, self.preference_range = preference, preference_range
        self.interval_iterations = interval_iterations
        self.calibrated_range = dict(calibrated_range or {})
        where = f"policy {name}"
        if preference is not None:
            low, high = preference_range or (0.0, math.inf)
            if not (0.0 <= low <= preference <= high and preference < math.inf):
                raise out_of_range("preference", preference, f"{low:g} to {high:g}", where)
            self.preference_range = preference_range or (preference, preference)
        self.memory_intervals, self.change_intervals = time_scales(memory_intervals, where), change_intervals
        remembers = bool(self.memory_intervals or change_intervals)
        self._memory = ObservationEMA(self.memory_intervals, change_intervals) if remembers else None
        self.squashes, self.activation, self.cell = squashes, activation, cell
        inputs = self.layers[0][0].shape[-1] if cell is None else cell.inputs
        views = signals.SIGNALS + (self._memory.entries if self._memory is not None else 0)
        if inputs != views + (preference is not None and self.PREFERENCE_IS_INPUT):
            allowed = f"a number with {views + 1} inputs, None with {views}"
            raise out_of_range("preference", preference, f"{allowed}; the network has {inputs}", where)
        self._preference = np.float32(0.0 if preference is None else signals.squashed_preference(preference))
        self._hold = RangeHold(self.calibrated_range, where)
        self._state_SBH = np.zeros((0, 0, 0), np.float32)

    PREFERENCE_IS_INPUT = True
    """Whether the network reads the preference; otherwise it acts on what the network says."""

    def with_preference(self, preference: float) -> Learned:
        """The same policy following another preference, with nothing seen yet.

        Raises InputError for a preference outside the range of its training, or for a policy without that input.

        Args:
            preference: weight of the variation in the reward.
        """
        return Learned(
            self.layers,
            self.mechanisms,
            self._name_with(preference),
            preference,
            preference_range=self.preference_range,
            calibrated_range=self.calibrated_range,
            memory_intervals=self.memory_intervals,
            interval_iterations=self.interval_iterations,
            change_intervals=self.change_intervals,
            squashes=self.squashes,
            activation=self.activation,
            cell=self.cell,
        )

    @property
    def weights(self) -> tuple[Layer, ...]:
        """All weights in order: the two pairs of the cell, if there is one, then the layers."""
        return self.layers if self.cell is None else (self.cell.view, self.cell.memory, *self.layers)

    def _name_with(self, preference: float) -> str:
        """The name of the same policy with a preference; InputError where it takes none."""
        if self.preference_range is None:
            raise InputError(
                f"policy {self.name}: preference = {preference:g}; allowed: no preference, as it was trained for one"
            )
        return f"{self.name.partition(':')[0]}:preference={preference:g}"

    def memory_iterations(self) -> int:
        longest = max(*self.memory_intervals, self.change_intervals, 0)
        return max(longest, self._cell_memory) * self.interval_iterations

    @cached_property
    def _cell_memory(self) -> int:
        """Control intervals over which its cell remembers, on views within the calibrated range that are held."""
        if self.cell is None:
            return 0
        ends_O2 = [self._hold.watch.ends(name) for name in signals.NAMES]
        low_O, high_O = np.array(ends_O2, np.float32).T
        held_BO = np.random.default_rng(0).uniform(low_O, high_O, (HELD_VIEWS, signals.SIGNALS)).astype(np.float32)
        changes = [np.zeros_like(held_BO)] * (self.change_intervals > 0)
        preference = [np.full((HELD_VIEWS, 1), self._preference, np.float32)] * (self.preference is not None)
        x_BI = np.concatenate([held_BO] * (1 + len(self.memory_intervals)) + changes + preference, axis=1)
        return self.cell.memory_steps(x_BI)

    def reset(self, rows: int) -> None:
        self._hold.reset(rows)
        if self._memory is not None:
            self._memory.reset(rows)
        if self.cell is not None:
            self._state_SBH = self.cell.start(rows)

    def restart(self, rows_B: NDArray[np.bool_]) -> None:
        """A new episode begins in the rows ``(B,)``: their cell's state is as at :meth:`reset`.

        Args:
            rows_B: which rows begin anew.
        """
        if self.cell is not None:
            self._state_SBH[:, rows_B] = 0.0

    def inputs(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float32]:
        """Inputs of the network ``(B, I)``: signals, their averages, the squashed preference.

        It updates the averages, so call it once for each view.

        Args:
            signals_BO: what each rank observed in the last interval, ``(B, O)``.
        """
        x_BO = np.asarray(signals_BO, np.float32)
        parts = [x_BO] if self._memory is None else [x_BO, self._memory.update(x_BO)]
        if self.preference is not None and self.PREFERENCE_IS_INPUT:
            parts.append(np.full((len(x_BO), 1), self._preference, np.float32))
        return np.concatenate(parts, axis=1) if len(parts) > 1 else x_BO

    def outputs(self, inputs_BI: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the last layer says, ``(B, outputs)``.

        A cell's state moves on, so call it once for each view. Another number of rows starts anew.

        Args:
            inputs_BI: from :meth:`inputs`.
        """
        x = np.asarray(inputs_BI, np.float32)
        if self.cell is not None:
            if self._state_SBH.shape[1:] != (len(x), self.cell.units):
                self._state_SBH = self.cell.start(len(x))
            self._state_SBH = self.cell.step(x, self._state_SBH)
            x = self._state_SBH[0]
        return perceptron(x, self.layers, self.activation)

    def action(self, inputs_BI: NDArray[np.float32]) -> NDArray[np.float32]:
        """Normalised actions ``(B, 2 * len(mechanisms))`` of the network alone, not clipped.

        Args:
            inputs_BI: from :meth:`inputs`.
        """
        x_BA = self.outputs(inputs_BI)
        return np.tanh(x_BA, out=x_BA) if self.squashes else x_BA

    def decide(self, inputs_BI: NDArray[np.float32]) -> NDArray[np.float64]:
        """Settings ``(B, M, 2)`` for the network's inputs.

        Args:
            inputs_BI: from :meth:`inputs`.
        """
        return pacing.decode_action(self.action(inputs_BI), self.mechanisms)

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        settings = self.decide(self.inputs(signals_BO))
        passive_B = self._hold.passive(signals_BO)
        if np.count_nonzero(passive_B):
            settings[passive_B] = pacing.off()
            self.rest(passive_B)
        return settings

    def rest(self, rows_B: NDArray[np.bool_]) -> None:
        """Take notice that the rows ``(B,)`` do not pace in the coming interval, whatever was decided.

        Args:
            rows_B: which rows rest.
        """

    def outside(self) -> Outside | None:
        return self._hold.outside()
