"""The learned policy at run time: a small tanh network in numpy, microseconds a decision, no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceenv import pacing
from policies.base import Policy

_einsum: Callable[..., NDArray[np.float32]] = inspect.unwrap(np.einsum)
"""The same function without numpy's look-up of other array types, which is a quarter of its time on one row."""


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
            x = _einsum("bi,oi->bo", x, weight)
            x += bias
            np.tanh(x, out=x)
        weight, bias = self.layers[-1]
        x = _einsum("bi,oi->bo", x, weight)
        x += bias
        return x

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        return pacing.decode_action(self.action(signals_BO), self.mechanisms)
