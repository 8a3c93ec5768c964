"""Two runs side by side: what changed in a step and its parts, and whether that is more than the noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from paceenv.core.metrics import correlation_length
from paceenv.core.operation_matrix import Array, OperationMatrix
from paceenv.core.wording import duration
from paceenv.diagnosis.host_activity import PARTS
from paceenv.diagnosis.step_times.ordinary import split
from paceenv.importers.log_text.conversion import StepLog
from paceenv.importers.timelines import RankActivity

STEP: Final = "step"
_SMALLEST_S: Final = 1e-7
"""Parts that take less in both runs are left out."""
_LEAST: Final = 4
"""Values whose spread tells noise."""


@dataclass(frozen=True)
class Change:
    """A mean before and after, seconds; ``half_width_s`` of the 95 % interval of the difference, None if unknown."""

    what: str
    before_s: float
    after_s: float
    half_width_s: float | None
    SHOWN: ClassVar = ("what", "before_s", "after_s", "half_width_s", "verdict")

    @property
    def verdict(self) -> str:
        if self.half_width_s is None:
            return "too few steps to tell from noise"
        return "more than noise" if abs(self.after_s - self.before_s) > self.half_width_s else "within noise"

    def row(self) -> tuple[str, ...]:
        ratio = f"{self.after_s / self.before_s - 1.0:+z.1%}" if self.before_s > 0.0 else "-"
        return self.what, duration(self.before_s), duration(self.after_s), ratio, self.verdict


def of_log(log: StepLog) -> dict[str, Array]:
    """Step times and parts of ordinary steps."""
    plain_V = split(log).plain_V
    parts = {STEP if log.of == STEP else f"time of a {log.of}": log.step_s_V, **log.phases}
    return {name: part_V[plain_V] for name, part_V in parts.items()}


def of_trace(matrix: OperationMatrix, activity: tuple[RankActivity, ...]) -> dict[str, Array]:
    """Steps, and the mean over ranks of where devices spend them; what is hidden under kernels is no part of them."""
    parts = {STEP: matrix.step_s_T}
    iterations = sorted({one.iteration for one in activity})
    named = {name: words for words, name in PARTS if activity}
    named.pop("hidden_s", None)
    for name, words in named.items():
        of_step = ([getattr(one, name) for one in activity if one.iteration == at] for at in iterations)
        parts[words] = np.array([np.mean(values) for values in of_step])
    return parts


def compare(before: Mapping[str, Array], after: Mapping[str, Array]) -> tuple[Change, ...]:
    """What both have, the step first, then the parts that changed most."""
    changes = []
    for name in before:
        if name in after:
            a, b = (x[np.isfinite(x)] for x in (before[name], after[name]))
            if len(a) and len(b) and max(a.mean(), b.mean()) > _SMALLEST_S:
                enough = min(len(a), len(b)) >= _LEAST
                half = 1.96 * math.hypot(_error(a), _error(b)) if enough else None
                changes.append(Change(name, float(a.mean()), float(b.mean()), half))
    first = next(iter(before), "")
    return tuple(sorted(changes, key=lambda one: (one.what != first, -abs(one.after_s - one.before_s))))


def _error(values: Array) -> float:
    """Standard error of a mean, with memory counted."""
    spread = float(values.std(ddof=1))
    return spread * math.sqrt(correlation_length(values) / len(values)) if spread > 0.0 else 0.0


def headline(changes: tuple[Change, ...]) -> str:
    """In a sentence: the step, and the part that accounts for most of its change."""
    if not changes:
        return "the two runs have nothing in common that could be compared"
    step, *parts = changes
    text = f"{step.what}: {duration(step.before_s)} before, {duration(step.after_s)} after, {step.verdict}"
    grown = [one for one in parts if one.verdict == "more than noise"]
    if grown:
        first = grown[0]
        text += f"; most of it in {first.what!r}: {duration(first.before_s)} before, {duration(first.after_s)} after"
    return text
