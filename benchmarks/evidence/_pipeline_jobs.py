"""Jobs simulated operation by operation, with causes the engine does not have: stages, unequal ways to the network.

Independent of what diagnoses them: the 1F1B schedule is that of described workloads, executed here in
plain NumPy over all steps and replicas at once. Every cause draws from a generator of its own, so that switching one
off leaves the others as they were. Axes: T steps, D data-parallel ranks, S stages, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core.trace import Trace, TraceMetadata
from paceenv.sim.cluster.program.described_steps import one_forward_one_backward

Array = NDArray[np.float64]
Row = tuple[str, int, int, int, Array, Array]
"""Operation, stage, group (-1 none), micro-batch (-1 none), start and end ``(T, D)``."""


@dataclass(frozen=True)
class PipelineJob:
    """``causes`` are strengths by name; absent ones are off. One stage and one micro-batch make a plain barrier job.

    jitter: CV of an operation; data: CV of a micro-batch, shifted gamma; slow: factor of one worker; stage: factor of
    one stage; drift: CV over tens of steps; stall: seconds, in ``stall_rate`` of operations; checkpoint: seconds every
    ``checkpoint_every`` steps; link: factor on the reduction of one group.
    """

    seed: int
    steps: int = 120
    replicas: int = 4
    stages: int = 4
    micro_batches: int = 8
    forward_s: float = 0.02
    backward_s: float = 0.04
    transfer_s: float = 0.0005
    reduce_s: float = 0.05
    groups: int = 1
    stall_rate: float = 0.001
    checkpoint_every: int = 25
    drift_steps: float = 12.0
    skewness: float = 1.0
    causes: dict[str, float] = field(default_factory=dict)

    def step_s(self, on: Collection[str]) -> float:
        """Mean step with only the causes ``on``, seconds."""
        return float(self._run(on)[0].mean())

    def trace(self) -> Trace:
        """What a profiler would record of the job with all its causes."""
        return self._to_trace(*self._run(self.causes))

    def _rng(self, cause: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, *cause.encode()])

    def _strength(self, cause: str, on: Collection[str], neutral: float) -> float:
        return self.causes.get(cause, neutral) if cause in on else neutral

    def _compute(self, on: Collection[str]) -> Array:
        """What every forward (0) and backward (1) takes, ``(2, M, T, D, S)``, seconds."""
        shape = (self.micro_batches, self.steps, self.replicas, self.stages)
        base = np.array([self.forward_s, self.backward_s])[:, None, None, None, None]
        stage_S = np.ones(self.stages)
        stage_S[int(self._rng("stage").integers(self.stages))] = self.causes.get("stage", 1.0)
        if "stage" not in on:  # the same work, spread evenly
            stage_S[:] = stage_S.mean()
        worker_DS = np.ones((self.replicas, self.stages))
        rng = self._rng("slow")
        worker_DS[rng.integers(self.replicas), rng.integers(self.stages)] = self._strength("slow", on, 1.0)
        shape_k = 4.0 / self.skewness**2
        rng = self._rng("data")
        gamma = rng.gamma(shape_k, 1.0 / np.sqrt(shape_k), shape[:3])[..., None] - np.sqrt(shape_k)
        data = 1.0 + self._strength("data", on, 0.0) * gamma
        drift = 1.0 + self._strength("drift", on, 0.0) * self._wander()
        out = base * stage_S * worker_DS * np.maximum(data * drift[None], 0.05)
        rng = self._rng("jitter")
        out = out * np.maximum(1.0 + self._strength("jitter", on, 0.0) * rng.standard_normal((2, *shape)), 0.05)
        rng = self._rng("stall")
        hit = rng.uniform(size=(2, *shape)) < self.stall_rate
        length = rng.exponential(size=(2, *shape))
        return np.asarray(out + self._strength("stall", on, 0.0) * hit * length)

    def _wander(self) -> Array:
        """Ornstein-Uhlenbeck with unit variance, ``(T, D, S)``."""
        rng, keep = self._rng("drift"), np.exp(-1.0 / self.drift_steps)
        x = rng.standard_normal((self.replicas, self.stages))
        out = np.empty((self.steps, *x.shape))
        for t in range(self.steps):
            out[t] = x = keep * x + np.sqrt(1.0 - keep * keep) * rng.standard_normal(x.shape)
        return out

    def _run(self, on: Collection[str]) -> tuple[Array, list[Row]]:
        """Step times, and what each rank does in a step, by operation."""
        took = self._compute(on)
        rows: list[Row] = []
        ended = self._pipeline(took, rows)
        reduce_G = np.full(self.groups, self.reduce_s)
        reduce_G[int(self._rng("link").integers(self.groups))] *= self._strength("link", on, 1.0)
        done_T = np.zeros(self.steps)
        group_D = np.arange(self.replicas) * self.groups // self.replicas
        for s in range(self.stages):
            end = np.empty_like(ended[s])
            for g in range(self.groups):
                mine = group_D == g
                vary = 1.0 + 0.01 * self._rng(f"reduce{s}-{g}").standard_normal(self.steps)
                end[:, mine] = (ended[s][:, mine].max(axis=1) + reduce_G[g] * vary)[:, None]
            rows.append(("all_reduce", s, s, -1, ended[s], end))
            done_T = np.maximum(done_T, end.max(axis=1))
        every = np.broadcast_to(done_T[:, None], (self.steps, self.replicas))
        rows += [("barrier", row[1], -1, -1, row[5], every) for row in rows if row[0] == "all_reduce"]
        due = (np.arange(self.steps) + 1) % self.checkpoint_every == 0
        step_T = done_T + self._strength("checkpoint", on, 0.0) * due
        end = np.broadcast_to(step_T[:, None], every.shape)
        if "checkpoint" in on:
            rows += [("checkpoint", s, -1, -1, every, end) for s in range(self.stages)]
        return step_T, rows

    def _pipeline(self, took: Array, rows: list[Row]) -> list[Array]:
        """Execute the schedule; when each stage's last compute ends, ``(T, D)`` each."""
        S, M, zero = self.stages, self.micro_batches, np.zeros((self.steps, self.replicas))
        orders = [one_forward_one_backward(s, S, M) for s in range(S)]
        at, free = [0] * S, [zero] * S
        there: list[list[dict[int, Array]]] = [[{} for _ in range(S)] for _ in range(2)]
        link_free = [[zero] * S for _ in range(2)]
        there[0][0] = dict.fromkeys(range(M), zero)
        there[1][S - 1] = dict.fromkeys(range(M), zero)
        names = ("forward", "backward")
        left = 2 * S * M
        while left:
            for s in range(S):
                while at[s] < len(orders[s]) and orders[s][at[s]][1] in there[orders[s][at[s]][0]][s]:
                    backward, i = orders[s][at[s]]
                    start = np.maximum(free[s], there[backward][s][i])
                    free[s] = start + took[int(backward), i, :, :, s]
                    op = "compute" if S == M == 1 else f"{names[backward]}-compute"
                    rows.append((op, s, -1, i, start, free[s]))
                    to = s - 1 if backward else s + 1
                    if 0 <= to < S:
                        border = min(s, to)
                        begin = np.maximum(free[s], link_free[backward][border])
                        done = begin + self.transfer_s
                        link_free[backward][border] = there[backward][to][i] = done
                        rows.append((f"{names[backward]}-send", s, -1, i, begin, done))
                        rows.append((f"{names[backward]}-recv", to, -1, i, begin, done))
                    at[s] += 1
                    left -= 1
        return free

    def _to_trace(self, step_T: Array, rows: list[Row]) -> Trace:
        D, S, T = self.replicas, self.stages, self.steps
        begin_T = np.concatenate([[0.0], np.cumsum(step_T)[:-1]])
        columns: dict[str, list[Any]] = {
            name: [] for name in ("rank", "iteration", "op", "group", "micro_batch", "start_s", "end_s")
        }
        rank_TD = np.broadcast_to(np.arange(D) * S, (T, D))
        iteration_TD = np.broadcast_to(np.arange(T)[:, None], (T, D))
        group_D = np.arange(D) * self.groups // D
        for op, stage, group, micro, start, end in rows:
            keep = np.broadcast_to((end > start) | (op == "barrier"), (T, D))
            columns["rank"].append((rank_TD + stage)[keep])
            columns["iteration"].append(iteration_TD[keep])
            columns["op"].append(np.full(int(keep.sum()), op))
            of = np.broadcast_to(group * self.groups + group_D, (T, D)) if group >= 0 else np.full((T, D), -1)
            columns["group"].append(of[keep])
            columns["micro_batch"].append(np.full(int(keep.sum()), micro))
            columns["start_s"].append((start + begin_T[:, None])[keep])
            columns["end_s"].append((end + begin_T[:, None])[keep])
        flat = {name: np.concatenate(parts) for name, parts in columns.items()}
        order = np.lexsort((flat["end_s"], flat["start_s"], flat["rank"], flat["iteration"]))
        flat = {name: column[order] for name, column in flat.items()}
        fresh = np.ones(len(order), np.bool_)
        fresh[1:] = (np.diff(flat["rank"]) != 0) | (np.diff(flat["iteration"]) != 0)
        row = np.arange(len(order))
        flat["seq"] = row - np.maximum.accumulate(np.where(fresh, row, 0))
        ranks = tuple({"rank": d * S + s, "dp_rank": d, "stage": s} for d in range(D) for s in range(S))
        return Trace.from_columns({"job": "pipeline", **flat}, TraceMetadata({"name": "pipeline"}, ranks, "simulated"))
