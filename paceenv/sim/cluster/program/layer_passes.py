"""What a GPU does for one micro-batch on some layers: computing, and the transfers that the next layer needs.

A pass is a list of pieces. Compute and transfers follow each other, except where a context-parallel ring runs beside
attention. Layers are folded into segments: their compute and transfers add up, so folding keeps sums and changes only
how finely other traffic lies between them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from paceenv.sim.cluster.collectives import Op
from paceenv.sim.cluster.placement import Links
from paceenv.sim.cluster.workload import BACKWARD, BYTES, Generic, Gpu, Moved, Workload

MAX_SEGMENTS = 32
"""Parts of a pass of a stage at most, each of equal layers."""
STEP_SEGMENTS = 512
"""Parts of all forward passes of a step at most: with many micro-batches a pass has fewer, down to ``MIN_SEGMENTS``."""
MIN_SEGMENTS = 4
TENSOR, CONTEXT, EXPERTS = "tensor", "context", "experts"
"""Names of communicators."""


class Work(NamedTuple):
    """Computing."""

    seconds: float


class Transfer(NamedTuple):
    """A transfer that the next piece needs."""

    communicator: str
    op: Op
    payload_bytes: float
    parts: int


class Beside(NamedTuple):
    """A transfer beside computing; both are over before the next piece."""

    transfer: Transfer
    seconds: float


Piece = Work | Transfer | Beside


class Segment(NamedTuple):
    """Layers that are folded, in the order of the forward pass: some without experts, then some with them."""

    dense: int
    sparse: int

    @property
    def layers(self) -> int:
        return self.dense + self.sparse

    def parts(self, *, backward: bool) -> list[tuple[int, bool]]:
        """Its layers of one kind and whether they have experts, in the order of a pass."""
        found = [(layers, sparse) for layers, sparse in ((self.dense, False), (self.sparse, True)) if layers]
        return found[::-1] if backward else found


def segments(layers: int, most: int, expert_every: int | None = None) -> list[Segment]:
    """The segments of some layers; the first and the last have one layer, as what they wait for hides behind nothing.

    Args:
        layers: how many there are.
        most: segments at most; 1 folds all.
        expert_every: layers from one with experts to the next; None: none has them.
    """
    if layers <= most:
        ends = list(range(layers + 1))
    elif most == 1:
        ends = [0, layers]
    else:
        middle, parts = layers - 2, most - 2
        ends = [0, *(1 + k * middle // parts for k in range(parts + 1)), layers]
    before = [0 if expert_every is None else end // expert_every for end in ends]
    pairs = zip(itertools.pairwise(ends), itertools.pairwise(before), strict=True)
    return [Segment(b - a - (d - c), d - c) for (a, b), (c, d) in pairs]


@dataclass(frozen=True)
class Passes:
    """Passes of a workload on one GPU.

    Attributes:
        workload: the model and how it is split.
        gpu: the kind of GPU.
        links: laws of the links, for what is folded into compute.
        folds_tensor: whether tensor-parallel collectives lie inside a node and meet nobody, and so cost only time.
    """

    workload: Workload
    gpu: Gpu
    links: Links
    folds_tensor: bool

    @property
    def _rate(self) -> float:
        return self.gpu.achievable_tflops * 1e12

    @property
    def _samples(self) -> float:
        """Of a micro-batch on one GPU, in sequences of full length."""
        return self.workload.micro_batch / self.workload.context_parallel

    @property
    def _tokens(self) -> float:
        """Of a micro-batch on one GPU."""
        model = self.workload.model
        return 0.0 if isinstance(model, Generic) else self._samples * model.sequence

    def _moved_s(self, layers: int, sparse: bool, *, backward: bool) -> Moved:
        """Seconds in which memory is read and written beside matrix products."""
        one, tokens = self.workload, layers * self._tokens
        outer, scores, inner = (tokens * self.gpu.memory_s(b) for b in one.moved(backward=backward))
        return Moved(outer, scores, inner * (one.top_k * one.capacity_imbalance if sparse else 1.0))

    @property
    def _host_s(self) -> float:
        """Of one layer and forward pass."""
        return self.workload.host_overhead_s / (1.0 + BACKWARD)

    def cuts(self) -> list[Segment]:
        """The segments of one part of a stage."""
        one, most = self.workload, 1
        if self._explicit_tensor or one.experts > 1 or one.context_parallel > 1 or one.zero_stage == 3:
            most = min(max(STEP_SEGMENTS // (one.micro_batches * one.virtual_stages), MIN_SEGMENTS), MAX_SEGMENTS)
        layers = one.model.layers // (one.pipeline_parallel * one.virtual_stages)
        return segments(layers, most, one.expert_every if one.experts > 1 else None)

    @property
    def _explicit_tensor(self) -> bool:
        return self.workload.tensor_parallel > 1 and not self.folds_tensor

    def forward(self, segment: Segment) -> list[Piece]:
        """Of the layers of a segment."""
        parts = segment.parts(backward=False)
        return _joined([piece for layers, sparse in parts for piece in self._forward(layers, sparse)])

    def backward(self, segment: Segment) -> list[Piece]:
        """Of the layers of a segment, with what is computed anew."""
        found: list[Piece] = []
        for layers, sparse in segment.parts(backward=True):
            if self.workload.recompute == "full":
                found += self._forward(layers, sparse, host=False)
            found += self._backward(layers, sparse)
        return _joined(found)

    def head(self, *, backward: bool) -> list[Piece]:
        """The output layer, at the end of the last stage."""
        model = self.workload.model
        if isinstance(model, Generic):
            return []
        seconds = self._samples * model.head_flops / self.workload.tensor_parallel / self._rate
        moved_s = self._tokens * self.gpu.memory_s(self.workload.moved_logits(backward=backward))
        if backward:
            return _joined([Work(BACKWARD * seconds + moved_s), *self._tensor(1)])
        return _joined([Work(seconds + moved_s)])

    def embedding(self) -> list[Piece]:
        """The token embedding, at the start of the first stage: cut by rows, so that its outputs are summed."""
        return [] if isinstance(self.workload.model, Generic) else _joined(self._tensor(1))

    def received(self) -> list[Piece]:
        """What a stage does with activations that arrive in shares: tensor-parallel ranks gather them."""
        one = self.workload
        if one.tensor_parallel == 1 or one.sequence_parallel:
            return []
        if self._explicit_tensor:
            return [Transfer(TENSOR, "all_gather", one.activation_bytes, 1)]
        group = self.links.tensor_group(one.tensor_parallel)
        return [Work(self.links.collective("all_gather", group, one.activation_bytes).time_s)]

    def _forward(self, layers: int, sparse: bool, *, host: bool = True) -> list[Piece]:
        one, model = self.workload, self.workload.model
        host_s = self._host_s * layers * host
        if isinstance(model, Generic):
            flops = self._samples * model.flops / (1.0 + BACKWARD) / model.layers
            return [Work(layers * flops / self._rate + host_s)]
        scale = layers * self._samples / one.tensor_parallel / self._rate
        moved_s = self._moved_s(layers, sparse, backward=False)
        matrices_s = scale * 8.0 * model.sequence * model.hidden**2 + 0.5 * moved_s.outer
        core_s = scale * model.attention_flops + moved_s.scores
        mlp_s = self._mlp_s(layers, sparse) + 0.5 * moved_s.outer + moved_s.inner
        return [
            Work(matrices_s + 0.5 * host_s),
            *self._attention(core_s, layers, 1.0),
            *self._tensor(layers),
            *self._exchange(layers, sparse),
            Work(mlp_s + 0.5 * host_s),
            *self._exchange(layers, sparse),
            *self._tensor(layers),
        ]

    def _backward(self, layers: int, sparse: bool) -> list[Piece]:
        one, model, host_s = self.workload, self.workload.model, BACKWARD * self._host_s * layers
        if isinstance(model, Generic):
            flops = self._samples * model.flops / (1.0 + BACKWARD) / model.layers
            return [Work(BACKWARD * layers * flops / self._rate + host_s)]
        scale = layers * self._samples / one.tensor_parallel / self._rate
        moved_s = self._moved_s(layers, sparse, backward=True)
        matrices_s = BACKWARD * scale * 8.0 * model.sequence * model.hidden**2 + 0.5 * moved_s.outer
        core_s = (BACKWARD + (one.recompute == "selective")) * scale * model.attention_flops + moved_s.scores
        mlp_s = BACKWARD * self._mlp_s(layers, sparse) + 0.5 * moved_s.outer + moved_s.inner
        return [
            *self._exchange(layers, sparse),
            Work(mlp_s + 0.5 * host_s),
            *self._exchange(layers, sparse),
            *self._tensor(layers),
            *self._attention(core_s, layers, 2.0),
            Work(matrices_s + 0.5 * host_s),
            *self._tensor(layers),
        ]

    def _mlp_s(self, layers: int, sparse: bool) -> float:
        """Forward, on the busiest GPU where layers have experts (``sparse``)."""
        one, model = self.workload, self.workload.model
        assert not isinstance(model, Generic)
        flops = 4.0 * model.sequence * model.hidden * model.mlp
        flops *= one.top_k * one.capacity_imbalance if sparse else 1.0
        return layers * self._samples * flops / one.tensor_parallel / self._rate

    def _tensor(self, layers: int) -> list[Piece]:
        """One all-reduce of activations a layer, or a reduce-scatter and an all-gather of the same bytes."""
        one, size = self.workload, self.workload.activation_bytes
        if one.tensor_parallel == 1:
            return []
        ops: tuple[Op, ...] = ("reduce_scatter", "all_gather") if one.sequence_parallel else ("all_reduce",)
        if self.folds_tensor:
            group = self.links.tensor_group(one.tensor_parallel)
            return [Work(layers * sum(self.links.collective(op, group, size).time_s for op in ops))]
        return [Transfer(TENSOR, op, layers * size, layers) for op in ops]

    def _exchange(self, layers: int, sparse: bool) -> list[Piece]:
        """The all-to-all that brings tokens to their experts, or back."""
        one = self.workload
        if not sparse or one.expert_parallel == 1:
            return []
        size = one.activation_bytes / one.tensor_parallel * one.top_k * one.capacity_imbalance
        return [Transfer(EXPERTS, "all_to_all", layers * size, layers)]

    def _attention(self, core_s: float, layers: int, passes: float) -> list[Piece]:
        """Scores and weighted sums, beside the ring of keys and values; backward sends their gradients too."""
        one, model = self.workload, self.workload.model
        if one.context_parallel == 1 or isinstance(model, Generic):
            return [Work(core_s)]
        tokens = one.micro_batch * model.sequence
        size = 2.0 * tokens * model.hidden / one.tensor_parallel * BYTES[one.activation_dtype]
        return [Beside(Transfer(CONTEXT, "all_gather", passes * layers * size, layers), core_s)]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Computing that follows computing is one piece."""
    found: list[Piece] = []
    for one in pieces:
        last = found[-1] if found else None
        if isinstance(one, Work) and isinstance(last, Work):
            found[-1] = Work(last.seconds + one.seconds)
        elif not (isinstance(one, Work) and one.seconds == 0.0):
            found.append(one)
    return found


def seconds_of(pieces: list[Piece]) -> float:
    """Computing in some pieces."""
    return sum(one.seconds for one in pieces if not isinstance(one, Transfer))
