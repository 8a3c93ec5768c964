"""Which ranks of a described job form the process groups of each communicator.

Tensor-parallel ranks are neighbours, then come context-parallel ones, then replicas; pipeline stages are outermost.
"""

from __future__ import annotations

from paceenv.core.errors import InputError
from paceenv.sim.cluster.job import Job
from paceenv.sim.cluster.program.gradient_buckets import DATA, EXPERT_DATA
from paceenv.sim.cluster.program.layer_passes import CONTEXT, EXPERTS, TENSOR
from paceenv.sim.cluster.workload import Workload

SHARDS, REPLICAS, GATHERS, EMBEDDING, STORAGE = "shards", "replicas", "gathers", "embedding", "storage"
"""Names of communicators."""


class Places:
    """Which ranks form which groups."""

    def __init__(self, workload: Workload, job: Job) -> None:
        self._workload, self._job = workload, job
        t, p, c = workload.tensor_parallel, workload.pipeline_parallel, workload.context_parallel
        if job.ranks % (t * p * c):
            raise InputError(
                f"workload.tensor_parallel x context_parallel x pipeline_parallel = {t} x {c} x {p} on {job.ranks} "
                "GPUs; allowed: a product that divides them"
            )
        self.replicas = job.ranks // (t * p)
        """Of every gradient; context-parallel ranks count, as each has a part of the tokens."""
        self.block = t * self.replicas
        for key in ("expert_parallel", "shard_group"):
            size = getattr(workload, key) or 1
            if self.replicas % size:
                raise InputError(f"workload.{key} = {size}; allowed: a divisor of the {self.replicas} replicas")

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
        found = {
            TENSOR: [list(range(first, first + t)) for first in range(0, ranks, t)],
            CONTEXT: self._data(1, one.context_parallel),
            EXPERTS: self._data(1, one.expert_parallel),
            DATA: self._data(1, D),
            GATHERS: self._data(1, one.shard_group or D),
            SHARDS: self._data(1, one.shard_group or D),
            EXPERT_DATA: self._data(one.expert_parallel, D // one.expert_parallel),
            REPLICAS: self._data(one.shard_group or D, D // (one.shard_group or D)),
            EMBEDDING: [[rank, rank + (p - 1) * block] for rank in range(block)],
            STORAGE: [[rank] for rank in range(ranks)],
        }
        for s in range(p):
            ahead, behind = (s + 1) % p, (s - 1) % p
            found[activations_of(s)] = [[s * block + k, ahead * block + k] for k in range(block)]
            found[gradients_of(s)] = [[s * block + k, behind * block + k] for k in range(block)]
        return found

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
