"""All layers of a job's durations side by side, and what each of them costs: Shapley shares of replayed time.

A layer is what one cause adds to durations; taking it out leaves the others as they are. What two layers cost together
is in general not the sum of what each costs, because a step is a maximum, so every layer gets the mean of what it costs
over all orders of taking them out (Shapley 1953): shares add up and do not depend on an order. Axes: N nodes, T steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np

from paceenv.core.trace import PACE_OP
from paceenv.diagnosis.compute_attribution import ComputeLayers, split_compute
from paceenv.diagnosis.dependency_graph import Graph
from paceenv.diagnosis.graph_replay import begins, replay
from paceenv.diagnosis.ideal_replay import MOST_WORK, ideal_durations
from paceenv.diagnosis.operation_matrix import Array, Cells, Integers
from paceenv.diagnosis.transfer_attribution import TransferLayers, split_transfers

LEAST_LAYER: Final = 0.002
"""Share of a step below which a layer is not worth its place: it stays as it is."""
MOST_LAYERS: Final = 8
COMPUTE_LAYERS: Final = ("stage", "rank", "episode", "drift", "data", "rest")
TRANSFER_LAYERS: Final = ("link", "contention", "tenant")


@dataclass(frozen=True)
class Layers:
    """``cost_s`` by layer: seconds of a mean step, among them ``gap``, what no operation explains.

    ``base_s`` is the mean step without any layer, ``measured_s`` with all. Layers of compute and of transfers have the
    names above, with ``stall``, ``timeout``, ``hiccup`` and ``transfer`` (the rest of transfers); each kind of other
    work has two, ``work:<operation>`` for what is fixed per rank and ``varies:<operation>`` for what is not, and what
    only some steps have has one, ``extra:<operation>``. ``stack`` replays any selection of them.
    """

    cost_s: dict[str, float]
    base_s: float
    measured_s: float
    compute: ComputeLayers
    transfers: TransferLayers
    present: dict[str, int]
    stack: _Stack

    def saved_s(self, names: frozenset[str]) -> float:
        """By how much a mean step is shorter without these layers, with all others, seconds."""
        gap_s = self.cost_s["gap"]
        return self.measured_s - gap_s - self.stack.without_s(names) + (gap_s if "gap" in names else 0.0)


def split(cells: Cells, graph: Graph, own_NT: Array) -> Layers:
    """The layers of a job, and their cost."""
    measured_s = float(cells.step_s_T.mean())
    compute, transfers = split_compute(cells, own_NT), split_transfers(cells, graph, own_NT, measured_s)
    other = _other(cells, compute, transfers, own_NT)
    stack = _Stack(cells, graph, compute, transfers, other, own_NT)
    cost_s, base_s, whole_s = stack.costs()
    cost_s["gap"] = measured_s - whole_s
    present = {name: int((own_NT[nodes].sum(axis=0) > 0.0).sum()) for name, (nodes, _) in other.items()}
    return Layers(cost_s, base_s, measured_s, compute, transfers, present, stack)


def _other(
    cells: Cells, compute: ComputeLayers, transfers: TransferLayers, own_NT: Array
) -> dict[str, tuple[Integers, Array]]:
    """What neither computes nor meets: by layer its nodes and what they take beyond the ideal, seconds."""
    described = np.zeros(len(cells.op_N), np.bool_)
    described[compute.node] = described[transfers.node] = True
    communicates = cells.is_collective_N | cells.is_transfer_N
    found: dict[str, tuple[Integers, Array]] = {}
    ideal_NT, usual = ideal_durations(cells, own_NT), cells.usual_N
    for op, name in enumerate(cells.ops):
        nodes = np.flatnonzero((cells.op_N == op) & ~described & ~communicates)
        rare, often = nodes[~usual[nodes]], nodes[usual[nodes]]
        if name == PACE_OP or len(rare):
            taken = nodes if name == PACE_OP else rare
            found[f"extra:{name}"] = (taken, own_NT[taken])
        if name != PACE_OP and len(often):
            fixed = np.broadcast_to(own_NT[often].mean(axis=1, keepdims=True), own_NT[often].shape)
            found[f"work:{name}"] = (often, fixed - ideal_NT[often])
            found[f"varies:{name}"] = (often, own_NT[often] - fixed)
    return found


class _Stack:
    """Durations with any selection of layers."""

    def __init__(
        self,
        cells: Cells,
        graph: Graph,
        compute: ComputeLayers,
        transfers: TransferLayers,
        other: dict[str, tuple[Integers, Array]],
        own_NT: Array,
    ) -> None:
        self._graph, self._own_NT = graph, own_NT
        self._compute, self._transfers, self._other = compute, transfers, other
        names = [*COMPUTE_LAYERS, "stall", *TRANSFER_LAYERS, "timeout", "hiccup", "transfer"]
        self._names = [name for name in names if self._differs(name)] + list(other)

    def _differs(self, name: str) -> bool:
        if name in COMPUTE_LAYERS:
            return bool((np.abs(getattr(self._compute, name) - 1.0) > 1e-9).any())
        if name in TRANSFER_LAYERS:
            return bool((np.abs(getattr(self._transfers, name) - 1.0) > 1e-9).any())
        values = {
            "stall": self._compute.stall_s,
            "timeout": self._transfers.timeout_s,
            "hiccup": self._transfers.hiccup_s,
            "transfer": self._transfers.rest - 1.0,
        }
        return bool((np.abs(values[name]) > 1e-12).any())

    def mean_s(self, on: frozenset[str], every: int = 1) -> float:
        """Mean step of the replay with only the layers ``on``, of every so many-th step."""
        d_NT = self._own_NT[:, ::every].copy()
        c, t = self._compute, self._transfers

        def product(layers: ComputeLayers | TransferLayers, names: tuple[str, ...]) -> Array:
            out = np.broadcast_to(layers.base_s, (len(layers.node), self._own_NT.shape[1]))[:, ::every].copy()
            for name in names:
                if name in on:
                    factor = getattr(layers, name)
                    out *= factor[:, ::every] if factor.shape[1] > 1 else factor
            return out

        d_NT[c.node] = product(c, COMPUTE_LAYERS) + (c.stall_s[:, ::every] if "stall" in on else 0.0)
        transfer = product(t, ("link", "tenant"))
        if "transfer" in on:
            transfer *= t.rest[:, ::every]
        late_s = t.timeout_s[:, ::every] if "timeout" in on else 0.0
        if "hiccup" in on:
            late_s = late_s + t.hiccup_s[:, ::every]
        for name, (nodes, excess) in self._other.items():
            if name not in on:
                d_NT[nodes] -= excess[:, ::every]
        d_NT[t.node] = np.maximum(transfer + late_s, 0.0)
        if "contention" in on:  # who starts when, hence who meets whom on the uplink, depends on the other layers
            for shared in t.uplinks:
                from paceenv.diagnosis.uplink_contention import (
                    contention,  # as in transfer_layers, only where it is needed
                )

                arrival_KT = begins(self._graph, np.maximum(d_NT, 0.0), shared.tasks)
                factor_KT = contention(arrival_KT, shared.alone_s, shared.work_s)
                for places, factor_T in zip(shared.places, factor_KT, strict=True):
                    transfer[places] *= factor_T
            d_NT[t.node] = np.maximum(transfer + late_s, 0.0)
        return float(replay(self._graph, np.maximum(d_NT, 0.0)).mean())

    def without_s(self, names: frozenset[str]) -> float:
        """Mean step of the replay with all layers but these."""
        return self.mean_s(frozenset(self._names) - names)

    def costs(self) -> tuple[dict[str, float], float, float]:
        """Shapley cost of every layer, seconds; the mean step without any, and with all."""
        every_layer, none = frozenset(self._names), frozenset[str]()
        whole_s, bare_s = self.mean_s(every_layer), self.mean_s(none)
        effect = {
            name: max(abs(whole_s - self.mean_s(every_layer - {name})), abs(self.mean_s(frozenset({name})) - bare_s))
            for name in self._names
        }
        least = LEAST_LAYER * whole_s
        chosen = sorted((n for n in self._names if effect[n] > least), key=lambda n: -effect[n])[:MOST_LAYERS]
        fixed = every_layer - set(chosen)
        every = max(1, math.ceil(self._own_NT.size * 2.0 ** len(chosen) / (8.0 * MOST_WORK)))
        value = {
            frozenset(part): self.mean_s(fixed | set(part), every)
            for size in range(len(chosen) + 1)
            for part in combinations(chosen, size)
        }
        n = len(chosen)
        costs = dict.fromkeys(self._names, 0.0)
        for name in chosen:
            for part, value_s in value.items():
                if name not in part:
                    k = len(part)
                    weight = math.factorial(k) * math.factorial(n - k - 1) / math.factorial(n)
                    costs[name] += weight * (value[part | {name}] - value_s)
        return costs, value[none], whole_s
