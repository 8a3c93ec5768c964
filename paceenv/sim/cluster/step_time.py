"""One optimizer step of one GPU from a description, when no rank is late and nothing is shared with others.

Kernels run at the GPU's achievable rate. Of communication, only data-parallel gradients (and the weights that ZeRO-3
prefetches) overlap with them. The optimizer's own time is left out: it is a few passes over memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceenv.core.errors import InputError
from paceenv.sim.cluster.architecture import BACKWARD, Generic, Tensor, Transformer
from paceenv.sim.cluster.collectives import Algorithm, Law
from paceenv.sim.cluster.pipeline import pipeline_s
from paceenv.sim.cluster.placement import Cost, Group, Links
from paceenv.sim.cluster.workload import BYTES, RESERVED_GB, Gpu, Memory, Workload


class Traffic(NamedTuple):
    """Payload the busiest node sends through its NICs in one direction in one step, bytes."""

    data: float = 0.0
    tensor: float = 0.0
    pipeline: float = 0.0
    embedding: float = 0.0
    """The tied embedding's gradients, summed over first and last stage."""

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class Step:
    """One optimizer step of one GPU."""

    compute_s: float
    """Busy beside data-parallel collectives: kernels, host overhead, bubble, tensor-parallel collectives, transfers."""
    overlap_s: float
    """How long before that the first gradients are ready to be reduced."""
    payload_bytes: float
    """What its data-parallel group all-reduces; for reduce-scatter and all-gather, the all-reduce of equal volume."""
    tail_bytes: float
    """The part of it that can only start when compute has ended: the last bucket, and the weights ZeRO gathers."""
    groups: int
    """Data-parallel groups: tensor times pipeline width."""
    group: Group
    """One of them: members, how many of them share a node, how many groups share a node's NICs."""
    samples: float
    """Per step of the whole job."""
    reduce_s: float
    """The data-parallel collectives that overlap with or follow compute, one after the other, alone on their links."""
    tail_s: float
    """The part of it that belongs to ``tail_bytes``."""
    step_s: float
    """Closed form of the whole step: compute, and the collectives as far as compute does not hide them."""
    kernel_s: float
    """Kernels alone, spread evenly over all GPUs."""
    kernel_flops: float
    """Of one of those kernels' GPUs, also what backward computes anew."""
    tensor_s: float
    """Of ``compute_s``: tensor-parallel collectives of the busiest stage."""
    flops: float
    """Of the whole job per step, without recomputation."""
    traffic: Traffic
    memory: Memory

    @property
    def members(self) -> int:
        return self.group.members

    @property
    def efficiency(self) -> float:
        """Kernel time as a share of the step."""
        return self.kernel_s / self.step_s

    @property
    def gpus(self) -> int:
        return self.group.members * self.groups

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_s


def plan(
    workload: Workload,
    gpu: Gpu,
    gpus: int,
    gpus_per_node: int,
    inside: Law,
    across: Law,
    *,
    algorithm: Algorithm = "auto",
) -> Step:
    """The step of a workload.

    Args:
        across: law of all NICs of a node together, whose bandwidth concurrent groups share.

    Raises:
        InputError: where the workload does not fit or does not divide.
    """
    replicas = _replicas(workload, gpus, gpus_per_node)
    memory = workload.memory(replicas)
    _check_memory(workload, gpu, memory, replicas)
    links = Links(inside, across, min(gpus_per_node, gpus), algorithm)
    stages = _stages(workload, gpu, links)
    group = links.data_group(replicas, workload.tensor_parallel)
    pipeline = _pipeline(workload, links, stages, replicas)
    embedding = pipeline.embedding
    if workload.zero_stage == 3:
        reduction = _fully_sharded(workload, links, group, stages[0])
    else:
        reduction = _bucketed(workload, links, group, stages[0], pipeline.time_s)
    m = workload.micro_batches
    samples = workload.batch * replicas / workload.context_parallel
    flops = samples * workload.sample_flops
    kernel_flops = sum(s.kernel_flops for s in stages) * m / workload.pipeline_parallel
    optimizer_s = [gpu.memory_s(workload.optimizer_bytes(s, replicas)) for s in range(len(stages))]
    moved_s = sum(one.moved_s * m + last for one, last in zip(stages, optimizer_s, strict=True)) / len(stages)
    after_s = embedding.time_s + max(optimizer_s)
    traffic = Traffic(
        reduction.nic_bytes, max(s.tensor.nic_bytes for s in stages) * m, pipeline.nic_bytes, embedding.nic_bytes
    )
    return Step(
        compute_s=reduction.compute_s + after_s,
        overlap_s=reduction.overlap_s,
        payload_bytes=reduction.payload_bytes,
        tail_bytes=reduction.tail_bytes,
        groups=workload.tensor_parallel * workload.pipeline_parallel,
        group=group,
        samples=samples,
        reduce_s=reduction.reduce_s,
        tail_s=reduction.tail_s,
        step_s=reduction.step_s + after_s,
        kernel_s=kernel_flops / (gpu.achievable_tflops * 1e12) + moved_s,
        kernel_flops=kernel_flops,
        tensor_s=max(s.tensor.time_s for s in stages) * m,
        flops=flops,
        traffic=traffic,
        memory=memory,
    )


def _replicas(workload: Workload, gpus: int, gpus_per_node: int) -> int:
    t, p, d = workload.tensor_parallel, workload.pipeline_parallel, workload.data_parallel
    if gpus < 1 or gpus_per_node < 1 or (gpus > gpus_per_node and gpus % gpus_per_node):
        raise InputError(f"{gpus} GPUs on nodes of {gpus_per_node}; allowed: whole nodes, or a part of one")
    node = min(gpus, gpus_per_node)
    if node % t and t % node:
        raise InputError(
            f"workload.tensor_parallel = {t}; allowed: a divisor or a multiple of the {node} GPUs of a node"
        )
    if gpus % (t * p) or (d is not None and d * t * p != gpus):
        ways, c = f"{d} x " if d is not None else "", workload.context_parallel
        shared = f", where data_parallel counts the {c} GPUs of context_parallel one by one" if c > 1 else ""
        raise InputError(
            f"workload.data_parallel x tensor_parallel x pipeline_parallel = {ways}{t} x {p} on {gpus} GPUs{shared}; "
            + ("allowed: a product of exactly that many" if d is not None else "allowed: a product that divides them")
        )
    return gpus // (t * p)


def _check_memory(workload: Workload, gpu: Gpu, memory: Memory, replicas: int) -> None:
    gb = 1e9
    if memory.total / gb + RESERVED_GB > gpu.memory_gb:
        parts = ", ".join(f"{name} {value / gb:.3g}" for name, value in memory._asdict().items())
        raise InputError(
            f"workload: {memory.total / gb + RESERVED_GB:.1f} GB on the fullest of {replicas} x "
            f"{workload.tensor_parallel} x {workload.pipeline_parallel} GPUs ({parts}, reserved {RESERVED_GB:g}); "
            f"allowed: at most gpu.memory_gb = {gpu.memory_gb:g}"
        )


class _Stage(NamedTuple):
    """One micro-batch on one GPU of a pipeline stage."""

    forward_s: float
    backward_s: float
    kernel_flops: float
    moved_s: float
    """Operations other than matrix products, where they have a time of their own."""
    tensor: Cost
    gradient_bytes: float
    weight_bytes: float


def _stages(workload: Workload, gpu: Gpu, links: Links) -> list[_Stage]:
    model, p, t = workload.model, workload.pipeline_parallel, workload.tensor_parallel
    rate, layers = gpu.achievable_tflops * 1e12, workload.model.layers // p
    mb = workload.micro_batch / workload.context_parallel
    host_s = layers * workload.host_overhead_s / (1.0 + BACKWARD)
    all_reduce = links.collective("all_reduce", links.tensor_group(t), workload.activation_bytes)
    stages = []
    for s in range(p):
        n = workload.stage_parameters(s)
        moved_s = _moved_s(workload, gpu, last=s == p - 1)
        gradient, weight = BYTES[workload.gradient_dtype], BYTES[workload.parameter_dtype]
        if isinstance(model, Generic):
            forward = mb * model.flops / (1.0 + BACKWARD)
            again = 0.0
            forward_calls = backward_calls = 0.0
        else:
            again = mb * layers * _recomputed(workload, model) / t
            head = mb * model.head_flops / t if s == p - 1 else 0.0
            forward = mb * layers * (model.layer_flops + workload.expert_flops) / t + head
            # two per layer and direction, again when a whole layer is computed anew; embedding forward, head backward
            forward_calls = 2.0 * layers + (s == 0)
            backward_calls = 2.0 * layers * (2 if workload.recompute == "full" else 1) + (s == p - 1)
        stages.append(
            _Stage(
                forward_s=forward / rate + moved_s[0] + host_s + forward_calls * all_reduce.time_s,
                backward_s=(BACKWARD * forward + again) / rate
                + moved_s[1]
                + BACKWARD * host_s
                + backward_calls * all_reduce.time_s,
                kernel_flops=(1.0 + BACKWARD) * forward + again,
                moved_s=sum(moved_s),
                tensor=all_reduce.times(forward_calls + backward_calls),
                gradient_bytes=n * gradient,
                weight_bytes=n * weight,
            )
        )
    return stages


def _moved_s(workload: Workload, gpu: Gpu, *, last: bool) -> tuple[float, float]:
    """Operations other than matrix products, of a micro-batch on one GPU of a stage: forward and backward, seconds."""
    model = workload.model
    if isinstance(model, Generic):
        return 0.0, 0.0
    layers = model.layers // workload.pipeline_parallel
    forward, backward = (
        layers * sum(workload.moved(backward=b)) + last * workload.moved_logits(backward=b) for b in (False, True)
    )
    if workload.recompute == "full":
        backward += layers * sum(workload.moved(backward=False))
    tokens = workload.micro_batch / workload.context_parallel * model.sequence
    return gpu.memory_s(tokens * forward), gpu.memory_s(tokens * backward)


def _recomputed(workload: Workload, model: Transformer) -> float:
    """Forward FLOPs of a layer and sample that backward repeats."""
    return {"none": 0.0, "selective": model.attention_flops, "full": model.layer_flops}[workload.recompute]


class _Pipeline(NamedTuple):
    """All micro-batches of a replica: time until the last backward, and what its stages exchange."""

    time_s: float
    nic_bytes: float
    embedding: Cost
    """All-reduce of the tied embedding's gradients between first and last stage, at the very end."""


def _pipeline(workload: Workload, links: Links, stages: list[_Stage], replicas: int) -> _Pipeline:
    p, t, m = workload.pipeline_parallel, workload.tensor_parallel, workload.micro_batches
    if p == 1:
        return _Pipeline(m * (stages[0].forward_s + stages[0].backward_s), 0.0, Cost(0.0, 0.0))
    block = t * replicas
    crossing = [links.crosses(s * block, (s + 1) * block) for s in range(p - 1)]
    # every tensor-parallel rank sends its part, which the receivers then gather (Narayanan et al. 2021, section 4.1)
    gather = links.collective("all_gather", links.tensor_group(t), workload.activation_bytes)
    sends = [links.send(workload.activation_bytes, block, t, c) for c in crossing]
    time_s = pipeline_s(
        [s.forward_s for s in stages], [s.backward_s for s in stages], m, [c.time_s + gather.time_s for c in sends]
    )
    # a node between others sends activations on and gradients back
    nic_bytes = m * min(sum(crossing), 2) * max(c.nic_bytes for c in sends)
    embedding = Cost(0.0, 0.0)
    if isinstance(workload.model, Transformer) and workload.model.tied_embeddings:
        payload = float(workload.model.embedding_parameters * BYTES[workload.gradient_dtype])
        embedding = links.send(payload, block, t, links.crosses(0, (p - 1) * block), rounds=2.0)
    return _Pipeline(time_s, nic_bytes, embedding)


class _Reduction(NamedTuple):
    """Data-parallel communication laid over the end of compute; fields as in :class:`Step`."""

    compute_s: float
    overlap_s: float
    payload_bytes: float
    tail_bytes: float
    reduce_s: float
    tail_s: float
    step_s: float
    nic_bytes: float


class Bucket(NamedTuple):
    """Gradients that are reduced together."""

    payload_bytes: float
    ready: float
    """Share of backward after which its last tensor is complete."""


def buckets(gradients: Sequence[Tensor], bytes_each: int, first_bytes: float, cap_bytes: float) -> list[Bucket]:
    """Whole tensors in the order in which they are ready; a bucket that has reached its cap is closed.

    PyTorch's rule for ``DistributedDataParallel`` (``compute_bucket_assignment_by_size``).
    """
    total = sum(t.flops for t in gradients)
    found, payload, flops, limit = [], 0.0, 0.0, first_bytes
    for i, tensor in enumerate(gradients):
        payload, flops = payload + tensor.parameters * bytes_each, flops + tensor.flops
        if payload >= limit or i == len(gradients) - 1:
            found.append(Bucket(payload, min(flops / total, 1.0)))
            payload, limit = 0.0, cap_bytes
    return found


def last_finish_s(ready_s: Sequence[float], collective_s: Sequence[float]) -> float:
    """When the last of several collectives has finished that follow each other on one link, in order."""
    free_s = 0.0
    for ready, duration in zip(ready_s, collective_s, strict=True):
        free_s = max(free_s, ready) + duration
    return free_s


def _bucketed(workload: Workload, links: Links, group: Group, stage: _Stage, compute_s: float) -> _Reduction:
    """Plain data parallelism, ZeRO-1 and ZeRO-2: the last micro-batch's backward hides what it can.

    The first stage ends last and has the most to reduce.
    """
    if group.members == 1:
        return _Reduction(compute_s, 0.0, 0.0, 0.0, 0.0, 0.0, compute_s, 0.0)
    sharded = workload.zero_stage > 0
    each = BYTES[workload.gradient_dtype]
    cut = buckets(workload.gradients(0), each, workload.first_bucket_bytes, workload.bucket_bytes)
    costs = [links.collective("reduce_scatter" if sharded else "all_reduce", group, b.payload_bytes) for b in cut]
    before_end_s = [(1.0 - b.ready) * stage.backward_s * workload.overlap for b in cut]
    payload = sum(b.payload_bytes for b in cut)
    durations_s = [c.time_s for c in costs]
    gather, weights = Cost(0.0, 0.0), 0.0
    if sharded:  # the updated weights, after the optimizer
        gather, weights = links.collective("all_gather", group, stage.weight_bytes), stage.weight_bytes
    end_s = last_finish_s([compute_s - b for b in before_end_s], durations_s)
    half = 0.5 if sharded else 1.0
    return _Reduction(
        compute_s,
        before_end_s[0],
        half * (payload + weights),
        half * ((cut[-1].payload_bytes if workload.overlap else payload) + weights),
        sum(durations_s) + gather.time_s,
        (durations_s[-1] if workload.overlap else sum(durations_s)) + gather.time_s,
        max(compute_s, end_s) + gather.time_s,
        sum(c.nic_bytes for c in costs) + gather.nic_bytes,
    )


def _fully_sharded(workload: Workload, links: Links, group: Group, stage: _Stage) -> _Reduction:
    """ZeRO-3: every layer's weights are gathered before its forward and again before its backward, one layer ahead.

    Gradients are reduce-scattered behind each layer's backward. All of it passes over the same links in order:
    ``2 (n-1)/n`` of the weights and ``(n-1)/n`` of the gradients for every micro-batch. Embedding and output layer are
    spread over the layers.
    """
    layers = workload.model.layers
    gather = links.collective("all_gather", group, stage.weight_bytes / layers)
    scatter = links.collective("reduce_scatter", group, stage.gradient_bytes / layers)
    forward_s, backward_s = stage.forward_s / layers, stage.backward_s / layers
    compute_s = free_s = start_s = 0.0
    for _micro_batch in range(workload.micro_batches):
        compute_s, free_s, _ = _prefetched(layers, forward_s, gather.time_s, 0.0, compute_s, free_s)
        compute_s, free_s, start_s = _prefetched(layers, backward_s, gather.time_s, scatter.time_s, compute_s, free_s)
    per_micro = gather.times(2.0 * layers).nic_bytes + scatter.times(layers).nic_bytes
    payload = 0.5 * (stage.weight_bytes + stage.gradient_bytes)
    return _Reduction(
        compute_s,
        compute_s - start_s,
        payload,
        0.5 * stage.gradient_bytes / layers,
        layers * (gather.time_s + scatter.time_s),
        scatter.time_s,
        max(compute_s, free_s),
        workload.micro_batches * per_micro,
    )


def _prefetched(
    layers: int, layer_s: float, gather_s: float, scatter_s: float, compute_s: float, free_s: float
) -> tuple[float, float, float]:
    """One pass over all layers: when compute and link are free again, and when the first gather began.

    The next layer's gather starts with a layer's compute, before the gradients of the one before are scattered.
    """
    begin_s = max(free_s, 0.0)
    there_s = free_s = begin_s + gather_s
    for layer in range(layers):
        start_s = max(compute_s, there_s)
        if layer + 1 < layers:
            there_s = free_s = max(free_s, start_s) + gather_s
        compute_s = start_s + layer_s
        if scatter_s:
            free_s = max(free_s, compute_s) + scatter_s
    return compute_s, free_s, begin_s
