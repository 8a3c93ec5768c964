"""Which gradients of a stage are reduced together, over which ranks, and when in a backward pass they are ready."""

from __future__ import annotations

from typing import NamedTuple

from paceenv.sim.cluster.step_time import Bucket, buckets
from paceenv.sim.cluster.workload import BACKWARD, BYTES, Generic, Tensor, Workload

MAX_BUCKETS = 32
"""Buckets of a pass and communicator; with more, neighbours in the middle are folded into one."""
DATA, EXPERT_DATA = "data", "expert_data"
"""Names of communicators."""


class Reduced(NamedTuple):
    """Gradients that are reduced together."""

    communicator: str
    payload_bytes: float
    ready: float
    """Share of the pass after which they are complete."""
    parts: int


def reduced(workload: Workload, stage: int, part: int) -> list[Reduced]:
    """The buckets of one part of a stage, in the order in which they are ready.

    Args:
        workload: the model and how it is split.
        stage: of the pipeline.
        part: of the stage, from input to output.
    """
    each = BYTES[workload.gradient_dtype]
    found: list[Reduced] = []
    for name, tensors in _tensors(workload, stage, part).items():
        cut = buckets(tensors, each, workload.first_bucket_bytes, workload.bucket_bytes)
        cut = [one for one in cut if one.payload_bytes > 0.0]
        found += [Reduced(name, *one) for one in _folded(cut)]
    if not workload.overlap:
        found = [one._replace(ready=1.0) for one in found]
    return sorted(found, key=lambda one: one.ready)


class _Folded(NamedTuple):
    payload_bytes: float
    ready: float
    parts: int


def _folded(cut: list[Bucket]) -> list[_Folded]:
    """At most ``MAX_BUCKETS``: the first and the last stay, as they set when reducing begins and what is left over."""
    if len(cut) <= MAX_BUCKETS:
        return [_Folded(*one, 1) for one in cut]
    middle, parts = cut[1:-1], MAX_BUCKETS - 2
    found = [_Folded(*cut[0], 1)]
    for k in range(parts):
        some = middle[k * len(middle) // parts : (k + 1) * len(middle) // parts]
        found.append(_Folded(sum(one.payload_bytes for one in some), some[-1].ready, len(some)))
    return [*found, _Folded(*cut[-1], 1)]


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
        layer, tensor = divmod(at - start, per_layer)  # from the output on
        if layer % workload.expert_every == 0 and tensor < len(of_mlp):
            flops = own[at].flops + more
            dense[at], sparse[at] = Tensor(0.0, flops), Tensor(experts, flops)
    return {DATA: dense, EXPERT_DATA: sparse}
