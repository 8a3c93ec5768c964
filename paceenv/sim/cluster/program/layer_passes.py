"""What a GPU does for one micro-batch on some layers: computing, the transfers that the next layer needs, and the
gradients that are ready to be reduced.

A pass is a list of pieces. Compute and transfers follow each other, except where a context-parallel ring runs beside
attention. Layers are folded into segments: their compute and transfers add up, so folding keeps sums and changes only
how finely other traffic lies between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceenv.sim.cluster.architecture import BACKWARD, Generic, Tensor
from paceenv.sim.cluster.collectives import Op
from paceenv.sim.cluster.program.program_tables import Compute, Start
from paceenv.sim.cluster.workload import BYTES, Gpu, Moved, Workload

MAX_SEGMENTS = 32
"""Parts of a pass of a stage at most, each of equal layers."""
STEP_SEGMENTS = 512
"""Parts of all forward passes of a step at most: with many micro-batches a pass has fewer, down to ``MIN_SEGMENTS``."""
MIN_SEGMENTS = 4
MAX_BUCKETS = 32
"""Buckets of a pass and communicator; with more, neighbours in the middle are folded into one."""
TENSOR, CONTEXT, EXPERTS, DATA, EXPERT_DATA = "tensor", "context", "experts", "data", "expert_data"
"""Names of communicators."""


class Beside(NamedTuple):
    """A transfer beside computing; both are over before the next piece."""

    transfer: Start
    seconds: float


Piece = Compute | Start | Beside
"""The next piece needs a transfer that is started: it is waited for at once."""


def _transfer(communicator: str, op: Op, payload_bytes: float, parts: int) -> Start:
    return Start(communicator, op, payload_bytes, name=communicator, parts=parts)


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

    @property
    def _samples(self) -> float:
        """Of a micro-batch on one GPU, in sequences of full length."""
        return self.workload.micro_batch / self.workload.context_parallel

    @property
    def _tokens(self) -> float:
        """Of a micro-batch on one GPU."""
        return self._samples * self.workload.model.sequence

    def _moved_s(self, layers: int, *, backward: bool) -> Moved:
        """Seconds in which memory is read and written beside matrix products."""
        one, tokens = self.workload, layers * self._tokens
        outer, scores, inner = (tokens * self.gpu.memory_s(b) for b in one.moved(backward=backward))
        return Moved(outer, scores, inner * one.top_k)

    @property
    def _host_s(self) -> float:
        """Of one layer and forward pass."""
        return self.workload.host_overhead_s / (1.0 + BACKWARD)

    def cuts(self) -> list[int]:
        """Layers of each segment of one part of a stage."""
        one, most = self.workload, 1
        if self._explicit_tensor or one.experts > 1 or one.context_parallel > 1 or one.zero_stage == 3:
            most = min(max(STEP_SEGMENTS // (one.micro_batches * one.virtual_stages), MIN_SEGMENTS), MAX_SEGMENTS)
        layers = one.model.layers // (one.pipeline_parallel * one.virtual_stages)
        return segments(layers, most)

    @property
    def _explicit_tensor(self) -> bool:
        return self.workload.tensor_parallel > 1 and self.tensor_s is None

    def forward(self, layers: int) -> list[Piece]:
        """Of so many layers."""
        return _joined(self._pass(layers, backward=False))

    def backward(self, layers: int) -> list[Piece]:
        """Of so many layers, with what is computed anew."""
        again = self._pass(layers, backward=False, host=False) if self.workload.recompute == "full" else []
        return _joined([*again, *self._pass(layers, backward=True)])

    def head(self, *, backward: bool) -> list[Piece]:
        """The output layer, at the end of the last stage."""
        seconds = self._samples * self.workload.model.head_flops / self.workload.tensor_parallel / self._rate
        moved_s = self._tokens * self.gpu.memory_s(self.workload.moved_logits(backward=backward))
        if backward:
            return _joined([Compute(BACKWARD * seconds + moved_s), *self._tensor(1)])
        return _joined([Compute(seconds + moved_s)])

    def embedding(self) -> list[Piece]:
        """The token embedding, at the start of the first stage: cut by rows, so that its outputs are summed."""
        return _joined(self._tensor(1))

    def received(self) -> list[Piece]:
        """What a stage does with activations that arrive in shares: tensor-parallel ranks gather them."""
        one = self.workload
        if one.tensor_parallel == 1 or one.sequence_parallel:
            return []
        if self.tensor_s is None:
            return [_transfer(TENSOR, "all_gather", one.activation_bytes, 1)]
        return [Compute(self.tensor_s("all_gather", one.activation_bytes))]

    def _pass(self, layers: int, *, backward: bool, host: bool = True) -> list[Piece]:
        one, model, times = self.workload, self.workload.model, BACKWARD if backward else 1.0
        host_s = times * self._host_s * layers * host
        if isinstance(model, Generic):
            flops = self._samples * model.flops / (1.0 + BACKWARD) / model.layers
            return [Compute(times * layers * flops / self._rate + host_s)]
        scale = layers * self._samples / one.tensor_parallel / self._rate
        moved_s = self._moved_s(layers, backward=backward)
        matrices_s = times * scale * 8.0 * model.sequence * model.hidden**2 + 0.5 * moved_s.outer
        repeats = backward and one.recompute == "selective"
        core_s = (times + repeats) * scale * model.attention_flops + moved_s.scores
        flops = 4.0 * model.sequence * model.hidden * model.mlp * one.top_k  # as many experts as a token goes to
        mlp_s = times * (layers * self._samples * flops / one.tensor_parallel / self._rate) + 0.5 * moved_s.outer
        matrices = [Compute(matrices_s + 0.5 * host_s)]
        exchange, tensor = self._exchange(layers), self._tensor(layers)
        attention = self._attention(core_s, layers, times)
        mlp = [*exchange, Compute(mlp_s + moved_s.inner + 0.5 * host_s), *exchange]
        if backward:
            return [*mlp, *tensor, *attention, *matrices, *tensor]
        return [*matrices, *attention, *tensor, *mlp, *tensor]

    def _tensor(self, layers: int) -> list[Piece]:
        """One all-reduce of activations a layer, or a reduce-scatter and an all-gather of the same bytes."""
        one, size = self.workload, self.workload.activation_bytes
        if one.tensor_parallel == 1:
            return []
        ops: tuple[Op, ...] = ("reduce_scatter", "all_gather") if one.sequence_parallel else ("all_reduce",)
        if self.tensor_s is not None:
            return [Compute(layers * sum(self.tensor_s(op, size) for op in ops))]
        return [_transfer(TENSOR, op, layers * size, layers) for op in ops]

    def _exchange(self, layers: int) -> list[Piece]:
        """The all-to-all that brings tokens to their experts, or back."""
        one = self.workload
        if one.expert_parallel == 1:
            return []
        size = one.activation_bytes / one.tensor_parallel * one.top_k
        return [_transfer(EXPERTS, "all_to_all", layers * size, layers)]

    def _attention(self, core_s: float, layers: int, passes: float) -> list[Piece]:
        """Scores and weighted sums, beside the ring of keys and values; backward sends their gradients too."""
        one, model = self.workload, self.workload.model
        if one.context_parallel == 1:
            return [Compute(core_s)]
        tokens = one.micro_batch * model.sequence
        size = 2.0 * tokens * model.hidden / one.tensor_parallel * BYTES[one.activation_dtype]
        return [Beside(_transfer(CONTEXT, "all_gather", passes * layers * size, layers), core_s)]


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


def seconds_of(pieces: list[Piece]) -> float:
    """Computing in some pieces."""
    return sum(one.seconds for one in pieces if not isinstance(one, Start))


class Bucket(NamedTuple):
    """Gradients that are reduced together."""

    communicator: str
    payload_bytes: float
    ready: float
    """Share of backward after which they are complete."""
    parts: int = 1


def buckets(
    gradients: Sequence[Tensor], bytes_each: int, first_bytes: float, cap_bytes: float, communicator: str = DATA
) -> list[Bucket]:
    """Whole tensors in the order in which they are ready; a bucket that has reached its cap is closed.

    PyTorch's rule for ``DistributedDataParallel`` (``compute_bucket_assignment_by_size``).
    """
    total = sum(t.flops for t in gradients)
    closed, payload, flops, limit = [], 0.0, 0.0, first_bytes
    for i, tensor in enumerate(gradients):
        payload, flops = payload + tensor.parameters * bytes_each, flops + tensor.flops
        if payload >= limit or i == len(gradients) - 1:
            closed.append(Bucket(communicator, payload, min(flops / total, 1.0)))
            payload, limit = 0.0, cap_bytes
    return closed


def reduced(workload: Workload, stage: int, part: int) -> list[Bucket]:
    """The buckets of one part of a stage, in the order in which they are ready."""
    each = BYTES[workload.gradient_dtype]
    reductions: list[Bucket] = []
    for name, tensors in _tensors(workload, stage, part).items():
        cut = buckets(tensors, each, workload.first_bucket_bytes, workload.bucket_bytes, name)
        reductions += _folded([one for one in cut if one.payload_bytes > 0.0])
    if not workload.overlap:
        reductions = [one._replace(ready=1.0) for one in reductions]
    return sorted(reductions, key=lambda one: one.ready)


def _folded(cut: list[Bucket]) -> list[Bucket]:
    """At most ``MAX_BUCKETS``: the first and the last stay, as they set when reducing begins and what is left over."""
    if len(cut) <= MAX_BUCKETS:
        return cut
    middle, parts, reductions = cut[1:-1], MAX_BUCKETS - 2, cut[:1]
    for k in range(parts):
        some = middle[k * len(middle) // parts : (k + 1) * len(middle) // parts]
        payload_bytes = sum(one.payload_bytes for one in some)
        reductions.append(some[-1]._replace(payload_bytes=payload_bytes, parts=len(some)))
    return [*reductions, cut[-1]]


def _tensors(workload: Workload, stage: int, part: int) -> dict[str, list[Tensor]]:
    """Tensors of a part of a stage by communicator, each list with the FLOPs of all."""
    model, p, v, t = workload.model, workload.pipeline_parallel, workload.virtual_stages, workload.tensor_parallel
    whole = workload.gradients(stage)
    if isinstance(model, Generic):
        return {DATA: whole}
    per_layer, layers = len(model.layer_tensors()), model.layers // (p * v)
    before, first = int(stage == p - 1), (v - 1 - part) * layers * per_layer
    own = whole[before + first : before + first + layers * per_layer]
    if part == v - 1:
        own = whole[:before] + own
    if part == 0:
        own += whole[before + v * layers * per_layer :]
    if workload.experts == 1:
        return {DATA: own}
    of_mlp = [tensor.parameters for tensor in model.layer_tensors()[:2]]
    experts = 0.5 * (workload.expert_parameters + sum(of_mlp)) / t
    more = (1.0 + BACKWARD) * workload.expert_flops / len(of_mlp)
    dense, sparse = list(own), [Tensor(0.0, one.flops) for one in own]
    start = before if part == v - 1 else 0
    for at in range(start, start + layers * per_layer):
        if (at - start) % per_layer < len(of_mlp):
            flops = own[at].flops + more
            dense[at], sparse[at] = Tensor(0.0, flops), Tensor(experts, flops)
    return {DATA: dense, EXPERT_DATA: sparse}
