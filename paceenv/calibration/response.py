"""The effect of a delay on a job, from a trace of a run in mode ``probe``: causal, not a correlation.

A random draw decides which unit (process group or rank) is delayed in which hold of a few iterations
(:mod:`paceenv.core.probing`). So the draws are independent of any other cause of long steps, and serve as instruments
in a regression over holds b,

    step_b = intercept + sum_u response_u * delay_bu + c' before_b + error_b.

- ``delay_bu`` is the measured delay of unit u. It is not random alone: a busy machine oversleeps when steps are long.
- ``before_b`` are the mean steps of the two holds before, which remove drift.
- Errors are robust to unequal spread (HC2) but never below those of equal spread. Student's t has the freedom of the
  delayed holds, which are few and may by luck be calm ones.
- Noise that lasts for many holds needs no correction: draws are independent of each other, so draw times error is
  uncorrelated from hold to hold.

Holds with head starts (all units but about one delayed alike) are left out. Effects of small delays add up; those of a
whole job that comes later do not. Calibration uses these holds (:mod:`paceenv.calibration.links`).

A response is in seconds of step per second of delay. It holds around the job's undisturbed state and for delays as
small as the probes. Effects after the next hold, such as a phase that moves against another job's, are not in it.
Legend: B holds, U units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from paceenv.calibration.probed import Probed, read_probed
from paceenv.core.probing import HOLD_ITERATIONS
from paceenv.core.trace import Trace

Verdict = Literal["shortens", "lengthens", "no effect", "not identified"]
NEGLIGIBLE: Final = 0.25
"""There is no effect if the whole interval is within this, ms per ms."""
ERROR_SHARE: Final = 0.05
MIN_HOLDS: Final = 40
MIN_DELAYED: Final = 8
"""Holds in which a unit must be delayed for an estimate."""
HOLDS_PER_UNIT: Final = 4
"""With fewer, units are not estimated one by one."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Effect:
    """The effect of one ms of delay, ms per ms, with standard error and 95 % interval; None where not identified.

    ``freedom`` is of Student's t.
    """

    value: float | None
    se: float | None
    freedom: int | None
    lo: float | None
    hi: float | None
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class UnitResponse:
    """The effect of delaying one unit on the step. ``mean_delay_s`` is over the holds in which it was delayed."""

    unit: str
    ranks: tuple[int, ...]
    delayed_holds: int
    mean_delay_s: float
    step: Effect


@dataclass(frozen=True)
class CollectiveResponse:
    """The effect of delays on a group's payload collectives: the time from its last member's entry to the last exit.

    ``own`` is per ms by which a unit within the group comes later, ``others`` per ms by which one outside does, which
    is a head start for the group.
    """

    group: int
    ranks: tuple[int, ...]
    mean_s: float
    own: Effect
    others: Effect


@dataclass(frozen=True)
class Response:
    """The response of a job to delays.

    ``iterations`` are all that were measured, ``holds`` those without head starts, from which effects are estimated.
    ``overall`` is per ms of delay of every unit, each by chance for itself: the sum of the units' responses. ``after``
    is what of that shows in the hold after (a phase that moved, say). ``cost_share`` is by how much of the step the run
    was longer than it was at rest. ``text`` says in a sentence what was found.
    """

    iterations: int
    holds: int
    mean_step_s: float | None
    cost_share: float | None
    overall: Effect
    after: Effect
    units: tuple[UnitResponse, ...]
    collectives: tuple[CollectiveResponse, ...]
    text: str

    def to_json(self) -> dict[str, Any]:
        """Plain data; null where nothing is identified."""
        return asdict(self)


def measure_response(trace: Trace) -> Response:
    """What delays did in the job of ``trace``; where the trace does not identify it, the answer says why.

    Args:
        trace: of a job with random delays, as mode ``probe`` records it.
    """
    every = read_probed(trace)
    if isinstance(every, str):
        return _unknown(every)
    probed = every.without_head_starts()
    if len(probed.hold_B) < MIN_HOLDS:
        left_out = " without head starts" if every.head_start_B.any() else ""
        return _unknown(
            f"{len(probed.hold_B)} holds of {HOLD_ITERATIONS} iterations{left_out}; at least {MIN_HOLDS} are "
            f"needed, so at least {(MIN_HOLDS - len(probed.hold_B)) * HOLD_ITERATIONS} iterations more"
        )
    step_s_B, delay_s_B, level_B = probed.step_s_B, probed.delay_s_BU.mean(axis=1), probed.level_BU.mean(axis=1)
    overall = _regress(step_s_B, delay_s_B[:, None], level_B[:, None], _before(probed, step_s_B, 1, 2))[0]
    delay_s_B2, level_B2 = (np.stack([now, *_before(probed, now, 1).T], axis=1) for now in (delay_s_B, level_B))
    after = _regress(step_s_B, delay_s_B2, level_B2, _before(probed, step_s_B, 2, 3))[1]
    units = _units(probed)
    said = _effect(overall, probed.iterations)
    rest_s = float(step_s_B[level_B == 0.0].mean()) if (level_B == 0.0).any() else math.nan
    mean_s = float(every.step_s_B.mean())
    return Response(
        iterations=probed.iterations,
        holds=len(step_s_B),
        mean_step_s=mean_s,
        cost_share=mean_s / rest_s - 1.0 if rest_s > 0.0 else None,
        overall=said,
        after=_effect(after, probed.iterations),
        units=units,
        collectives=tuple(_collective(probed, g) for g in range(len(probed.groups))),
        text=_sentence(units, said),
    )


class _Estimate(NamedTuple):
    """A coefficient with its standard error and degrees of freedom; not-a-number where the draws moved nothing."""

    value: float
    se: float
    freedom: int


def _regress(y_B: Array, delay_BX: Array, level_BX: Array, before_BK: Array) -> list[_Estimate]:
    """Coefficients of ``delay`` with ``level`` as instruments, given what was ``before``; robust errors."""
    known = np.isfinite(y_B)
    y_B, delay_BX, level_BX, before_BK = y_B[known], delay_BX[known], level_BX[known], before_BK[known]
    count, delayed_X = delay_BX.shape[1], np.count_nonzero(level_BX, axis=0)
    scale_s = max(float(np.abs(delay_BX).max(initial=0.0)), 1e-12)  # columns of like size are solved for more exactly
    size_s = max(float(np.abs(y_B).max(initial=0.0)), 1e-12)
    moved_BK = (before_BK - before_BK.mean(axis=0)) / size_s
    given = np.concatenate([np.ones((len(y_B), 1)), moved_BK[:, moved_BK.std(axis=0) > 1e-9]], axis=1)
    X, Z = (np.concatenate([first, given], axis=1) for first in (delay_BX / scale_s, level_BX))
    freedom = len(y_B) - X.shape[1]
    cross = Z.T @ X
    if freedom < 1 or (delayed_X < MIN_DELAYED).any() or np.linalg.cond(cross) > 1e10:
        return [_Estimate(math.nan, math.nan, 0)] * count
    inverse = np.linalg.inv(cross)
    solution = inverse @ (Z.T @ y_B)
    leverage = np.einsum("bi,ij,bj->b", X, inverse, Z)
    error_B = (y_B - X @ solution) / np.sqrt(np.maximum(1.0 - leverage, 0.1))
    robust = ((inverse @ (Z * error_B[:, None]).T) ** 2).sum(axis=1)
    pooled = float(((y_B - X @ solution) ** 2).sum()) / freedom * ((inverse @ Z.T) ** 2).sum(axis=1)
    se = np.sqrt(np.maximum(robust, pooled)) / scale_s
    return [
        _Estimate(float(solution[i]) / scale_s, float(se[i]), min(int(delayed_X[i]) - 1, freedom)) for i in range(count)
    ]


def _before(probed: Probed, values_B: Array, *lags: int) -> Array:
    """The values ``lags`` holds before, ``(B, lags)``; their mean where that hold is missing."""
    place = {hold: b for b, hold in enumerate(probed.hold_B.tolist())}
    mean = float(np.nanmean(values_B))
    columns = []
    for lag in lags:
        index = np.array([place.get(hold - lag, -1) for hold in probed.hold_B.tolist()])
        found = np.where(index >= 0, values_B[index], mean)
        columns.append(np.where(np.isfinite(found), found, mean))
    return np.stack(columns, axis=1)


def _units(probed: Probed) -> tuple[UnitResponse, ...]:
    delayed_BU = (probed.level_BU > 0.0) & (probed.delay_s_BU > 0.0)
    delayed_U = delayed_BU.sum(axis=0)
    few, holds = len(probed.hold_B) < HOLDS_PER_UNIT * len(probed.units), len(probed.hold_B)
    asked = np.flatnonzero((delayed_U >= MIN_DELAYED) & (not few))
    before = _before(probed, probed.step_s_B, 1, 2)
    estimates = _regress(probed.step_s_B, probed.delay_s_BU[:, asked], probed.level_BU[:, asked], before)
    estimated = dict(zip(asked.tolist(), estimates, strict=True))
    found = []
    for u, unit in enumerate(probed.units):
        if u in estimated:
            effect = _effect(estimated[u], probed.iterations)
        elif few:
            effect = _nothing(f"{holds} holds for {len(probed.units)} units; at least {HOLDS_PER_UNIT} for each needed")
        else:
            effect = _nothing(f"delayed in {delayed_U[u]} holds; at least {MIN_DELAYED} are needed")
        amounts = probed.delay_s_BU[delayed_BU[:, u], u]
        mean_s = float(amounts.mean()) if len(amounts) else 0.0
        found.append(UnitResponse(unit.name, unit.ranks, int(delayed_U[u]), mean_s, effect))
    return tuple(found)


def _collective(probed: Probed, g: int) -> CollectiveResponse:
    group, span_s_B = probed.groups[g], probed.collective_s_BG[:, g]
    own_U = np.array([unit.group == group for unit in probed.units])
    member = np.stack([which_U for which_U in (own_U, ~own_U) if which_U.any()], axis=1).astype(np.float64)
    before = _before(probed, span_s_B, 1, 2)
    estimated = _regress(span_s_B, probed.delay_s_BU @ member, probed.level_BU @ member, before)
    alone = _nothing("no unit outside this group was delayed")
    own, *others = [_effect(one, probed.iterations) for one in estimated]
    ranks = tuple(sorted(rank for unit in probed.units if unit.group == group for rank in unit.ranks))
    return CollectiveResponse(group, ranks, float(np.nanmean(span_s_B)), own, others[0] if others else alone)


def _effect(estimate: _Estimate, iterations: int) -> Effect:
    value, se, freedom = estimate
    if not (math.isfinite(value) and math.isfinite(se)):
        return _nothing("what was drawn did not decide what was delayed")
    half = float(stats.t.ppf(1.0 - 0.5 * ERROR_SHARE, freedom)) * se
    lo, hi = value - half, value + half
    verdict: Verdict = "not identified"
    if hi < 0.0:
        verdict = "shortens"
    elif lo > 0.0:
        verdict = "lengthens"
    elif max(-lo, hi) < NEGLIGIBLE:
        verdict = "no effect"
    text = f"{value:+.2g} ms per ms [{lo:.2g}, {hi:.2g}]"
    if verdict == "not identified":
        needed = iterations * max((half / NEGLIGIBLE) ** 2, 2.0)
        more = f"some {needed:.1g} iterations instead of {iterations} would do"
        text = f"cannot be identified from this trace: {text}; {more}"
    return Effect(value, se, freedom, lo, hi, verdict, text)


def _unknown(why: str) -> Response:
    nothing = _nothing(why)
    return Response(0, 0, None, None, nothing, nothing, (), (), nothing.text)


def _nothing(why: str) -> Effect:
    return Effect(None, None, None, None, None, "not identified", f"cannot be identified from this trace: {why}")


def _sentence(units: Sequence[UnitResponse], overall: Effect) -> str:
    """What was found: the units whose delays shorten the step, such that all of them together err in 5 %; then all."""
    tail = 0.5 * ERROR_SHARE / max(len(units), 1)
    said = [f"delaying {one.unit} shortens the step: {one.step.text}" for one in units if _upper(one.step, tail) < 0.0]
    named = {
        "shortens": "delays shorten the step: ",
        "lengthens": "delays cost: ",
        "no effect": "no effect: ",
        "not identified": "",
    }
    return "; ".join(
        [*said, ("the responses of all units together: " if said else named[overall.verdict]) + overall.text]
    )


def _upper(effect: Effect, tail: float) -> float:
    """The end of an effect's interval above which it lies with a chance of ``tail``; infinite where it is not known."""
    if effect.value is None or effect.se is None or effect.freedom is None:
        return math.inf
    return effect.value + float(stats.t.ppf(1.0 - tail, effect.freedom)) * effect.se
