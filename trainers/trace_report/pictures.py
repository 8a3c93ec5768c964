"""Pictures of what a fitted cluster foretells: the job at other sizes, and under policies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceenv import figures
from paceenv.report.picture import Numbers, Picture, Unit, drawn
from trainers import report
from trainers.trace_report.fitted import Fitted, Paced, Size

_NOW = "#d55e00"


def scaling(fitted: Fitted, found: Sequence[Size]) -> Picture:
    """Mean step and throughput over the number of nodes."""
    today, measured_s = fitted.fit.cluster.job.nodes, fitted.fit.measured.mean_s
    unit, nodes = Unit.of(measured_s), [size.nodes for size in found]
    figure, (left, right) = figures.figure(2)
    figure.set_size_inches(11.2, 3.8)
    shown = (left, [s.step_s for s in found], unit.per_s), (right, [s.throughput for s in found], 1.0)
    for panel, values, per in shown:
        value, low, high = per * np.array(values).T
        panel.fill_between(nodes, low, high, color="#4c72b0", alpha=0.25, lw=0, label="95 % interval")
        panel.plot(nodes, value, "o-", color="#4c72b0", ms=5, label="simulated")
        panel.set_xscale("log", base=2)
        panel.set_xticks(nodes, [str(n) for n in nodes])
        panel.minorticks_off()
        panel.set_xlabel("nodes (each rank of the trace is one)")
    left.plot([today], [unit.per_s * measured_s], "D", color=_NOW, ms=8, label="measured", zorder=5)
    top = 1.15 * unit.per_s * max(measured_s, *(s.step_s[2] for s in found))
    left.set(ylabel=f"mean step, {unit.name}", ylim=(0.0, top))
    right.plot(nodes, [n / today for n in nodes], "--", color="#999999", lw=1.0, label="linear")
    right.set_yscale("log", base=2)
    right.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    right.set_ylabel("throughput, today's = 1")
    for panel in (left, right):
        panel.legend(fontsize=8, frameon=False)
    caption = (
        "The job on more or fewer nodes, without pacing: every rank does what it does today, as many ranks are slow as "
        "today, and uplinks grow with the nodes. The band is what the trace leaves open of the fitted cluster; it "
        "does not know what a larger fabric adds that this one has not shown."
    )
    rows = [
        (str(s.nodes), *_three(s.step_s, unit.per_s), *_three(s.throughput, 1.0), *_three(s.cv, 1.0)) for s in found
    ]
    names = (f"step, {unit.name}", "throughput", "CV")
    columns = ("nodes", *(f"{name}{part}" for name in names for part in ("", " low", " high")))
    return drawn("At other sizes", caption, figure, Numbers("scaling", columns, rows))


def _three(interval: tuple[float, float, float], per: float) -> tuple[str, ...]:
    return tuple(f"{per * x:.4g}" for x in interval)


def policies(fitted: Fitted, found: Sequence[Paced]) -> Picture:
    """Throughput and CV of every policy against no pacing."""
    figure, (left, right) = figures.figure(2)
    figure.set_size_inches(11.2, 1.3 + 0.4 * len(found))
    names = [figures.literal(report.label(one.policy), 30) for one in found]
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
    if not fitted.knows_tenants:
        caption += (
            " This trace shows no other job on the same links; one that collides with ours in every single step would "
            "look like a slower link here, and only a canary can tell it."
        )
    columns = (
        *("policy", "throughput gain", "low", "high", "CV", "CV without pacing", "mean delay / step", "so it"),
        "outside its range",
    )
    rows = [
        (
            *(report.label(one.policy), *(f"{x:+.4f}" for x in one.gain), f"{one.cv:.4f}", f"{one.cv_passive:.4f}"),
            *(f"{one.delay_share:.4f}", one.verdict, one.outside),
        )
        for one in found
    ]
    return drawn("Would pacing help?", caption, figure, Numbers("policies", columns, rows))
