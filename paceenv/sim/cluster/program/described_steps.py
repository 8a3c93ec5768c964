"""From a described workload to a step as a program: every collective where it happens, on the communicator that has it.

Ranks are numbered node by node: tensor-parallel neighbours first, then context-parallel ones, then replicas, pipeline
stages outermost (Megatron-LM's order), so that what communicates most stays inside a node. Ranks of a stage do the
same, so a stage is a role.

What the next piece of work needs is waited for at once. What nobody needs until the optimizer may be held back
(``can_wait``): gradient buckets, reduce-scatters, all-reduces between shards.

Simplifications. Layers and buckets are folded (:mod:`paceenv.sim.cluster.program.layer_passes`). A receive is posted at
the start of the step, so that a sender never waits. Under pipeline parallelism, weights of ZeRO-3 are gathered with the
first micro-batch and stay until the step's end, as in torchtitan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceenv.core.errors import InputError
from paceenv.sim.cluster.architecture import Transformer
from paceenv.sim.cluster.collectives import Op
from paceenv.sim.cluster.environment import Job
from paceenv.sim.cluster.fabric import Fabric
from paceenv.sim.cluster.pipeline import interleaved
from paceenv.sim.cluster.program.layer_passes import (
    CONTEXT,
    DATA,
    EXPERT_DATA,
    EXPERTS,
    TENSOR,
    Beside,
    Bucket,
    Passes,
    Piece,
    reduced,
    seconds_of,
)
from paceenv.sim.cluster.program.program_tables import Compute, Instruction, Start, StepPlan, Wait
from paceenv.sim.cluster.transfers import use_of
from paceenv.sim.cluster.workload import BYTES, RESERVED_GB, Gpu, Workload

SHARDS, REPLICAS, EMBEDDING = "shards", "replicas", "embedding"
"""Names of communicators."""


class Places:
    """Which ranks form the process groups of each communicator."""

    def __init__(self, workload: Workload, job: Job) -> None:
        self._workload, self._job = workload, job
        t, p = workload.tensor_parallel, workload.pipeline_parallel
        self._check(job.ranks, job.ranks_per_node)
        self.replicas = job.ranks // (t * p)
        """Of every gradient; context-parallel ranks count, as each has a part of the tokens."""
        self.block = t * self.replicas
        for key in ("expert_parallel", "shard_group"):
            size = getattr(workload, key) or 1
            if self.replicas % size:
                raise InputError(f"workload.{key} = {size}; allowed: a divisor of the {self.replicas} replicas")

    def _check(self, ranks: int, ranks_per_node: int) -> None:
        one, node = self._workload, min(ranks, ranks_per_node)
        t, p, d, c = one.tensor_parallel, one.pipeline_parallel, one.data_parallel, one.context_parallel
        if node % t and t % node:
            raise InputError(
                f"workload.tensor_parallel = {t}; allowed: a divisor or a multiple of the {node} GPUs of a node"
            )
        if ranks % (t * p * c) or (d is not None and d * t * p != ranks):
            ways = f"{d} x {t} x {p}" if d is not None else f"{t} x {p}" + (f" x {c}" if c > 1 else "")
            shared = f", where data_parallel counts the {c} GPUs of context_parallel one by one" if c > 1 else ""
            allowed = "a product of exactly that many" if d is not None else "a product that divides them"
            raise InputError(
                f"workload.data_parallel x tensor_parallel x pipeline_parallel = {ways} on {ranks} GPUs{shared}; "
                f"allowed: {allowed}"
            )

    @property
    def folds_tensor(self) -> bool:
        """Whether tensor-parallel groups lie inside nodes and no other group uses the links there."""
        t, node = self._workload.tensor_parallel, self._job.ranks_per_node
        if t > node or node % t:
            return False
        are_replicas_apart = self.replicas == 1 or node == t
        return are_replicas_apart and (self._workload.pipeline_parallel == 1 or self.block % node == 0)

    def communicators(self) -> dict[str, list[list[int]]]:
        """All that a workload can have."""
        one, D = self._workload, self.replicas
        t, p, block, ranks = one.tensor_parallel, one.pipeline_parallel, self.block, self._job.ranks
        communicators = {
            TENSOR: [list(range(first, first + t)) for first in range(0, ranks, t)],
            CONTEXT: self._data(1, one.context_parallel),
            EXPERTS: self._data(1, one.expert_parallel),
            DATA: self._data(1, D),
            SHARDS: self._data(1, one.shard_group or D),
            EXPERT_DATA: self._data(one.expert_parallel, D // one.expert_parallel),
            REPLICAS: self._data(one.shard_group or D, D // (one.shard_group or D)),
            EMBEDDING: [[rank, rank + (p - 1) * block] for rank in range(block)],
        }
        for s in range(p):
            ahead, behind = (s + 1) % p, (s - 1) % p
            communicators[activations_of(s)] = [[s * block + k, ahead * block + k] for k in range(block)]
            communicators[gradients_of(s)] = [[s * block + k, behind * block + k] for k in range(block)]
        return communicators

    def _data(self, stride: int, size: int) -> list[list[int]]:
        """Groups of replicas, ``stride`` apart, of every stage and tensor-parallel place."""
        t = self._workload.tensor_parallel
        return [
            [stage + t * (first + k + stride * i) + place for i in range(size)]
            for stage in range(0, self._job.ranks, self.block)
            for first in range(0, self.replicas, stride * size)
            for k in range(stride)
            for place in range(t)
        ]


def activations_of(stage: int) -> str:
    """The communicator on which a stage sends activations on."""
    return f"activations_{stage}"


def gradients_of(stage: int) -> str:
    """The communicator on which a stage sends their gradients back."""
    return f"gradients_{stage}"


def described_plan(workload: Workload, gpu: Gpu, fabric: Fabric, job: Job) -> StepPlan:
    """What every rank of a described job does in a step."""
    places = Places(workload, job)
    _check_memory(workload, gpu, places.replicas)
    use, tensor = use_of(fabric, job), list(range(workload.tensor_parallel))

    def tensor_s(op: Op, payload_bytes: float) -> float:
        one = use(Start(TENSOR, op, payload_bytes), tensor)
        return one.alone_s + one.latency_s

    passes = Passes(workload, gpu, tensor_s if places.folds_tensor else None)
    roles = [_Role(workload, passes, places.replicas, s).instructions() for s in range(workload.pipeline_parallel)]
    used = {one.communicator for role in roles for one in role if isinstance(one, Start)}
    every = {name: groups for name, groups in places.communicators().items() if name in used}
    block = places.block
    role_R = [rank // block for rank in range(job.ranks)]
    wide = workload.tensor_parallel * workload.context_parallel
    return StepPlan(role_R, roles, every, [rank % block // wide for rank in range(job.ranks)])


def _check_memory(workload: Workload, gpu: Gpu, replicas: int) -> None:
    memory, gb = workload.memory(replicas), 1e9
    if memory.total / gb + RESERVED_GB > gpu.memory_gb:
        parts = ", ".join(f"{name} {value / gb:.3g}" for name, value in memory._asdict().items())
        raise InputError(
            f"workload: {memory.total / gb + RESERVED_GB:.1f} GB on the fullest of {replicas} x "
            f"{workload.tensor_parallel} x {workload.pipeline_parallel} GPUs ({parts}, reserved {RESERVED_GB:g}); "
            f"allowed: at most gpu.memory_gb = {gpu.memory_gb:g}"
        )


@dataclass
class _Role:
    """What the ranks of one stage do."""

    workload: Workload
    passes: Passes
    replicas: int
    stage: int
    _rows: list[Instruction] = field(default_factory=list)
    _begun: dict[str, int] = field(default_factory=dict)
    """Transfers of each communicator so far."""
    _held: list[Wait] = field(default_factory=list)
    """Reductions under way."""
    _behind: tuple[Wait | None, float, int] | None = None
    """The segment whose shards are still to be summed over the replicas: what to wait for, bytes of a shard, layers."""

    def _start(self, one: Start) -> Wait:
        wait = Wait(one.communicator, self._begun.get(one.communicator, 0))
        self._begun[one.communicator] = wait.number + 1
        self._rows.append(one)
        return wait

    def _compute(self, seconds: float, micro_batch: int) -> None:
        if seconds > 0.0:
            self._rows.append(Compute(seconds, micro_batch))

    def _run(self, pieces: Sequence[Piece], micro_batch: int) -> None:
        for one in pieces:
            if isinstance(one, Compute):
                self._compute(one.seconds, micro_batch)
                continue
            wait = self._start(one if isinstance(one, Start) else one.transfer)
            if isinstance(one, Beside):
                self._compute(one.seconds, micro_batch)
            self._rows.append(wait)

    def instructions(self) -> list[Instruction]:
        one, p = self.workload, self.workload.pipeline_parallel
        if one.zero_stage == 3 and p == 1:
            self._fully_sharded()
        else:
            receives = {backward: self._post_receives(backward=backward) for backward in (False, True)}
            for backward, i, part in interleaved(self.stage, p, one.micro_batches, one.virtual_stages):
                wait = receives[backward].get((i, part))
                if wait is not None:
                    self._rows.append(wait)
                    self._run(self.passes.received(), i)
                self._pass(backward, i, part)
                if self._part_after(self.stage, backward, part) is not None:
                    self._start(self._message(self.stage, backward))
        self._finish()
        return self._rows

    def _post_receives(self, *, backward: bool) -> dict[tuple[int, int], Wait]:
        """Start all receives of one direction; returns what each (micro-batch, part) waits for."""
        one, p, v = self.workload, self.workload.pipeline_parallel, self.workload.virtual_stages
        sender = (self.stage + (1 if backward else -1)) % p
        waits = {}
        for is_backward, i, part in interleaved(sender, p, one.micro_batches, v):
            to = self._part_after(sender, backward, part)
            if is_backward == backward and to is not None:
                waits[i, to] = self._start(self._message(sender, backward))
        return waits

    def _part_after(self, sender: int, backward: bool, part: int) -> int | None:
        """Which part of its stage the receiver goes on with; None where nobody does."""
        p, v = self.workload.pipeline_parallel, self.workload.virtual_stages
        to = part + (sender == (0 if backward else p - 1)) * (-1 if backward else 1)
        return to if p > 1 and 0 <= to < v else None

    def _message(self, sender: int, backward: bool) -> Start:
        name = gradients_of(sender) if backward else activations_of(sender)
        return Start(name, "send", self.workload.activation_bytes / self.workload.tensor_parallel, name=name)

    def _pieces(self, backward: bool, part: int) -> list[list[Piece]]:
        """A pass of a part of the stage, segment by segment, in the order of computing."""
        one, v = self.workload, self.workload.virtual_stages
        cuts = self.passes.cuts()
        if backward:
            segments = [self.passes.backward(layers) for layers in reversed(cuts)]
        else:
            segments = [self.passes.forward(layers) for layers in cuts]
        if self.stage == one.pipeline_parallel - 1 and part == v - 1:
            at = 0 if backward else len(segments) - 1
            head = self.passes.head(backward=backward)
            segments[at] = head + segments[at] if backward else segments[at] + head
        if self.stage == 0 and part == 0 and not backward:
            segments[0] = self.passes.embedding() + segments[0]
        return segments

    def _pass(self, backward: bool, i: int, part: int) -> None:
        one, cut_pieces = self.workload, self._pieces(backward, part)
        if one.zero_stage == 3 and not backward and i == 0:
            cuts = self.passes.cuts()
            there = self._gather(cuts[:1])
            for k, segment in enumerate(cut_pieces):
                self._rows += there
                there = self._gather(cuts[k + 1 : k + 2])
                self._run(segment, i)
            return
        pieces = [piece for segment in cut_pieces for piece in segment]
        if backward and self.replicas > 1 and i == one.micro_batches - 1:
            cut = reduced(one, self.stage, part)
            self._reducing(pieces, i, [b for b in cut if b.communicator == DATA or self.replicas > one.expert_parallel])
        else:
            self._run(pieces, i)

    def _reducing(self, pieces: list[Piece], i: int, cut: list[Bucket]) -> None:
        """A backward pass whose buckets are handed over when they are ready."""
        op: Op = "reduce_scatter" if self.workload.zero_stage else "all_reduce"
        whole_s, done_s = seconds_of(pieces), 0.0
        waiting = list(cut)

        def hand_over(until_s: float) -> None:
            while waiting and waiting[0].ready * whole_s <= until_s * (1.0 + 1e-12):
                one = waiting.pop(0)
                start = Start(one.communicator, op, one.payload_bytes, True, name="gradients", parts=one.parts)
                self._held.append(self._start(start))

        for one in pieces:
            if isinstance(one, Compute):
                left_s = one.seconds
                while waiting and waiting[0].ready * whole_s < done_s + left_s:
                    first_s = max(waiting[0].ready * whole_s - done_s, 0.0)
                    self._compute(first_s, i)
                    done_s, left_s = done_s + first_s, left_s - first_s
                    hand_over(done_s)
                self._compute(left_s, i)
                done_s += left_s
            else:
                self._run([one], i)
                done_s += one.seconds if isinstance(one, Beside) else 0.0
            hand_over(done_s)
        hand_over(float("inf"))

    @property
    def _is_sharded(self) -> bool:
        """Whether weights of ZeRO-3 have more than one shard."""
        return (self.workload.shard_group or self.replicas) > 1

    @property
    def _shards(self) -> str:
        """The communicator of weights and gradients of ZeRO-3."""
        return SHARDS if self.workload.shard_group else DATA

    def _segment_parameters(self, segment: int) -> tuple[float, float]:
        """Of so many layers: those that all replicas share, and experts that several have.

        Embeddings and the output layer count as spread over all layers of the stage.
        """
        one, layers = self.workload, self.workload.model.layers // self.workload.pipeline_parallel
        shared = one.stage_parameters(self.stage) - one.stage_sparse_parameters
        sparse = segment * one.sparse_parameters / one.tensor_parallel
        return segment * shared / layers, sparse if self.replicas > one.expert_parallel else 0.0

    def _gather(self, ahead: Sequence[int]) -> list[Wait]:
        """Start to gather the weights of segments."""
        each, waits = BYTES[self.workload.parameter_dtype], list[Wait]()
        for layers in ahead if self._is_sharded else ():
            dense, sparse = self._segment_parameters(layers)
            waits.append(self._start(Start(self._shards, "all_gather", each * dense, name="weights", parts=layers)))
            if sparse > 0.0:
                start = Start(EXPERT_DATA, "all_gather", each * sparse, name="weights", parts=layers)
                waits.append(self._start(start))
        return waits

    def _fully_sharded(self) -> None:
        """ZeRO-3: weights are gathered one segment ahead, gradients reduced behind; HSDP sums shards over replicas."""
        one = self.workload
        cuts, gradient = self.passes.cuts(), BYTES[one.gradient_dtype]
        order = [
            (i, backward, k) for i in range(one.micro_batches) for backward in (False, True) for k in range(len(cuts))
        ]
        sizes = {False: cuts, True: cuts[::-1]}
        passes = {backward: self._pieces(backward, 0) for backward in (False, True)}
        there = self._gather(cuts[:1])
        for at, (i, backward, k) in enumerate(order):
            self._rows += there
            there = self._gather([sizes[backward_too][after] for _, backward_too, after in order[at + 1 : at + 2]])
            self._run(passes[backward][k], i)
            if backward:
                layers = sizes[True][k]
                dense, sparse = self._segment_parameters(layers)
                self._scatter(dense * gradient, layers, i)
                if sparse > 0.0:
                    start = Start(EXPERT_DATA, "reduce_scatter", sparse * gradient, True, parts=layers)
                    self._held.append(self._start(start._replace(name="gradients")))
        self._sum_shards()

    def _scatter(self, payload_bytes: float, count: int, i: int) -> None:
        """Reduce a segment's gradients, and start to sum the shards of the one before it over the replicas."""
        one, wait = self.workload, None
        if self._is_sharded:
            start = Start(self._shards, "reduce_scatter", payload_bytes, True, name="gradients", parts=count)
            wait = self._start(start)
            self._held.append(wait)
        self._sum_shards()
        shards = one.shard_group or self.replicas
        if self.replicas > shards and i == one.micro_batches - 1:
            self._behind = wait, payload_bytes / shards, count

    def _sum_shards(self) -> None:
        if self._behind is not None:
            (wait, payload_bytes, count), self._behind = self._behind, None
            self._rows += [] if wait is None else [wait]
            start = Start(REPLICAS, "all_reduce", payload_bytes, True, name="shards", parts=count)
            self._held.append(self._start(start))

    def _finish(self) -> None:
        """After the last backward: what is under way, the optimizer, weights that ZeRO gathers, what is summed last."""
        one = self.workload
        self._rows += self._held
        self._compute(self.passes.gpu.memory_s(one.optimizer_bytes(self.stage, self.replicas)), -1)
        parameters = one.stage_parameters(self.stage)
        if one.zero_stage in (1, 2) and self.replicas > 1:
            sparse = one.stage_sparse_parameters
            for name, count in ((DATA, parameters - sparse), (EXPERT_DATA, sparse)):
                if count > 0.0 and (name == DATA or self.replicas > one.expert_parallel):
                    self._rows.append(
                        self._start(Start(name, "all_gather", count * BYTES[one.parameter_dtype], name="weights"))
                    )
        p, model = one.pipeline_parallel, one.model
        if p > 1 and self.stage in (0, p - 1) and isinstance(model, Transformer) and model.tied_embeddings:
            size = model.embedding_parameters * BYTES[one.gradient_dtype] / one.tensor_parallel
            self._rows.append(self._start(Start(EMBEDDING, "all_reduce", size, name="embedding")))
