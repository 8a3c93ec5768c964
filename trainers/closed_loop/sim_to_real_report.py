"""The report of a closed loop, predictions beside measurements: Markdown, JSON, tables, pictures, one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import paceenv
from paceenv.calibration.cluster_builder import GOOD_CV, GOOD_MEAN
from paceenv.calibration.parameters import Parameter
from paceenv.live.testbed.testbed_scenario import Scenario
from paceenv.report.section import Section
from paceenv.trainers.closed_loop.paired_blocks import Effect, Found
from paceenv.trainers.closed_loop.predict import Prediction
from paceenv.trainers.closed_loop.scenario_program import left_out
from paceenv.trainers.evaluation.evaluate import NULL_LIMIT
from paceenv.trainers.evaluation.score_table import label
from paceenv.ui import config_files, figures, output

SCHEMA = "paceenv.loop/2"
CONSTANTS = ("constant", "default")
"""Roles of candidates that are constant settings; the better one as measured is what the others are held to."""
_SHADES = {"predicted, always on": "#b0b0b0", "predicted, in blocks": "#4c72b0", "measured": "#c44e52"}


def build(
    scenario: Scenario,
    observed: Found,
    probed: Found | None,
    parameters: Sequence[Parameter],
    predicted: Found,
    contest: Found,
    *,
    untailored: bool,
) -> Found:
    """The report, from the results of the stages.

    Args:
        untailored: whether no policy was trained, as no setting gains anything.
    """
    plan, passive, contest = scenario.loop, predicted["passive"], judged(contest, predicted)
    nothing = ["no policy was tailored: no setting gains anything on the calibrated cluster"]
    report = {
        "schema": SCHEMA,
        "paceenv": paceenv.__version__,
        "scenario": scenario.name,
        "description": scenario.description.strip(),
        "mechanism": plan.mechanism,
        "expect": plan.expect,
        "observed": {"job": plan.job, **observed},
        "probe": probed,
        "simulated": passive,
        "fit": fit(observed, passive),
        "held_out": fit(contest["unpaced"], passive),
        "calibration": parameters,
        "policies": predicted["policies"],
        "chosen": choose(predicted["policies"]),
        "contest": contest,
        "notes": [*(nothing if untailored else []), *left_out(scenario), *notes(contest)],
    }
    return {**report, "verdict": verdict(report)}


def choose(predicted: Sequence[Prediction]) -> Found:
    """The policy with the best predicted effect, always on, whose interval excludes 0; else passive."""
    best = min((one for one in predicted if one.always.high < 0.0), key=lambda one: one.always.change, default=None)
    if best is None:
        return {"policy": "passive", "why": "no candidate is predicted to help"}
    return {"policy": best.policy, "why": f"the best predicted effect, {best.always}"}


def judged(run: Found, predicted: Found) -> Found:
    """A real run with every candidate beside its prediction and beside the best constant."""
    policies = {one.policy: one for one in predicted["policies"]}
    differences = {(one["policy"], one["than"]): one for one in predicted["differences"]}
    constant = reference(run["candidates"])
    rows = []
    for row in run["candidates"]:
        known = policies[row["policy"]]
        said = compare(known.blocks, row["measured"])
        rows.append({**row, "predicted": known.blocks, "always": known.always, **said})
    both = [{**one, "always": differences[one["policy"], one["than"]]["always"]} for one in run["differences"]]
    return {**run, "candidates": rows, "differences": both, "reference": constant}


def reference(rows: Sequence[Found]) -> str | None:
    """The constant setting with the best measured effect; None where no candidate is one."""
    constants = [row for row in rows if set(row["roles"]) & set(CONSTANTS)]
    known = [(row["measured"].change, row["policy"]) for row in constants]
    return min((one for one in known if math.isfinite(one[0])), default=(0.0, None))[1]


def verdict(report: Found) -> str:
    """The loop in one sentence: the chosen policy if it took part, else the best one as measured."""
    rows = report["contest"]["candidates"]
    mine = next((row for row in rows if row["policy"] == report["chosen"]["policy"]), None)
    if mine is not None:
        return f"{label(mine['policy'])}: {mine['verdict']}"
    row = min(rows, key=lambda row: row["predicted"].change)
    return f"no candidate is predicted to help; {label(row['policy'])}: {row['verdict']}"


def fit(observed: Mapping[str, float], passive: Mapping[str, float]) -> Found:
    """Errors of the simulated job without pacing, against the run it was fitted to or against another one."""
    mean_error, cv_error = passive["mean_s"] / observed["mean_s"] - 1.0, passive["cv"] - observed["cv"]
    within = {"mean_within": abs(mean_error) <= GOOD_MEAN, "cv_within": abs(cv_error) <= GOOD_CV}
    return {"mean_error": mean_error, "cv_error": cv_error, **within}


def compare(predicted: Effect, measured: Effect) -> Found:
    """Whether a prediction agrees with the measurement, in words.

    ``inside``: the predicted change lies in the measured interval. ``sign``: both have the same sign. Where the
    measured interval contains 0, a prediction inside it or within the limit of a null has the right sign.
    """
    said = f"predicted {predicted}, measured {measured}"
    if not math.isfinite(measured.low):
        return {"verdict": f"{said}: too few pairs", "inside": None, "sign": None}
    inside = measured.low <= predicted.change <= measured.high
    if measured.high < 0.0 or measured.low > 0.0:
        sign = predicted.change * measured.change > 0.0
    else:
        sign = inside or abs(predicted.change) <= NULL_LIMIT
    if inside and abs(predicted.change) > NULL_LIMIT and measured.low <= 0.0 <= measured.high:
        how = "cannot tell: the measured interval holds both the prediction and no effect"
    elif inside:
        how = "agrees"
    elif predicted.low <= measured.high and measured.low <= predicted.high:
        how = "agrees within the error of the prediction"
    elif not sign:
        how = f"disagrees: predicted {_does(predicted.change)}, measured {_does(measured.change)}"
    else:
        more = abs(predicted.change) > abs(measured.change)
        by = 100 * abs(predicted.change - measured.change)
        how = f"disagrees: right in sign, predicted {by:.1f} points too {'much' if more else 'little'}"
    return {"verdict": f"{said}: {how}", "inside": inside, "sign": sign}


def _does(change: float) -> str:
    return "shorter steps" if change < -NULL_LIMIT else "longer steps" if change > NULL_LIMIT else "no difference"


def notes(contest: Found) -> list[str]:
    """What a reader must know before believing the numbers of a contest: who did not pace to its end, and why."""
    lines, delays = list[str](), contest["delays"]
    for row in contest["candidates"]:
        name, agents = label(row["policy"]), row["agents"]
        if agents["paced_pairs"] is not None:
            why, more = (agents["stopped"] or ["no reason given"])[0] or "no reason given", len(agents["stopped"]) - 1
            why += f"; {more} similar reasons" if more > 0 else ""
            pairs = f"only the first {agents['paced_pairs']} pairs count"
            lines.append(f"{name}: did not pace to the end on every rank ({why}); {pairs}")
    if delays["holds"] and not delays["held"]:
        why = "; ".join(delays["unheld"]) or "no transfer of the named communicators was started asynchronously"
        lines.append(f"rule defer was on in {delays['holds']} iterations of ranks and held no transfer back: {why}")
    return lines


def write(report: Found, out: Path) -> None:
    """Write the report and its picture."""
    _picture(report, out / "effects.png")
    output.write_json(report, str(out / "report.json"))
    config_files.write_text(out / "report.md", markdown(report))


def _picture(report: Found, path: Path) -> None:
    """Above the real job's course, block by block; below each policy's effect, predicted and measured."""
    rows, measured = report["policies"], {row["policy"]: row["measured"] for row in report["contest"]["candidates"]}
    figure, (course, panel) = figures.stack([2.4, 0.7 + 0.45 * len(rows)])
    for policy in (None, *(row.policy for row in rows)):
        blocks = [block for block in report["contest"]["blocks"] if block["policy"] == policy]
        ends_min, steps_ms = [b["end_s"] / 60.0 for b in blocks], [1e3 * b["mean_s"] for b in blocks]
        shade, name = ("#555555", "no pacing") if policy is None else (None, label(policy))
        course.plot(ends_min, steps_ms, "o", ms=5, color=shade, label=name)
    course.set(title=f"{report['scenario']}: the real job, block by block", xlabel="minutes", ylabel="mean step, ms")
    course.set_ylim(0.0, 1.1 * course.get_ylim()[1])
    course.legend(fontsize=8, loc="lower right", ncols=len(rows) + 1)
    panel.set(title="Effect of each policy", xlabel="change of mean step time, %")
    for k, (what, shade) in enumerate(_SHADES.items()):
        data = [(row.always, row.blocks, measured[row.policy])[k] for row in rows]
        effects = {i + 0.22 * (k - 1): one for i, one in enumerate(data)}
        change = np.array([effect.change for effect in effects.values()])
        ends = np.array([(effect.change - effect.low, effect.high - effect.change) for effect in effects.values()])
        bars = 100 * np.nan_to_num(ends.reshape(-1, 2).clip(0.0), posinf=0.0).T
        panel.errorbar(100 * change, [*effects], xerr=bars, fmt="o", ms=4, capsize=3, color=shade, label=what)
    panel.axvline(0.0, color="#999999", lw=0.8)
    panel.set_yticks(range(len(rows)), [label(row.policy) for row in rows], fontsize=8)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=len(_SHADES), frameon=False)
    figures.save(figure, path)


def markdown(report: Found) -> str:
    """The report for people."""
    lines = [
        f"# Closed loop: {report['scenario']}",
        "",
        report["description"],
        "",
        f"**{report['verdict']}**",
        "",
        f"- chosen by its prediction: {label(report['chosen']['policy'])} ({report['chosen']['why']})",
        f"- expected of pacing beforehand: {report['expect']}",
        *[f"- {note}" for note in report["notes"]],
        "",
        "Changes are of mean step time, below 0 where steps got shorter; intervals are 95 %. A static rule is named by "
        "its mechanism = threshold / window.",
    ]
    for one in sections(report):
        lines += ["", f"## {one.title}", "", *output.markdown_table(one.columns, one.rows)]
        lines += ["", *one.text] if one.text else []
    return "\n".join([*lines, "", "![predicted and measured effects](effects.png)", ""])


def sections(report: Found) -> list[Section]:
    """Its tables."""
    observed, simulated, close, run = report["observed"], report["simulated"], report["fit"], report["contest"]
    job: list[tuple[str, ...]] = [
        ("mean step, ms", interval_ms(observed), interval_ms(simulated), f"{close['mean_error']:+z.1%}"),
        ("CV", f"{observed['cv']:.3f}", f"{simulated['cv']:.3f}", f"{close['cv_error']:+z.3f}"),
    ]
    if not math.isnan((other := report["held_out"])["mean_error"]):
        steps, blocks = run["unpaced"], "the contest's blocks without pacing"
        job += [
            (f"mean step, {blocks}, ms", interval_ms(steps), "", f"{other['mean_error']:+z.1%}"),
            (f"CV, {blocks}", f"{steps['cv']:.3f}", "", f"{other['cv_error']:+z.3f}"),
        ]
    made = [
        Section(
            "The job without pacing",
            ["calibrated to the run in the first two rows; the contest's blocks without pacing are another run"],
            ("", "measured", "simulated", "difference"),
            job,
        ),
        Section(
            f"Calibrated {'with' if report['probe'] else 'without'} a probe",
            (),
            ("parameter", "value", "standard error", "95 % low", "high", "evidence"),
            [_parameter(p) for p in report["calibration"]],
        ),
        Section(
            "Predicted",
            ["with the limits of delays that the agent's guard will have"],
            ("policy", "always on", "in paired blocks", "CV", "mean delay, ms"),
            [_predicted(row) for row in report["policies"]],
        ),
        Section(
            "Predicted and measured",
            ["measured on the job's own stamps, without the agent; inside: the prediction lies in the interval"],
            ("policy", "roles", "predicted", "measured", "pairs", "inside", "sign", "the agents"),
            [_measured(row) for row in run["candidates"]],
        ),
    ]
    if rows := [_compared(one) for one in run["differences"] if one["than"] == run["reference"]]:
        title = f"Against the best constant, {label(run['reference'])}"
        note = (
            "change of mean step time from the constant to the policy in the same rounds; below 0 the policy is better"
        )
        made.append(Section(title, [note], ("policy", "predicted, always on", "measured", "rounds"), rows))
    return made


def _compared(one: Mapping[str, Any]) -> tuple[str, ...]:
    measured = one["measured"]
    return label(one["policy"]), str(one["always"]), str(measured), str(measured.units)


def _parameter(one: Parameter) -> tuple[str, ...]:
    numbers = (one.value, one.se, one.lo, one.hi)
    return (one.key, *("–" if x is None else f"{x:.4g}" for x in numbers), one.evidence)


def _predicted(one: Prediction) -> tuple[str, ...]:
    return label(one.policy), str(one.always), str(one.blocks), f"{one.cv:.3f}", f"{1e3 * one.mean_delay_s:.1f}"


def _measured(row: Mapping[str, Any]) -> tuple[str, ...]:
    measured = row["measured"]
    agents = "; ".join(f"{count} x {verdict}" for verdict, count in row["agents"]["verdicts"].items())
    ok = ({True: "yes", False: "NO", None: "–"}[row[key]] for key in ("inside", "sign"))
    effects = (str(row["predicted"]), str(measured), str(measured.units))
    return (label(row["policy"]), ", ".join(row["roles"]), *effects, *ok, agents)


def interval_ms(steps: Mapping[str, Any]) -> str:
    """A mean step with its interval, milliseconds."""
    mean, low, high = (1e3 * steps[key] for key in ("mean_s", "low_s", "high_s"))
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"
