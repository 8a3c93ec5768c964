"""The one verdict on a traced job: what it loses, whether pacing gains anything, and what a trace cannot show.

All headlines come from :func:`conclude`, which reads the causes and the simulated policies that stand below them, so
that a headline cannot contradict its page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from paceenv.core.intervals import Interval
from paceenv.core.wording import name_ranks
from paceenv.diagnosis.arrivals import Arrivals
from paceenv.diagnosis.causes import MIN_LOST, OF_ONE_RANK, Cause
from paceenv.diagnosis.paced_steps import PacedSteps, in_words
from paceenv.diagnosis.self_check import REPLAY_FAILS

INSUFFICIENT: Final = "insufficient evidence"
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
class Paced:
    """A policy on the fitted clusters: throughput against no pacing, CV with and without, delay as a share of a step.

    ``outside`` says whether it met conditions outside its calibrated range.
    """

    policy: str
    gain: Interval  # of throughput, a share
    cv: float
    cv_passive: float
    delay_share: float
    outside: str = ""
    SHOWN: ClassVar = ("policy", "gain", "cv", "cv_passive", "delay_share", "verdict", "outside")

    @property
    def verdict(self) -> str:
        word = word_of(self.gain)
        more = {
            "makes no difference": f" (less than {NO_DIFFERENCE:.1%})",
            "is open": "; this trace does not show whether it helps",
        }
        return word + more.get(word, "")

    @property
    def text(self) -> str:
        return f"{self.policy} {in_words(self.gain)}"


@dataclass(frozen=True)
class Pacing:
    """What policies gained on clusters fitted to the trace."""

    policies: tuple[Paced, ...] = ()  # empty: not simulated
    why_not: str = ""  # why nothing was simulated
    doubt: str = ""  # why the fitted clusters may not be the job; "" if nothing
    clusters: int = 0  # how many


@dataclass(frozen=True)
class Verdict:
    """The conclusion, and what it was made from."""

    lost: str  # what the job loses, or that it is healthy, or why that cannot be said
    claim: Claim  # whether pacing helps
    said: str  # the claim in words, with numbers
    best: Paced | None  # the policy with the largest gain; None where nothing was simulated
    unseen: str  # what a trace without a cause cannot show; "" with one
    measured: Interval | None = None  # gain of the delays in the trace itself; None without any

    @property
    def text(self) -> str:
        return "; ".join(filter(None, (self.lost, self.said, self.unseen)))

    def advice(self, cause: Cause) -> str:
        """What to do about a cause, with what the simulation says of pacing where delays act on it."""
        if not cause.pacing:
            return cause.advice
        if self.claim == "not simulated":
            return f"{cause.advice}; {cause.pacing} may help (not simulated here)"
        words = {"helps": "which helps", "gains nothing": "which gains nothing here", "is open": "which may help"}
        seen = [f"measured in this file: {in_words(self.measured)}"] if self.measured else []
        seen += [f"simulated: {self.best.text}"] if self.best else []
        return f"{cause.advice}; or {cause.pacing}, {words[self.claim]} ({'; '.join(seen)})"

    def to_json(self) -> dict[str, Any]:
        policy, gain = (self.best.policy, self.best.gain) if self.best else (None, None)
        pacing = {"claim": self.claim, "policy": policy, "throughput_gain": gain, "measured": self.measured}
        return {"text": self.text, "lost": self.lost, "pacing": pacing}


def conclude(diagnosis: Diagnosis, pacing: Pacing | None = None) -> Verdict:
    pacing = pacing or Pacing()
    best = max(pacing.policies, key=lambda one: (word_of(one.gain) == "helps", one.gain.value), default=None)
    measured = diagnosis.paced_steps.gain if diagnosis.paced_steps and diagnosis.paced_steps.gain.is_bounded else None
    seen = [gain for gain in (best.gain if best else None, measured) if gain is not None]
    is_paying = any(word_of(gain) == "helps" and gain.value >= MIN_LOST for gain in seen)
    claim, lost = _claim(diagnosis, pacing, measured), _lost(diagnosis, is_paying=is_paying)
    said = _simulated(diagnosis, pacing, claim, best) if measured is None else _measured(measured, pacing, best)
    unseen = "" if diagnosis.refused or diagnosis.causes or diagnosis.late else BLIND_SPOT
    return Verdict(lost, claim, said, best, unseen, measured)


def _lost(diagnosis: Diagnosis, *, is_paying: bool) -> str:
    """What the job loses, led by what its agent says."""
    costs = [f"{c.cause} {c.lost_s / diagnosis.step_time_s:.0%}" for c in diagnosis.causes[:3]]
    if diagnosis.refused:
        lost = f"{diagnosis.refused}; {diagnosis.arrivals.text}"
        if diagnosis.arrivals.named is not None and REPLAY_FAILS in diagnosis.refused and not diagnosis.agent:
            shares = f"what that costs is not known ({diagnosis.refused})"
            lost = f"{diagnosis.arrivals.culprits}; {shares}; {diagnosis.arrivals.where}"
        elif diagnosis.late and not diagnosis.refused.startswith(INSUFFICIENT):
            lost = f"what else is lost {lost}"
    elif diagnosis.late and not (diagnosis.causes and diagnosis.causes[0].cause in OF_ONE_RANK):
        # the agent names a late rank, and the replay, which knows no waits for a rank, divides its cost up otherwise
        they_are, it = ("they are", "they have") if len(diagnosis.late) > 1 else ("it is", "it has")
        lost = f"find out why {they_are} late: clocks, the host, the data loader, or work that only {it}"
        lost += diagnosis.doubt
        lost += f"; the replay cannot tell this from {', '.join(costs)} of the step" if costs else ""
    elif diagnosis.causes:
        first = diagnosis.causes[0]
        besides = f" ({', '.join(costs[1:])} besides)" if costs[1:] else ""
        share = f"{first.lost_s / diagnosis.step_time_s:.0%}"
        verb = "cost" if first.cause.endswith("s") else "costs"
        lost = f"{first.cause} {verb} {share} of the step{besides}: {first.advice}{diagnosis.doubt}"
    else:
        lost = f"no cause costs as much as {100 * MIN_LOST:.0f} % of a step{diagnosis.doubt}"
        is_healthy = not (is_paying or diagnosis.ended)
        lost = f"{HEALTHY} as far as a trace shows: {lost}" if is_healthy else lost
    unsure = [f"{INSUFFICIENT}: {name_ranks(cause.ranks)};" for cause in diagnosis.causes if cause.ranks]
    if diagnosis.agent.startswith(tuple(unsure)):  # the replay, which has every step, is sure
        return lost
    if diagnosis.agent and diagnosis.ended:  # nobody asks then what steps lose
        return diagnosis.agent + (f"; in the steps before, {', '.join(costs)} of the step" if costs else "")
    if diagnosis.agent:
        return f"{diagnosis.agent}; {lost}"
    return f"a job died or hangs; in the trace, {lost}" if diagnosis.ended else lost


def _claim(diagnosis: Diagnosis, pacing: Pacing, measured: Interval | None) -> Claim:
    """Whether pacing helps; what the trace itself shows of it goes before any simulation."""
    words = {word_of(one.gain) for one in pacing.policies}
    if (word_of(measured) if measured is not None else "helps" if "helps" in words else "") == "helps":
        return "helps"
    if not words:
        return "not simulated" if measured is None else "is open"
    may_help = "helps" in words or any(one.gain.high >= NO_DIFFERENCE for one in pacing.policies)
    # a cluster that is not the job cannot show that nothing helps the job, unless delays do not act on what it suffers
    is_sketch = bool(diagnosis.refused or (pacing.doubt and diagnosis.causes and diagnosis.causes[0].pacing))
    return "is open" if may_help or is_sketch else "gains nothing"


def _simulated(diagnosis: Diagnosis, pacing: Pacing, claim: Claim, best: Paced | None) -> str:
    """What a simulation says, or why there is none."""
    acted_on = [cause for cause in diagnosis.causes if cause.pacing]  # those that delays act on
    names = " and ".join(cause.cause for cause in acted_on)
    if best is None:
        why = f"not simulated: {pacing.why_not}" if pacing.why_not else "not simulated"
        if diagnosis.refused:
            of_it = "" if diagnosis.refused.startswith(INSUFFICIENT) else f" ({why})"  # else the same reason again
            return f"whether pacing helps cannot be said{of_it}"
        if acted_on:
            return f"pacing may help against {names} ({why})"
        return f"the trace shows no cause that delays act on; whether pacing gains anything was not tried ({why})"
    doubt = f"; a sketch: {pacing.doubt}" if pacing.doubt else ""
    if claim == "is open":
        return f"whether pacing helps is open (simulated: {best.text}{doubt})"
    against = f" against {names}" if names else ""
    if claim == "gains nothing":
        return f"pacing gains nothing{against} (simulated: the best is {best.text}{doubt})"
    if diagnosis.refused:
        return f"pacing helps (simulated: {best.text}{doubt})"
    if not acted_on:
        doubt += "; no cause here is one that delays act on, so only a canary (paceenv live) shows whether that is true"
    else:
        lost = min(sum(cause.lost_s for cause in acted_on) / diagnosis.step_time_s, 0.99)
        most = lost / (1.0 - lost)  # the gain of throughput if all that these causes cost were gone
        exaggerates = f"; more than {names} can cost ({most:+z.1%}), so the simulation exaggerates"
        doubt += exaggerates if best.gain.low > most + _MARGIN else ""
    return f"pacing helps{against} (simulated: {best.text}{doubt})"


def _measured(gain: Interval, pacing: Pacing, best: Paced | None) -> str:
    """What the delays in the trace did, and what a simulation says beside it."""
    words = {
        "helps": "pacing helps",
        "costs": "the pacing in this file costs more than it gains",
        "makes no difference": "the pacing in this file makes no difference",
        "is open": "whether pacing helps is open",
    }
    said = f"{words[word_of(gain)]} (measured in this file: {in_words(gain)}"
    if best is None:
        return f"{said}; other settings were not simulated{f': {pacing.why_not}' if pacing.why_not else ''})"
    said += f"; simulated: {best.text}{f'; a sketch: {pacing.doubt}' if pacing.doubt else ''})"
    if word_of(best.gain) == "helps" and word_of(gain) != "helps":
        canary = f"only a canary (paceenv live) shows whether {best.policy} helps"
        return f"{said}, so the simulation is not confirmed: {canary}"
    if best.gain.low > gain.high or best.gain.high < gain.low:
        return f"{said}, which disagree: the measurement counts, for the settings that were measured"
    return said
