"""Steps of a traced job with some ranks replaced or taken out: the trace's own dependency graph, replayed.

Replaced: the rank computes like its peers, the ranks of its own stage. In every step it takes what one of them took in
some other step, relative to what all of them took then and now, so that it varies as they do and shares what all share.
Taken out: the whole data-parallel rank, all its stages, is no longer there and nobody waits for it. What the operations
do not explain of a step stays as measured, and so do collectives and transfers.

Axes: N nodes, T steps, P peers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from paceenv.core.errors import InputError, out_of_range
from paceenv.diagnosis.dependency_graph import Graph, build_graph
from paceenv.diagnosis.graph_replay import own_durations, replay
from paceenv.diagnosis.operation_matrix import Array, Cells, Integers

_SHOWN: Final = 8
"""Ranks that an error lists."""


@dataclass(frozen=True)
class Scenario:
    """A traced job, and what its steps would have been with other ranks."""

    cells: Cells

    @cached_property
    def graph(self) -> Graph:
        return build_graph(self.cells)

    @cached_property
    def own_NT(self) -> Array:
        """Durations of the operations, waiting taken out, seconds."""
        return own_durations(self.cells, self.graph)

    @cached_property
    def replayed_s_T(self) -> Array:
        """Steps as the operations explain them, seconds."""
        return replay(self.graph, self.own_NT)

    @property
    def replicas(self) -> int:
        """Data-parallel ranks."""
        return len(np.unique(self.cells.dp_rank_N))

    @property
    def stages(self) -> int:
        return len(np.unique(self.cells.stage_N))

    def replicas_of(self, ranks: Collection[int]) -> set[int]:
        """The data-parallel ranks that these ranks of the trace belong to. Raises InputError for one it lacks."""
        return {int(self.cells.dp_rank_N[self._nodes_of(rank)[0]]) for rank in ranks}

    def steps(
        self, replaced: Collection[int] = (), removed: Collection[int] = (), *, spread: bool = False, seed: int = 0
    ) -> Array:
        """Steps ``(T,)`` in seconds with ranks ``replaced`` by one like their peers and others ``removed``.

        Both are ranks of the trace; a removed one takes its data-parallel rank with it. With ``spread`` the others
        compute its part as well, each the same share longer. ``seed`` draws what replaced ranks do. Raises InputError
        for a rank that the trace lacks or that has no peer, and where fewer than two data-parallel ranks would be left.
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
                    f"such that two of the {self.replicas} data-parallel ranks are left", self.cells.name,
                )  # fmt: skip
            kept = np.flatnonzero(~np.isin(self.cells.dp_rank_N, sorted(gone)))
            cells = _only(self.cells, kept)
            graph, own_NT = build_graph(cells), own_NT[kept]
            if spread:
                own_NT[cells.is_compute_N] *= self.replicas / left
        return np.asarray(self.cells.step_s_T - self.replayed_s_T + replay(graph, own_NT))

    def _nodes_of(self, rank: int) -> Integers:
        if rank not in self.cells.ranks:
            shown = ", ".join(map(str, self.cells.ranks[:_SHOWN])) + (", ..." if len(self.cells.ranks) > _SHOWN else "")
            raise out_of_range("rank", rank, f"one of the trace's ranks {shown}", f"trace of {self.cells.name}")
        return np.flatnonzero(self.cells.rank_N == self.cells.ranks.index(rank))

    def _like_peers(self, own_NT: Array, replaced: Collection[int], seed: int) -> Array:
        cells, own_NT = self.cells, own_NT.copy()
        bad = np.isin(cells.rank_N, [int(cells.rank_N[self._nodes_of(rank)[0]]) for rank in replaced])
        rng = np.random.default_rng(seed)
        for rank in sorted(replaced):
            mine = self._nodes_of(rank)
            stage = cells.stage_N[mine[0]]
            peers = np.unique(cells.rank_N[(cells.stage_N == stage) & ~bad])
            if not len(peers):
                raise InputError(
                    f"trace of {cells.name}: rank {rank} has no peer in stage {stage} to be replaced by; allowed: a "
                    "rank with another in its stage that is not replaced"
                )
            peer_T, when_T = rng.integers(len(peers), size=cells.steps), rng.permutation(cells.steps)
            for nodes in _like(cells, mine[cells.is_compute_N[mine]], peers):
                if len(nodes) < 2:
                    continue  # nobody else has this operation
                now_PT = self.own_NT[nodes[1:]]
                level_T = now_PT.mean(axis=0)
                then_s_T = now_PT[peer_T % len(now_PT), when_T]
                own_NT[nodes[0]] = level_T * then_s_T / np.maximum(level_T[when_T], np.finfo(float).tiny)
        return own_NT


def _like(cells: Cells, mine: Integers, peers: Integers) -> list[Integers]:
    """Each of the nodes ``mine`` with the same operation of the peers."""
    keys = (cells.op_N, cells.micro_batch_N, cells.chunk_N, cells.position_N)
    of_peers = np.isin(cells.rank_N, peers)
    found = []
    for n in mine.tolist():
        alike = of_peers & np.logical_and.reduce([key == key[n] for key in keys])
        found.append(np.concatenate([[n], np.flatnonzero(alike)]))
    return found


def _only(cells: Cells, kept: Integers) -> Cells:
    """The matrix with some of its nodes."""
    rows = {name: getattr(cells, name)[kept] for name in vars(cells) if name.endswith(("_N", "_NT"))}
    return replace(cells, **rows)
