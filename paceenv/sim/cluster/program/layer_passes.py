"""What a GPU does for one micro-batch on some layers: computing, the transfers that the next layer needs, and the
gradients that are ready to be reduced.

A pass is a list of pieces that follow each other. Layers are folded into segments: their compute and transfers add up,
so folding keeps sums and changes only how finely other traffic lies between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceenv.sim.cluster.architecture import BACKWARD, Tensor
from paceenv.sim.cluster.collectives import Op
from paceenv.sim.cluster.program.program_tables import Compute, Start
from paceenv.sim.cluster.workload import BYTES, Gpu, Workload

MAX_SEGMENTS = 32
"""Parts of a pass of a stage at most, each of equal layers."""
STEP_SEGMENTS = 512
"""Parts of all forward passes of a step at most: with many micro-batches a pass has fewer, down to ``MIN_SEGMENTS``."""
MIN_SEGMENTS = 4
MAX_BUCKETS = 32
"""Buckets of a pass; with more, neighbours in the middle are folded into one."""
TENSOR, DATA = "tensor", "data"
"""Names of communicators."""

Piece = Compute | Start
"""The next piece needs a transfer that is started: it is waited for at once."""


def segments(layers: int, most: int) -> list[int]:
    """How many layers each of at most ``most`` segments has; the first and the last have one layer, as what they wait
    for hides behind nothing."""
    if layers <= most:
        return [1] * layers
    if most == 1:
        return [layers]
    middle, parts = layers - 2, most - 2
    ends = [0, *(1 + k * middle // parts for k in range(parts + 1)), layers]
    return [after - before for before, after in itertools.pairwise(ends)]


@dataclass(frozen=True)
class Passes:
    """Passes of a workload on one GPU."""

    workload: Workload
    gpu: Gpu
    tensor_s: Callable[[Op, float], float] | None
    """Seconds of a tensor-parallel collective of so many bytes, where it lies inside a node and meets nobody, and so
    costs only time."""

    @property
    def _rate(self) -> float:
        return self.gpu.achievable_tflops * 1e12

    def cuts(self) -> list[int]:
        """Layers of each segment of a stage."""
        one, most = self.workload, 1
        if (one.tensor_parallel > 1 and self.tensor_s is None) or one.zero_stage == 3:
            most = min(max(STEP_SEGMENTS // one.micro_batches, MIN_SEGMENTS), MAX_SEGMENTS)
        return segments(one.model.layers // one.pipeline_parallel, most)

    def segment(self, layers: int, *, backward: bool) -> list[Piece]:
        """A pass of so many layers, with what backward computes anew."""
        is_again = backward and self.workload.recompute == "full"
        again = self._pass(layers, backward=False, host=False) if is_again else []
        return _joined([*again, *self._pass(layers, backward=backward)])

    def head(self, *, backward: bool) -> list[Piece]:
        """The output layer, at the end of the last stage."""
        one = self.workload
        seconds = one.micro_batch * one.model.head_flops / one.tensor_parallel / self._rate
        return _joined([Compute(BACKWARD * seconds), *self.tensor(1)] if backward else [Compute(seconds)])

    def tensor(self, layers: int, op: Op = "all_reduce") -> list[Piece]:
        """What tensor-parallel ranks exchange: activations of so many layers."""
        one, size = self.workload, self.workload.activation_bytes
        if one.tensor_parallel == 1:
            return []
        if self.tensor_s is not None:
            return [Compute(layers * self.tensor_s(op, size))]
        return [Start(TENSOR, op, layers * size, parts=layers)]

    def _pass(self, layers: int, *, backward: bool, host: bool = True) -> list[Piece]:
        one, model, times = self.workload, self.workload.model, BACKWARD if backward else 1.0
        host_s = times * (one.host_overhead_s / (1.0 + BACKWARD)) * layers * host
        scale = layers * one.micro_batch / one.tensor_parallel / self._rate
        matrices_s = times * scale * 8.0 * model.sequence * model.hidden**2
        repeats = backward and one.recompute == "selective"
        attention_s = (times + repeats) * scale * model.attention_flops
        mlp_flops = 4.0 * model.sequence * model.hidden * model.mlp
        mlp_s = times * (layers * one.micro_batch * mlp_flops / one.tensor_parallel / self._rate)
        attention = [Compute(matrices_s + 0.5 * host_s), Compute(attention_s)]
        mlp, tensor = Compute(mlp_s + 0.5 * host_s), self.tensor(layers)
        if backward:
            return [mlp, *tensor, *reversed(attention), *tensor]
        return [*attention, *tensor, mlp, *tensor]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Computing that follows computing is one piece."""
    joined: list[Piece] = []
    for one in pieces:
        last = joined[-1] if joined else None
        if isinstance(one, Compute) and isinstance(last, Compute):
            joined[-1] = Compute(last.seconds + one.seconds)
        elif not (isinstance(one, Compute) and one.seconds == 0.0):
            joined.append(one)
    return joined


class Bucket(NamedTuple):
    """Gradients that are reduced together."""

    payload_bytes: float
    ready: float
    """Share of backward after which they are complete."""
    parts: int = 1


def buckets(gradients: Sequence[Tensor], bytes_each: int, first_bytes: float, cap_bytes: float) -> list[Bucket]:
    """Whole tensors in the order in which they are ready; a bucket that has reached its cap is closed.

    PyTorch's rule for ``DistributedDataParallel`` (``compute_bucket_assignment_by_size``).
    """
    total = sum(t.flops for t in gradients)
    closed, payload, flops, limit = [], 0.0, 0.0, first_bytes
    for i, tensor in enumerate(gradients):
        payload, flops = payload + tensor.parameters * bytes_each, flops + tensor.flops
        if payload >= limit or i == len(gradients) - 1:
            closed.append(Bucket(payload, min(flops / total, 1.0)))
            payload, limit = 0.0, cap_bytes
    return closed


def reduced(workload: Workload, stage: int) -> list[Bucket]:
    """The buckets of a stage, in the order in which they are ready; at most ``MAX_BUCKETS``.

    The first and the last stay, as they set when reducing begins and what is left over.
    """
    one = workload
    cut = buckets(one.gradients(stage), BYTES[one.gradient_dtype], one.first_bucket_bytes, one.bucket_bytes)
    if len(cut) > MAX_BUCKETS:
        middle, parts, kept = cut[1:-1], MAX_BUCKETS - 2, cut[:1]
        for k in range(parts):
            some = middle[k * len(middle) // parts : (k + 1) * len(middle) // parts]
            kept.append(Bucket(sum(bucket.payload_bytes for bucket in some), some[-1].ready, len(some)))
        cut = [*kept, cut[-1]]
    return cut if workload.overlap else [bucket._replace(ready=1.0) for bucket in cut]
