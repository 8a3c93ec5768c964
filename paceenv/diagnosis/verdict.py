"""The one verdict on a traced job: what it loses, whether pacing gains anything, and what a trace cannot show.

All headlines come from :func:`conclude`, which reads the causes and the simulated policies that stand below them, so
that a headline cannot contradict its page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from paceenv.core.intervals import Interval
from paceenv.diagnosis.arrivals import Arrivals
from paceenv.diagnosis.causes import MIN_LOST, OF_ONE_RANK, Cause
from paceenv.diagnosis.paced_steps import PacedSteps
from paceenv.diagnosis.self_check import REPLAY_FAILS

HEALTHY: Final = "healthy"
NO_DIFFERENCE: Final = 0.005
"""Share of throughput; an interval within it is no difference."""
BLIND_SPOT: Final = (
    "a trace cannot show a slowdown of all ranks alike (clocks, a slow fabric, slow kernels): run nccl-tests on its "
    "nodes, and compare the job's share of the peak FLOPs with the 38 to 55 % that are published"
)
_MARGIN: Final = 0.03
"""Throughput by which a simulated gain may exceed what the causes cost, both having errors."""

Word = Literal["helps", "costs", "makes no difference", "is open"]
Claim = Literal["helps", "gains nothing", "is open", "not simulated"]


def word_of(gain: Interval) -> Word:
    """A gain of throughput against no pacing, a share, in words."""
    if max(-gain.low, gain.high) < NO_DIFFERENCE:
        return "makes no difference"
    return "helps" if gain.low > 0.0 else "costs" if gain.high < 0.0 else "is open"


@dataclass(frozen=True)
class Diagnosis:
    """What the trace shows; times are seconds of a mean step.

    Attributes:
        slowdown: of the replay (``paceenv.diagnosis.replay``), at least 1; None where the replay is not the job
            (``paceenv.diagnosis.self_check``), as are the next two.
        bare_step_s: the mean step without any cause (``paceenv.diagnosis.attribution``); the difference to the measured
            one is the cost of all causes, including those too small to be named. None where causes are not determined.
    """

    slowdown: float | None
    ideal_step_time_s: float | None  # of the replay with all ranks equal
    step_time_s: float  # the measured mean step
    replay_error: float  # by how much the replayed mean step exceeds the measured one, as a share of it
    causes: tuple[Cause, ...]  # the largest first, behind that of a rank that is late; none where undetermined
    refused: str  # why no causes can be named; "" where they can
    bare_step_s: float | None
    arrivals: Arrivals  # who arrived last where, seen without any model
    doubt: str = ""  # what the trace leaves open, "" if nothing
    notes: tuple[str, ...] = ()  # what else is to be known of it, a line each
    agent: str = ""  # what the agent of a live job says of late ranks; leads the verdict
    late: tuple[int, ...] = ()  # the ranks that it names
    ended: bool = False  # whether the job broke off or stands still, as its agent or other files say
    paced_steps: PacedSteps | None = None  # what delays in the trace did; None without enough steps with and without
    SHOWN: ClassVar = (
        *("slowdown", "ideal_step_time_s", "bare_step_s", "step_time_s", "replay_error", "causes", "verdict"),
        *("arrivals", "paced_steps", "notes"),
    )

    @property
    def verdict(self) -> str:
        """In one sentence, without a simulation."""
        return conclude(self).text


@dataclass(frozen=True)
class Pacing:
    """What policies gained on clusters fitted to the trace."""

    gains: tuple[tuple[str, Interval], ...] = ()  # of throughput, a share, by policy; empty: not simulated
    why_not: str = ""  # why nothing was simulated
    doubt: str = ""  # why the fitted clusters may not be the job; "" if nothing


@dataclass(frozen=True)
class Verdict:
    """The conclusion, and what it was made from."""

    lost: str  # what the job loses, or that it is healthy, or why that cannot be said
    claim: Claim  # whether pacing helps
    said: str  # the claim in words, with numbers
    best: tuple[str, Interval] | None  # the policy with the largest gain; None where nothing was simulated
    unseen: str  # what a trace without a cause cannot show; "" with one
    measured: Interval | None = None  # gain of the delays in the trace itself; None without any

    @property
    def text(self) -> str:
        """The headline."""
        return "; ".join(filter(None, (self.lost, self.said, self.unseen)))

    def advice(self, cause: Cause) -> str:
        """What to do about a cause, with what the simulation says of pacing where delays act on it."""
        if not cause.pacing:
            return cause.advice
        if self.claim == "not simulated":
            return f"{cause.advice}; {cause.pacing} may help (not simulated here)"
        words = {"helps": "which helps", "gains nothing": "which gains nothing here", "is open": "which may help"}
        seen = [f"measured in this file: {_gain(self.measured)}"] if self.measured else []
        seen += [f"simulated: {_shown(self.best)}"] if self.best else []
        return f"{cause.advice}; or {cause.pacing}, {words[self.claim]} ({'; '.join(seen)})"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        policy, gain = self.best or (None, None)
        pacing = {"claim": self.claim, "policy": policy, "throughput_gain": gain, "measured": self.measured}
        return {"text": self.text, "lost": self.lost, "pacing": pacing}


def conclude(diagnosis: Diagnosis, pacing: Pacing | None = None) -> Verdict:
    """The verdict."""
    pacing = pacing or Pacing()
    best = max(pacing.gains, key=lambda one: (word_of(one[1]) == "helps", one[1].value), default=None)
    claim = _claim(diagnosis, pacing)
    measured = diagnosis.paced_steps.gain if diagnosis.paced_steps and diagnosis.paced_steps.gain.is_bounded else None
    seen = [gain for gain in (best and best[1], measured) if gain is not None]
    is_paying = any(word_of(gain) == "helps" and gain.value >= MIN_LOST for gain in seen)
    unseen = ""
    if diagnosis.refused:
        lost = f"{diagnosis.refused}; {diagnosis.arrivals.text}"
        if diagnosis.arrivals.named is not None and REPLAY_FAILS in diagnosis.refused and not diagnosis.agent:
            shares = f"what that costs is not known ({diagnosis.refused})"
            lost = f"{diagnosis.arrivals.culprits}; {shares}; {diagnosis.arrivals.where}"
    elif diagnosis.late and not (diagnosis.causes and diagnosis.causes[0].cause in OF_ONE_RANK):
        lost = _find_out(diagnosis)
    elif diagnosis.causes:
        lost = _costs(diagnosis)
    else:
        is_healthy = not is_paying and not diagnosis.late and not diagnosis.ended
        lost = f"no cause costs as much as {100 * MIN_LOST:.0f} % of a step{diagnosis.doubt}"
        lost = f"{HEALTHY} as far as a trace shows: {lost}" if is_healthy else lost
        unseen = BLIND_SPOT
    lost = f"{diagnosis.agent}; {lost}" if diagnosis.agent else lost
    if diagnosis.ended:
        died = "the job died or hangs; before that" if diagnosis.agent else "a job died or hangs; in the trace"
        lost = f"{died}, {lost}"
    return Verdict(lost, claim, _said(diagnosis, pacing, claim, best), best, unseen, measured)


def _claim(diagnosis: Diagnosis, pacing: Pacing) -> Claim:
    """Whether pacing helps; what the trace itself shows of it goes before any simulation."""
    simulated = _simulated_claim(diagnosis, pacing)
    if diagnosis.paced_steps is None or not diagnosis.paced_steps.gain.is_bounded:
        return simulated
    if word_of(diagnosis.paced_steps.gain) == "helps":
        return "helps"
    return "gains nothing" if simulated == "gains nothing" else "is open"


def _simulated_claim(diagnosis: Diagnosis, pacing: Pacing) -> Claim:
    if not pacing.gains:
        return "not simulated"
    if any(word_of(gain) == "helps" for _, gain in pacing.gains):
        return "helps"
    may_help = any(gain.high >= NO_DIFFERENCE for _, gain in pacing.gains)
    # a cluster that is not the job cannot show that nothing helps the job, unless delays do not act on what it suffers
    is_sketch = bool(diagnosis.refused or (pacing.doubt and diagnosis.causes and diagnosis.causes[0].pacing))
    return "is open" if may_help or is_sketch else "gains nothing"


def _costs(diagnosis: Diagnosis) -> str:
    first, *others = diagnosis.causes
    text = f"{first.cause} costs {first.lost_s / diagnosis.step_time_s:.0%} of the step"
    if others:
        text += " (" + ", ".join(f"{c.cause} {c.lost_s / diagnosis.step_time_s:.0%}" for c in others[:2]) + " besides)"
    return f"{text}: {first.advice}{diagnosis.doubt}"


def _find_out(diagnosis: Diagnosis) -> str:
    """The agent names a late rank, and the replay, which knows no waits for a rank, divides its cost up otherwise."""
    they_are, it = ("they are", "they have") if len(diagnosis.late) > 1 else ("it is", "it has")
    text = f"find out why {they_are} late: clocks, the host, the data loader, or work that only {it}{diagnosis.doubt}"
    costs = ", ".join(f"{c.cause} {c.lost_s / diagnosis.step_time_s:.0%}" for c in diagnosis.causes[:3])
    return f"{text}; the replay cannot tell this from {costs} of the step" if costs else text


def _said(diagnosis: Diagnosis, pacing: Pacing, claim: Claim, best: tuple[str, Interval] | None) -> str:
    if diagnosis.paced_steps is not None and diagnosis.paced_steps.gain.is_bounded:
        return _measured(diagnosis.paced_steps.gain, pacing, best)
    acted_on = [cause for cause in diagnosis.causes if cause.pacing]  # those that delays act on
    names = " and ".join(cause.cause for cause in acted_on)
    if claim == "not simulated":
        why = f"not simulated: {pacing.why_not}" if pacing.why_not else "not simulated"
        if diagnosis.refused:
            return f"whether pacing helps cannot be said ({why})"
        if acted_on:
            return f"pacing may help against {names} ({why})"
        return f"the trace shows no cause that delays act on; whether pacing gains anything was not tried ({why})"
    shown = _shown(best)
    doubt = f"; a sketch: {pacing.doubt}" if pacing.doubt else ""
    if claim == "is open":
        return f"whether pacing helps is open (simulated: {shown}{doubt})"
    if claim == "gains nothing":
        return f"pacing gains nothing{f' against {names}' if names else ''} (simulated: the best is {shown}{doubt})"
    assert best is not None
    if diagnosis.refused:
        return f"pacing helps (simulated: {shown}{doubt})"
    if not acted_on:
        doubt += "; no cause here is one that delays act on, so only a canary (paceenv live) shows whether that is true"
    else:
        lost = min(sum(cause.lost_s for cause in acted_on) / diagnosis.step_time_s, 0.99)
        most = lost / (1.0 - lost)  # the gain of throughput if all that these causes cost were gone
        exaggerates = f"; more than {names} can cost ({most:+z.1%}), so the simulation exaggerates"
        doubt += exaggerates if best[1].low > most + _MARGIN else ""
    return f"pacing helps{f' against {names}' if names else ''} (simulated: {shown}{doubt})"


def _measured(gain: Interval, pacing: Pacing, best: tuple[str, Interval] | None) -> str:
    """What the delays in the trace did, and what a simulation says beside it."""
    words = {
        "helps": "pacing helps",
        "costs": "the pacing in this file costs more than it gains",
        "makes no difference": "the pacing in this file makes no difference",
        "is open": "whether pacing helps is open",
    }
    said = f"{words[word_of(gain)]} (measured in this file: {_gain(gain)}"
    if best is None:
        return f"{said}; other settings were not simulated{f': {pacing.why_not}' if pacing.why_not else ''})"
    said += f"; simulated: {_shown(best)}{f'; a sketch: {pacing.doubt}' if pacing.doubt else ''})"
    simulated = word_of(best[1])
    if simulated == "helps" and word_of(gain) != "helps":
        return f"{said}, so the simulation is not confirmed: only a canary (paceenv live) shows whether {best[0]} helps"
    if best[1].low > gain.high or best[1].high < gain.low:
        return f"{said}, which disagree: the measurement counts, for the settings that were measured"
    return said


def _shown(best: tuple[str, Interval] | None) -> str:
    assert best is not None, "there is a simulation"
    return f"{best[0]} {_gain(best[1])}"


def _gain(gain: Interval) -> str:
    return f"{gain.value:+z.1%} throughput [{gain.low:+z.1%} to {gain.high:+z.1%}]"
