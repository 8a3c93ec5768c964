"""Step times at other sizes, from the logs of a job at a few: mean, variation and tail, with ranges.

Few sizes do not identify a law, so the mean is one of two simple ones and carries a range, not an interval: what one
more change like the last would do. Variation carries an interval, from how it changed between sizes of real systems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from paceenv.core import metrics
from paceenv.core.errors import InputError
from paceenv.core.intervals import Interval
from paceenv.diagnosis.step_times.step_diagnosis import StepDiagnosis
from paceenv.importers.step_log import StepLog

SPREAD, TAIL_SPREAD = 0.7, 0.95
"""Standard deviations of the logarithms of the ratios of CVs, and of p99 / median - 1, at twice the nodes: eleven pairs
of MLPerf v5.1's systems (docs/evidence/reality.md)."""
_T: Final = 2.23
"""Student's t at 97.5 % for eleven pairs."""
_MODEL: Final = ("num_layers", "hidden_size", "seq_length", "micro_batch_size", "global_batch_size")


@dataclass(frozen=True)
class AtSize:
    """What is predicted for a size.

    ``mean_s`` is of ordinary steps, with a range; None where one size alone is known. ``cv`` and ``p99_over_median``
    are without outliers, with 95 % intervals.
    """

    size: float
    mean_s: Interval | None
    cv: Interval
    p99_over_median: Interval


@dataclass(frozen=True)
class SizePrediction:
    """Predictions, the law of the mean in words, and what stands against them."""

    law: str
    sizes: tuple[AtSize, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""

        def three(interval: Interval | None) -> dict[str, float] | None:
            return None if interval is None else {"value": interval.value, "low": interval.low, "high": interval.high}

        rows = [
            {
                "size": one.size,
                "mean_s": three(one.mean_s),
                "cv": three(one.cv),
                "p99_over_median": three(one.p99_over_median),
            }
            for one in self.sizes
        ]
        return {"kind": "other sizes", "law": self.law, "predicted": rows, "notes": list(self.notes)}


def predict_sizes(sizes: Sequence[float], found: Sequence[StepDiagnosis], wanted: Sequence[float]) -> SizePrediction:
    """Predict step times at other sizes.

    Raises InputError: sizes that are not positive or not different, or as many as there are logs.
    """
    if len(sizes) != len(found) or len(set(sizes)) < len(sizes) or not all(0 < s < 1e9 for s in (*sizes, *wanted)):
        raise InputError(
            f"--sizes {', '.join(f'{s:g}' for s in sizes)} for {len(found)} logs; allowed: one positive size per log, "
            "all different, and positive sizes to predict"
        )
    order = np.argsort(sizes)
    sizes, found = [sizes[i] for i in order], [found[i] for i in order]
    plain = [one.log.step_s_V[one.ordinary.plain_V] for one in found]
    level = [float(np.median(x)) for x in plain]
    notes = _differences([one.log for one in found])
    work, law = _law([one.log for one in found], sizes)
    cv, tail = found[-1].plain_cv, float(np.quantile(plain[-1], 0.99) / np.median(plain[-1])) - 1.0
    independent = max(len(plain[-1]) / metrics.correlation_length(plain[-1]), 3.0)
    rows = []
    for size in wanted:
        doublings = abs(math.log2(size / sizes[-1]))
        mean_s: Interval | None = None
        if len(sizes) > 1:
            unit = [t / work(s) for t, s in zip(level, sizes, strict=True)]
            between = math.log2(sizes[-1] / sizes[-2])
            last = math.log(unit[-1] / unit[-2]) / between
            # The pipeline's law leaves the change of a stage's time open; the power law goes on as before.
            trend = 0.0 if law.startswith("pipeline") else last * math.log2(size / sizes[-1])
            middle = unit[-1] * work(size) * math.exp(trend)
            open_ = math.exp(abs(last) * math.sqrt(doublings))
            mean_s = Interval(middle, middle / open_, middle * open_)
        wide, tail_wide = (
            math.exp(_T * math.sqrt(spread**2 * doublings + 0.5 / (independent - 1.0)))
            for spread in (SPREAD, TAIL_SPREAD)
        )
        rows.append(
            AtSize(
                size,
                mean_s,
                Interval(cv, cv / wide, cv * wide),
                Interval(1.0 + tail, 1.0 + tail / tail_wide, 1.0 + tail * tail_wide),
            )
        )
    if len(sizes) == 1:
        law = "the mean cannot be determined from one size"
    elif len(sizes) == 2:
        notes.append("two sizes do not identify a law: the range of the mean is one more change like that between them")
    notes.append("outliers are not predicted; CV and 99th percentile are of ordinary steps")
    if any(one.averaged != 1.0 for one in found):
        notes.append("values are means over several steps; so are the predicted CV and 99th percentile")
    return SizePrediction(law, tuple(rows), tuple(notes))


def _law(logs: Sequence[StepLog], sizes: Sequence[float]) -> tuple[Any, str]:
    """How much work a step of a size has, up to a constant, and that in words."""
    settings = [_numbers(log) for log in logs]
    keys = ("pipeline_model_parallel_size", "micro_batch_size", "global_batch_size", "data_parallel_size")
    if len(logs) > 1 and all(key in one for one in settings for key in keys):
        stages = [one[keys[0]] for one in settings]
        batches = {one[keys[2]] / (one[keys[1]] * one[keys[3]]) for one in settings}
        per_size = {p / s for p, s in zip(stages, sizes, strict=True)}
        if len(batches) == 1 and len(per_size) == 1 and len({one[keys[3]] for one in settings}) == 1:
            m, share = batches.pop(), per_size.pop()
            if stages[-1] > stages[0]:
                law = (
                    f"pipeline: step = ({m:g} micro-batches + stages - 1) times a stage's time, stages grow with size, "
                    "a stage takes as long as at the largest size known"
                )
                return lambda size: m + share * size - 1.0, law
    return lambda size: 1.0, "power law through the two largest sizes"


def _numbers(log: StepLog) -> dict[str, float]:
    found = {}
    for key, text in log.settings.items():
        if text.isdecimal() and 0 < int(text) < 10**9:
            found[key] = float(text)
    return found


def _differences(logs: Sequence[StepLog]) -> list[str]:
    """Settings of the model in which the logs differ: then they are not of one job."""
    found = []
    for key in _MODEL:
        values = list(dict.fromkeys(log.settings[key] for log in logs if key in log.settings))
        if len(values) > 1:
            found.append(f"{key} {', '.join(values)}")
    return [f"the logs are of different models ({'; '.join(found)}), which the law does not know"] if found else []
