"""What a log's step times tell: named findings, the headline from what explains or costs most, and the ceiling.

The ceiling is what removing all variation could gain at most: the mean over the first percentile, less one, within a
kind of step where kinds take turns. Nothing that only makes steps more even gives more. Contention or a late rank in
every step is no part of it: the fastest steps have it, too. Axes: V values in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from paceenv.core.errors import InputError
from paceenv.core.intervals import Interval
from paceenv.core.metrics import correlation_length
from paceenv.diagnosis.step_times import step_findings
from paceenv.diagnosis.step_times.ordinary import Ordinary, clipped, split
from paceenv.diagnosis.step_times.step_findings import Drift, Finding
from paceenv.importers.log_text.conversion import Array, Integers, StepLog

MIN_VALUES: Final = 8
"""Values that an interval needs."""
PERCENTILE: Final = 0.01
_ROUNDING: Final = 1e-12
_RESAMPLES: Final = 200
_MAX_VALUES: Final = 50_000
"""Values of a resample; of more, evenly spread blocks are taken."""
WORTH: Final = 0.02
"""A ceiling below it is not worth a second look: any cure of variation gets a part of it. What slows all steps alike
is not in it."""
_COARSE: Final = 2e-3
"""Share of a step: a coarser last digit hides variation."""
_IRREGULAR: Final = 1.5
"""Times as long that the longest tenth of the steps takes, from which on that is the answer."""
_ROUNDED: Final = 0.3
"""Share of the variance that rounding may make before it is said."""
RECORD: Final = "paceenv live run --nproc-per-node 8 --out runs/live train.py"
"""The live agent, which only observes by default."""
LOG_EVERY_STEP: Final = (
    "Megatron-LM --log-interval 1, torchtitan --metrics.log_freq 1, Hugging Face logging_steps=1, "
    "nanoGPT log_interval=1"
)


@dataclass(frozen=True)
class StepDiagnosis:
    """What a log's step times tell; times in seconds, shares and gains relative."""

    log: StepLog
    ordinary: Ordinary  # which of its values are warm-up and outliers, and levels
    averaged: float  # steps that a value averages over; 0 if the log does not tell
    drift: Drift | None  # within the longest level
    findings: tuple[Finding, ...]  # what explains the variation, and which rank or part of a step takes long
    minor: tuple[Finding, ...]  # what else is there and explains little
    ceiling: Interval | None  # relative throughput that removing all variation gains; None with too few values

    @property
    def runs(self) -> int:
        """Runs in the log: one more than restarts."""
        return int(self.log.run_V[-1]) + 1

    @property
    def steady_s_V(self) -> Array:
        """Step times after the warm-up; so are mean, median and CV."""
        return self.log.step_s_V[self.ordinary.steady_V]

    @property
    def mean_s(self) -> float:
        return float(self.steady_s_V.mean())

    @property
    def median_s(self) -> float:
        return float(np.median(self.steady_s_V))

    @property
    def cv(self) -> float:
        return float(self.steady_s_V.std(ddof=1)) / self.mean_s

    @property
    def p99_over_median(self) -> float:
        return float(np.quantile(self.steady_s_V, 0.99)) / self.median_s

    @property
    def from_outliers(self) -> float:
        """The part of the ceiling that outliers cost."""
        plain_s = float(self.log.step_s_V[self.ordinary.plain_V].mean())
        return max((1.0 - plain_s / self.mean_s) * (1.0 + (self.ceiling.value if self.ceiling else 0.0)), 0.0)

    @property
    def rounding_share(self) -> float:
        """Share of the variance that rounding makes; of values that are all alike all of it, where digits are few.

        Rounding errors are uniform; those of a clock's differences, two of which make one value, count twice.
        """
        variance = float(self.steady_s_V.var())
        if variance <= 0.0:
            return 1.0 if self.log.rounding_s > _COARSE * self.mean_s else 0.0
        return min(self.log.rounding_s**2 / 12.0 / variance, 1.0)

    @property
    def verdict(self) -> str:
        return self._answer[0]

    @property
    def next_step(self) -> str:
        return self._answer[1]

    @property
    def _answer(self) -> tuple[str, str]:
        again = f"log more steps ({LOG_EVERY_STEP}), then: paceenv diagnose on that log"
        count = len(self.steady_s_V)
        if self.ceiling is None:
            few = f"too few step times after the warm-up for a ceiling: {count}, needed {MIN_VALUES}"
            return "; ".join([*(one.text for one in self.findings[:1]), few]), again
        most, low, high = map(_digits, (self.ceiling.value, self.ceiling.low, self.ceiling.high))
        shown = f"removing all variation would gain at most {most} % [{low} to {high} %] of throughput"
        if self.findings:
            first = self.findings[0]
            gain = f"; removing all variation would gain at most {most} % of throughput in the mean of this log"
            text = first.text + gain * (first.kind not in {"rank", "part"})  # which are more than variation
            return text, first.next_step or f"to see who waits for whom in every step: {RECORD}"
        if self.rounding_share > _ROUNDED:
            share = self.log.rounding_s / self.mean_s
            return (
                f"the log rounds times to {_digits(share)} % of a step, which hides what is smaller: removing all "
                f"variation would gain at most about {_digits(self.ceiling.value + share)} % of throughput",
                "log step times with more digits (milliseconds with a decimal), then: paceenv diagnose on that log",
            )
        if self.averaged > 1.0 and self.ceiling.high < WORTH:
            return (
                f"{shown} as far as the log shows, but each value averages {self.averaged:.0f} steps, which hides how "
                "single steps vary: whether variation is worth a second look cannot be determined",
                f"log every step for some hundred steps ({LOG_EVERY_STEP}), then: paceenv diagnose on that log",
            )
        if self.ceiling.high < WORTH:
            return (
                f"{shown}: variation is not worth a second look here; what slows every step alike, a rank that is "
                "always late or transfers that always collide, does not show in step times",
                f"nothing against variation; to see who waits for whom in every step: {RECORD}",
            )
        if self.ceiling.low < WORTH:
            return (
                f"{shown}: whether that is above the {WORTH:.0%} from which variation is worth a second look cannot "
                f"be determined from {count} values",
                again,
            )
        short_s, long_s = np.quantile(self.steady_s_V, [0.1, 0.9]).tolist()
        if long_s > _IRREGULAR * short_s:
            said = self.log.said
            shown = (
                f"steps vary, and no pattern shows: a tenth takes less than {said(short_s)}, a tenth more than "
                f"{said(long_s)}; {shown}"
            )
        return (
            f"{shown}: a second look is worth it, at which ranks and operations it comes from",
            f"record which ranks are late: {RECORD}; then: paceenv diagnose runs/live",
        )

    def to_json(self) -> dict[str, Any]:
        log, steady_V, levels = self.log, self.ordinary.steady_V, self.ordinary.levels
        at_v, outlier_v = log.step_V[steady_V], self.ordinary.outlier_V[steady_V]
        about = {
            "kind": "step times",
            "file": log.name,
            "format": log.source,
            "notes": log.notes,
            "rank": log.rank,
            "seconds_of_a": log.of,
            "values": len(log.step_V),
            "steps": [log.step_V.min(), log.step_V.max()],
            "warm_up_values": self.ordinary.warm_up_V.sum(),
            "outliers": {"count": outlier_v.sum(), "steps": at_v[outlier_v][:100]},
            "levels": [{"from_step": at_v[r.start], "to_step": at_v[r.end - 1], "level_s": r.level_s} for r in levels],
            "phases_s": {name: np.nanmedian(part_V[steady_V]) for name, part_V in log.phases.items()},
            "ranks": {one.rank: np.median(one.step_s_V) for one in (log, *log.others) if log.others},
        }
        numbers = ("averaged", "runs", "mean_s", "median_s", "cv", "p99_over_median", "rounding_share")
        said = ("drift", "ceiling", "from_outliers", "findings", "minor", "verdict", "next_step")
        return about | {name: getattr(self, name) for name in (*numbers, *said)}


def diagnose_steps(log: StepLog) -> StepDiagnosis:
    """Diagnose a job from its step times alone.

    Raises InputError if the log has fewer than 4 values after its warm-up.
    """
    ordinary = split(log)
    steady_V, levels = ordinary.steady_V, ordinary.levels
    x, outlier_v = log.step_s_V[steady_V], ordinary.outlier_V[steady_V]
    step_v = log.step_V[steady_V]
    if len(x) < 4:
        raise InputError(f"{log.name}: {len(x)} step times after the warm-up; allowed: at least 4")
    level_of_v = np.concatenate([np.full(r.end - r.start, r.level_s) for r in levels])
    # A change of level is no memory of steps, and single long steps are no pattern.
    flat = np.where(outlier_v, 1.0, x / level_of_v)
    longest = max(levels, key=lambda r: r.end - r.start)
    slope = step_findings.drift(x[~outlier_v] if len(levels) == 1 else x[longest.start : longest.end])
    if slope is not None and len(levels) == 1:
        first_s, last_s = (max(one_s, 1e-3 * float(x.mean())) for one_s in slope.ends_s)
        flat = flat / np.linspace(first_s, last_s, len(x))
        flat /= np.median(flat)
    gap = max(int(np.median(np.diff(step_v))), 1)
    pattern = step_findings.pattern_period(clipped(flat), gap)
    kind_v = (np.arange(len(x)) % (pattern // gap)) if pattern else np.zeros(len(x), np.int64)
    averaged = float(np.median(log.steps_V)) if (log.steps_V > 0).all() else 0.0
    named, minor = step_findings.find_all(log, ordinary, slope, pattern, kind_v)
    enough = len(x) >= MIN_VALUES and (~outlier_v).sum() >= MIN_VALUES
    if pattern and not step_findings.take_turns(x, kind_v):
        kind_v = np.zeros(len(x), np.int64)
    ceiling = _ceiling(x, kind_v) if enough else None
    return StepDiagnosis(log, ordinary, averaged, slope, named, minor, ceiling)


def _ceiling(step_s_V: Array, kind_V: Integers) -> Interval:
    """The gain of throughput if all values were as the fastest of their kind."""
    fastest_V, least_V = np.zeros(len(step_s_V)), np.zeros(len(step_s_V))
    for kind in range(int(kind_V.max()) + 1):
        fastest_V[kind_V == kind] = np.quantile(step_s_V[kind_V == kind], PERCENTILE)
        least_V[kind_V == kind] = step_s_V[kind_V == kind].min()
    most, gain = (float(step_s_V.mean() / x.mean()) - 1.0 for x in (least_V, fastest_V))
    gain = gain if gain > _ROUNDING else 0.0
    low, high = _resampled(step_s_V, fastest_V)
    return Interval(gain, min(max(low, 0.0), gain), max(min(high, most), gain))


def _resampled(step_s_V: Array, fastest_V: Array) -> tuple[float, float]:
    """Ends of the 95 % interval, from resampled blocks of neighbours, whose length follows the autocorrelation."""
    if len(step_s_V) > _MAX_VALUES:
        starts = np.linspace(0, len(step_s_V) - 500, _MAX_VALUES // 500).astype(np.int64)
        kept = np.concatenate([np.arange(start, start + 500) for start in starts])
        step_s_V, fastest_V = step_s_V[kept], fastest_V[kept]
    n = len(step_s_V)
    length = int(min(max(round(correlation_length(step_s_V)) * 2, round(n ** (1 / 3)), 1), max(n // 5, 1)))
    random = np.random.default_rng(0)
    resamples = _RESAMPLES if n <= 5000 else _RESAMPLES // 2
    gains = np.zeros(resamples)
    for k in range(resamples):
        starts = random.integers(0, n, -(-n // length))
        drawn = (starts[:, None] + np.arange(length)).ravel()[:n] % n  # around the end, so that all count alike
        x, fast = step_s_V[drawn], fastest_V[drawn]
        gains[k] = x.mean() / (np.quantile(x / fast, PERCENTILE) * fast.mean()) - 1.0
    low, high = np.quantile(gains, [0.025, 0.975]).tolist()
    return low, high


def _digits(share: float) -> str:
    """Two digits of a percentage, never in powers of ten."""
    return f"{100.0 * share:.2g}" if share < 0.995 else f"{100.0 * share:.0f}"
