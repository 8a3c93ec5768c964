"""The closed loop over every testbed scenario, one after the other; ``--write`` rebuilds ``docs/sim-to-real.md``.

Takes hours and root. Every loop resumes where it was, so that a run which was stopped is simply started again, and one
that is through only rebuilds the document.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks._common import Target, machine
from paceenv.calibration.job_fit import calibrate_job
from paceenv.core.errors import InputError
from paceenv.live.testbed.testbed_run import run_scenario
from paceenv.live.testbed.testbed_scenario import load_scenario
from paceenv.trainers.closed_loop.closed_loop import STAGES, ClosedLoop, LoopOptions
from paceenv.trainers.closed_loop.loop_plots import label
from paceenv.trainers.closed_loop.paired_blocks import Effect
from paceenv.trainers.closed_loop.sim_to_real_report import CV_LIMIT, MEAN_LIMIT, interval_ms
from paceenv.trainers.evaluation.evaluate import NULL_LIMIT
from paceenv.ui import config_files, output
from paceenv.ui.output import markdown_table

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "sim-to-real.md"
LEAST_INSIDE_SHARE = 7 / 9
"""Of the scenarios, those whose prediction has to lie in the measured interval."""
WANTED = {"unequal-slack": -0.15, "incast-shallow": -0.40, "two-jobs": -0.06}
"""The change of mean step time that the chosen policy has to reach, for the other job on the uplink as well."""
EXPLAINED: dict[str, str] = {
    "fail-slow": (
        "The paper's rule: every block of the real job holds one whole episode, by design. "
        "The simulation draws episodes at random, so its blocks differ by their episodes, and its interval is wide. "
        "Always on, the rule is predicted at +2.5 %."
    ),
    "incast-shallow": (
        "Two loops on a quiet machine measured -50.1 % and -46.9 %; both were predicted at -53 %. "
        "With stagger 4.5 % of the steps still ran into a timeout, where the calibrated buffer allows hardly any. "
        "A sender that meets only two or three others loses the end of its window more often than the "
        "model's cubic law predicts. "
        "The job itself also differs from run to run (265 ms observed, 252 ms in the canary's blocks without "
        "pacing)."
    ),
    "nano-cluster": (
        "The paper's rule: the guard cut half of its delays to the rank's own slack (336 cut, 299 taken as asked). "
        "Predictions do not include that yet, so the rule cost less than predicted."
    ),
    "slow-rank": (
        "The default rule was predicted with a normal factor on the payload's 20 ms, which vary by 29 %. "
        "Its low tail makes slack where there is none. "
        "The factor is lognormal since, with the measured quantiles; the numbers here are those of the run. "
        "The guard cut half of the paper's delays to the rank's own slack, which predictions do not include yet."
    ),
    "two-jobs": (
        "The fitted tenant pauses in a tenth of its periods and takes 47 % of its period. "
        "The other job pauses in a twentieth and takes 45 %, so contention comes and goes more often in the "
        "simulation. "
        "The observed run was also calmer than both canaries, whose blocks without pacing have a CV of 0.105 "
        "and 0.110."
    ),
}
"""Why a scenario missed, by its name."""

HEAD = """# From simulation to real sockets

Here you find how well predictions from simulation hold on real jobs.
`python -m benchmarks.evidence.sim_to_real_evidence --write` makes this page.
It runs `paceenv testbed loop` on every scenario of `configs/testbed`.
The jobs are real torchrun jobs on gloo, over real TCP between network namespaces ([testbed](testbed.md)).

Each loop

1. observes the job,
2. calibrates a cluster from its trace,
3. predicts by simulation the effect of every policy,
4. measures two policies on the real job in paired blocks: the chosen one and the paper's rule.

Where no policy is predicted to help, the loop measures the mechanism's default rule instead of a chosen one.

| number | meaning |
| --- | --- |
| change | of mean step time; below 0 steps got shorter |
| measured, with 95 % interval | from paired blocks of the job's own time stamps |
| predicted, with 95 % interval | the reading of 95 % of canaries, given the errors of the calibration |
| a static rule | its mechanism, threshold / window |

The machine was quiet.
Beside other work on the same cores a canary of unequal slack lost a third of its effect: -14.7 % [-19.2, -9.9].
Ranks that are held up have less slack.
"""

Reports = Mapping[str, Mapping[str, Any]]


def close_loops(names: Sequence[str], out: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Reports by scenario, and what ended the loops that have none."""
    reports, failed = {}, {}
    for name in names:
        closed = ClosedLoop(load_scenario(name), out / name, LoopOptions(), run_scenario, calibrate_job)
        try:
            reports[name] = closed.go(STAGES[-1])
        except InputError as error:
            failed[name] = str(error)
            output.say(f"{name}: {error}")
    return reports, failed


def targets(reports: Reports, failed: Sequence[str] = ()) -> list[Target]:
    """What was promised, and whether it came true; a scenario that ``failed`` has missed everything."""
    scenarios = len(reports) + len(failed)
    ours = {name: report["canaries"]["canary-ours"] for name, report in reports.items()}
    inside = [name for name, canary in ours.items() if canary["inside"]]
    wrong = [
        f"{name} ({label(canary['policy'])})"
        for name, report in reports.items()
        for canary in report["canaries"].values()
        if not canary["sign"]
    ]
    wrong += [name for name in failed for _ in range(2)]
    far = [name for name, report in reports.items() if not report["fit"]["mean_within"]] + [*failed]
    loose = [name for name, report in reports.items() if not report["fit"]["cv_within"]] + [*failed]
    found = [
        Target("simulated mean step", f"within {MEAN_LIMIT:.0%}", *_all_but(far, scenarios)),
        Target("simulated CV", f"within {CV_LIMIT:g}", *_all_but(loose, scenarios)),
        Target("sign of each canary's effect", "right", *_all_but(wrong, 2 * scenarios)),
        Target(
            "prediction inside the measured interval",
            f"at least 7 of 9, so {math.ceil(LEAST_INSIDE_SHARE * scenarios - 1e-9)} of {scenarios}",
            f"{len(inside)} of {scenarios}",
            len(inside) >= LEAST_INSIDE_SHARE * scenarios,
        ),
    ]
    for name, wanted in WANTED.items():
        if name in reports:
            effects = [ours[name]["measured"], *ours[name]["others"].values()]
            measured = [Effect.of(effect) for effect in effects]
            deployed = reports[name]["chosen"]["policy"] != "passive"
            what = f"{name}: change" + ("" if deployed else " (the default rule, not deployed)")
            met = deployed and all(effect.change <= wanted for effect in measured)
            found.append(Target(what, f"at most {wanted:.0%}", ", ".join(map(str, measured)), met))
        elif name in failed:
            found.append(Target(f"{name}: change", f"at most {wanted:.0%}", "no report", False))
    for name, report in reports.items():
        if report["expect"] == "neutral":
            null = Effect.of(ours[name]["measured"])
            what = "the default rule, not deployed" if report["chosen"]["policy"] == "passive" else "deployed"
            met = abs(null.change) <= NULL_LIMIT
            found.append(Target(f"{name}: null ({what})", f"within ±{NULL_LIMIT:.1%}", str(null), met))
    return found


def _all_but(missed: Sequence[str], of: int) -> tuple[str, bool]:
    return f"{of - len(missed)} of {of}" + (f"; not {', '.join(missed)}" if missed else ""), not missed


def document(reports: Reports, failed: Mapping[str, str]) -> str:
    """``docs/sim-to-real.md``."""
    lines = [HEAD, "## Machine", "", *markdown_table(("", ""), list(machine().items()))]
    rows = [(t.what, t.wanted, t.measured, "met" if t.met else "**missed**") for t in targets(reports, list(failed))]
    lines += ["", "## Targets", "", *markdown_table(("what", "target", "measured", ""), rows)]
    columns: tuple[str, ...] = (
        "scenario",
        "measured, ms",
        "simulated, ms",
        "difference",
        "CV",
        "simulated",
        "difference",
        "not seen by the fit: mean",
        "CV",
    )
    lines += [
        "",
        "## Mean step and CV without pacing",
        "",
        *markdown_table(columns, [_fit(*r) for r in reports.items()]),
    ]
    columns = ("scenario", "policy", "always on", "predicted", "measured", "inside", "sign", "other jobs", "agents")
    effects = [_effect(name, canary) for name, report in reports.items() for canary in report["canaries"].values()]
    lines += ["", "## Effects, predicted and measured", "", *markdown_table(columns, effects)]
    lines += ["", "## Every policy predicted", ""]
    predicted = [
        (name, label(row["policy"]), str(Effect.of(row["always"])), str(Effect.of(row["blocks"])), f"{row['cv']:.3f}")
        for name, report in reports.items()
        for row in report["policies"]
    ]
    lines += markdown_table(("scenario", "policy", "always on", "in blocks", "CV"), predicted)
    lines += ["", "## Scenarios", ""]
    for name, report in reports.items():
        lines += [f"### {name}", "", _by_sentences(report["description"]), "", *_said(name, report), ""]
    lines += [f"- **{name}** has no report: {why}" for name, why in failed.items()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines).rstrip() + "\n")


def _fit(name: str, report: Mapping[str, Any]) -> tuple[str, ...]:
    observed, simulated, fit = report["observed"], report["simulated"], report["fit"]
    mean, cv = (f"{fit['mean_error']:+.1%}", f"{fit['cv_error']:+.3f}")
    others = [other for other in report["held_out"].values() if other["mean_error"] is not None]
    unseen = (
        ", ".join(f"{o['mean_error']:+.1%}" for o in others) or "–",
        ", ".join(f"{o['cv_error']:+.3f}" for o in others) or "–",
    )
    means = (interval_ms(observed), interval_ms(simulated), mean if fit["mean_within"] else f"**{mean}**")
    return (
        name,
        *means,
        f"{observed['cv']:.3f}",
        f"{simulated['cv']:.3f}",
        cv if fit["cv_within"] else f"**{cv}**",
        *unseen,
    )


def _effect(name: str, canary: Mapping[str, Any]) -> tuple[str, ...]:
    effects = (str(Effect.of(canary[key])) for key in ("always", "predicted", "measured"))
    ok = ({True: "yes", False: "**no**", None: "–"}[canary[key]] for key in ("inside", "sign"))
    others = "; ".join(f"{other} {Effect.of(effect)}" for other, effect in canary["others"].items())
    agents = "; ".join(f"{count} x {verdict}" for verdict, count in canary["agents"]["verdicts"].items())
    return (name, label(canary["policy"]), *effects, *ok, others or "–", agents)


def _said(name: str, report: Mapping[str, Any]) -> list[str]:
    """A scenario's verdicts, parameters that were not identified, and why it missed."""
    canaries, fit = report["canaries"], report["fit"]
    vague = [p["key"] for p in report["calibration"] if p["se"] is None]
    lines = [f"- {report['verdict']}", f"- the paper's rule: {canaries['canary-paper']['verdict']}"]
    lines += [
        f"- chosen: {report['chosen']['policy']}; {report['chosen']['why']}",
        *(f"- {n}" for n in report["notes"]),
    ]
    lines += [f"- not identified by the trace: {', '.join(vague)}"] if vague else []
    missed = [] if fit["mean_within"] and fit["cv_within"] else ["the simulated job without pacing"]
    missed += [label(canary["policy"]) for canary in canaries.values() if not (canary["inside"] and canary["sign"])]
    if missed:
        lines.append(f"- **missed**: {'; '.join(missed)}. {EXPLAINED.get(name, 'Not explained yet.')}")
    return [_by_sentences(line, "  ") for line in lines]


def _by_sentences(text: str, indent: str = "") -> str:
    return re.sub(r"(?<=\.) (?=[A-Z])", f"\n{indent}", " ".join(text.split()))


def main(
    scenarios: Annotated[list[str] | None, typer.Argument(help="Names in configs/testbed. Default: all.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the loops.")] = Path("runs/sim-to-real"),
    write: Annotated[bool, typer.Option("--write", help="Rebuild docs/sim-to-real.md.")] = False,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Close the loop on every scenario, and hold what was predicted against what was measured."""
    reports, failed = close_loops(scenarios or config_files.names("testbed"), out)
    text = document(reports, failed)
    if write:
        config_files.write_text(DOCUMENT, text)
    if json_ is not None:
        output.write_json({"machine": machine(), "reports": reports, "failed": failed}, json_)
    if json_ != "-":
        print(text)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
