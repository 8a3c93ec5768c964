"""What the networks of policies are made of, in numpy: the forward pass, and averages of a rank's observations.

Rows never mix, and a row rounds alike in a batch of any size: a live rank, with a batch of one, decides exactly as the
simulated one. Hence einsum and not a matrix product. Legend: B rows, I inputs, O signals, K time scales.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceenv.core import signals
from paceenv.core.errors import out_of_range

Array = NDArray[np.float32]
Layer = tuple[Array, Array]
"""Weight ``(out, in)`` and bias ``(out,)``, as in torch."""

_einsum: Callable[..., Array] = inspect.unwrap(np.einsum)
"""The same function without numpy's look-up of other array types, a quarter of its time on one row."""


def _tanh(x: Array) -> Array:
    return np.tanh(x, out=x)


def _relu(x: Array) -> Array:
    return np.maximum(x, np.float32(0.0), out=x)


def _silu(x: Array) -> Array:
    half = np.float32(0.5)
    sigmoid = np.tanh(half * x)  # which does not overflow
    sigmoid += np.float32(1.0)
    sigmoid *= half
    return np.asarray(np.multiply(x, sigmoid, out=x))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"tanh": _tanh, "relu": _relu, "silu": _silu}
"""Between layers, in place."""


def _linear(x_BI: Array, layer: Layer) -> Array:
    weight, bias = layer
    y = _einsum("bi,oi->bo", x_BI, weight)
    y += bias
    return y


def perceptron(x_BI: Array, layers: Sequence[Layer], activation: str = "tanh") -> Array:
    """Layers with an activation between them, the last one linear: ``(B, out)``, new."""
    activate = ACTIVATIONS[activation]
    for layer in layers[:-1]:
        x_BI = activate(_linear(x_BI, layer))
    return _linear(x_BI, layers[-1])


MAX_SCALES, MAX_INTERVALS = 16, 10_000


def time_scales(memory_intervals: int | Sequence[int], where: str = "policy") -> tuple[int, ...]:
    """The time scales that a config or a policy file names: a number, 0 for none, or a list of different ones.

    Raises InputError for anything else.
    """
    given = [memory_intervals] if type(memory_intervals) is int else memory_intervals
    scales = tuple(given) if isinstance(given, (list, tuple)) else (-1,)
    if scales in {(), (0,)}:
        return ()
    valid = all(type(scale) is int and 1 <= scale <= MAX_INTERVALS for scale in scales)
    if not valid or len(scales) > MAX_SCALES or len(set(scales)) < len(scales):
        allowed = f"an integer from 0 to {MAX_INTERVALS}, or at most {MAX_SCALES} different ones of at least 1"
        raise out_of_range("memory_intervals", memory_intervals, allowed, where)
    return scales


class ObservationEMA:
    """Exponential means of views, one view a row, over one or several time scales; the first view starts them.

    A single view does not separate a co-tenant of our own period from one that drifts past, nor short contention from
    lasting contention; the recent views do.

    Args:
        change_intervals: also the mean absolute change from view to view, over about so many intervals; 0: without.
            The means do not show whether a signal is steady or swings.
    """

    def __init__(self, intervals: int | Sequence[int], change_intervals: int = 0) -> None:
        self.intervals, self.change_intervals = time_scales(intervals), change_intervals
        self._weight_K1 = np.array([1.0 / scale for scale in self.intervals], np.float32)[:, None]
        self._change_weight = np.float32(1.0 / max(change_intervals, 1))
        self.entries = (len(self.intervals) + (change_intervals > 0)) * signals.SIGNALS
        """Numbers that it adds to a view."""
        self.reset(0)

    def reset(self, rows: int) -> None:
        """Forget everything and prepare for ``rows``."""
        scales, O = len(self.intervals), signals.SIGNALS  # noqa: E741
        self._all_BKO = np.zeros((rows, self.entries // O, O), np.float32)
        self._mean_BKO, self._change_BKO = self._all_BKO[:, :scales], self._all_BKO[:, scales:]  # K = 0 or 1 changes
        self._last_BO = np.zeros((rows, O), np.float32)
        self._is_new = True

    @property
    def mean_BO(self) -> NDArray[np.float32]:
        """What it remembers, ``(B, entries)``: the means scale by scale, then the mean change."""
        return self._all_BKO.reshape(len(self._all_BKO), self.entries)

    def update(self, views_BO: NDArray[np.float32]) -> NDArray[np.float32]:
        """Take in one view of every row; :attr:`mean_BO` with it. Another number of rows starts anew."""
        if len(views_BO) != len(self._all_BKO):
            self.reset(len(views_BO))
        if self._is_new:
            self._mean_BKO[:], self._last_BO[:], self._is_new = views_BO[:, None], views_BO, False
            return self.mean_BO
        self._mean_BKO += self._weight_K1 * (views_BO[:, None] - self._mean_BKO)
        if self.change_intervals:
            change_BO = np.abs(views_BO - self._last_BO)
            self._change_BKO += self._change_weight * (change_BO[:, None] - self._change_BKO)
            self._last_BO[:] = views_BO
        return self.mean_BO

    def start(self, which: NDArray[np.int64], views_BO: NDArray[np.float32]) -> None:
        """Start the rows ``which`` anew from their views."""
        self._mean_BKO[which], self._last_BO[which] = views_BO[which, None], views_BO[which]
        self._change_BKO[which] = 0.0
