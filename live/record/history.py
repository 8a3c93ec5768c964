"""The last few thousand iterations of a rank: step times, parts, waits, and whether it is early or late.

:class:`History` has local evidence only: the rank's own stamps. A rank is *early* in steps in which it waited for
longer than its own noise explains. It is *late* in steps that its own work made longer while it did not wait. A skew
that has been constant since the start is inside every duration this rank has ever seen. Its own stamps cannot show it,
unless a barrier ends the step; :func:`compare_ranks` can, where the other ranks of the job have written their status.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.live.record.snapshot import EARLY, LATE, ON_TIME, UNKNOWN, Snapshot, number

KEPT_ITERATIONS = 4096
ENOUGH_ITERATIONS = 40
"""With fewer, early and late cannot be identified."""
NOISE_SPREADS = 5.0
"""Robust standard deviations of the rank's own work beyond which a wait is not noise."""
FLOOR_S, FLOOR_SHARE = 0.5e-3, 0.01
"""A shorter time is never called a wait: seconds, share of the step."""
TOO_NOISY_SHARE = 0.25
"""Where this share of the step would still count as noise, early and late cannot be identified."""
STRETCHES = 8
CLAIM_SHARE = 0.1
"""Share of the steps that must be early, or late, before the rank is called early, or late."""

_STEP, _COMM, _BARRIER, _PACING, _WAIT = range(5)

OWN, OWN_WAIT = "own timing", "own timing, which does not distinguish a late peer from a slow network"
COMPARED = "all ranks side by side, on average"
"""Kinds of evidence, as the page names them."""


class History:
    """A ring of iterations, all times in seconds."""

    def __init__(self) -> None:
        self._rows = np.zeros((KEPT_ITERATIONS, 5))
        self.count = 0
        self._overhead_s: deque[float] = deque(maxlen=KEPT_ITERATIONS)
        self.add_overhead = self._overhead_s.append
        """Takes in the cost of a tick to the training thread, seconds."""

    def add(self, step_s: float, comm_s: float, barrier_s: float, pacing_s: float, wait_s: float) -> None:
        """Take in a regular iteration.

        Args:
            step_s: step time, seconds.
            comm_s: time in the payload collectives, seconds.
            barrier_s: time in the barrier, seconds.
            pacing_s: this rank's delay, seconds.
            wait_s: wait for other ranks, seconds.
        """
        self._rows[self.count % KEPT_ITERATIONS] = step_s, comm_s, barrier_s, pacing_s, wait_s
        self.count += 1

    def overhead(self) -> dict[str, float | None]:
        """Mean and 99 % quantile of the ticks' cost."""
        took = np.array(self._overhead_s)
        if not len(took):
            return dict.fromkeys(("mean_s", "p99_s"))
        return {"mean_s": float(took.mean()), "p99_s": float(np.quantile(took, 0.99))}

    def _kept(self) -> NDArray[np.float64]:
        return self._rows[: min(self.count, KEPT_ITERATIONS)]

    def step(self) -> dict[str, float | None]:
        """Mean, coefficient of variation and quantiles of the step time."""
        step = self._kept()[:, _STEP]
        if not len(step):
            return dict.fromkeys(("mean_s", "cv", "p50_s", "p99_s"))
        p50, p99 = np.quantile(step, (0.5, 0.99))
        return {
            "mean_s": float(step.mean()),
            "cv": float(step.std() / step.mean()),
            "p50_s": float(p50),
            "p99_s": float(p99),
        }

    def parts(self) -> dict[str, float | None]:
        """Where the mean step went; the parts sum to it."""
        names = ("compute_s", "collective_s", "barrier_s", "pacing_s")
        if not self.count:
            return dict.fromkeys(names)
        step, comm, barrier, pacing, _ = map(float, self._kept().mean(axis=0))
        return dict(zip(names, (step - comm - barrier - pacing, comm, barrier, pacing), strict=True))

    def own(self) -> dict[str, float | None]:
        """Mean time outside collectives and barrier, and its standard error from the means of eight stretches."""
        rows = self._in_order()
        own = rows[:, _STEP] - rows[:, _COMM] - rows[:, _BARRIER]
        if len(own) < 2 * STRETCHES:
            return dict.fromkeys(("mean_s", "error_s"))
        means = [float(stretch.mean()) for stretch in np.array_split(own, STRETCHES)]
        return {"mean_s": float(own.mean()), "error_s": float(np.std(means, ddof=1)) / STRETCHES**0.5}

    def _in_order(self) -> NDArray[np.float64]:
        """The kept iterations, the oldest first."""
        return (
            np.roll(self._rows, -(self.count % KEPT_ITERATIONS), axis=0)
            if self.count > KEPT_ITERATIONS
            else self._kept()
        )

    def wait(self) -> dict[str, float | None]:
        """Mean and quantiles of the wait in the step's last collective."""
        wait = self._kept()[:, _WAIT]
        if not len(wait):
            return dict.fromkeys(("mean_s", "p50_s", "p95_s"))
        p50, p95 = np.quantile(wait, (0.5, 0.95))
        return {"mean_s": float(wait.mean()), "p50_s": float(p50), "p95_s": float(p95)}

    def arrival(self, members: int) -> dict[str, Any]:
        """Whether this rank is early or late, by how much in those steps, and in which share of the steps.

        ``members`` is the size of its process group: by chance alone a rank arrives last in one of ``members`` steps,
        and then it sees a collective without any wait.
        """
        rows = self._kept()
        if len(rows) < ENOUGH_ITERATIONS:
            return arrival_of(UNKNOWN, 0.0, 0.0, None, f"{len(rows)} iterations")
        if members < 2:
            return arrival_of(UNKNOWN, 0.0, 0.0, None, "no process group of several ranks waits for each other")
        step, blocked = rows[:, _STEP], rows[:, _COMM] + rows[:, _BARRIER]
        own = step - blocked - rows[:, _PACING]
        # without a barrier the policy's baseline is a minimum: a noisy network alone would look like a wait
        from_low = blocked - np.quantile(blocked, 0.5 / max(members, 2))
        wait = rows[:, _WAIT] if rows[:, _BARRIER].any() else from_low
        usual_s, margin_s = float(np.quantile(own, 0.25)), self._margin_s(step, own, blocked)
        late = own - usual_s > np.maximum(wait, margin_s)
        early = (wait > margin_s) & ~late
        early_s = float(np.median(wait[early])) if early.any() else 0.0
        late_s = float(np.median(own[late])) - usual_s if late.any() else 0.0
        early_share, late_share = float(early.mean()), float(late.mean())
        if max(early_share, late_share) < CLAIM_SHARE:
            if margin_s > TOO_NOISY_SHARE * float(np.median(step)):
                noise = f"own timing is too noisy to identify less than {1e3 * margin_s:.3g} ms"
                return arrival_of(UNKNOWN, 0.0, 0.0, None, noise)
            return arrival_of(ON_TIME, 0.0, 0.0, None, OWN)
        if early_share * early_s >= late_share * late_s:
            evidence = OWN if rows[:, _BARRIER].any() else OWN_WAIT
            return arrival_of(EARLY, early_s, 0.0, early_share, evidence)
        return arrival_of(LATE, 0.0, late_s, late_share, OWN)

    @staticmethod
    def _margin_s(step: NDArray[np.float64], own: NDArray[np.float64], blocked: NDArray[np.float64]) -> float:
        """Below this a wait is noise, seconds.

        From the spreads of the own work and of the collectives, about a standard deviation each. Only their lower sides
        count: the upper tails hold the late steps and the waits themselves.
        """
        spreads_s = [float(np.quantile(part, 0.25) - np.quantile(part, 0.05)) for part in (own, blocked)]
        return max(FLOOR_S, FLOOR_SHARE * float(np.median(step)), NOISE_SPREADS * max(spreads_s))


def arrival_of(verdict: str, early_s: float, late_s: float, share: float | None, evidence: str) -> dict[str, Any]:
    """The field ``arrival`` of a snapshot.

    Args:
        verdict: one of ``snapshot.ARRIVALS``.
        early_s: how early the rank is, seconds.
        late_s: how late it is, seconds.
        share: share of the steps in which it is so; None where single steps are not known.
        evidence: the reason for the verdict, in words.
    """
    return {"verdict": verdict, "early_s": early_s, "late_s": late_s, "share": share, "evidence": evidence}


def compare_ranks(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """The snapshots of a job's ranks, each with its ``arrival`` from the comparison within its process group.

    The step is common to all ranks, so the last rank to arrive spends the most of it outside collectives. Another rank
    waits for the difference. The times inside collectives are not compared: they hold the network's noise. A snapshot
    stays unchanged where a rank of its group, or its times, are missing. Ranks are compared over the iterations that
    each kept, which are the same except for the newest few.
    """
    groups: dict[float | None, list[int]] = {}
    for i, snapshot in enumerate(snapshots):
        groups.setdefault(number(snapshot, "group", "number"), []).append(i)
    found = list(snapshots)
    for together in groups.values():
        group = [snapshots[i] for i in together]
        times = [seconds for snapshot in group if (seconds := number(snapshot, "own", "mean_s")) is not None]
        sizes = {number(snapshot, "group", "members") for snapshot in group}
        if len(times) < 2 or len(times) != len(group) or sizes != {float(len(group))}:
            continue
        typical_s, margin_s = median(times), max(_margin_s(snapshot) for snapshot in group)
        for i, seconds in zip(together, times, strict=True):
            found[i] = snapshots[i] | {"arrival": _compared(seconds, max(times), typical_s, margin_s)}
    return found


def _compared(own_s: float, longest_s: float, typical_s: float, margin_s: float) -> dict[str, Any]:
    if longest_s - own_s > margin_s:
        return arrival_of(EARLY, longest_s - own_s, 0.0, None, COMPARED)
    if own_s - typical_s > margin_s:
        return arrival_of(LATE, 0.0, own_s - typical_s, None, COMPARED)
    return arrival_of(ON_TIME, 0.0, 0.0, None, COMPARED)


def _margin_s(snapshot: Snapshot) -> float:
    """Smallest difference that counts, seconds: at least three standard errors of a difference of two ranks."""
    error_s = number(snapshot, "own", "error_s") or 0.0
    return max(FLOOR_S, FLOOR_SHARE * (number(snapshot, "step", "mean_s") or 0.0), 3.0 * math.sqrt(2.0) * error_s)
