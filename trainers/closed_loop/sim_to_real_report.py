"""The report of a closed loop, predictions beside measurements: a page, JSON, tables, a picture, one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import paceenv
from paceenv.core.files import atomic_write
from paceenv.core.intervals import Interval
from paceenv.live.testbed.testbed_scenario import Scenario
from paceenv.report.fit_sections import fitted
from paceenv.report.section import Section, page
from paceenv.trainers.closed_loop.paired_blocks import Candidate, Found, shown
from paceenv.trainers.evaluation.score_table import label
from paceenv.ui import figures, output

SCHEMA = "paceenv.loop/4"
CONSTANTS = ("constant", "default")
"""Roles of candidates that are constant settings; the better one as measured is what the others are held to."""
_DRAWN = {
    "always": ("predicted, always on", "#b0b0b0"),
    "blocks": ("predicted, in blocks", "#4c72b0"),
    "measured": ("measured", "#c44e52"),
}
"""Effects in the picture: legend and colour."""


def build(
    scenario: Scenario, stages: Found, candidates: Sequence[Candidate], measured: Found, notes: Sequence[str]
) -> Found:
    """The report; ``stages`` are the results of those before the measurement, by the report's keys."""
    constants = [one for one in candidates if set(one.roles) & set(CONSTANTS) and len(one.measured_P)]
    reference = min(constants, key=lambda one: one.measured.value, default=None)
    helpful = [one for one in candidates if one.always.high < 0.0]
    chosen = {"policy": "passive", "why": "no candidate is predicted to help"}
    if helpful:
        best = min(helpful, key=lambda one: one.always.value)
        chosen = {"policy": best.policy, "why": f"the best predicted effect, {shown(best.always)}"}
    return {
        "schema": SCHEMA,
        "paceenv": paceenv.__version__,
        "scenario": scenario.name,
        "description": scenario.description.strip(),
        "mechanism": scenario.loop.mechanism,
        "expect": scenario.loop.expect,
        "job": scenario.loop.job,
        **stages,
        "policies": candidates,
        "chosen": chosen,
        "reference": None if reference is None else reference.policy,
        "against": {one.policy: one.against(reference) for one in candidates if reference and one is not reference},
        "measured": measured,
        "notes": [note for note in (*notes, *map(_stopped, candidates), measured["unheld"]) if note],
        "verdict": verdict(candidates, chosen["policy"]),
    }


def verdict(candidates: Sequence[Candidate], chosen: str) -> str:
    """The loop in one sentence: the chosen policy if it took part, else the one with the best prediction."""
    mine = next((one for one in candidates if one.policy == chosen), None)
    if mine is not None:
        return f"{label(chosen)}: {mine.agreement['verdict']}"
    one = min(candidates, key=lambda one: one.blocks.value)
    return f"no candidate is predicted to help; {label(one.policy)}: {one.agreement['verdict']}"


def _stopped(one: Candidate) -> str:
    """Of a policy that did not pace to the end of the measurement, why; else empty."""
    if one.agents["paced_pairs"] is None:
        return ""
    why, more = (one.agents["stopped"] or ["no reason given"])[0] or "no reason given", len(one.agents["stopped"]) - 1
    why += f"; {more} similar reasons" if more > 0 else ""
    pairs = f"only the first {one.agents['paced_pairs']} pairs count"
    return f"{label(one.policy)}: did not pace to the end on every rank ({why}); {pairs}"


def write(report: Found, out: Path) -> None:
    """Write the report as JSON and as a page, and its picture."""
    picture, chosen = _picture(report), report["chosen"]
    figures.save(picture, out / "effects.png")
    output.write_json(report, str(out / "report.json"))
    said = [
        f"Chosen by its prediction: {label(chosen['policy'])} ({chosen['why']}).",
        f"Expected of pacing beforehand: {report['expect']}.",
        *map(output.sentence, report["notes"]),
        "Changes are of mean step time, below 0 where steps got shorter; intervals are 95 %. A static rule is named by "
        "its mechanism = threshold / window.",
    ]
    drawn = Section("The job and the effects", said, verdict=report["verdict"], svg=figures.svg(picture, "effects"))
    made = page(f"Closed loop: {report['scenario']}", report["description"], [drawn, *sections(report)])
    atomic_write(out / "report.html", made)


def _picture(report: Found) -> Figure:
    """Above the real job's course, block by block; below each policy's effect, predicted and measured."""
    rows = report["policies"]
    figure, (course, panel) = figures.stack([2.4, 0.7 + 0.45 * len(rows)])
    for policy in (None, *(row.policy for row in rows)):
        blocks = [block for block in report["measured"]["blocks"] if block["policy"] == policy]
        ends_min, steps_ms = [b["end_s"] / 60.0 for b in blocks], [1e3 * b["mean_s"] for b in blocks]
        shade, name = ("#555555", "no pacing") if policy is None else (None, label(policy))
        course.plot(ends_min, steps_ms, "o", ms=5, color=shade, label=name)
    course.set(title=f"{report['scenario']}: the real job, block by block", xlabel="minutes", ylabel="mean step, ms")
    course.set_ylim(0.0, 1.1 * course.get_ylim()[1])
    course.legend(fontsize=8, loc="lower right", ncols=len(rows) + 1)
    panel.set(title="Effect of each policy", xlabel="change of mean step time, %")
    for k, (key, (what, shade)) in enumerate(_DRAWN.items()):
        change, low, high = np.array([getattr(row, key) for row in rows]).T
        bars = 100 * np.nan_to_num(np.array([change - low, high - change]).clip(0.0), posinf=0.0)
        at = np.arange(len(rows)) + 0.22 * (k - 1)
        panel.errorbar(100 * change, at, xerr=bars, fmt="o", ms=4, capsize=3, color=shade, label=what)
    panel.axvline(0.0, color="#999999", lw=0.8)
    panel.set_yticks(range(len(rows)), [label(row.policy) for row in rows], fontsize=8)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=len(_DRAWN), frameon=False)
    return figure


def sections(report: Found) -> list[Section]:
    """Its tables."""
    simulated, rows = report["simulated"], report["policies"]
    job = list[tuple[str, ...]]()
    for run, more in (
        (report["observed"], ""),
        (report["measured"]["unpaced"], " of blocks without pacing"),
    ):
        if not math.isnan(run["cv"]):
            mean, cv = ("", "") if more else (_interval_ms(simulated["step_s"]), f"{simulated['cv']:.3f}")
            error = f"{simulated['step_s'].value / run['step_s'].value - 1.0:+z.1%}"
            job.append((f"mean step{more}, ms", _interval_ms(run["step_s"]), mean, error))
            job.append((f"CV{more}", f"{run['cv']:.3f}", cv, f"{simulated['cv'] - run['cv']:+z.3f}"))
    made = [
        Section(
            "The job without pacing",
            ["calibrated to the run in the first two rows; the blocks without pacing are of another run"],
            ("", "measured", "simulated", "difference"),
            job,
        ),
        fitted(f"Calibrated {'with' if report['probe'] else 'without'} a probe", (), report["calibration"]),
        Section(
            "Predicted",
            ["with the limits of delays that the agent's guard will have"],
            ("policy", "always on", "in paired blocks", "CV", "mean delay, ms"),
            [_predicted(row) for row in rows],
        ),
        Section(
            "Predicted and measured",
            ["measured on the job's own stamps, without the agent; inside: the prediction lies in the interval"],
            ("policy", "roles", "predicted", "measured", "pairs", "inside", "sign", "the agents"),
            [_measured(row) for row in rows],
        ),
    ]
    if report["against"]:
        title = f"Against the best constant, {label(report['reference'])}"
        note = (
            "change of mean step time from the constant to the policy in the same rounds; below 0 the policy is better"
        )
        compared = [
            (label(policy), shown(one["always"]), shown(one["measured"]), str(one["rounds"]))
            for policy, one in report["against"].items()
        ]
        made.append(Section(title, [note], ("policy", "predicted, always on", "measured", "rounds"), compared))
    return made


def _predicted(one: Candidate) -> tuple[str, ...]:
    return label(one.policy), shown(one.always), shown(one.blocks), f"{one.cv:.3f}", f"{1e3 * one.mean_delay_s:.1f}"


def _measured(one: Candidate) -> tuple[str, ...]:
    agents = "; ".join(f"{count} x {verdict}" for verdict, count in one.agents["verdicts"].items())
    ok = ({True: "yes", False: "NO", None: "–"}[one.agreement[key]] for key in ("inside", "sign"))
    effects = shown(one.blocks), shown(one.measured), str(one.pairs)
    return (label(one.policy), ", ".join(one.roles), *effects, *ok, agents)


def _interval_ms(step_s: Interval) -> str:
    return f"{Interval(*(1e3 * one for one in step_s)):.1f}"
