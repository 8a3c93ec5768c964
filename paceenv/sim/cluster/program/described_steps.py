"""From a described workload to a step as a program: every collective where it happens, on the communicator that has it.

Ranks are numbered node by node: tensor-parallel neighbours first, then replicas, pipeline stages outermost
(Megatron-LM's order), so that what communicates most stays inside a node. Ranks of a stage do the same, so a stage is a
role.

What the next piece of work needs is waited for at once. What nobody needs until the optimizer may be held back
(``can_wait``): gradient buckets, reduce-scatters.

Simplifications. Layers and buckets are folded (:mod:`paceenv.sim.cluster.program.layer_passes`). A receive is posted at
the start of the step, so that a sender never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceenv.core.errors import InputError
from paceenv.sim.cluster.collectives import Op
from paceenv.sim.cluster.environment import Job
from paceenv.sim.cluster.fabric import Fabric
from paceenv.sim.cluster.program.layer_passes import DATA, TENSOR, Passes, Piece, reduced
from paceenv.sim.cluster.program.program_tables import Compute, Instruction, Start, StepPlan, Wait
from paceenv.sim.cluster.transfers import use_of
from paceenv.sim.cluster.workload import BYTES, Gpu, Workload

EMBEDDING = "embedding"
"""The communicator of tied embeddings, which the first and the last stage have."""


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[tuple[bool, int]]:
    """Passes of a stage in order, as (is backward, micro-batch): fill, alternate, drain.

    PipeDream-flush (Narayanan et al. 2019).
    """
    ahead = min(stages - 1 - stage, micro_batches)
    passes = [(False, k) for k in range(ahead)]
    for k in range(micro_batches - ahead):
        passes += [(False, ahead + k), (True, k)]
    return passes + [(True, k) for k in range(micro_batches - ahead, micro_batches)]


def described_plan(workload: Workload, gpu: Gpu, fabric: Fabric, job: Job) -> StepPlan:
    """What every rank of a described job does in a step."""
    t, p, ranks = workload.tensor_parallel, workload.pipeline_parallel, job.ranks
    node = min(ranks, job.ranks_per_node)
    if node % t and t % node:
        raise InputError(
            f"workload.tensor_parallel = {t}; allowed: a divisor or a multiple of the {node} GPUs of a node"
        )
    if ranks % (t * p):
        raise InputError(
            f"workload.tensor_parallel x pipeline_parallel = {t} x {p} on {ranks} GPUs; "
            "allowed: a product that divides them"
        )
    block, use = ranks // p, use_of(fabric, job)
    replicas = block // t

    def tensor_s(op: Op, payload_bytes: float) -> float:
        one = use(Start(TENSOR, op, payload_bytes), range(t))
        return one.alone_s + one.latency_s

    passes = Passes(workload, gpu, tensor_s if _is_apart(workload, job, replicas) else None)
    roles = [_Role(workload, passes, replicas, stage).instructions() for stage in range(p)]
    every = {
        TENSOR: [list(range(first, first + t)) for first in range(0, ranks, t)],
        DATA: [list(range(s + i, s + block, t)) for s in range(0, ranks, block) for i in range(t)],
        EMBEDDING: [[rank, rank + (p - 1) * block] for rank in range(block)],
    }
    for s in range(p):
        ahead, behind = (s + 1) % p, (s - 1) % p
        every[_message(s, backward=False)] = [[s * block + k, ahead * block + k] for k in range(block)]
        every[_message(s, backward=True)] = [[s * block + k, behind * block + k] for k in range(block)]
    used = {one.communicator for role in roles for one in role if isinstance(one, Start)}
    communicators = {name: groups for name, groups in every.items() if name in used}
    return StepPlan([rank // block for rank in range(ranks)], roles, communicators)


def _is_apart(workload: Workload, job: Job, replicas: int) -> bool:
    """Whether tensor-parallel groups lie inside nodes and no other group uses the links there."""
    t, node = workload.tensor_parallel, job.ranks_per_node
    if t > node or node % t:
        return False
    return (replicas == 1 or node == t) and (workload.pipeline_parallel == 1 or t * replicas % node == 0)


def _message(sender: int, *, backward: bool) -> str:
    """The communicator on which a stage sends activations on, or their gradients back."""
    return f"gradients_{sender}" if backward else f"activations_{sender}"


@dataclass
class _Role:
    """What the ranks of one stage do."""

    workload: Workload
    passes: Passes
    replicas: int
    stage: int
    _rows: list[Instruction] = field(default_factory=list)
    _held: list[Wait] = field(default_factory=list)
    """Reductions under way."""

    def _start(self, one: Start) -> Wait:
        self._rows.append(one)
        return Wait(len(self._rows) - 1)

    def _compute(self, seconds: float) -> None:
        if seconds > 0.0:
            self._rows.append(Compute(seconds))

    def _run(self, pieces: Sequence[Piece]) -> None:
        for one in pieces:
            if isinstance(one, Compute):
                self._compute(one.seconds)
            else:
                self._rows.append(self._start(one))

    def instructions(self) -> list[Instruction]:
        one, p = self.workload, self.workload.pipeline_parallel
        if one.zero_stage == 3:
            self._fully_sharded()
        else:
            receives = {backward: self._post_receives(backward=backward) for backward in (False, True)}
            for backward, i in one_forward_one_backward(self.stage, p, one.micro_batches):
                if i in receives[backward]:
                    self._rows.append(receives[backward][i])
                    self._run(self.passes.tensor(1, "all_gather"))  # activations arrive in shares
                pieces = [piece for segment in self._segments(backward) for piece in segment]
                if backward and self.replicas > 1 and i == one.micro_batches - 1:
                    self._reducing(pieces)
                else:
                    self._run(pieces)
                if self.stage != (0 if backward else p - 1):
                    self._start(self._send(self.stage, backward))
        self._finish()
        return self._rows

    def _post_receives(self, *, backward: bool) -> dict[int, Wait]:
        """Start all receives of one direction; returns what each micro-batch waits for."""
        p = self.workload.pipeline_parallel
        if self.stage == (p - 1 if backward else 0):
            return {}
        sender = self.stage + (1 if backward else -1)
        return {i: self._start(self._send(sender, backward)) for i in range(self.workload.micro_batches)}

    def _send(self, sender: int, backward: bool) -> Start:
        size_bytes = self.workload.activation_bytes / self.workload.tensor_parallel
        return Start(_message(sender, backward=backward), "send", size_bytes)

    def _segments(self, backward: bool) -> list[list[Piece]]:
        """A pass of the stage, segment by segment, in the order of computing."""
        cuts = self.passes.cuts()
        segments = [self.passes.segment(layers, backward=backward) for layers in (cuts[::-1] if backward else cuts)]
        if self.stage == self.workload.pipeline_parallel - 1:
            head = self.passes.head(backward=backward)
            if backward:
                segments[0] = head + segments[0]
            else:
                segments[-1] = segments[-1] + head
        if self.stage == 0 and not backward:  # the token embedding is cut by rows, so that its outputs are summed
            segments[0] = self.passes.tensor(1) + segments[0]
        return segments

    def _reducing(self, pieces: list[Piece]) -> None:
        """A backward pass whose buckets are handed over when they are ready."""
        op: Op = "reduce_scatter" if self.workload.zero_stage else "all_reduce"
        whole_s, done_s = sum(one.seconds for one in pieces if isinstance(one, Compute)), 0.0
        waiting = reduced(self.workload, self.stage)

        def hand_over(until_s: float) -> None:
            while waiting and waiting[0].ready * whole_s <= until_s * (1.0 + 1e-12):
                one = waiting.pop(0)
                start = Start(DATA, op, one.payload_bytes, True, parts=one.parts)
                self._held.append(self._start(start))

        for one in pieces:
            if isinstance(one, Compute):
                left_s = one.seconds
                while waiting and waiting[0].ready * whole_s < done_s + left_s:
                    first_s = max(waiting[0].ready * whole_s - done_s, 0.0)
                    self._compute(first_s)
                    done_s, left_s = done_s + first_s, left_s - first_s
                    hand_over(done_s)
                self._compute(left_s)
                done_s += left_s
            else:
                self._run([one])
            hand_over(done_s)
        hand_over(float("inf"))

    def _sharded(self, op: Op, layers: int) -> Wait:
        """Start to gather the weights of a segment, or to reduce its gradients and keep the own shard.

        Embeddings and the output layer count as spread over all layers.
        """
        one, gathers = self.workload, op == "all_gather"
        size = BYTES[one.parameter_dtype if gathers else one.gradient_dtype]
        size_bytes = layers * one.stage_parameters(self.stage) / one.model.layers * size
        return self._start(Start(DATA, op, size_bytes, not gathers, parts=layers))

    def _fully_sharded(self) -> None:
        """ZeRO-3: weights are gathered one segment ahead, gradients reduced behind."""
        cuts = self.passes.cuts()
        passes = [(layers, False, pieces) for layers, pieces in zip(cuts, self._segments(False), strict=True)]
        passes += [(layers, True, pieces) for layers, pieces in zip(cuts[::-1], self._segments(True), strict=True)]
        passes *= self.workload.micro_batches
        gathered = [layers for layers, *_ in passes] if self.replicas > 1 else []
        there = [self._sharded("all_gather", layers) for layers in gathered[:1]]
        for k, (layers, backward, pieces) in enumerate(passes):
            self._rows += there
            there = [self._sharded("all_gather", ahead) for ahead in gathered[k + 1 : k + 2]]
            self._run(pieces)
            if backward and gathered:
                self._held.append(self._sharded("reduce_scatter", layers))

    def _finish(self) -> None:
        """After the last backward: what is under way, weights that ZeRO gathers, what is summed last."""
        one, p, model = self.workload, self.workload.pipeline_parallel, self.workload.model
        self._rows += self._held
        if one.zero_stage in (1, 2) and self.replicas > 1:
            size_bytes = one.stage_parameters(self.stage) * BYTES[one.parameter_dtype]
            self._rows.append(self._start(Start(DATA, "all_gather", size_bytes)))
        if p > 1 and self.stage in (0, p - 1) and model.tied_embeddings:
            size_bytes = model.embedding_parameters * BYTES[one.gradient_dtype] / one.tensor_parallel
            self._rows.append(self._start(Start(EMBEDDING, "all_reduce", size_bytes)))
