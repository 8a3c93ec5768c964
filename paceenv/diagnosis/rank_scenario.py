"""Steps of a traced job with some ranks replaced or removed: the trace's own dependency graph, replayed.

Replaced: the rank computes like its peers, the ranks of its own stage. Each step it takes the time of a random peer in
a random other step, relative to the mean of its peers then and now. So it varies as they do and shares their course.
Removed: the whole data-parallel rank, with all its stages, is gone and no rank waits for it.
Collectives, transfers and the part of a step that operations do not explain stay as measured.

Axes: N operations, T steps, P peers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from paceenv.core.errors import InputError, out_of_range
from paceenv.diagnosis.dependency_graph import Graph, build_graph
from paceenv.diagnosis.operation_matrix import Array, Integers, OperationMatrix
from paceenv.diagnosis.replay import own_durations, replay

_SHOWN: Final = 8
"""Ranks that an error lists."""


@dataclass(frozen=True)
class RankScenario:
    """A traced job, and what its step times with other ranks."""

    matrix: OperationMatrix

    @cached_property
    def graph(self) -> Graph:
        return build_graph(self.matrix)

    @cached_property
    def own_NT(self) -> Array:
        """Durations of the operations, waiting taken out, seconds."""
        return own_durations(self.matrix, self.graph)

    @cached_property
    def replayed_s_T(self) -> Array:
        """Steps as the operations explain them, seconds."""
        return replay(self.graph, self.own_NT)

    @property
    def replicas(self) -> int:
        """Data-parallel ranks."""
        return len(np.unique(self.matrix.dp_rank_N))

    @property
    def stages(self) -> int:
        return len(np.unique(self.matrix.stage_N))

    def replicas_of(self, ranks: Collection[int]) -> set[int]:
        """The data-parallel ranks that these ranks of the trace belong to. Raises InputError for one it lacks."""
        return {int(self.matrix.dp_rank_N[self._nodes_of(rank)[0]]) for rank in ranks}

    def steps(self, replaced: Collection[int] = (), removed: Collection[int] = (), *, seed: int = 0) -> Array:
        """Step times ``(T,)`` in seconds with some ranks replaced and others removed.

        Raises:
            InputError: the trace lacks a rank, a replaced rank has no peer, or fewer than two data-parallel ranks stay.
        """
        own_NT = self.own_NT
        if replaced:
            own_NT = self._like_peers(own_NT, replaced, seed)
        graph, gone = self.graph, self.replicas_of(removed)
        if gone:
            left = self.replicas - len(gone)
            if left < 2:
                raise out_of_range(
                    "ranks removed", ", ".join(map(str, sorted(removed))),
                    f"such that two of the {self.replicas} data-parallel ranks are left", self.matrix.name,
                )  # fmt: skip
            kept = np.flatnonzero(~np.isin(self.matrix.dp_rank_N, sorted(gone)))
            matrix = _only(self.matrix, kept)
            graph, own_NT = build_graph(matrix), own_NT[kept]
        return np.asarray(self.matrix.step_s_T - self.replayed_s_T + replay(graph, own_NT))

    def _nodes_of(self, rank: int) -> Integers:
        if rank not in self.matrix.ranks:
            shown = ", ".join(map(str, self.matrix.ranks[:_SHOWN])) + (
                ", ..." if len(self.matrix.ranks) > _SHOWN else ""
            )
            raise out_of_range("rank", rank, f"one of the trace's ranks {shown}", f"trace of {self.matrix.name}")
        return np.flatnonzero(self.matrix.rank_N == self.matrix.ranks.index(rank))

    def _like_peers(self, own_NT: Array, replaced: Collection[int], seed: int) -> Array:
        matrix, own_NT = self.matrix, own_NT.copy()
        bad = np.isin(matrix.rank_N, [int(matrix.rank_N[self._nodes_of(rank)[0]]) for rank in replaced])
        rng = np.random.default_rng(seed)
        for rank in sorted(replaced):
            mine = self._nodes_of(rank)
            stage = matrix.stage_N[mine[0]]
            peers = np.unique(matrix.rank_N[(matrix.stage_N == stage) & ~bad])
            if not len(peers):
                raise InputError(
                    f"trace of {matrix.name}: rank {rank} has no peer in stage {stage}; allowed: a "
                    "rank with another in its stage that is not replaced"
                )
            peer_T, when_T = rng.integers(len(peers), size=matrix.steps), rng.permutation(matrix.steps)
            for operations in _like(matrix, mine[matrix.is_compute_N[mine]], peers):
                if len(operations) < 2:
                    continue  # no peer has this operation
                now_PT = self.own_NT[operations[1:]]
                level_T = now_PT.mean(axis=0)
                then_s_T = now_PT[peer_T % len(now_PT), when_T]
                own_NT[operations[0]] = level_T * then_s_T / np.maximum(level_T[when_T], np.finfo(float).tiny)
        return own_NT


def _like(matrix: OperationMatrix, mine: Integers, peers: Integers) -> list[Integers]:
    """Each of the operations ``mine`` with the same operation of the peers."""
    keys = (matrix.op_N, matrix.micro_batch_N, matrix.chunk_N, matrix.position_N)
    of_peers = np.isin(matrix.rank_N, peers)
    found = []
    for n in mine.tolist():
        alike = of_peers & np.logical_and.reduce([key == key[n] for key in keys])
        found.append(np.concatenate([[n], np.flatnonzero(alike)]))
    return found


def _only(matrix: OperationMatrix, kept: Integers) -> OperationMatrix:
    """The matrix with some of its operations."""
    rows = {name: getattr(matrix, name)[kept] for name in vars(matrix) if name.endswith(("_N", "_NT"))}
    return replace(matrix, **rows)
