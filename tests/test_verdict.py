"""The one verdict: a headline never contradicts the causes, simulated gains and checks that stand below it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traced_jobs import job_of, trace_of

from benchmarks._common import recorded
from paceenv.core.intervals import Interval
from paceenv.core.operation_matrix import read_matrix
from paceenv.core.plain import plain
from paceenv.core.trace import Trace, TraceMetadata, write_trace
from paceenv.diagnosis.answer import find_answer
from paceenv.diagnosis.causes import _WORDS, CONTENTION, INCAST, TENANT, Cause
from paceenv.diagnosis.diagnose import diagnose
from paceenv.diagnosis.paced_steps import PacedSteps, measure_pacing
from paceenv.diagnosis.verdict import BLIND_SPOT, HEALTHY, Diagnosis, Paced, Pacing, Verdict, conclude, word_of
from paceenv.importers.inputs import Inputs
from paceenv.report.answer_sections import headline
from paceenv.report.examination import examine
from paceenv.trainers.evaluation.suites import load_suite

PLAIN = diagnose(job_of(np.tile([1.0, 1.0, 1.0, 2.0], (20, 1))))
SHARE, MAY_HELP = st.floats(0.02, 0.3), (CONTENTION, TENANT, INCAST)
GAIN = st.builds(lambda at, half: Interval(at, at - half, at + half), st.floats(-0.3, 0.6), st.floats(0.0, 0.1))


def paced(policy: str, gain: Interval) -> Paced:
    return Paced(policy, gain, cv=0.1, cv_passive=0.1, delay_share=0.01)


def check(found: Diagnosis, pacing: Pacing, verdict: Verdict) -> None:
    """Every claim of the headline against what stands below it."""
    text = verdict.text
    gains = [one.gain for one in pacing.policies]
    words = {word_of(gain) for gain in gains}
    seen = found.paced_steps
    measured = word_of(seen.gain) if seen is not None and seen.gain.is_bounded else None
    helps = "helps" in words if measured is None else measured == "helps"
    assert (verdict.claim == "not simulated") == (not gains and measured is None)
    assert (verdict.claim == "helps") == helps
    assert verdict.said.startswith("pacing helps") == helps
    assert ("measured in this file" in verdict.said) == (measured is not None)
    if measured is not None and measured != "helps" and "helps" in words:
        assert "the simulation is not confirmed" in verdict.said
    if "pacing gains nothing" in text:
        assert words <= {"makes no difference", "costs"}
    if not gains:
        assert f"not simulated: {pacing.why_not}" in text if pacing.why_not else "not simulated" in text
    else:
        largest = max(gain.value for gain in gains if "helps" not in words or word_of(gain) == "helps")
        assert f"{largest:+z.1%} throughput" in text
        assert "was not tried" not in text
        assert "may help" not in text.replace(verdict.lost, "")
    acts = [cause for cause in found.causes if cause.pacing]
    for cause in found.causes[:3]:
        assert f"{cause.cause} " in text
        assert f"{cause.lost_s / found.step_time_s:.0%}" in text
    for cause in found.causes:
        advice = verdict.advice(cause)
        assert advice.startswith(cause.advice)
        assert ("which helps" in advice) == (bool(cause.pacing) and verdict.claim == "helps")
        assert ("which gains nothing" in advice) == (bool(cause.pacing) and verdict.claim == "gains nothing")
    if text.startswith(HEALTHY):
        assert not found.causes
        assert not found.refused
        assert all(gain.value < 0.02 for gain in gains if word_of(gain) == "helps")
    if not found.causes and not found.refused:
        assert BLIND_SPOT in text
    if verdict.claim == "helps" and measured is None and found.causes and not acts and not found.refused:
        assert "only a canary" in text
    if found.refused:
        assert found.refused in text


@st.composite
def diagnoses(draw: st.DrawFn) -> Diagnosis:
    """Any causes, none, or a refusal."""
    if draw(st.booleans()) and draw(st.booleans()):
        return replace(PLAIN, causes=(), refused="cannot be determined: clocks disagree", bare_step_s=None)
    chosen = draw(st.lists(st.sampled_from([*_WORDS]), unique=True, max_size=4))
    causes = [
        Cause(name, 0.25, "seen", "do this", draw(SHARE) * PLAIN.step_time_s, "pacing" * (name in MAY_HELP))
        for name in chosen
    ]
    gain = draw(st.none() | GAIN | st.builds(Interval, st.floats(-0.3, 0.6)))
    steps = None if gain is None else PacedSteps(1.0, 1.0 + gain.value, 40, np.arange(40), gain)
    return replace(PLAIN, causes=tuple(sorted(causes, key=lambda c: -c.lost_s)), refused="", paced_steps=steps)


@given(
    found=diagnoses(),
    gains=st.lists(GAIN, max_size=4),
    doubt=st.sampled_from(["", "the fitted cluster's mean step is +12% off"]),
)
def test_a_headline_never_contradicts_what_it_was_made_from(
    found: Diagnosis, gains: list[Interval], doubt: str
) -> None:
    pacing = Pacing(tuple(paced(f"p{i}", gain) for i, gain in enumerate(gains)), "" if gains else "no cluster", doubt)
    verdict = conclude(found, pacing)
    check(found, pacing, verdict)
    assert headline(verdict).casefold().count(verdict.said.casefold()) == 1, "and the page shows it"


def paced_job(gain: float, seed: int) -> Trace:
    """Half a second of transfer; rank 0 delays itself by 0.1 s in every second stretch, of which ``gain`` is known."""
    is_paced_T, rows, at_s = np.arange(400) // 40 % 2 == 1, list[tuple[Any, ...]](), 0.0
    step_T = np.where(is_paced_T, 1.5 / (1.0 + gain), 1.5)
    step_T *= np.exp(0.05 * np.random.default_rng(seed).standard_normal(400))
    for t, step_s in enumerate(step_T.tolist()):
        rows += [(0, t, 0, "pace", -1, at_s, at_s + 0.1)] if is_paced_T[t] else []
        for r in range(2):
            begin_s = at_s + 0.1 * bool(r == 0 and is_paced_T[t])
            rows.append((r, t, 1, "compute", -1, begin_s, at_s + 1.0))
            rows.append((r, t, 2, "all_reduce", 0, at_s + 1.0, at_s + step_s))
        at_s += step_s
    return trace_of(rows)


@pytest.mark.parametrize("gain", [-0.1, 0.0, 0.2])
def test_delays_in_a_trace_are_measured_against_its_steps_without(gain: float) -> None:
    inside = 0
    for seed in range(10):
        found = measure_pacing(read_matrix(paced_job(gain, seed)))
        assert found is not None
        assert (found.paced, len(found.plain_T)) == (200, 199)
        assert found.gain.value == pytest.approx(gain, abs=0.02)
        inside += gain in found.gain
    assert inside >= 8, "of 10 intervals of 95 %"


def test_a_headline_says_what_the_delays_in_the_file_did() -> None:
    found = diagnose(paced_job(-0.2, 0))
    verdict = conclude(found, Pacing((paced("learned", Interval(0.04, 0.01, 0.08)),)))
    assert verdict.claim == "is open"
    assert verdict.said.startswith("the pacing in this file costs more than it gains (measured in this file: -")
    assert "simulated: learned +4.0%" in verdict.said
    assert "own pacing" not in {cause.cause for cause in found.causes}, "causes are those without delays"
    assert found.notes[0].startswith("causes are those of the 199 steps without delays")
    assert found.step_time_s == pytest.approx(1.5, rel=0.02)
    assert plain(found)["paced_steps"]["paced"] == 200


def test_a_simulated_job_has_one_verdict(tmp_path: Path) -> None:
    """The smallest cluster of a suite, recorded, diagnosed, fitted and simulated: claims and numbers agree."""
    cluster = min((case.load() for case in load_suite("nulls").cases), key=lambda one: (one.ranks, one.name))
    path = tmp_path / "run.parquet"
    write_trace(recorded(cluster, 0, 60), path)
    found = examine([path])
    assert found.answer.diagnosis is not None
    assert found.verdict is not None
    check(found.answer.diagnosis, found.pacing, found.verdict)
    for one in found.pacing.policies:
        assert one.verdict.startswith(word_of(one.gain))


@pytest.mark.parametrize(("aside_s", "causes"), [(0.0, True), (0.5, False)])
def test_what_the_agent_of_the_job_says_leads(aside_s: float, causes: bool) -> None:
    """Where collectives run beside the compute, its rows contain waiting, and no cause is named from them."""
    made = job_of(np.tile([1.0, 1.0, 1.0, 2.0], (20, 1)))
    agent = {"text": "rank 3 is late by 1.0 s", "late": [3], "aside_s": aside_s}
    trace = Trace(made.table, TraceMetadata({**made.metadata.job, "agent": agent}, made.metadata.ranks, "test"))
    found = find_answer(Inputs(trace))
    assert found.diagnosis is not None
    assert found.diagnosis.verdict.startswith("rank 3 is late by 1.0 s; ")
    assert bool(found.diagnosis.causes) == causes
    assert found.lateness is None  # one verdict, one number
    assert ("collectives of 500 ms a step run beside the compute" in found.diagnosis.verdict) != causes
    assert "waiting for others" not in found.diagnosis.verdict


def test_a_trace_beside_a_hang_is_not_said_to_be_of_the_same_job() -> None:
    assert conclude(replace(PLAIN, ended=True)).lost.startswith("a job died or hangs; in the trace, ")
    assert conclude(replace(PLAIN, ended=True, agent="no step has ended")).lost.startswith(
        "no step has ended; in the steps before, p"
    )


@pytest.mark.parametrize("rank", [2, 3])
def test_a_headline_that_names_a_rank_does_not_doubt_it(rank: int) -> None:
    lost = conclude(replace(PLAIN, agent=f"insufficient evidence: rank {rank}; it varies too much")).lost
    assert lost.startswith("persistent slow rank" if rank == 3 else "insufficient evidence: rank 2; it")
