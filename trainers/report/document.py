"""The page of a report, section by section, and the same as plain data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paceenv.cli.activity_text import ACTIVITY
from paceenv.cli.diagnosis_text import headline
from paceenv.core import metrics
from paceenv.diagnosis.diagnose import Diagnosis
from paceenv.diagnosis.operation_matrix import OperationMatrix
from paceenv.policies.whatif.answer import Answer
from paceenv.trainers.report import prediction_pictures
from paceenv.trainers.report.conclusion import Conclusion
from paceenv.trainers.report.fitted import Paced
from paceenv.trainers.report.picture import Picture, Unit
from paceenv.ui import html_page, output


@dataclass
class Report:
    """Everything that a page shows. A missing cluster, sizes or policies are replaced by the reason, in words."""

    files: Sequence[Path]
    notes: Sequence[str]
    matrix: OperationMatrix
    diagnosis: Diagnosis
    conclusion: Conclusion
    lateness: Sequence[str] = ()
    """When which rank turned late, and what the hosts of late ranks did, in sentences."""
    activity: tuple[list[str], list[list[str]]] | None = None
    """Columns and rows of where a step's time went on each device."""
    pictures: list[Picture] = field(default_factory=list)
    sizes: Answer | str = ""
    more: Sequence[str] = ()
    """Further pieces of HTML, below all else."""
    viewer: Path | None = None
    viewer_steps: tuple[int, int] = (0, 0)

    def as_json(self) -> dict[str, Any]:
        """The numbers of the page as plain data."""
        fitted = self.conclusion.fitted
        cluster = (
            {"why_not": fitted} if isinstance(fitted, str) else fitted.fit.to_json() | {"doubt": fitted.doubt or None}
        )
        return {
            "files": [str(path) for path in self.files],
            "notes": list(self.notes),
            "job": self.matrix.name,
            "ranks": len(self.matrix.ranks),
            "steps": self.matrix.steps,
            "steps_left_out": self.matrix.dropped,
            "step_time_s": metrics.step_statistics(self.matrix.step_s_T),
            "diagnosis": self.diagnosis.to_json() | {"verdict": self.conclusion.verdict.text},
            **self.conclusion.to_json(),
            "fitted": cluster,
            "sizes": {"why_not": self.sizes} if isinstance(self.sizes, str) else self.sizes.as_dict(),
        }

    def html(self, beside: Path) -> str:
        """The page; links are relative to the folder ``beside``."""
        name = self.matrix.name
        parts = [html_page.paragraph(self._read(), "note")]
        parts.append(html_page.paragraph(headline(self.conclusion.verdict), "verdict"))
        parts += [self._facts(), html_page.heading("Causes"), self._causes(), *self._late()]
        parts += [picture.html() for picture in self.pictures]
        if self.viewer is not None:
            parts.append(self._viewer_link(beside))
        parts += [*self._measured(), *self._fit(), *self.more]
        return html_page.page(f"Why the steps of {name} take as long as they do", parts)

    def _read(self) -> str:
        matrix, names = self.matrix, [path.name for path in self.files]
        files = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        said = [f"Read from {files} ({matrix.source}): {len(matrix.ranks)} ranks, {matrix.steps} steps"]
        return "; ".join([*said, *self.notes, *self.diagnosis.notes]) + "."

    def _facts(self) -> str:
        statistics, d = metrics.step_statistics(self.matrix.step_s_T), self.diagnosis
        unit = Unit.of(statistics["mean"])
        ideal = []
        if d.ideal_step_time_s is not None:
            ideal = [
                ("ideal step, all ranks alike", unit.text(d.ideal_step_time_s)),
                ("slowdown against it", f"{d.slowdown:.3f}"),
            ]
        return html_page.facts(
            [
                ("mean step", unit.text(statistics["mean"])),
                *([] if d.paced is None else [("with delays", unit.text(d.paced.paced_s))]),
                *([] if d.paced is None else [("without delays", unit.text(d.paced.plain_s))]),
                ("99th percentile", unit.text(statistics["p99"])),
                ("coefficient of variation", f"{statistics['cv']:.3f}"),
                *ideal,
                ("ranks", str(len(self.matrix.ranks))),
                ("steps", str(self.matrix.steps)),
            ]
        )

    def _causes(self) -> str:
        unit = Unit.of(self.diagnosis.step_time_s)
        rows = [
            (c.cause, f"{c.share:.0%}", f"{unit.per_s * c.lost_s:.4g}", c.evidence, self.conclusion.verdict.advice(c))
            for c in self.diagnosis.causes
        ]
        if not rows:
            why = "costs enough to be named" if self.diagnosis.bare_step_s is not None else "can be named, see above"
            return html_page.paragraph(f"No cause {why}.")
        return html_page.table(("cause", "of lost time", f"{unit.name} a step", "evidence", "what to do"), rows)

    def _late(self) -> list[str]:
        """Which ranks were late when, and why."""
        parts = [html_page.paragraph(line) for line in self.lateness]
        if self.activity is not None:
            parts += [html_page.heading(ACTIVITY), html_page.table(*self.activity)]
        return [html_page.heading("Late ranks"), *parts] if parts else []

    def _viewer_link(self, beside: Path) -> str:
        assert self.viewer is not None
        address = quote(os.path.relpath(self.viewer, beside))
        first, last = (self.matrix.iteration_T[t] for t in self.viewer_steps)
        said = f" has iterations {first} to {last} of every rank: open it in ui.perfetto.dev or chrome://tracing."
        return f'<p class="note">{html_page.link(address, self.viewer.name)}{said}</p>'

    def _fit(self) -> list[str]:
        """The fitted cluster, or why there is none."""
        if isinstance(self.conclusion.fitted, str):
            why = f"This trace gives no cluster to simulate: {self.conclusion.fitted}."
            said = f"{why} So other sizes and pacing policies are not predicted here."
            return [html_page.heading("At other sizes, and with pacing"), html_page.paragraph(said)]
        fitted, fit, policies = self.conclusion.fitted, self.conclusion.fitted.fit, self.conclusion.policies
        unit = Unit.of(fit.measured.mean_s)
        mean_s, cv = (fit.measured.mean_s, fit.simulated.mean_s), (fit.measured.cv, fit.simulated.cv)
        said = (
            f"The predictions below come from a cluster with {len(fit.parameters)} parameters fitted to this trace. "
            f"Its mean step is {unit.text(mean_s[1])}, measured {unit.text(mean_s[0])} ({fit.mean_error:+.1%}); its CV "
            f"{cv[1]:.3f}, measured {cv[0]:.3f}."
        )
        rows = [
            (p.key, *(_number(x) for x in (p.value, p.lo, p.hi)), p.evidence) for p in fit.parameters if p.is_identified
        ]
        parts = [html_page.heading("The fitted cluster"), html_page.paragraph(said), html_page.paragraph(fitted.doubt)]
        parts.append(html_page.numbers("parameters", ("parameter", "value", "95 % low", "high", "evidence"), rows))
        open_ = [(p.key, _number(p.value), p.reason) for p in fit.parameters if not p.is_identified]
        if open_:
            parts.append(html_page.paragraph("Not identified by the trace, and what is used instead:"))
            parts.append(html_page.table(("parameter", "used", "why"), open_))
        if isinstance(self.sizes, str):
            parts += [html_page.heading("At other sizes"), html_page.paragraph(f"Not predicted: {self.sizes}.")]
        else:
            parts.append(prediction_pictures.scaling(self.sizes).html())
        if isinstance(policies, str):
            parts += [html_page.heading("Would pacing help?")]
            return [*parts, html_page.paragraph(f"Not predicted: {policies}.")]
        return [*parts, prediction_pictures.policies(fitted, policies).html()]

    def _measured(self) -> list[str]:
        """What the delays in the trace did."""
        if (paced := self.diagnosis.paced) is None:
            return []
        said = f"{paced.text[:1].upper()}{paced.text[1:]}. Other settings of pacing may do better or worse."
        return [html_page.heading("What the delays in this trace did"), html_page.paragraph(said)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def say(report: Report, out: Path) -> None:
    """Print a summary for people.

    Args:
        report: what was found.
        out: the page that was written.
    """
    d, unit = report.diagnosis, Unit.of(report.diagnosis.step_time_s)
    rows = [("mean step", unit.text(d.step_time_s), "")]
    if d.slowdown is not None:
        rows.append(("slowdown", f"{d.slowdown:.3f}", ""))
    verdict = report.conclusion.verdict
    rows += [(c.cause, f"{c.lost_s / d.step_time_s:.0%} of the step", verdict.advice(c)) for c in d.causes]
    rows += [
        (f"throughput with {one.policy}", f"{one.gain[0]:+.1%}", one.verdict)
        for one in report.conclusion.policies
        if isinstance(one, Paced)
    ]
    title = f"{report.matrix.name}: {len(report.matrix.ranks)} ranks, {report.matrix.steps} steps"
    output.print_table(title, ("", "", ""), rows)
    output.say(headline(verdict))
    fitted = report.conclusion.fitted
    if isinstance(fitted, str):
        output.say(f"not predicted: {fitted}")
    elif fitted.doubt:
        output.say(fitted.doubt)
    output.say(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")
