"""Pictures of what a fitted cluster predicts: the job at other sizes, and under policies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceenv.core.intervals import Interval
from paceenv.policies.whatif.answer import Answer
from paceenv.trainers.evaluation import score_table
from paceenv.trainers.report.fitted import Fitted, Paced
from paceenv.trainers.report.picture import Numbers, Picture, Unit, drawn
from paceenv.ui import figures

_NOW = "#d55e00"
_SAME = Interval(0.0, 0.0, 0.0)


def scaling(answer: Answer) -> Picture:
    """Mean step and throughput over the number of nodes: the answer of ``paceenv whatif --nodes``."""
    now = answer.today
    cases = sorted(
        [(now, _SAME), *((r.case, r.against_today.throughput) for r in answer.changed)], key=lambda of: of[0].nodes
    )
    nodes = [case.nodes for case, _ in cases]
    measured_s = now.step_s.value if answer.measured_step_s is None else answer.measured_step_s.value
    unit = Unit.of(measured_s)
    steps = [_three(case.step_s, unit.per_s) for case, _ in cases]
    throughputs = [_three(Interval(1.0 + e.value, 1.0 + e.low, 1.0 + e.high), 1.0) for _, e in cases]
    figure, (left, right) = figures.figure(2)
    figure.set_size_inches(11.2, 3.8)
    for panel, values in ((left, steps), (right, throughputs)):
        value, low, high = np.array(values).T
        panel.fill_between(nodes, low, high, color="#4c72b0", alpha=0.25, lw=0, label="95 % interval")
        panel.plot(nodes, value, "o-", color="#4c72b0", ms=5, label="simulated")
        panel.set_xscale("log", base=2)
        panel.set_xticks(nodes, [str(n) for n in nodes])
        panel.minorticks_off()
        panel.set_xlabel("nodes (each rank of the trace is one)" if now.ranks == now.nodes else "nodes")
    left.plot([now.nodes], [unit.per_s * measured_s], "D", color=_NOW, ms=8, label="measured", zorder=5)
    top = 1.15 * max(unit.per_s * measured_s, *(high for _, _, high in steps))
    left.set(ylabel=f"mean step, {unit.name}", ylim=(0.0, top))
    right.plot(nodes, [n / now.nodes for n in nodes], "--", color="#999999", lw=1.0, label="linear")
    right.set_yscale("log", base=2)
    right.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    right.set_ylabel("throughput, today's = 1")
    for panel in (left, right):
        panel.legend(fontsize=8, frameon=False)
    caption = (
        "The job on more or fewer nodes, without pacing, as paceenv whatif --nodes predicts it: where one run ends up "
        f"in 95 % of cases. Taken for granted: {'; '.join(answer.assumes)}."
    )
    if answer.left_open:
        caption += f" Open, and in the band: {'; '.join(answer.left_open)}."
    rows = [
        (str(case.nodes), *_texts(step), *_texts(throughput), *_texts(_three(case.cv, 1.0)))
        for (case, _), step, throughput in zip(cases, steps, throughputs, strict=True)
    ]
    names = (f"step, {unit.name}", "throughput", "CV")
    columns = ("nodes", *(f"{name}{part}" for name in names for part in ("", " low", " high")))
    return drawn("At other sizes", caption, figure, Numbers("scaling", columns, rows))


def _three(estimate: Interval, per: float) -> tuple[float, float, float]:
    return per * estimate.value, per * estimate.low, per * estimate.high


def _texts(values: tuple[float, float, float]) -> tuple[str, ...]:
    return tuple(f"{x:.4g}" for x in values)


def policies(fitted: Fitted, found: Sequence[Paced]) -> Picture:
    """Throughput and CV of every policy against no pacing.

    Args:
        fitted: the cluster that the trace calibrates to.
        found: a simulated result for each policy.
    """
    figure, (left, right) = figures.figure(2)
    figure.set_size_inches(11.2, 1.3 + 0.4 * len(found))
    label = score_table.labels(one.policy for one in found)
    names = [label[one.policy] for one in found]
    names = [figures.literal(name if len(name) <= 30 else f"…{name[-29:]}", 30) for name in names]
    for i, one in enumerate(found):
        value, low, high = (100.0 * x for x in one.gain)
        shade = figures.colour(one.policy)
        left.plot([low, high], [i, i], color=shade, lw=3, solid_capstyle="butt", alpha=0.6)
        left.plot([value], [i], "o", color=shade, ms=8)
        right.plot([one.cv], [i], "o", color=shade, ms=8)
    left.axvline(0.0, color="black", lw=0.9)
    right.axvline(found[0].cv_passive, color="black", lw=0.9, label="without pacing")
    right.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.1)
    edge = max(1.0, *(110.0 * abs(x) for one in found for x in one.gain))
    left.set(xlim=(-edge, edge), xlabel="throughput against no pacing, %", ylim=(len(found) - 0.5, -0.5))
    most = max(found[0].cv_passive, *(one.cv for one in found))
    right.set(xlim=(0.0, 1.1 * most + 1e-6), xlabel="CV of step time", ylim=(len(found) - 0.5, -0.5))
    left.set_yticks(range(len(found)), names)
    right.set_yticks(range(len(found)), [""] * len(found))
    nodes = fitted.fit.cluster.job.nodes
    caption = (
        f"Pacing policies on {len(fitted.clusters)} clusters that may be the one behind this trace, each with {nodes} "
        "nodes, paired with no pacing on the same noise; the bar is the range in which 95 % of such clusters lie. "
        "Right of the line helps. A simulation: on the job itself a canary (paceenv live) decides."
    )
    if fitted.tenants is False:
        caption += (
            " This trace shows no other job on the same links; one that collides with ours in every single step would "
            "look like a slower link here; only a canary shows it."
        )
    columns = ["policy", "throughput gain", "low", "high", "CV", "CV without pacing", "mean delay / step", "so it"]
    columns += ["outside its range"]
    rows = [
        (
            *(label[one.policy], *(f"{x:+.4f}" for x in one.gain)),
            *(*(f"{x:.4f}" for x in (one.cv, one.cv_passive, one.delay_share)), one.verdict, one.outside),
        )
        for one in found
    ]
    return drawn("Would pacing help?", caption, figure, Numbers("policies", columns, rows))
