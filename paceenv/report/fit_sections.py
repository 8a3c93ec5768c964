"""A fit in sections: the record in the fitted cluster, which ``paceenv calibrate`` prints and a report shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceenv.calibration.parameters import Parameter
from paceenv.calibration.posterior import parameters_of
from paceenv.report.section import Section
from paceenv.sim.cluster import Cluster


def fit_sections(cluster: Cluster) -> list[Section]:
    """The parameters that the source tells, why it does not tell the others, and checks on unseen steps."""
    record = cluster.calibration
    measured, simulated, notes = record.get("measured"), record.get("simulated"), []
    if measured and simulated:
        step_s, again_s = measured["step_mean_s"], simulated["step_mean_s"]
        note = f"Mean step {step_s:.4g} s, simulated {again_s:.4g} s ({again_s / step_s - 1.0:+z.1%}); "
        notes.append(f"{note}CV {measured['step_cv']:.3f}, simulated {simulated['step_cv']:.3f}.")
    known = parameters_of(cluster)
    title = f"{cluster.name}: fitted to {record['source']}"
    sections = [fitted(title, notes, [p for p in known if p.is_identified])]
    rows = [(p.key, *_numbers(p.value), _bounds(p), p.reason) for p in known if not p.is_identified]
    if rows:
        open_ = ("parameter", "value used", "bounds", "why")
        sections.append(Section("Cannot be identified from this trace", (), open_, rows))
    if "held_out_steps" in record:
        sections.append(_check(record["held_out_steps"]))
    return sections


def fitted(title: str, text: Sequence[str], parameters: Sequence[Parameter]) -> Section:
    """The table of parameters that a fit found."""
    columns = ("parameter", "value", "standard error", "95 % low", "high", "evidence")
    rows = [(p.key, *_numbers(p.value, p.se, p.lo, p.hi), p.evidence) for p in parameters]
    return Section(title, text, columns, rows)


def _check(check: dict[str, Any]) -> Section:
    """A check on held-out steps, or the reason why there is none."""
    if "cannot_tell" in check:
        return Section("Steps not seen", [f"not compared: {check['cannot_tell']}"])
    rows = [
        (
            f"{x['quantity']}{x['unit'] and ', s'}",
            *_numbers(x["held_out"], x["simulated"], x["low"], x["high"]),
            f"{x['error']:+z.1%}" if x["unit"] else f"{x['error']:+z.3f}",
            x["verdict"],
        )
        for x in check["lines"]
    ]
    text = [
        "the interval holds single simulated runs of that length, of clusters drawn from the errors of that fit. "
        "close: outside of it but not by much. The written cluster is fitted to all steps.",
    ]
    title = f"Steps not seen: {check['held_out_steps']} held out, fitted to the {check['fitted_steps']} before"
    return Section(title, text, ("quantity", "held out", "simulated", "95 % low", "high", "error", "verdict"), rows)


def _numbers(*values: float | None) -> list[str]:
    return ["" if value is None else f"{value:.4g}" for value in values]


def _bounds(parameter: Parameter) -> str:
    said = {"at least": parameter.lo, "at most": parameter.hi}
    return " ".join(f"{word} {edge:.4g}" for word, edge in said.items() if edge is not None)
