"""A network in an ONNX file as a policy, run by onnxruntime (extra ``onnx``), which reads a graph and no code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, signals
from paceenv.core.errors import InputError
from paceenv.policies.base import INTERVAL_ITERATIONS, Policy

_MAX_BYTES = 256 << 20


class OnnxPolicy(Policy):
    """One input ``(batch, signals)``, or one column more for a preference, and one output: normalised actions.

    Args:
        path: the file; all weights are inside it.
        mechanisms: those whose threshold and window the action sets, in its order.
        preference: weight of variation against throughput; None for a network without that input.
        interval_iterations: iterations of the control interval that it was trained with.

    Raises:
        InputError: for a file that onnxruntime refuses, another number of inputs or outputs, and a fixed batch.
    """

    def __init__(
        self,
        path: Path,
        mechanisms: Sequence[str],
        *,
        preference: float | None = None,
        interval_iterations: int = INTERVAL_ITERATIONS,
    ) -> None:
        self.name, self.mechanisms, self.interval_iterations = path.stem, tuple(mechanisms), interval_iterations
        self._session = _open(path)
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        width = signals.SIGNALS + (preference is not None)
        wanted = f"one input (batch, {width}) and one output (batch, {2 * len(self.mechanisms)}), the batch free"
        shapes = [list(one.shape) for one in (*inputs, *outputs)]
        fits = len(inputs) == len(outputs) == 1 and [len(shape) for shape in shapes] == [2, 2]
        if not fits or isinstance(shapes[0][0], int) or shapes[0][1] != width:
            raise InputError(f"{path}: inputs and outputs of shapes {shapes}; allowed: {wanted}")
        self._input = inputs[0].name
        self._preference = None if preference is None else np.float32(signals.squashed_preference(preference))
        try:
            actions = self.action(np.zeros((3, signals.SIGNALS), np.float32))
        except Exception as error:  # of the runtime's own classes
            raise InputError(f"{path}: {' '.join(str(error).split())[:200]}; allowed: {wanted}") from None
        if actions.shape != (3, 2 * len(self.mechanisms)):
            raise InputError(f"{path}: {actions.shape[1:]} actions; allowed: {wanted}")

    def action(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float32]:
        """Normalised actions ``(B, 2 * len(mechanisms))``, not clipped."""
        x = np.asarray(signals_BO, np.float32)
        if self._preference is not None:
            x = np.column_stack([x, np.full(len(x), self._preference, np.float32)])
        return np.asarray(self._session.run(None, {self._input: x})[0], np.float32)

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        return pacing.decode_action(self.action(signals_BO), self.mechanisms)


def _open(path: Path) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise InputError(f"{path}: reading it needs onnxruntime; install paceenv[onnx]") from None
    if path.stat().st_size > _MAX_BYTES:
        raise InputError(f"{path}: {path.stat().st_size} bytes; allowed: at most {_MAX_BYTES}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    try:  # from its bytes: a graph must not name other files
        return onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise InputError(f"{path}: not a readable ONNX file: {' '.join(str(error).split())[:200]}") from None
