"""Named findings of step times: growth, levels, steps that take turns, rare long steps, a slow rank, a long part.

Each says how much of the variation it explains: how much closer its medians are to the values than one median of all.
Below them what recurs or grows: periods of outliers and of patterns, a steady change. Axes: V values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from scipy import stats

from paceenv.core.lateness.watch import find_late_ranks
from paceenv.core.student_t import student_t_quantile
from paceenv.core.wording import duration, name_ranks
from paceenv.diagnosis.step_times.ordinary import Flags, Ordinary
from paceenv.importers.log_text.conversion import Array, Integers, StepLog

Kind = Literal["growth", "drift", "levels", "alternation", "long steps", "rank", "part"]
LEAST: Final = 0.3
"""Share of the variation that a finding explains at least."""
LARGE: Final = 0.02
"""Share of a step: what changes less is no finding."""
GROWTH: Final = 0.15
STEADY: Final = 0.6
"""Share of the variation that a line explains where steps grow steadily; a random walk has less."""
MOST_STEPS: Final = 0.8
"""Share of the steps in which it is the slower one."""
LONG_PART: Final = 0.1
"""Share of a step that a part must take to be named, where steps should not wait for it."""
LONG_TRANSFERS: Final = 0.3
"""The same of transfers, which a job cannot do without."""
_WAITED_FOR: Final = ("data", "load", "read", "fetch")
_WAITING: Final = frozenset(("send", "recv", "reduce", "allreduce", "gather", "sync", "barrier", "params", "grads"))
"""Parts in which ranks wait for each other: there the slowest rank takes least."""
_CAUSE: Final = 0.15
"""A part that explains about as much as a course of time stands first: it says where to look."""
_VARIES: Final = 0.005
"""Mean deviation, as a share of the step, from which on there is something to explain; of a part four times as much."""
_MOST_LEVELS: Final = 6

MAX_PERIOD: Final = 128
MAX_VALUES: Final = 20_000
"""Values of which a pattern's period is looked for."""
_ALPHA = 1e-4


@dataclass(frozen=True)
class Finding:
    """``explains`` is the share of the variation, 0 to 1; a slow rank or part stands before what explains variation.

    ``period`` counts the steps from one to the next of what recurs, 0 without. ``is_small``: too small a change to
    begin with, whatever it explains. ``costs``: the share of all time, of rare long steps and of a part that steps
    should not wait for; a larger part stands before what is rare, or only takes turns.
    """

    kind: Kind
    text: str
    explains: float
    next_step: str = ""
    period: int = 0
    is_small: bool = False
    costs: float = 0.0


def find_all(
    log: StepLog, ordinary: Ordinary, slope: Drift | None, pattern: int, kind_v: Integers
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """All findings that explain enough, the one to begin with first; and what else is there.

    ``kind_v``: of steady steps that take turns every ``pattern`` steps, which kind each is.
    """
    steady_V = ordinary.steady_V
    x, step_v, outlier_v = log.step_s_V[steady_V], log.step_V[steady_V], ordinary.outlier_V[steady_V]
    findings = [
        _levels(x, step_v, ordinary) if len(ordinary.levels) > 1 else None,
        _growth(x, slope, ordinary) if slope is not None else None,
        _alternation(x, kind_v, pattern, log) if pattern else None,
        _long_steps(x, step_v, outlier_v, log) if outlier_v.any() else None,
        *(_part(name, part_V[steady_V], x) for name, part_V in log.phases.items()),
    ]
    there = [one for one in findings if one is not None]
    most = max((one.costs for one in there if one.kind == "part"), default=0.0)
    there.sort(
        key=lambda one: (
            one.kind in {"long steps", "alternation"} and one.costs < most,
            -one.explains - (_CAUSE if one.kind == "part" else 0.0),
        )
    )
    named = [one for one in there if one.explains >= LEAST and not one.is_small]
    return tuple(_slow_ranks(log) + named), tuple(one for one in there if one not in named)


def _explained(x: Array, fitted: Array | float, least: float = _VARIES) -> float:
    total = float(np.abs(x - np.median(x)).sum())
    return max(1.0 - float(np.abs(x - fitted).sum()) / total, 0.0) if total > least * float(x.sum()) else 0.0


def begin_of(step_v: Integers, at: int) -> str:
    """The step at which a value begins; a value that stands for several steps began after the one before."""
    begin = int(step_v[at - 1]) + 1 if at else int(step_v[at])
    return f"{'' if begin == step_v[at] else 'about '}step {begin}"


def _levels(x: Array, step_v: Integers, ordinary: Ordinary) -> Finding:
    levels = ordinary.levels
    fitted = np.concatenate([np.full(one.end - one.start, one.level_s) for one in levels])
    first, second, words = levels[0].level_s, levels[1].level_s, ordinary.log.said
    at = begin_of(step_v, levels[1].start)
    if len(levels) > 2:
        said = ", ".join(f"{words(one.level_s)} from {begin_of(step_v, one.start)}" for one in levels[:_MOST_LEVELS])
        said += " ..." * (len(levels) > _MOST_LEVELS)
        text = f"the step time changes its level {len(levels) - 1} times: {said}"
    else:
        change = (
            f"take {second / first:.3g} times as long" if second > first else f"are {first / second:.3g} times as fast"
        )
        text = f"steps {change} since {at}: {words(first)} before, {words(second)} from there on"
    next_step = f"look at what changed at {at}: another job, a clock, a phase of the program"
    large = max(first, second) > (1.0 + LARGE) * min(first, second) or len(levels) > 2
    return Finding("levels", text, _explained(x, fitted), next_step, is_small=not bool(large))


def _growth(x: Array, slope: Drift, ordinary: Ordinary) -> Finding:
    begin_s, end_s = slope.ends_s
    explains = _explained(x, np.linspace(begin_s, end_s, len(x)))
    if abs(slope.change) < GROWTH or len(ordinary.levels) > 1 or explains < STEADY:
        of = " of the longest level" if len(ordinary.levels) > 1 else ""
        text = f"{slope.change:+z.1%} from beginning to end{of}, +-{slope.half_width:.1%}"
        return Finding("drift", text, explains, is_small=True)
    ends, next_step = f"{ordinary.log.said(begin_s)} to {ordinary.log.said(end_s)}", ""
    text = f"steps get steadily shorter, from {ends}"
    if slope.change > 0.0:
        text = f"steps grow steadily from {ends}: a leak or growing work on the host, not ranks"
        next_step = (
            "compare a host profile (py-spy) of the beginning with one of the end: lists, caches, logs that grow"
        )
    return Finding("growth", text, explains, next_step)


def take_turns(x: Array, kind_v: Integers) -> bool:
    """Whether one kind of step takes longer, and the others are alike; else it is a course that recurs."""
    kind_s, longest, others_s = _kinds(x, kind_v)
    return _explained(x, np.where(kind_v == longest, kind_s[longest], others_s)) >= LEAST


def _kinds(x: Array, kind_v: Integers) -> tuple[Array, int, float]:
    """The median of each kind of step, which kind takes longest, and the median of the others."""
    kind_s = np.array([np.median(x[kind_v == kind]) for kind in range(int(kind_v.max()) + 1)])
    longest = int(np.argmax(kind_s))
    return kind_s, longest, float(np.median(np.delete(kind_s, longest)))


def _alternation(x: Array, kind_v: Integers, steps: int, log: StepLog) -> Finding:
    kind_s, longest, others_s = _kinds(x, kind_v)
    explains, is_small = _explained(x, kind_s[kind_v]), bool(kind_s[longest] <= (1.0 + LARGE) * others_s)
    if not take_turns(x, kind_v):
        ends = f"{log.said(float(kind_s.min()))} and {log.said(kind_s[longest])}"
        text = f"the same course recurs every {steps} steps, between {ends}"
        return Finding("alternation", text, explains, "", steps, is_small)
    apart = "every second step" if steps == 2 else f"one of {steps} steps"
    text = (
        f"steps take turns: {apart} takes {log.said(kind_s[longest])}, the others {log.said(others_s)}, as "
        "with gradient accumulation"
    )
    return Finding("alternation", text, explains, "compare steps of the same kind only", steps, is_small)


def _long_steps(x: Array, step_v: Integers, outlier_v: Flags, log: StepLog) -> Finding:
    period = _outlier_period(step_v, outlier_v)
    usual_s, long_s = float(np.median(x[~outlier_v])), float(np.median(x[outlier_v]))
    when = f", every {period} steps" if period else ""
    count, steps = int(outlier_v.sum()), float(np.median(log.steps_V))
    what = f"{count} rare long step{'s' * (count > 1)}"
    if steps > 1.0:
        what = f"{count} rare long value{'s, each' * (count > 1) or ','} the mean of {steps:.0f} steps"
    text = (
        f"{what}{when}, of {log.said(long_s)} where {log.said(usual_s)} is usual, "
        "which pacing does not remove: look at evaluation, checkpoints, the data loader and garbage collection instead"
    )
    explains, costs = _explained(x, np.where(outlier_v, long_s, usual_s)), 1.0 - float(x[~outlier_v].mean() / x.mean())
    return Finding("long steps", text, explains, period=period, costs=costs)


def _part(name: str, part: Array, x: Array) -> Finding | None:
    """A part of a step that makes its variation, or one that a step should not wait for."""
    share, mean_s = float(np.nanmean(part) / np.mean(x)), float(np.mean(x))
    part = np.where(np.isfinite(part), part, np.nanmedian(part))
    is_transfer = not _WAITING.isdisjoint(name.split())
    waited = is_transfer or any(word in name for word in _WAITED_FOR)
    explains = _explained(x, np.median(x - part) + part, 4.0 * _VARIES)
    if not (waited and share >= (LONG_TRANSFERS if is_transfer else LONG_PART)) and explains < 0.5:
        return None
    text = f"{name!r} takes {share:.0%} of all time ({duration(share * mean_s)} of {duration(mean_s)} in the mean step)"
    text += f" and makes {explains:.0%} of the variation" if explains >= LEAST else ""
    if is_transfer:
        text += ": transfers, and waiting in them for ranks that come late, which a log does not tell apart"
    next_step = "" if is_transfer else f"profile some steps: what {name!r} does, or waits for"
    return Finding("part", text, max(explains, LEAST if waited else 0.0), next_step, costs=share if waited else 0.0)


def _slow_ranks(log: StepLog) -> list[Finding]:
    """Ranks that take longer than the others in most steps, in whole or else in a part."""
    logs = {one.rank: one for one in (log, *log.others) if one.rank is not None}
    step_s = float(np.median(log.step_s_V))
    for name in ("", *log.phases):
        of_rank = {
            rank: dict(zip(one.step_V.tolist(), part_V.tolist(), strict=True))
            for rank, one in logs.items()
            if (part_V := one.phases.get(name) if name else one.step_s_V) is not None
        }
        if len(of_rank) < 2:
            continue
        common = sorted(set.intersection(*map(set, of_rank.values())))
        time_RS = np.array([[times[step] for step in common] for times in of_rank.values()])
        late = [one.rank for one in find_late_ranks(time_RS.T, step_s).late]
        if not late:
            continue
        usual_R, fast_S = np.nanmedian(time_RS, axis=1), np.median(np.delete(time_RS, late, axis=0), axis=0)
        slow_s, fast_s = float(np.median(usual_R[late])), float(np.median(np.delete(usual_R, late)))
        slower = float((time_RS[late].min(axis=0) > fast_S).mean())
        if slower < MOST_STEPS:
            continue
        who, what = name_ranks([[*of_rank][r] for r in late]), f" in {name!r}" if name else ""
        takes, are = ("takes", "is") if len(late) == 1 else ("take", "are")
        when = "in every step" if slower == 1.0 else f"in {slower:.0%} of the steps"
        text = f"{who} {takes} {duration(slow_s)}{what}, the others {duration(fast_s)}, {when} ({len(common)} steps)"
        text += f": {(slow_s - fast_s) / max(step_s, slow_s):.0%} of a step, if the others wait for that"
        next_step = f"find out why {who} {are} slow: clocks, neighbours, its share of the data"
        return [Finding("rank", text, 1.0, next_step)]
    return []


def _outlier_period(step_V: Integers, outlier_V: Flags) -> int:
    """How many steps lie between outliers, if most keep to one period and most of its places have one; else 0."""
    at = step_V[outlier_V]
    if len(at) < 4:
        return 0
    gap = max(int(np.median(np.diff(step_V))) if len(step_V) > 1 else 1, 1)
    gaps = np.diff(at)
    periods: list[tuple[int, int]] = []
    for steps in np.unique(gaps[gaps > 0])[:200].tolist():
        if steps < 2 * gap:
            continue
        phase = at % steps
        # A logged value covers the steps since the last one, so phases within a logging interval are one.
        nearest = np.minimum(np.abs(phase[:, None] - phase[None, :]), steps - np.abs(phase[:, None] - phase[None, :]))
        members = int((nearest < gap).sum(axis=1).max()) if len(at) <= 2000 else 0
        places = (at[-1] - at[0]) / steps + 1.0
        chance = min(2.0 * gap / steps, 1.0)
        unlikely = float(stats.binom.sf(members - 2, len(at) - 1, chance)) < 1e-2 / len(gaps)
        if members >= 0.7 * len(at) and members >= 0.7 * places and unlikely:
            periods.append((members, int(steps)))
    return max(periods, default=(0, 0))[1]


def pattern_period(values: Array, gap: int) -> int:
    """The period of ordinary steps that take turns, as every k-th one being longer; 0 if there is none."""
    values = values[:MAX_VALUES]
    n, total = len(values), float(((values - values.mean()) ** 2).sum())
    if n < 16 or not total > 1e-18 * n * float(values.mean()) ** 2:
        return 0
    best, share = 0, 0.0  # the share of their variance that it explains
    periods = range(2, min(MAX_PERIOD, n // 4) + 1)
    for period in periods:
        phase = np.arange(n) % period
        means = np.bincount(phase, values, period) / np.bincount(phase, minlength=period)
        between = float((np.bincount(phase, minlength=period) * (means - values.mean()) ** 2).sum())
        ratio = (between / (period - 1)) / max((total - between) / (n - period), 1e-300)
        adjusted = 1.0 - (total - between) / (n - period) / (total / (n - 1))
        clear = float(stats.f.sf(ratio, period - 1, n - period)) < _ALPHA / len(periods) and adjusted > 0.1
        # A multiple of the period explains as much; it must explain clearly more to be the better answer.
        if clear and (not best or adjusted > 1.1 * share + 0.02):
            best, share = period * gap, adjusted
    return best


_BLOCKS = 10
_SMALLEST_DRIFT = 0.002


@dataclass(frozen=True)
class Drift:
    """Change of the level from the beginning to the end, relative, with the half width of its 95 % interval.

    ``ends_s`` are the beginning and the end of the line, seconds.
    """

    change: float
    half_width: float
    ends_s: tuple[float, float]


def drift(values: Array) -> Drift | None:
    """A steady change from the beginning to the end, by a line through the means of ten blocks, or fewer of few values.

    None if it cannot be told from 0, is below 0.2 %, or for fewer than 12 values.
    """
    n = len(values)
    if n < 12:
        return None
    blocks = _BLOCKS if n >= 3 * _BLOCKS else n // 3
    mean_s = float(values.mean())
    means = np.array([block.mean() for block in np.array_split(values, blocks)]) / mean_s
    x = (np.arange(blocks) - (blocks - 1) / 2.0) / blocks
    slope = float(x @ means / (x @ x))
    left = means - means.mean() - slope * x
    # Neighbouring blocks of a slow variation are alike, so that a line fits them by chance more often.
    memory = max(float(left[1:] @ left[:-1]) / max(float(left @ left), 1e-300), 0.0)
    error = math.sqrt(float(left @ left) / (blocks - 2) / float(x @ x)) * math.sqrt((1.0 + memory) / (1.0 - memory))
    half_width = error * student_t_quantile(0.025, blocks - 2)
    if abs(slope) < max(1.5 * half_width, _SMALLEST_DRIFT):
        return None
    half_s = 0.5 * (n - 1) * float(np.polyfit(np.arange(n), values, 1)[0])
    return Drift(slope, half_width, (max(mean_s - half_s, 0.0), max(mean_s + half_s, 0.0)))
