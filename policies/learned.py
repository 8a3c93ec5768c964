"""The learned policy at run time: a small tanh network in numpy, microseconds a decision, no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceenv import pacing
from policies.base import Policy


class Learned(Policy):
    """A multilayer perceptron over one rank's signals; the action is decoded by the project's one codec.

    ``layers`` are (weight ``(out, in)``, bias ``(out,)``) in order, tanh between them, the last one linear: the
    deterministic action of an actor, clipped to [-1, 1] by the codec.
    """

    def __init__(
        self,
        layers: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]],
        mechanisms: Sequence[str],
        name: str = "learned",
    ) -> None:
        self.layers, self.mechanisms, self.name = tuple(layers), tuple(mechanisms), name

    def action(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float32]:
        """Normalised actions ``(B, 2 * len(mechanisms))``, not clipped."""
        # einsum and not a matrix product: that would round a row differently in batches of different size, and a live
        # rank, which sees a batch of one, would not decide quite as the simulated one did
        x = np.asarray(signals_BO, np.float32)
        for weight, bias in self.layers[:-1]:
            x = np.tanh(np.einsum("bi,oi->bo", x, weight) + bias)
        weight, bias = self.layers[-1]
        return np.asarray(np.einsum("bi,oi->bo", x, weight) + bias)

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        return pacing.decode_action(self.action(signals_BO), self.mechanisms)
