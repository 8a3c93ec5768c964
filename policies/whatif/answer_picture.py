"""The picture of a what-if answer: step time and throughput of today's job and of every changed one, with intervals."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes

from paceenv.core.intervals import Interval
from paceenv.policies.whatif.answer import Answer, Case
from paceenv.ui import figures

_TODAY = "#555555"


def draw(answer: Answer, path: Path) -> None:
    """One panel each, a line per row from the top; over nodes where nothing else is changed but policies."""
    sizes = {row.case.nodes for row in answer.changed}
    over_nodes = len(sizes) > 1 and all(
        set(row.change.label.split(", ")) <= {f"{row.case.nodes} nodes", row.change.pacing} for row in answer.changed
    )
    made, (left, right) = figures.figure(2)
    made.suptitle(f"{answer.source}: predicted, 95 % intervals")
    for panel, of in ((left, "step_s"), (right, "throughput")):
        (_over_nodes if over_nodes else _in_rows)(panel, answer, of)
    quantities = ("mean step, s", f"throughput, {answer.unit}/s")
    for panel, quantity in zip((left, right), quantities, strict=True):
        if over_nodes:
            panel.set(xlabel="nodes", ylabel=quantity)
            panel.set_ylim(bottom=0.0)
        else:
            panel.set_xlabel(quantity)
            panel.set_xlim(left=0.0)
    if over_nodes:
        left.legend(fontsize=7)
    else:
        right.set_yticklabels([])
    figures.save(made, path)


def _over_nodes(panel: Axes, answer: Answer, of: str) -> None:
    today: Interval = getattr(answer.today, of)
    _mark(panel, [answer.today.nodes], [today], _TODAY, f"today, {answer.today.policy}", "s")
    for policy in dict.fromkeys(row.case.policy for row in answer.changed):
        cases = sorted((r.case for r in answer.changed if r.case.policy == policy), key=lambda case: case.nodes)
        found = [getattr(case, of) for case in cases]
        _mark(panel, [case.nodes for case in cases], found, figures.colour(policy), policy, "o-")
    panel.set_xscale("log")
    ticks = sorted({answer.today.nodes, *(row.case.nodes for row in answer.changed)})
    panel.set_xticks(ticks, [str(n) for n in ticks])
    panel.minorticks_off()


def _mark(panel: Axes, x: list[int], found: list[Interval], colour: str, label: str, style: str) -> None:
    below = [0.0 if math.isnan(e.low) else e.value - e.low for e in found]
    above = [0.0 if math.isnan(e.high) else e.high - e.value for e in found]
    panel.errorbar(x, [e.value for e in found], [below, above], fmt=style, ms=4, color=colour, capsize=3, label=label)


def _in_rows(panel: Axes, answer: Answer, of: str) -> None:
    rows: list[tuple[str, Case]] = [("today", answer.today), *((r.change.label, r.case) for r in answer.changed)]
    for y, (_, case) in enumerate(rows):
        estimate: Interval = getattr(case, of)
        colour = _TODAY if y == 0 else figures.colour(case.policy)
        low, high = estimate.low, estimate.high
        if not math.isnan(low):
            panel.plot([low, high], [y, y], "|-", color=colour)
        panel.plot([estimate.value], [y], "o", color=colour, ms=4)
    panel.axvline(getattr(answer.today, of).value, color=_TODAY, lw=0.8, ls=":")
    panel.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
    panel.set_ylim(len(rows) - 0.5, -0.5)
