"""What a log's step times tell: named findings, the headline from the one that explains most, and the ceiling.

The ceiling is what removing all variation could gain at most: the mean over the first percentile, less one, within a
kind of step where kinds take turns. Nothing that only makes steps more even gives more. Contention or a late rank in
every step is no part of it: the fastest steps have it, too. Axes: V values in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from paceenv.core.errors import InputError
from paceenv.core.intervals import Interval
from paceenv.core.metrics import correlation_length
from paceenv.diagnosis.step_times.ordinary import Level, Ordinary, clipped, split
from paceenv.diagnosis.step_times.step_findings import Finding, find_all
from paceenv.diagnosis.step_times.step_patterns import Drift, Period, drift, outlier_period, pattern_period
from paceenv.importers.step_log import StepLog

MIN_VALUES: Final = 8
"""Values that an interval needs."""
PERCENTILE: Final = 0.01
_Z: Final = -float(stats.norm.ppf(PERCENTILE))
_MOST_HIDDEN: Final = 0.5
"""Of the mean: where the first percentile of single steps would lie further below it, they are not normal."""
_ROUNDING: Final = 1e-12
_RESAMPLES: Final = 200
_MAX_CELLS: Final = 1_000_000
_MAX_VALUES: Final = 50_000
"""Values of a resample; of more, evenly spread blocks are taken."""

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Ceiling:
    """``gain`` is relative throughput with its 95 % interval; ``from_outliers`` the part of it that outliers cost.

    ``hidden`` is the gain if the steps within one logged value vary independently of each other, which averaging would
    hide; equal to ``gain`` where a value is one step, and not-a-number where the log does not tell.
    """

    gain: Interval
    from_outliers: float
    hidden: float


def ceiling(step_s_V: Array, plain_V: Flags, averaged: float, kind_V: Integers, left_V: Array) -> Ceiling | None:
    """The ceiling of values after the warm-up; None for fewer than :data:`MIN_VALUES`.

    Args:
        kind_V: of steps that take turns, which kind each is, from 0.
        left_V: values without what is found to recur; what single steps vary is estimated from them.
    """
    if len(step_s_V) < MIN_VALUES or plain_V.sum() < MIN_VALUES:
        return None
    fastest_V, least_V = np.zeros(len(step_s_V)), np.zeros(len(step_s_V))
    for kind in range(int(kind_V.max()) + 1):
        fastest_V[kind_V == kind] = np.quantile(step_s_V[kind_V == kind], PERCENTILE)
        least_V[kind_V == kind] = step_s_V[kind_V == kind].min()
    mean_s = float(step_s_V.mean())
    most = mean_s / float(least_V.mean()) - 1.0
    gain = mean_s / float(fastest_V.mean()) - 1.0
    gain = gain if gain > _ROUNDING else 0.0
    low, high = _resampled(step_s_V, fastest_V)
    from_outliers = max((mean_s - float(step_s_V[plain_V].mean())) * (1.0 + gain) / mean_s, 0.0)
    hidden = math.nan if averaged <= 0.0 else gain
    if averaged > 1.0:
        spread = _Z * single_step_cv(left_V[plain_V], averaged)
        hidden = max(gain, spread / (1.0 - spread) + from_outliers) if spread < _MOST_HIDDEN else math.nan
    return Ceiling(Interval(gain, min(max(low, 0.0), gain), max(min(high, most), gain)), from_outliers, hidden)


def single_step_cv(step_s_V: Array, averaged: float) -> float:
    """CV of single steps behind means over ``averaged`` steps, if what has no memory varies from step to step."""
    centred = step_s_V - step_s_V.mean()
    variance = float((centred**2).mean())
    lags = range(1, min(4, len(centred) // 4))
    remembered = float(np.mean([(centred[k:] * centred[:-k]).mean() for k in lags])) if len(lags) else 0.0
    remembered = min(max(remembered, 0.0), variance)
    return math.sqrt(remembered + averaged * (variance - remembered)) / float(step_s_V.mean())


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
    for part in np.array_split(np.arange(resamples), max(resamples * n // _MAX_CELLS, 1)):
        starts = random.integers(0, n, (len(part), -(-n // length)))
        # Blocks go around the end, so that all count alike.
        drawn = (starts[:, :, None] + np.arange(length)).reshape(len(part), -1)[:, :n] % n
        fastest = np.quantile(step_s_V[drawn] / fastest_V[drawn], PERCENTILE, axis=1) * fastest_V[drawn].mean(axis=1)
        gains[part] = step_s_V[drawn].mean(axis=1) / fastest - 1.0
    low, high = np.quantile(gains, [0.025, 0.975]).tolist()
    return low, high


WORTH: Final = 0.02
"""A ceiling below it is not worth a second look: any cure of variation gets a part of it. What slows all steps alike
is not in it."""
_COARSE: Final = 2e-3
"""Share of a step: a coarser last digit hides variation."""
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
    ordinary: Ordinary  # which of its values are warm-up and outliers
    averaged: float  # steps that a value averages over; 0 if the log does not tell
    mean_s: float  # mean, ``cv``, ``median_s``, ``p99_over_median``: of all values after the warm-up
    cv: float
    median_s: float
    p99_over_median: float
    plain_cv: float  # CV without outliers
    rounding_share: float  # share of the variance that comes from rounding in the log
    outlier_period: Period | None  # of outliers; ``pattern``: of ordinary steps
    pattern: Period | None
    levels: tuple[Level, ...]  # as positions in the values after the warm-up
    drift: Drift | None  # within the longest level
    findings: tuple[Finding, ...]  # what explains the variation, and which rank or part of a step takes long
    ceiling: Ceiling | None  # None with too few values
    verdict: str  # one sentence
    next_step: str  # what to record or do next, and the command

    @property
    def runs(self) -> int:
        """Runs in the log: one more than restarts."""
        return int(self.log.run_V[-1]) + 1

    @property
    def steady_s_V(self) -> Array:
        """Step times after the warm-up."""
        return self.log.step_s_V[self.ordinary.steady_V]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        log, steady_V = self.log, self.ordinary.steady_V
        at_v, outlier_v = log.step_V[steady_V], self.ordinary.outlier_V[steady_V]
        ceil = self.ceiling
        return {
            "kind": "step times",
            "file": log.name,
            "format": log.source,
            "notes": list(log.notes),
            "values": len(log.step_V),
            "warm_up_values": int(self.ordinary.warm_up_V.sum()),
            "runs": self.runs,
            "steps": [int(log.step_V.min()), int(log.step_V.max())],
            "steps_per_value": self.averaged or None,
            "rank": log.rank,
            "mean_s": self.mean_s,
            "median_s": self.median_s,
            "cv": self.cv,
            "p99_over_median": self.p99_over_median,
            "cv_without_outliers": self.plain_cv,
            "rounding_share_of_variance": self.rounding_share,
            "outliers": {"count": int(outlier_v.sum()), "steps": at_v[outlier_v][:100].tolist()}
            | {"period_steps": self.outlier_period.steps if self.outlier_period else None},
            "pattern_period_steps": self.pattern.steps if self.pattern else None,
            "levels": [
                {"from_step": int(at_v[r.start]), "to_step": int(at_v[r.end - 1]), "level_s": r.level_s}
                for r in self.levels
            ],
            "findings": [vars(one) for one in self.findings],
            "phases_s": {name: float(np.nanmedian(part_V[steady_V])) for name, part_V in log.phases.items()},
            "ranks": {str(one.rank): float(np.median(one.step_s_V)) for one in (log, *log.others) if log.others},
            "drift": {"change": self.drift.change, "half_width": self.drift.half_width} if self.drift else None,
            "ceiling": None
            if ceil is None
            else ceil.gain._asdict() | {"from_outliers": ceil.from_outliers, "hidden_by_averaging": ceil.hidden},
            "verdict": self.verdict,
            "next": self.next_step,
        }


def diagnose_steps(log: StepLog) -> StepDiagnosis:
    """Diagnose a job from its step times alone.

    Raises InputError if the log has fewer than 4 values after its warm-up.
    """
    ordinary = split(log)
    steady_V = ordinary.steady_V
    x, outlier_v = log.step_s_V[steady_V], ordinary.outlier_V[steady_V]
    step_v = log.step_V[steady_V]
    if len(x) < 4:
        raise InputError(f"{log.name}: {len(x)} step times after the warm-up; allowed: at least 4")
    averaged, mean_s, plain = _averaged(log), float(x.mean()), x[~outlier_v]
    variance = float(x.var())
    level_of_v = np.concatenate([np.full(r.end - r.start, r.level_s) for r in ordinary.levels])
    # A change of level is no memory of steps, and single long steps are no pattern.
    flat = np.where(outlier_v, 1.0, x / level_of_v)
    longest = max(ordinary.levels, key=lambda r: r.end - r.start)
    slope = drift(plain) if len(ordinary.levels) == 1 else drift(x[longest.start : longest.end])
    if slope is not None and len(ordinary.levels) == 1:
        begin_s, end_s = (max(one_s, 1e-3 * mean_s) for one_s in slope.ends_s)
        flat = flat / np.linspace(begin_s, end_s, len(x))
        flat /= np.median(flat)
    gap = max(int(np.median(np.diff(step_v))), 1)
    pattern = pattern_period(clipped(flat), gap)
    kind_v = (np.arange(len(x)) % (pattern.steps // gap)) if pattern else np.zeros(len(x), np.int64)
    kind_s = np.array([np.median(flat[kind_v == kind]) for kind in range(int(kind_v.max()) + 1)])
    period = outlier_period(step_v, outlier_v)
    found: dict[str, Any] = {
        "log": log,
        "ordinary": ordinary,
        "averaged": averaged,
        "mean_s": mean_s,
        "cv": float(x.std(ddof=1)) / mean_s,
        "median_s": float(np.median(x)),
        "p99_over_median": float(np.quantile(x, 0.99) / np.median(x)),
        "plain_cv": float(plain.std(ddof=1)) / float(plain.mean()) if len(plain) > 1 else 0.0,
        "rounding_share": _rounding_share(log.rounding_s, variance, mean_s),
        "outlier_period": period,
        "pattern": pattern,
        "levels": ordinary.levels,
        "drift": slope,
        "findings": find_all(log, ordinary, slope, pattern, period, kind_v),
        "ceiling": ceiling(x, ~outlier_v, averaged, kind_v, flat / kind_s[kind_v]),
    }
    verdict, next_step = _verdict(found)
    return StepDiagnosis(**found, verdict=verdict, next_step=next_step)


def _rounding_share(rounding_s: float, variance: float, mean_s: float) -> float:
    """Share of the variance that rounding makes; of values that are all alike all of it, where digits are few.

    Rounding errors are uniform; those of a clock's differences, two of which make one value, count twice.
    """
    if variance <= 0.0:
        return 1.0 if rounding_s > _COARSE * mean_s else 0.0
    return min(rounding_s**2 / 12.0 / variance, 1.0)


def _averaged(log: StepLog) -> float:
    return float(np.median(log.steps_V)) if (log.steps_V > 0).all() else 0.0


def _verdict(found: dict[str, Any]) -> tuple[str, str]:
    """The verdict in one sentence, and what to do next."""
    top: Ceiling | None = found["ceiling"]
    averaged, log = found["averaged"], found["log"]
    if top is None:
        return (
            f"too few step times after the warm-up for a ceiling: {len(found['ordinary'].steady_V.nonzero()[0])}, "
            f"needed {MIN_VALUES}",
            f"log more steps ({LOG_EVERY_STEP}), then: paceenv diagnose {log.name}",
        )
    gain, rare = top.gain, top.from_outliers
    shown = f"removing all variation would gain at most {_percent(gain.value)} [{_bounds(gain)}] of throughput"
    if found["findings"]:
        first: Finding = found["findings"][0]
        return f"{first.text}; {shown}", first.next_step or f"to see who waits for whom in every step: {RECORD}"
    if found["rounding_share"] > _ROUNDED:
        why = f"{found['rounding_share']:.0%} of the variance that the log shows is rounding"
        return (
            f"{shown}, but {why}, so that the ceiling cannot be determined closer",
            "log step times with more digits (milliseconds with a decimal), then: paceenv diagnose on that log",
        )
    if averaged > 1.0 and gain.high < WORTH <= top.hidden:
        return (
            f"{shown} as far as the log shows, but each value averages {averaged:.0f} steps: if single steps vary "
            f"independently, up to {_percent(top.hidden)} is hidden, so whether variation is worth a second look "
            "cannot be determined",
            f"log every step for some hundred steps ({LOG_EVERY_STEP}), then: paceenv diagnose on that log",
        )
    if gain.high < WORTH:
        return (
            f"{shown}: variation is not worth a second look here; what slows every step alike, a rank that is always "
            "late or transfers that always collide, does not show in step times",
            f"nothing against variation; to see who waits for whom in every step: {RECORD}",
        )
    if gain.value - rare < WORTH and rare > 0.5 * gain.value:
        period: Period | None = found["outlier_period"]
        when = f", every {period.steps} steps" if period is not None else ""
        return (
            f"{shown}, {_percent(rare)} of it in rare long steps{when}, which pacing does not remove: look at "
            "evaluation, checkpoints, the data loader and garbage collection instead",
            f"to see what the long steps wait for: {RECORD}",
        )
    if gain.low < WORTH:
        return (
            f"{shown}: whether that is above the {WORTH:.0%} from which variation is worth a second look cannot be "
            f"determined from {len(found['ordinary'].steady_V.nonzero()[0])} values",
            f"log more steps ({LOG_EVERY_STEP}), then: paceenv diagnose on that log",
        )
    return (
        f"{shown}: a second look is worth it, at which ranks and operations it comes from",
        f"record which ranks are late: {RECORD}; then: paceenv diagnose runs/live",
    )


def _percent(share: float) -> str:
    return f"{_digits(share)} %"


def _bounds(interval: Interval) -> str:
    return f"{_digits(interval.low)} to {_digits(interval.high)} %"


def _digits(share: float) -> str:
    """Two digits of a percentage, never in powers of ten."""
    return f"{100.0 * share:.2g}" if share < 0.995 else f"{100.0 * share:.0f}"
