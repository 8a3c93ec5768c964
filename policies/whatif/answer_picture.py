"""The picture of a what-if answer: scaling curves over nodes, or a line per row, with 95 % intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes

from paceenv.core.intervals import Interval
from paceenv.policies.whatif.answer import Answer, Case
from paceenv.ui import figures

_TODAY = "#555555"
_STYLES = ("-", "--", "-.", ":", (0, (1, 3)))


def draw(answer: Answer, path: Path) -> None:
    """Draw an answer to a file: over nodes where the rows differ in them and no rank is taken out, else row by row.

    Args:
        answer: rows of predictions.
        path: of the picture; its suffix gives the file type.
    """
    sizes = {row.case.nodes for row in answer.changed}
    over_nodes = len(sizes) > 1 and all(
        row.change.nodes is not None and not row.change.removed for row in answer.changed
    )
    quantities = {"step_s": "mean step, s", "throughput": f"throughput, {answer.unit}/s"}
    if over_nodes:
        quantities["cv"] = "coefficient of variation of step time"
    made, panels = figures.figure(len(quantities))
    made.suptitle(f"{answer.source}: predicted, 95 % intervals")
    for panel, (of, quantity) in zip(panels, quantities.items(), strict=True):
        (_over_nodes if over_nodes else _in_rows)(panel, answer, of, quantity)
    if over_nodes:
        panels[1].legend(fontsize=7, handlelength=4)
    else:
        panels[1].set_yticklabels([])
    figures.save(made, path)


def _over_nodes(panel: Axes, answer: Answer, of: str, quantity: str) -> None:
    """One line for each policy and variant."""
    lines: dict[tuple[str, str], list[Case]] = {}
    for row in answer.changed:
        variant = replace(row.change, nodes=None, pacing="passive").label
        lines.setdefault((variant, row.change.pacing), []).append(row.case)
    _mark(panel, [answer.today], of, _TODAY, "today", "s")
    styles = dict(zip(dict.fromkeys(variant for variant, _ in lines), _STYLES, strict=False))
    for (variant, policy), found in lines.items():
        label = ", ".join(filter(None, (policy, variant)))
        cases = sorted(found, key=lambda case: case.nodes)
        _mark(panel, cases, of, figures.colour(policy), label, "o", ls=styles.get(variant, ":"))
    nodes = sorted({answer.today.nodes, *(case.nodes for cases in lines.values() for case in cases)})
    if of == "throughput":
        first = min((case for cases in lines.values() for case in cases), key=lambda case: case.nodes)
        per_node = first.throughput.value / first.nodes
        panel.plot(nodes, [per_node * n for n in nodes], ":", color="#999999", lw=0.8, label="linear")
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0.0)
    panel.set(xlabel="nodes", ylabel=quantity, xscale="log")
    panel.set_xticks(nodes, [str(n) for n in nodes])
    panel.minorticks_off()


def _mark(panel: Axes, cases: Sequence[Case], of: str, colour: str, label: str, marker: str, ls: object = "") -> None:
    found: list[Interval] = [getattr(case, of) for case in cases]
    errors = [
        [e.value - e.low if e.is_bounded else 0.0 for e in found],
        [e.high - e.value if e.is_bounded else 0.0 for e in found],
    ]
    panel.errorbar(
        [c.nodes for c in cases],
        [e.value for e in found],
        errors,
        marker=marker,
        ls=ls,
        ms=4,
        color=colour,
        capsize=3,
        label=label,
    )


def _in_rows(panel: Axes, answer: Answer, of: str, quantity: str) -> None:
    rows: list[tuple[str, Case]] = [("today", answer.today), *((r.change.label, r.case) for r in answer.changed)]
    for y, (_, case) in enumerate(rows):
        interval: Interval = getattr(case, of)
        colour = _TODAY if y == 0 else figures.colour(case.policy)
        if interval.is_bounded:
            panel.plot(interval[1:], [y, y], "|-", color=colour)
        panel.plot([interval.value], [y], "o", color=colour, ms=4)
    panel.axvline(getattr(answer.today, of).value, color=_TODAY, lw=0.8, ls=":")
    panel.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xlabel(quantity)
    panel.set_xlim(left=0.0)
