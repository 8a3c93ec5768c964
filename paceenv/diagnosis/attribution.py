"""Attributes step time to components, one per cause: Shapley shares of replayed time.

A component is what one cause adds to durations; taking it out leaves the others as they are. A step is a maximum, so
two components together rarely cost the sum of what each costs. Every component therefore gets its mean cost over all
orders of taking them out (Shapley 1953): costs add up and depend on no order. Axes: N operations, T steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np

from paceenv.core.operation_matrix import Array, Integers, OperationMatrix
from paceenv.core.trace import PACE_OP
from paceenv.diagnosis.compute_attribution import Components, ComputeAttribution, attribute_compute
from paceenv.diagnosis.dependency_graph import Graph
from paceenv.diagnosis.replay import MAX_WORK, begins, ideal_durations, replay
from paceenv.diagnosis.transfer_attribution import TransferAttribution, attribute_transfers

MIN_COMPONENT: Final = 0.002
"""Share of a step; a component that costs less always stays in, so that it gets no cost of its own."""
MAX_COMPONENTS: Final = 8


@dataclass(frozen=True)
class Component:
    """What one cause adds to durations: its name, and for other work than compute and transfers the operation."""

    name: str
    operation: str = ""


GAP: Final = Component("gap")


class TimeAttribution:
    """What each component costs of a mean step.

    ``cost_s`` holds seconds by component, among them ``gap``, which no operation explains.

    ``base_s`` is the mean step without any component, ``measured_s`` with all. There are those of compute and those of
    transfers. Each kind of other work has two: ``work`` is fixed per rank, ``varies`` is not. Each operation that only
    some steps have has one, ``extra``, and ``present`` counts these steps.
    """

    def __init__(self, matrix: OperationMatrix, graph: Graph, own_NT: Array) -> None:
        self.measured_s = float(matrix.step_s_T.mean())
        self.compute = attribute_compute(matrix, own_NT)
        self.transfers = attribute_transfers(matrix, graph, own_NT, self.measured_s)
        self._graph, self._own_NT = graph, own_NT
        self._other = _other(matrix, self.compute, self.transfers, own_NT)
        c, t = self.compute, self.transfers
        there = {name: bool((np.abs(factor - 1.0) > 1e-9).any()) for name, factor in (c.factors | t.factors).items()}
        there |= {name: bool((np.abs(more_s) > 1e-12).any()) for name, more_s in (c.seconds | t.seconds).items()}
        there["contention"] |= bool(t.uplinks)
        self._components = [*(Component(name) for name, is_there in there.items() if is_there), *self._other]
        self.cost_s, self.base_s, whole_s = self._costs()
        self.cost_s[GAP] = self.measured_s - whole_s
        self.present = {name: int((own_NT[at].sum(axis=0) > 0.0).sum()) for name, (at, _) in self._other.items()}

    def of(self, name: str) -> float:
        """What a component of compute or of transfers costs, seconds."""
        return self.cost_s.get(Component(name), 0.0)

    def saved_s(self, components: frozenset[Component]) -> float:
        """Seconds by which a mean step is shorter without these components while all others stay."""
        gap_s = self.cost_s[GAP]
        left_s = self._mean_s(frozenset(self._components) - components)
        return self.measured_s - gap_s - left_s + (gap_s if GAP in components else 0.0)

    def _mean_s(self, on: frozenset[Component], every: int = 1) -> float:
        """Mean step of the replay with only the components ``on``, of every so many-th step."""
        d_NT = self._own_NT[:, ::every].copy()
        c, t = self.compute, self.transfers
        names = {component.name for component in on}

        def made_of(part: Components) -> tuple[Array, Array | int]:
            """The base times all factors that are on, and the seconds to be added."""
            out = np.broadcast_to(part.base_s, (len(part.operation), self._own_NT.shape[1]))[:, ::every].copy()
            for factor in (factor for name, factor in part.factors.items() if name in names):
                out *= factor[:, ::every] if factor.shape[1] > 1 else factor
            return out, sum(more_s[:, ::every] for name, more_s in part.seconds.items() if name in names)

        compute, stall_s = made_of(c)
        d_NT[c.operation] = compute + stall_s
        transfer, late_s = made_of(t)
        for component, (operations, excess) in self._other.items():
            if component not in on:
                d_NT[operations] -= excess[:, ::every]
        d_NT[t.operation] = np.maximum(transfer + late_s, 0.0)
        # which groups meet on the uplink depends on the other components
        for shared in t.uplinks if "contention" in names else ():
            from paceenv.diagnosis.uplink_contention import contention  # only where it is needed

            arrival_KT = begins(self._graph, np.maximum(d_NT, 0.0), shared.tasks)
            factor_KT = contention(arrival_KT, shared.alone_s, shared.work_s)
            for places, factor_T in zip(shared.places, factor_KT, strict=True):
                transfer[places] *= factor_T
        d_NT[t.operation] = np.maximum(transfer + late_s, 0.0)
        return float(replay(self._graph, np.maximum(d_NT, 0.0)).mean())

    def _costs(self) -> tuple[dict[Component, float], float, float]:
        """Shapley cost of every component, seconds; the mean step without any, and with all."""
        every_component, none = frozenset(self._components), frozenset[Component]()
        whole_s, bare_s = self._mean_s(every_component), self._mean_s(none)
        effect = {
            one: max(abs(whole_s - self._mean_s(every_component - {one})), abs(self._mean_s(frozenset({one})) - bare_s))
            for one in self._components
        }
        large = [one for one in self._components if effect[one] > MIN_COMPONENT * whole_s]
        chosen = sorted(large, key=lambda one: -effect[one])[:MAX_COMPONENTS]
        fixed = every_component - set(chosen)
        every = max(1, math.ceil(self._own_NT.size * 2.0 ** len(chosen) / (8.0 * MAX_WORK)))
        value = {
            frozenset(part): self._mean_s(fixed | set(part), every)
            for size in range(len(chosen) + 1)
            for part in combinations(chosen, size)
        }
        n = len(chosen)
        costs = dict.fromkeys(self._components, 0.0)
        for one in chosen:
            for part, value_s in value.items():
                if one not in part:
                    k = len(part)
                    weight = math.factorial(k) * math.factorial(n - k - 1) / math.factorial(n)
                    costs[one] += weight * (value[part | {one}] - value_s)
        return costs, value[none], whole_s


def _other(
    matrix: OperationMatrix, compute: ComputeAttribution, transfers: TransferAttribution, own_NT: Array
) -> dict[Component, tuple[Integers, Array]]:
    """Operations that neither compute nor meet, by component, and what they take beyond the ideal, seconds."""
    described = np.zeros(len(matrix.op_N), np.bool_)
    described[compute.operation] = described[transfers.operation] = True
    communicates = matrix.is_collective_N | matrix.is_transfer_N
    by_component: dict[Component, tuple[Integers, Array]] = {}
    ideal_NT, usual = ideal_durations(matrix, own_NT), matrix.usual_N
    for op, name in enumerate(matrix.ops):
        operations = np.flatnonzero((matrix.op_N == op) & ~described & ~communicates)
        rare, often = operations[~usual[operations]], operations[usual[operations]]
        if name == PACE_OP or len(rare):
            taken = operations if name == PACE_OP else rare
            by_component[Component("extra", name)] = (taken, own_NT[taken])
        if name != PACE_OP and len(often):
            fixed = np.broadcast_to(own_NT[often].mean(axis=1, keepdims=True), own_NT[often].shape)
            by_component[Component("work", name)] = (often, fixed - ideal_NT[often])
            by_component[Component("varies", name)] = (often, own_NT[often] - fixed)
    return by_component
