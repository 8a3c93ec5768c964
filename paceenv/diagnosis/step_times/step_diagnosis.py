"""The ceiling: at most this much throughput could be won by removing all variation of step times.

It is the mean over the first percentile, less one: if every step took as long as the fastest hundredth. Nothing that
only makes steps more even gives more. Contention or a late rank in every step is no part of it: the fastest steps have
it, too. Axes: V values in order.
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
from paceenv.diagnosis.outliers import Ordinary, split
from paceenv.diagnosis.step_times.step_patterns import (
    Drift,
    Period,
    Regime,
    autocorrelation,
    drift,
    outlier_period,
    pattern_period,
    predictable,
    regimes,
    tamed,
)
from paceenv.importers.step_log import StepLog

MIN_VALUES: Final = 8
"""Values that an interval needs."""
PERCENTILE: Final = 0.01
MANY: Final = 300
"""Values from which on their own first percentile counts; of fewer, it is extrapolated from the lower half."""
_Z: Final = -float(stats.norm.ppf(PERCENTILE))
_ROUNDING: Final = 1e-12
_RESAMPLES: Final = 200
_MAX_CELLS: Final = 1_000_000
_MAX_VALUES: Final = 50_000
"""Values of a resample; of more, evenly spread blocks are taken."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Ceiling:
    """``gain`` is relative throughput with its 95 % interval; ``from_outliers`` the part of it that outliers cost.

    ``hidden`` is the gain if the steps within one logged value vary independently of each other, which averaging would
    hide; equal to ``gain`` where a value is one step, and not-a-number where the log does not tell.
    """

    gain: Interval
    from_outliers: float
    hidden: float


def ceiling(step_s_V: Array, plain_V: NDArray[np.bool_], averaged: float) -> Ceiling | None:
    """The ceiling of values after the warm-up; None for fewer than :data:`MIN_VALUES`."""
    if len(step_s_V) < MIN_VALUES or plain_V.sum() < MIN_VALUES:
        return None
    gain = float(_gain(step_s_V))
    low, high = _resampled(step_s_V, gain)
    mean_s, plain_mean_s = float(step_s_V.mean()), float(step_s_V[plain_V].mean())
    from_outliers = max((mean_s - plain_mean_s) * (1.0 + gain) / mean_s, 0.0)
    hidden = math.nan if averaged <= 0.0 else gain
    if averaged > 1.0:
        single_cv = single_step_cv(step_s_V[plain_V], averaged)
        hidden = max(gain, 1.0 / max(1.0 - _Z * single_cv, 0.05) - 1.0 + from_outliers)
    return Ceiling(Interval(gain, low, high), from_outliers, hidden)


def single_step_cv(step_s_V: Array, averaged: float) -> float:
    """CV of single steps behind means over ``averaged`` steps, if what has no memory varies from step to step."""
    centred = step_s_V - step_s_V.mean()
    variance = float((centred**2).mean())
    lags = range(1, min(4, len(centred) // 4))
    remembered = float(np.mean([(centred[k:] * centred[:-k]).mean() for k in lags])) if len(lags) else 0.0
    remembered = min(max(remembered, 0.0), variance)
    return math.sqrt(remembered + averaged * (variance - remembered)) / float(step_s_V.mean())


def _first_percentile(step_s_V: Array) -> Array:
    """Along the last axis."""
    quantile = np.quantile(step_s_V, PERCENTILE, axis=-1)
    if step_s_V.shape[-1] >= MANY:
        return np.asarray(quantile)
    # The least of few values lies above the first percentile of what they were drawn from.
    lower, middle = np.quantile(step_s_V, [0.16, 0.5], axis=-1)
    extrapolated = middle - _Z * (middle - lower) / 0.9945
    return np.asarray(np.maximum(np.minimum(quantile, extrapolated), 0.05 * middle))


def _gain(step_s_V: Array) -> Array:
    """Along the last axis."""
    gain = step_s_V.mean(axis=-1) / _first_percentile(step_s_V) - 1.0
    return np.where(gain > _ROUNDING, gain, 0.0)


def _resampled(step_s_V: Array, gain: float) -> tuple[float, float]:
    """Ends of the 95 % interval, from resampled blocks of neighbours, whose length follows the autocorrelation."""
    if len(step_s_V) > _MAX_VALUES:
        starts = np.linspace(0, len(step_s_V) - 500, _MAX_VALUES // 500).astype(np.int64)
        step_s_V = np.concatenate([step_s_V[s : s + 500] for s in starts])
    n = len(step_s_V)
    length = int(min(max(round(correlation_length(step_s_V)) * 2, round(n ** (1 / 3)), 1), max(n // 5, 1)))
    random = np.random.default_rng(0)
    around = np.concatenate([step_s_V, step_s_V[: length - 1]])  # blocks go around the end, so that all count alike
    resamples = _RESAMPLES if n <= 5000 else _RESAMPLES // 2
    lows, highs = np.zeros(resamples), np.zeros(resamples)
    for part in np.array_split(np.arange(resamples), max(resamples * n // _MAX_CELLS, 1)):
        starts = random.integers(0, n, (len(part), -(-n // length)))
        drawn = around[(starts[:, :, None] + np.arange(length)).reshape(len(part), -1)[:, :n]]
        lows[part] = drawn.mean(axis=1) / np.quantile(drawn, PERCENTILE, axis=1) - 1.0
        highs[part] = _gain(drawn)
    low, high = float(np.quantile(lows, 0.025)), float(np.quantile(highs, 0.975))
    independent = max(n / correlation_length(step_s_V), 3.0)
    if independent < MANY:
        # Quantiles of few values vary more than resampling shows; the chi-square law of a spread, for the upper end.
        high = max(high, gain * math.sqrt((independent - 1.0) / float(stats.chi2.ppf(0.025, independent - 1.0))))
    return min(max(low, 0.0), gain), max(high, gain)


WORTH: Final = 0.02
"""A ceiling below it is not worth a second look: any cure of variation gets a part of it. What slows all steps alike
is not in it."""
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
    autocorrelation: tuple[float, ...]  # at lags from 1, of values without outliers
    predictable: Interval | None  # share of the variance that the past predicts; None with too few values
    regimes: tuple[Regime, ...]  # levels, as positions in the values after the warm-up
    drift: Drift | None  # within the longest regime
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
            "autocorrelation": list(self.autocorrelation),
            "predictable_share": _interval(self.predictable),
            "regimes": [
                {"from_step": int(at_v[r.start]), "to_step": int(at_v[r.end - 1]), "level_s": r.level_s}
                for r in self.regimes
            ],
            "drift": {"change": self.drift.change, "half_width": self.drift.half_width} if self.drift else None,
            "ceiling": None
            if ceil is None
            else _interval(ceil.gain) | {"from_outliers": ceil.from_outliers, "hidden_by_averaging": ceil.hidden},  # type: ignore[operator]
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
    run_v, step_v = log.run_V[steady_V], log.step_V[steady_V]
    if len(x) < 4:
        raise InputError(f"{log.name}: {len(x)} step times after the warm-up; allowed: at least 4")
    calm = tamed(x, outlier_v)
    averaged = _averaged(log)
    mean_s, plain = float(x.mean()), x[~outlier_v]
    variance = float(x.var())
    levels = regimes(calm)
    longest = max(levels, key=lambda r: r.end - r.start)
    within = calm[longest.start : longest.end]
    level_of_v = np.concatenate([np.full(r.end - r.start, r.level_s) for r in levels])
    flat = calm - level_of_v + calm.mean()  # a change of level is no memory of steps
    gap = max(int(np.median(np.diff(step_v))), 1)
    found: dict[str, Any] = {
        "log": log,
        "ordinary": ordinary,
        "averaged": averaged,
        "mean_s": mean_s,
        "cv": float(x.std(ddof=1)) / mean_s,
        "median_s": float(np.median(x)),
        "p99_over_median": float(np.quantile(x, 0.99) / np.median(x)),
        "plain_cv": float(plain.std(ddof=1)) / float(plain.mean()) if len(plain) > 1 else 0.0,
        # Rounding errors are uniform; those of a clock's differences, two of which make one value, count twice.
        "rounding_share": min(log.rounding_s**2 / 12.0 / variance, 1.0) if variance > 0.0 else 0.0,
        "outlier_period": outlier_period(step_v, outlier_v),
        "pattern": pattern_period(flat, gap),
        "autocorrelation": tuple(autocorrelation(flat, run_v).tolist()),
        "predictable": predictable(calm),
        "regimes": levels,
        "drift": drift(within),
        "ceiling": ceiling(x, ~outlier_v, averaged),
    }
    verdict, next_step = _verdict(found)
    return StepDiagnosis(**found, verdict=verdict, next_step=next_step)


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
    past: Interval | None = found["predictable"]
    foresight = (
        f" ({past.value:.0%} of the variance of ordinary steps is predictable from the past)"
        if past is not None
        else ""
    )
    return (
        f"{shown}{foresight}: a second look is worth it, at which ranks and operations it comes from",
        f"record which ranks are late: {RECORD}; then: paceenv diagnose runs/live",
    )


def _percent(share: float) -> str:
    return f"{100.0 * share:.2g} %" if share < 0.1 else f"{share:.0%}".replace("%", " %")


def _bounds(interval: Interval) -> str:
    return f"{100.0 * interval.low:.2g} to {100.0 * interval.high:.2g} %"


def _interval(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else {"value": interval.value, "low": interval.low, "high": interval.high}
