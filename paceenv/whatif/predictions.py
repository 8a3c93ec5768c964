"""The answer to a what-if question: today's job, each changed one beside it, what the numbers rest on; its picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceenv.core.intervals import Interval
from paceenv.policies.ranges import Outside
from paceenv.whatif.change import Change
from paceenv.whatif.estimate import Spread, as_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TODAY = "#555555"


@dataclass(frozen=True)
class Case:
    """A job: mean step in seconds, throughput in the answer's unit a second, CV of the step, energy in J a sample."""

    nodes: int
    ranks: int
    policy: str
    step_s: Interval
    throughput: Interval
    cv: Interval
    energy_j: Interval | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "ranks": self.ranks,
            "policy": self.policy,
            "step_time_s": as_json(self.step_s),
            "throughput_per_s": as_json(self.throughput),
            "cv": as_json(self.cv),
            "energy_j_per_sample": as_json(self.energy_j),
        }


@dataclass(frozen=True)
class Differences:
    """Differences between two jobs, run by run or step by step; relative, except for the CV."""

    step: Interval
    throughput: Interval
    cv: Interval
    energy: Interval | None = None

    def as_dict(self) -> dict[str, Any]:
        found = {"step_time": self.step, "throughput": self.throughput, "cv": self.cv, "energy": self.energy}
        return {name: as_json(value) for name, value in found.items()}


@dataclass(frozen=True)
class Row:
    """A changed job, its difference from today's and, if it is paced, from the same job without pacing."""

    change: Change
    case: Case
    against_today: Differences
    against_unpaced: Differences | None = None
    interval_from: Spread | None = None
    outside: Outside | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "label": self.change.label,
            "change": self.change.as_dict(),
            **self.case.as_dict(),
            "against_today": self.against_today.as_dict(),
            "against_unpaced": None if self.against_unpaced is None else self.against_unpaced.as_dict(),
            "interval_from": None if self.interval_from is None else self.interval_from.as_dict(),
            "outside_calibrated_range": None if self.outside is None else asdict(self.outside),
        }


@dataclass(frozen=True)
class Prediction:
    """The answer to a what-if question.

    Attributes:
        source: name of the config or trace.
        basis: ``simulator`` or ``replay``.
        method: the same in words.
        unit: what throughput counts.
        today: the job as it is.
        changed: the changed jobs.
        assumes: what the numbers take for granted.
        cannot_tell: what they leave open outside of the intervals.
        left_open: what the intervals hold besides: between which ends, and which measurement would identify it.
        measured_step_s: mean step of the trace.
        measured_cv: coefficient of variation of the trace's steps.
    """

    source: str
    basis: str
    method: str
    unit: str
    today: Case
    changed: Sequence[Row]
    assumes: Sequence[str]
    cannot_tell: Sequence[str]
    left_open: Sequence[str] = ()
    measured_step_s: Interval | None = None
    measured_cv: Interval | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as ``paceenv whatif --json`` prints it."""
        return {
            "source": self.source,
            "basis": self.basis,
            "method": self.method,
            "throughput_unit": self.unit,
            "measured": {"step_time_s": as_json(self.measured_step_s), "cv": as_json(self.measured_cv)},
            "today": self.today.as_dict(),
            "changed": [row.as_dict() for row in self.changed],
            "assumes": list(self.assumes),
            "left_open": list(self.left_open),
            "cannot_tell": list(self.cannot_tell),
        }


def draw(answer: Prediction, path: Path) -> None:
    """Draw an answer to a file: over nodes where the rows differ in them and no rank is taken out, else row by row."""
    from paceenv.ui import figures  # matplotlib, which most answers do not need

    over_nodes = len({row.case.nodes for row in answer.changed}) > 1 and all(
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


def _over_nodes(panel: Axes, answer: Prediction, of: str, quantity: str) -> None:
    """One line for each policy."""
    from paceenv.ui import figures

    lines: dict[tuple[str, str], list[Case]] = {}
    for row in answer.changed:
        other = replace(row.change, nodes=None, pacing="passive").label
        lines.setdefault((row.change.pacing, other), []).append(row.case)
    _mark(panel, [answer.today], of, color=_TODAY, label="today", marker="s", ls="")
    styles = dict(zip(dict.fromkeys(other for _, other in lines), ("-", "--", "-."), strict=False))
    for (policy, other), found in lines.items():
        label = ", ".join(filter(None, (policy, other)))
        cases = sorted(found, key=lambda case: case.nodes)
        _mark(panel, cases, of, color=figures.colour(policy), label=label, marker="o", ls=styles.get(other, ":"))
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


def _mark(panel: Axes, cases: Sequence[Case], of: str, **how: Any) -> None:
    found: list[Interval] = [getattr(case, of) for case in cases]
    errors = [
        [e.value - e.low if e.is_bounded else 0.0 for e in found],
        [e.high - e.value if e.is_bounded else 0.0 for e in found],
    ]
    panel.errorbar([c.nodes for c in cases], [e.value for e in found], errors, ms=4, capsize=3, **how)


def _in_rows(panel: Axes, answer: Prediction, of: str, quantity: str) -> None:
    from paceenv.ui import figures

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
