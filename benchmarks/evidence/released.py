"""Evidence on the released policy beyond the score table: its training, Pareto front, far-off clusters.

`python -m benchmarks.evidence.released --write` makes docs/evidence/policies/released-policy.md from the folder of a
training (`paceenv train distilled -o FOLDER`, with or without `--seeds`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks._common import machine
from paceenv.core import metrics
from paceenv.trainers.evaluation.evaluate import SuiteResult, evaluate
from paceenv.trainers.evaluation.suites import ALL, Case, Suite, load_suite
from paceenv.trainers.sweep.score import spelled
from paceenv.trainers.sweep.static_search import StaticSearch, search_static
from paceenv.ui import config_files, figures, output
from paceenv.ui.output import markdown_table

PREFERENCES = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
SCENARIO = "when-scaling-fails"
WANTED: dict[str, tuple[float, float | None]] = {
    "4": (-0.006, None),
    "16": (0.033, 0.05),
    "32": (0.078, 0.07),
    "64": (0.11, 0.09),
}
"""By nodes: throughput against the baseline, at least; CV of step time, at most."""
FAR = [
    Case(
        name="episodes on 512 ranks",
        cluster="when-scaling-fails",
        set={"job.nodes": 512, "fabric.uplink_gbps": 18000, "noise.transfer_cv": 0.03},
    ),
    Case(
        name="jitter on 512 ranks",
        cluster="null-jitter-64",
        null_case=True,
        set={"job.nodes": 512, "fabric.nodes_per_leaf": 512, "fabric.uplink_gbps": 102400, "noise.transfer_cv": 0.02},
    ),
    Case(
        name="post-collective work 0.4 s",
        cluster="unequal-slack",
        set={"post_collective_work.work_s": 0.4},
    ),
    Case(name="tenant transfers 70 %", cluster="two-jobs", set={"tenants.0.comm_share": 0.7}),
    Case(name="timeout of 1 s", cluster="incast-shallow", set={"fabric.timeout_ms": 1000}),
    Case(name="jitter 60 %", cluster="null-jitter", null_case=True, set={"noise.jitter_cv": 0.6}),
    Case(
        name="another job for 90 % of the time",
        cluster="one-job",
        set={"tenants": [{"period_ratio": 0.2, "comm_share": 0.9}]},
    ),
]
"""At 512 ranks, and mechanisms stronger than in the suites by hand."""
SLACK_CASES = ("unequal-slack", "pairs-16", "episodes-24", "small-payload-16", "imbalanced-16", "jitter-16")


def front(found: StaticSearch) -> list[str]:
    """The static settings that no other one beats in both mean gain and mean CV, at most eight of them."""
    gain_S, cv_S = found.gain_SCE.mean(axis=(1, 2)), found.cv_SCE.mean(axis=(1, 2))
    kept, lowest_cv = [], np.inf
    for s in np.lexsort((cv_S, -gain_S)).tolist():
        if cv_S[s] < lowest_cv:
            kept.append(s)
            lowest_cv = cv_S[s]
    return [spelled(found.settings[s]) for s in kept[:8]]


def points(result: SuiteResult, policies: list[str]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean gain and mean CV over the cases ``(policies, seeds)``."""
    cases = result.suite.cases
    gain_PE = np.array([np.mean([result.gain_E(p, c) for c in cases], axis=0) for p in policies])
    cv_PE = np.array([np.mean([result.outcomes[p, c.name].cv_E for c in cases], axis=0) for p in policies])
    return gain_PE, cv_PE


def pareto(out: Path) -> list[str]:
    """One policy over its preferences against the best front of static settings, on the held-out positives."""
    suite = load_suite(ALL).only(["held-out"])
    cases = [case for case in suite.cases if not case.null_case and case.load().ranks <= 64]
    suite = suite.model_copy(update={"cases": cases, "seeds": 32, "iterations": 1000})
    learned = [f"learned:preference={weight:g}" for weight in PREFERENCES]
    with output.progress("static front", 1) as done:
        statics = front(search_static(suite, on_done=done))
    with output.progress("Pareto front", len(cases) * (len(learned) + len(statics) + 1)) as done:
        found = evaluate([*learned, *statics], suite, on_done=done)
    passive_cv = points(found, ["passive"])[1]
    (gain_LE, cv_LE), (gain_SE, cv_SE) = points(found, learned), points(found, statics)

    def areas(seeds: NDArray[np.int64]) -> tuple[float, float]:
        corner = max(float(cv_PE[:, seeds].mean(axis=1).max()) for cv_PE in (passive_cv, cv_LE, cv_SE))
        return (
            metrics.hypervolume(gain_LE[:, seeds].mean(axis=1), cv_LE[:, seeds].mean(axis=1), corner),
            metrics.hypervolume(gain_SE[:, seeds].mean(axis=1), cv_SE[:, seeds].mean(axis=1), corner),
        )

    ours, theirs = areas(np.arange(suite.seeds))
    picks = np.random.default_rng(0).integers(0, suite.seeds, (2000, suite.seeds))
    ratios = np.array([a / max(b, 1e-12) for a, b in (areas(pick) for pick in picks)])
    low, high = np.percentile(ratios, [2.5, 97.5])
    _draw_pareto(found, learned, statics, out)
    rows = [
        (f"`{p}`", f"{100 * g:+.2f} %", f"{c:.4f}")
        for p, g, c in zip(
            [*learned, *statics],
            [*gain_LE.mean(axis=1), *gain_SE.mean(axis=1)],
            [*cv_LE.mean(axis=1), *cv_SE.mean(axis=1)],
            strict=True,
        )
    ]
    return [
        "## The Pareto front",
        "",
        f"Mean gain and mean CV over the {len(cases)} held-out positives of at most 64 ranks, {suite.seeds} seeds of "
        f"{suite.iterations} iterations.\nPassive has a CV of {passive_cv.mean():.4f}.\nThe static front holds the "
        "settings of a sweep that no other setting beats in both; it was chosen on other seeds.\nHypervolume is the "
        "area between a front and the corner of no gain and the largest CV of them all.",
        "",
        *markdown_table(
            ("front", "hypervolume (gain in % times CV in %)"),
            [
                ("policy over its preferences", f"{1e4 * ours:.2f}"),
                ("static settings", f"{1e4 * theirs:.2f}"),
                ("ratio", f"{ours / max(theirs, 1e-12):.2f} [{low:.2f}, {high:.2f}]"),
            ],
        ),
        "",
        "![Pareto front](released-policy-pareto.png)",
        "",
        *markdown_table(("policy", "throughput", "CV"), rows),
    ]


def _draw_pareto(found: SuiteResult, learned: list[str], statics: list[str], out: Path) -> None:
    figure, panel = figures.axes(
        "Held-out clusters: one policy and its preference, against static settings",
        "mean coefficient of variation of step time",
        "throughput against passive, %",
    )
    for policies, name, shade in (
        (learned, "learned, preference 0 to 1", figures.colour("learned")),
        (statics, "static settings", figures.STATIC_COLOUR),
        (["passive"], "passive", figures.colour("passive")),
    ):
        gain_PE, cv_PE = points(found, policies)
        panel.plot(cv_PE.mean(axis=1), 100 * gain_PE.mean(axis=1), "o-", ms=4, color=shade, label=name)
    panel.legend(fontsize=8)
    figures.save(figure, out)


def far() -> list[str]:
    """At 512 ranks and outside the trained strengths: never worse than passive, and said where it goes passive."""
    suite = Suite(name="far", cases=FAR, seeds=8, iterations=1000)
    with output.progress("far from training", 2 * len(FAR)) as done:
        found = evaluate(["learned"], suite, on_done=done)
    rows = []
    for case in suite.cases:
        score, outside = found.score("learned", case), found.outcomes["learned", case.name].outside
        interval = f"{score.gain:+.2%} [{score.gain_ci95[0]:+.2%}, {score.gain_ci95[1]:+.2%}]"
        said = f"{outside.share:.0%} of decisions ({outside.signal})" if outside else "never"
        rows.append((case.name + (", null" if case.null_case else ""), interval, said))
    return [
        "## Far from what it was trained on",
        "",
        "A rank outside its calibrated range reports that and is passive.",
        "",
        *markdown_table(("cluster", "throughput against passive", "passive because out of range"), rows),
    ]


def published() -> list[str]:
    """The seeds' scenario against what it publishes, with the bound as proof of what the calibrated physics allows."""
    suite = load_suite("scaling").model_copy(update={"seeds": 24, "iterations": 5000})
    cases = [case for case in suite.cases if case.name.removeprefix(f"{SCENARIO}-") in WANTED]
    suite = suite.model_copy(update={"cases": cases})
    policies = ["learned", "learned:preference=1", "clairvoyant", "clairvoyant:preference=1"]
    with output.progress("the published scenario", len(cases) * (len(policies) + 1)) as done:
        found = evaluate(policies, suite, on_done=done)
    rows = []
    for case in cases:
        nodes = case.name.removeprefix(f"{SCENARIO}-")
        gain, cv = WANTED[nodes]
        cells = [f"{found.score(p, case).gain:+.2%}, {found.score(p, case).cv:.3f}" for p in policies]
        rows.append(
            (nodes, f"{gain:+.1%}" + (f", {cv:.2f}" if cv else ""), f"{found.score('passive', case).cv:.3f}", *cells)
        )
    return [
        "## The published scenario",
        "",
        f"`{SCENARIO}` as calibrated on Table 1 of the paper: throughput against this scenario's own baseline, and CV "
        f"of step time; {suite.seeds} seeds of {suite.iterations} iterations.\nThe scenario was fitted to that "
        "table, and chosen with its paced column in view ([validation](../validation.md#when-scaling-fails)).\n"
        "The calibrated physics does not allow "
        "more than the bound reaches: throughput with preference 0, variation with preference 1.",
        "",
        *markdown_table(("nodes", "wanted", "CV of passive", *policies), rows),
    ]


def of_seeds(folder: Path) -> list[str]:
    """The seeds of the release: validation score of each, decisions, CPU time."""
    rows, scores = [], []
    seeds = sorted(folder.glob("seed-*"), key=lambda p: int(p.name.partition("-")[2]))
    for place in seeds or [folder]:
        curve = json.loads((place / "curve.json").read_text())
        cpu_s = curve[-1]["cpu_s"]
        looks = [row for row in curve if "score" in row]
        best = max(looks, key=lambda row: row["score"])
        scores.append(best["score"])
        cells = (f"{best['gap_closed']:.1%}", f"{best['null_loss']:.2%}", f"{best['score']:.3f}")
        name = place.name if seeds else "seed-0"
        rows.append((name, *cells, f"{curve[-1]['timesteps']:,}", f"{cpu_s / 60:.1f}"))
    band = f"{np.median(scores):.3f} (median), {min(scores):.3f} to {max(scores):.3f}" if seeds else f"{scores[0]:.3f}"
    made_by = f"`paceenv train distilled --seeds {len(rows)}`" if seeds else "`paceenv train distilled`, one seed"
    return [
        "## Training",
        "",
        f"{made_by}: validation score {band}.\nThe best round is released.\nCPU minutes include every evaluation on "
        "the validation clusters, which are those that were held out before, their relatives and random ones.",
        "",
        "![Learning curves](released-policy-learning.png)",
        "",
        *markdown_table(("seed", "gap closed", "worst null", "score", "decisions", "CPU minutes"), rows),
    ]


def slack_quantile() -> list[str]:
    """The slack rule on the low quantile of slack against the same on its mean, each compiled in its own process."""
    found: dict[str, dict[str, list[float]]] = {}
    for rule in ("low", "mean"):
        run = [sys.executable, "-m", "benchmarks.speed.mean_slack", rule, *SLACK_CASES]
        found[rule] = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    rows = [
        (
            name,
            *(
                f"{found[rule][name][0]:+.2%} [{found[rule][name][1]:+.2%}, {found[rule][name][2]:+.2%}]"
                for rule in found
            ),
        )
        for name in found["low"]
    ]
    return [
        "## Low quantile or mean of slack",
        "",
        "The static slack rule takes its delay from the low quantile of a rank's slack.\nHere it is compared with the "
        "same rule on the mean of slack: threshold 0.02, window 0.3, throughput against passive.",
        "",
        *markdown_table(("cluster", "low quantile", "mean"), rows),
    ]


HEAD = """# The released policy

Here you find the training of the released policy and results beyond the score table, [SCORES.md](../scores.md).
Its properties and limitations are in the [model card](policy-card.md).
`python -m benchmarks.evidence.released --write` makes this page.
"""


def main(
    folder: Annotated[Path, typer.Option(help="What `paceenv train distilled -o` left.")] = Path("runs/released"),
    write: Annotated[
        bool, typer.Option(help="Write docs/evidence/policies/released-policy.md, with pictures.")
    ] = False,
) -> None:
    """Hold the released policy to what it promises beyond the score table."""
    docs = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "policies" if write else folder
    sections = [
        of_seeds(folder),
        pareto(docs / "released-policy-pareto.png"),
        published(),
        far(),
        slack_quantile(),
    ]
    text = "\n".join([HEAD, *("\n".join([*section, ""]) for section in sections)])
    facts = markdown_table(("", ""), [(key, value) for key, value in machine().items()])
    text += "\n".join(["", "## Machine", "", *facts, ""])
    config_files.write_text(docs / "released-policy.md", text)
    if write:
        (docs / "released-policy-learning.png").write_bytes((folder / "learning-curve.png").read_bytes())
    print(text)


if __name__ == "__main__":
    typer.run(main)
