"""The report of a closed loop, predictions beside measurements: Markdown, JSON, tables, pictures, one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import paceenv
from paceenv.core.intervals import Interval
from paceenv.live.decide.canary import Schedule
from paceenv.live.testbed.testbed_scenario import Scenario
from paceenv.trainers.closed_loop import loop_plots
from paceenv.trainers.closed_loop.loop_plots import label
from paceenv.trainers.closed_loop.paired_blocks import Array, Effect
from paceenv.trainers.evaluation.evaluate import NULL_LIMIT
from paceenv.ui import config_files, output

SCHEMA = "paceenv.loop/1"
FILES = ("report.md", "report.json", "effects.png", "steps.png", "calibration.png")
MEAN_LIMIT, CV_LIMIT = 0.05, 0.03
"""How near a simulated mean step, relative, and a simulated CV must come to the measured ones."""
MANY = 0.2
"""Share of the delays that the guard may cut before it is worth a note."""
CANARIES = {"canary-ours": "ours", "canary-paper": "the paper's rule"}
Found = dict[str, Any]


def build(scenario: Scenario, found: Mapping[str, Found]) -> Found:
    """The report as plain data, from the results of the stages."""
    plan = scenario.loop
    observed, passive = found["observe"]["jobs"][plan.job], found["predict"]["passive"]
    policies = {row["policy"]: row for row in found["predict"]["policies"]}
    canaries = {}
    for stage in CANARIES:
        canary = found[stage]
        predicted = policies[canary["policy"]]
        verdict = compare(Effect.of(predicted["blocks"]), Effect.of(canary["measured"]))
        verdict["against_observed"] = {
            kind: against(steps, observed).as_dict() for kind, steps in canary["steps"].items()
        }
        canaries[stage] = {**canary, "predicted": predicted["blocks"], "always": predicted["always"], **verdict}
    ours = canaries["canary-ours"]
    report = {
        "schema": SCHEMA,
        "paceenv": paceenv.__version__,
        "scenario": scenario.name,
        "description": scenario.description.strip(),
        "mechanism": plan.mechanism,
        "expect": plan.expect,
        "observed": {"job": plan.job, **observed},
        "others": {name: steps for name, steps in found["observe"]["jobs"].items() if name != plan.job},
        "probe": found["probe"].get("response"),
        "simulated": passive,
        "fit": fit(observed, passive),
        "held_out": {stage: fit(found[stage]["steps"]["unpaced"], passive) for stage in CANARIES},
        "calibration": found["calibrate"]["parameters"],
        "limits": vars(plan.limits),
        "policies": found["predict"]["policies"],
        "chosen": found["choose"],
        "canaries": canaries,
        "notes": [note for stage in CANARIES for note in notes(CANARIES[stage], canaries[stage], scenario)],
    }
    return {**report, "verdict": f"{label(ours['policy'])}: {ours['verdict']}"}


def fit(observed: Mapping[str, float | None], passive: Mapping[str, float]) -> Found:
    """Errors of the simulated job without pacing, against the run it was fitted to or against another one."""
    mean_s, cv = observed["mean_s"], observed["cv"]
    if mean_s is None or cv is None:
        return dict.fromkeys(("mean_error", "cv_error", "mean_within", "cv_within"))
    mean_error, cv_error = passive["mean_s"] / mean_s - 1.0, passive["cv"] - cv
    within = {"mean_within": abs(mean_error) <= MEAN_LIMIT, "cv_within": abs(cv_error) <= CV_LIMIT}
    return {"mean_error": mean_error, "cv_error": cv_error, **within}


def against(steps: Mapping[str, Any], observed: Mapping[str, Any]) -> Effect:
    """Change from the observed run to a canary's blocks of one kind; two runs, so the interval is wide."""
    if steps["mean_s"] is None:
        return Effect.of_logs(Interval(math.nan), 1)
    change = math.log(steps["mean_s"] / observed["mean_s"])
    spread = math.hypot(*((run["high_s"] - run["low_s"]) / (2.0 * run["mean_s"]) for run in (steps, observed)))
    return Effect.of_logs(Interval(change, change - spread, change + spread), 1)


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
    if inside:
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


def notes(name: str, canary: Found, scenario: Scenario) -> list[str]:
    """What a reader must know before believing a canary's numbers.

    Args:
        name: name of the canary, for the text.
        canary: its part of the report.
        scenario: with the plan of its loop.
    """
    agents, found = canary["agents"], []
    if agents["paced_pairs"] is not None:
        why, more = (agents["stopped"] or ["no reason given"])[0], len(agents["stopped"]) - 1
        why += f"; {more} similar reasons" if more > 0 else ""
        pairs = f"only the first {agents['paced_pairs']} pairs count"
        found.append(f"{name}: not all agents paced to the end ({why}); {pairs}")
    unpaced, paced = (Effect.of(canary["against_observed"][kind]) for kind in ("unpaced", "paced"))
    if unpaced.low > 0.0 or unpaced.high < 0.0:
        why = "the effect of pacing outlasts its blocks, or the job has changed; the paired effect is only a part"
        found.append(
            f"{name}: against the job as observed, blocks without pacing {unpaced}, with pacing {paced}: {why}"
        )
    held = agents["cut"].get("slack", 0)
    if held > MANY * max(agents.get("delays", 0), 1):
        found.append(f"{name}: the guard cut {held} delays to the rank's own slack, which predictions do not include")
    steps, budget = canary["steps"], scenario.loop.budget_s_per_minute / 60.0
    if agents["cut"].get("budget") and steps["paced"]["mean_s"]:
        share = agents["mean_delay_s"] / steps["paced"]["mean_s"]
        times = f"cut {agents['cut']['budget']} delays"
        found.append(f"{name}: the budget of {budget:.0%} of the time {times} (mean delay {share:.1%} of the step)")
    return found


def write(report: Found, runs: Mapping[str, tuple[Array, Schedule]], out: Path) -> None:
    """Write the report and its pictures.

    Args:
        report: from :func:`build`.
        runs: for each canary the ends of its steps ``(T, R)`` and its schedule.
        out: the run directory.
    """
    loop_plots.effects(report, out / "effects.png")
    loop_plots.calibration(report, out / "calibration.png")
    titles = {stage: f"{name}: {label(report['canaries'][stage]['policy'])}" for stage, name in CANARIES.items()}
    loop_plots.steps({titles[stage]: run for stage, run in runs.items()}, out / "steps.png")
    output.write_json(report, str(out / "report.json"))
    config_files.write_text(out / "report.md", markdown(report))


def markdown(report: Found) -> str:
    """The report for people."""
    canaries = report["canaries"]
    lines = [
        f"# Closed loop: {report['scenario']}",
        "",
        report["description"],
        "",
        f"**{report['verdict']}**",
        "",
        f"- the paper's rule: {canaries['canary-paper']['verdict']}",
        f"- chosen: {report['chosen']['policy']} ({report['chosen']['why']})",
        f"- expected of pacing beforehand: {report['expect']}",
        *[f"- {note}" for note in report["notes"]],
        "",
        "Changes are of mean step time, below 0 where steps got shorter; intervals are 95 %. A static rule is named by "
        "its mechanism, threshold / window.",
    ]
    for title, columns, rows, note in tables(report):
        lines += ["", f"## {title}", "", *output.markdown_table(columns, rows)]
        lines += ["", note] if note else []
    lines += ["", "![predicted and measured effects](effects.png)", "", "![steps of the canaries](steps.png)", ""]
    lines += ["![calibrated parameters](calibration.png)", ""]
    return "\n".join(lines)


def show(report: Found) -> None:
    """The report in the terminal."""
    for title, columns, rows, note in tables(report):
        output.print_table(title, columns, rows, note)
    print(report["verdict"])


Table = tuple[str, Sequence[str], list[tuple[str, ...]], str]


def tables(report: Found) -> list[Table]:
    """Its tables: title, columns, rows, a note."""
    observed, simulated, close = report["observed"], report["simulated"], report["fit"]
    job: list[tuple[str, ...]] = [
        ("mean step, ms", interval_ms(observed), interval_ms(simulated), f"{close['mean_error']:+.1%}"),
        ("CV", f"{observed['cv']:.3f}", f"{simulated['cv']:.3f}", f"{close['cv_error']:+.3f}"),
    ]
    for stage, name in CANARIES.items():
        if (other := report["held_out"][stage])["mean_error"] is not None:
            steps, blocks = report["canaries"][stage]["steps"]["unpaced"], f"blocks without {name}"
            job += [
                (f"mean step, {blocks}, ms", interval_ms(steps), "", f"{other['mean_error']:+.1%}"),
                (f"CV, {blocks}", f"{steps['cv']:.3f}", "", f"{other['cv_error']:+.3f}"),
            ]
    job += [(f"mean step of {name}, ms", interval_ms(other), "", "") for name, other in report["others"].items()]
    probe = "with a probe" if report["probe"] else "without a probe"
    return [
        (
            "The job without pacing",
            ("", "measured", "simulated", "difference"),
            job,
            "calibrated to the run in the first two rows; the canaries' blocks without pacing are other runs",
        ),
        (
            f"Calibrated {probe}",
            ("parameter", "value", "standard error", "95 % low", "high", "evidence"),
            [_parameter(p) for p in report["calibration"]],
            f"the probe: {report['probe']['text']}" if report["probe"] else "",
        ),
        (
            "Predicted",
            ("policy", "always on", "in the canary's blocks", "CV", "mean delay, ms"),
            [_predicted(row) for row in report["policies"]],
            "with the limits of delays that the agent's guard will have",
        ),
        (
            "Predicted and measured",
            ("policy", "predicted", "measured", "pairs", "inside", "sign", "on other jobs", "the agents"),
            [_measured(canary) for canary in report["canaries"].values()],
            "measured on the job's own stamps, without the agent; inside: the prediction lies in the measured interval",
        ),
    ]


def _parameter(parameter: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = [parameter[key] for key in ("value", "se", "lo", "hi")]
    return (parameter["key"], *("–" if x is None else f"{x:.4g}" for x in numbers), parameter["evidence"])


def _predicted(row: Mapping[str, Any]) -> tuple[str, ...]:
    effects = (str(Effect.of(row[key])) for key in ("always", "blocks"))
    return (label(row["policy"]), *effects, f"{row['cv']:.3f}", f"{1e3 * row['mean_delay_s']:.1f}")


def _measured(canary: Mapping[str, Any]) -> tuple[str, ...]:
    measured = Effect.of(canary["measured"])
    others = "; ".join(f"{name} {Effect.of(other)}" for name, other in canary["others"].items())
    agents = "; ".join(f"{count} x {verdict}" for verdict, count in canary["agents"]["verdicts"].items())
    ok = ({True: "yes", False: "NO", None: "–"}[canary[key]] for key in ("inside", "sign"))
    predicted = str(Effect.of(canary["predicted"]))
    return (label(canary["policy"]), predicted, str(measured), str(measured.units), *ok, others or "–", agents)


def interval_ms(steps: Mapping[str, Any]) -> str:
    """A mean step with its interval, milliseconds."""
    mean, low, high = (
        1e3 * x if x is not None else math.nan for x in (steps[k] for k in ("mean_s", "low_s", "high_s"))
    )
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"
