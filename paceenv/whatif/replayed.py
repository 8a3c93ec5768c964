"""Predictions from a trace's own operations: ranks replaced or taken out, everything else as it was.

Replaced: the rank computes like its peers, the ranks of its own stage. Each step it takes the time of a random peer in
a random other step, relative to the mean of its peers then and now. So it varies as they do and shares their course.
Removed: the whole data-parallel rank, with all its stages, is gone and no rank waits for it.
Collectives, transfers and the part of a step that operations do not explain stay as measured.

Axes: N operations, T steps, P peers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from paceenv.core.errors import InputError, out_of_range
from paceenv.diagnosis.dependency_graph import Graph, build_graph
from paceenv.diagnosis.operation_matrix import Array, Integers, OperationMatrix
from paceenv.diagnosis.replay import own_durations, replay
from paceenv.whatif.change import Change
from paceenv.whatif.estimate import MIN_STEPS, cv, mean, of_steps
from paceenv.whatif.predictions import Case, Differences, Prediction, Row

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

    def replicas_of(self, ranks: Collection[int]) -> set[int]:
        """The data-parallel ranks that these ranks of the trace belong to. Raises InputError for one it lacks."""
        return {int(self.matrix.dp_rank_N[self._nodes_of(rank)[0]]) for rank in ranks}

    def steps(self, replaced: Collection[int] = (), removed: Collection[int] = (), *, seed: int = 0) -> Array:
        """Step times ``(T,)`` in seconds with some ranks replaced and others removed."""
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


def predict(scenario: RankScenario, source: str, changes: Sequence[Change]) -> Prediction:
    """Today's steps as measured, and the steps after every change, from the trace's own operations."""
    today_s_T = scenario.matrix.step_s_T
    rows = [_row(scenario, change, today_s_T) for change in changes]
    open_ = ["energy: a trace has no power figures"]
    if scenario.matrix.steps < MIN_STEPS:
        open_.append(f"intervals: {scenario.matrix.steps} steps are too few, at least {MIN_STEPS} are needed")
    explained = float((scenario.replayed_s_T / today_s_T).mean())
    return Prediction(
        source=source,
        basis="replay",
        method=f"replay of {scenario.matrix.steps} steps' own operations, which explain {explained:.1%} of a step",
        unit="batches of a data-parallel rank",
        today=_case(scenario, today_s_T, scenario.replicas),
        changed=rows,
        assumes=_assumes(changes),
        cannot_tell=open_,
        measured_step_s=of_steps(mean(today_s_T), len(today_s_T)),
        measured_cv=of_steps(cv(today_s_T), len(today_s_T), positive=True),
    )


def _row(scenario: RankScenario, change: Change, today_s_T: Array) -> Row:
    changed_s_T = scenario.steps(change.replaced, change.removed)
    left = scenario.replicas - len(scenario.replicas_of(change.removed))
    after_s, before_s = mean(changed_s_T), mean(today_s_T)
    after_cv, before_cv = cv(changed_s_T), cv(today_s_T)
    T = len(today_s_T)
    return Row(
        change,
        _case(scenario, changed_s_T, left),
        Differences(
            step=of_steps(lambda w: after_s(w) / before_s(w) - 1.0, T),
            throughput=of_steps(lambda w: left / scenario.replicas * before_s(w) / after_s(w) - 1.0, T),
            cv=of_steps(lambda w: after_cv(w) - before_cv(w), T),
        ),
    )


def _case(scenario: RankScenario, step_s_T: Array, replicas: int) -> Case:
    mean_s, T = mean(step_s_T), len(step_s_T)
    ranks = int(np.unique(scenario.matrix.rank_N).size * replicas / scenario.replicas)
    throughput = of_steps(lambda w: replicas / mean_s(w), T)
    return Case(ranks, ranks, "as traced", of_steps(mean_s, T), throughput, of_steps(cv(step_s_T), T, positive=True))


def _assumes(changes: Sequence[Change]) -> list[str]:
    lines = ["collectives and transfers take as long as in the trace; waits follow from the replay"]
    if any(c.replaced for c in changes):
        lines.append("ranks replaced: they compute like the ranks of their stage, with the same variation")
    if any(c.removed for c in changes):
        lines.append("ranks taken out: with all stages of their data-parallel rank; a stage cannot go alone")
        lines.append("the others keep their batch, so a step does less work")
    return lines
