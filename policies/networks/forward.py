"""The forward pass of small networks in numpy: layers, activations, one recurrent cell. No torch.

Rows never mix, and a row rounds alike in a batch of any size: a live rank, with a batch of one, decides exactly as the
simulated one. Hence einsum and not a matrix product. Legend: B rows, I inputs, H units, G gates, S states.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Layer = tuple[Array, Array]
"""Weight ``(out, in)`` and bias ``(out,)``, as in torch."""

_einsum: Callable[..., Array] = inspect.unwrap(np.einsum)
"""The same function without numpy's look-up of other array types, a quarter of its time on one row."""
_HALF = np.float32(0.5)


def _tanh(x: Array) -> Array:
    return np.tanh(x, out=x)


def _relu(x: Array) -> Array:
    return np.maximum(x, np.float32(0.0), out=x)


def _sigmoid(x: Array) -> Array:
    """As a tanh, which does not overflow; new."""
    y = np.tanh(_HALF * x)
    y += np.float32(1.0)
    y *= _HALF
    return np.asarray(y)


def _silu(x: Array) -> Array:
    return np.multiply(x, _sigmoid(x), out=x)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"tanh": _tanh, "relu": _relu, "silu": _silu}
"""Between layers, in place."""


def linear(x_BI: Array, layer: Layer) -> Array:
    """One layer: ``(B, out)``, new.

    Args:
        x_BI: inputs, a row each.
        layer: weights and bias.
    """
    weight, bias = layer
    y = _einsum("bi,oi->bo", x_BI, weight)
    y += bias
    return y


def perceptron(x_BI: Array, layers: Sequence[Layer], activation: str = "tanh") -> Array:
    """Layers with an activation between them, the last one linear: ``(B, out)``.

    Args:
        x_BI: inputs, float32.
        layers: in order.
        activation: one of :data:`ACTIVATIONS`.
    """
    activate = ACTIVATIONS[activation]
    for layer in layers[:-1]:
        x_BI = activate(linear(x_BI, layer))
    return linear(x_BI, layers[-1])


GATES = {"lstm": 4, "gru": 3}
"""Recurrent cells, and how many gates each has, in torch's order: input, forget, cell, output; reset, update, new."""
MAX_MEMORY = 200
"""Control intervals after which a cell that still remembers counts as remembering that long."""


class Cell(NamedTuple):
    """One layer of LSTM or GRU, as torch's ``nn.LSTM`` and ``nn.GRU`` compute it.

    Attributes:
        kind: one of :data:`GATES`.
        view: what the input does to the gates, weight ``(G * H, I)`` and bias ``(G * H,)``.
        memory: what its last output does to them, weight ``(G * H, H)`` and bias ``(G * H,)``.
    """

    kind: str
    view: Layer
    memory: Layer

    @property
    def inputs(self) -> int:
        return int(self.view[0].shape[-1])

    @property
    def units(self) -> int:
        return int(self.memory[0].shape[-1])

    def start(self, rows: int) -> Array:
        """The state of ranks that have seen nothing, ``(S, B, H)``: the output, and an LSTM's cell state."""
        return np.zeros((2 if self.kind == "lstm" else 1, rows, self.units), np.float32)

    def step(self, x_BI: Array, state_SBH: Array) -> Array:
        """The state after one more input, ``(S, B, H)``, new; its first entry is the cell's output.

        Args:
            x_BI: inputs, a row each.
            state_SBH: state before them, ``(S, B, H)``.
        """
        from_view, from_memory = linear(x_BI, self.view), linear(state_SBH[0], self.memory)
        if self.kind == "lstm":
            i, f, c, o = np.split(from_view + from_memory, 4, axis=1)
            cell = _sigmoid(f) * state_SBH[1] + _sigmoid(i) * np.tanh(c)
            return np.stack([_sigmoid(o) * np.tanh(cell), cell])
        (r, z, n), (hr, hz, hn) = np.split(from_view, 3, axis=1), np.split(from_memory, 3, axis=1)
        new = np.tanh(n + _sigmoid(r + hr) * hn)
        return np.asarray(new + _sigmoid(z + hz) * (state_SBH[0] - new))[None]

    def memory_steps(self, x_BI: Array) -> int:
        """Steps after which two different pasts differ by 1/e of what they did, each row seeing the same from then on.

        At most :data:`MAX_MEMORY`. The pasts are nothing at all, and some steps of another row's input.

        Args:
            x_BI: inputs that are held, some dozens of rows.
        """
        fresh, other = self.start(len(x_BI)), self.start(len(x_BI))
        for _ in range(MAX_MEMORY // 4):
            other = self.step(np.roll(x_BI, 1, axis=0), other)
        at_first = float(np.abs(other - fresh).mean())
        for n in range(MAX_MEMORY):
            if float(np.abs(other - fresh).mean()) * np.e <= at_first:
                return n
            fresh, other = self.step(x_BI, fresh), self.step(x_BI, other)
        return MAX_MEMORY
