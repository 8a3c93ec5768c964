"""The page of a traced job: made from what was read, section by section, and the same as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceenv.core import metrics
from paceenv.core.errors import InputError
from paceenv.diagnosis.answer import find_answer
from paceenv.diagnosis.dependency_graph import build_graph
from paceenv.diagnosis.operation_matrix import OperationMatrix
from paceenv.diagnosis.verdict import Diagnosis
from paceenv.importers.inputs import Inputs
from paceenv.report import pictures
from paceenv.report.answer_text import ACTIVITY, activity_table, headline, late_sentences
from paceenv.report.conclusion import Conclusion, conclude_answer
from paceenv.report.fitted import Fitted, sizes
from paceenv.report.pictures import Picture, Unit
from paceenv.report.rank_pictures import heat_map, lateness, spans, timeline
from paceenv.ui import html_page, output
from paceenv.ui.output import sentence
from paceenv.whatif.predictions import Prediction


@dataclass(frozen=True)
class Report:
    """Everything that a page shows. A missing cluster, sizes or policies are replaced by the reason, in words."""

    files: Sequence[Path]
    notes: Sequence[str]
    matrix: OperationMatrix
    diagnosis: Diagnosis
    conclusion: Conclusion
    lateness: Sequence[str]  # when which rank turned late, and what the hosts of late ranks did, in sentences
    activity: tuple[list[str], list[list[str]]] | None  # columns and rows of where a step's time went on each device
    pictures: Sequence[Picture]
    sizes: Prediction | str

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

    def html(self) -> str:
        """The page."""
        name = self.matrix.name
        parts = [html_page.paragraph(self._read(), "note")]
        parts.append(html_page.paragraph(headline(self.conclusion.verdict), "verdict"))
        parts += [self._facts(), html_page.heading("Causes"), self._causes(), *self._late()]
        parts += [picture.html() for picture in self.pictures]
        parts += [*self._measured(), *self._fit()]
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
        parts = [html_page.heading("The fitted cluster"), html_page.paragraph(said)]
        if fitted.doubt:
            parts.append(html_page.paragraph(f"{sentence(fitted.doubt)} Read the predictions below as a sketch."))
        parts.append(html_page.numbers("parameters", ("parameter", "value", "95 % low", "high", "evidence"), rows))
        open_ = [(p.key, _number(p.value), p.reason) for p in fit.parameters if not p.is_identified]
        if open_:
            parts.append(html_page.paragraph("Not identified by the trace, and what is used instead:"))
            parts.append(html_page.table(("parameter", "used", "why"), open_))
        if isinstance(self.sizes, str):
            parts += [html_page.heading("At other sizes"), html_page.paragraph(f"Not predicted: {self.sizes}.")]
        else:
            parts.append(pictures.scaling(self.sizes).html())
        if isinstance(policies, str):
            parts += [html_page.heading("Would pacing help?")]
            return [*parts, html_page.paragraph(f"Not predicted: {policies}.")]
        parts += [html_page.heading("Would pacing help?"), html_page.paragraph(policies_caption(fitted))]
        columns = (
            "policy", "throughput gain", "low", "high", "CV", "CV without pacing", "mean delay / step", "so it",
            "outside its range",
        )  # fmt: skip
        rows = [
            (
                one.policy, *(f"{x:+.2%}" for x in one.gain), f"{one.cv:.4f}", f"{one.cv_passive:.4f}",
                f"{one.delay_share:.4f}", one.verdict, one.outside,
            )
            for one in policies
        ]  # fmt: skip
        return [*parts, html_page.table(columns, rows)]

    def _measured(self) -> list[str]:
        """What the delays in the trace did."""
        if (paced := self.diagnosis.paced) is None:
            return []
        said = f"{sentence(paced.text)} Other settings of pacing may do better or worse."
        return [html_page.heading("What the delays in this trace did"), html_page.paragraph(said)]


def policies_caption(fitted: Fitted) -> str:
    """What the comparison of policies is."""
    caption = (
        f"Pacing policies on {len(fitted.clusters)} clusters that may be the one behind this trace, each with "
        f"{fitted.fit.cluster.job.nodes} nodes, paired with no pacing on the same noise; 95 % of such clusters lie "
        "between low and high. A simulation: on the job itself a canary (paceenv live) decides."
    )
    if fitted.tenants is False:
        caption += (
            " This trace shows no other job on the same links; one that collides with ours in every single step would "
            "look like a slower link here; only a canary shows it."
        )
    return caption


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def make_report(inputs: Inputs, files: Sequence[Path], policies: Sequence[str], job: str | None) -> Report:
    """Diagnose, draw and predict."""
    inputs.require_trace()
    with output.progress("diagnose, draw, simulate", 4 + len(policies)) as done:
        answer = find_answer(replace(inputs, dumps=(), inspected=(), steps=()), job)
        matrix, diagnosis = answer.matrix, answer.diagnosis
        assert matrix is not None, "there is a trace"
        assert diagnosis is not None, "there is a trace"
        if not matrix.step_s_T.max() > 0.0:
            raise InputError(f"trace of {matrix.name}: steps that take no time; allowed: a job that takes some")
        graph = build_graph(matrix)
        done(1)
        late = lateness(matrix, graph)
        drawn = [
            pictures.waterfall(diagnosis),
            timeline(matrix, spans(matrix, graph), diagnosis.arrivals.late_RT.sum(axis=1)),
            None if late is None else heat_map(matrix, late),
            pictures.course(matrix),
            pictures.spread(matrix),
        ]
        done(2)
        conclusion = conclude_answer(
            answer, inputs, str(files[0]), job, policies=policies, on_done=lambda n: done(2 + n)
        )
        over_time = answer.lateness.text() if answer.lateness and not answer.lateness.why_not else ()
        at_sizes: Prediction | str = ""
        if not isinstance(conclusion.fitted, str):
            at_sizes = sizes(conclusion.fitted, lambda part: done(2 + len(policies) + part))
    return Report(
        files,
        answer.notes,
        matrix,
        diagnosis,
        conclusion,
        lateness=[*map(sentence, over_time), *late_sentences(answer.late_hosts, diagnosis)],
        activity=activity_table(inputs.activity, answer.late_hosts) if inputs.activity else None,
        pictures=[picture for picture in drawn if picture is not None],
        sizes=at_sizes,
    )
