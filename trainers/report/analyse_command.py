"""``paceenv analyse``: recognises what lies in a folder, does what can be done with it, and says the next step."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceenv.cli.activity_text import sentence
from paceenv.cli.calibrate_command import calibrate_links
from paceenv.cli.hang_text import WAIT_COLUMNS
from paceenv.cli.step_log_output import PATTERN_HELP, rows
from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.diagnosis.answer import Answer, find_answer
from paceenv.diagnosis.causes import SLOW_RANK
from paceenv.diagnosis.sources import MAX_ROWS
from paceenv.importers.inputs import Inputs, read_inputs
from paceenv.trainers.report.conclusion import POLICIES, Conclusion, Flops
from paceenv.trainers.report.diagnose_command import FLOPS_HELP, PEAK_HELP, conclude_inputs, print_answer
from paceenv.trainers.report.recognised import Recognised, recognise
from paceenv.ui import html_page, output

COLUMNS = ("policy", "throughput", "95 % low", "high")
_ITERATIONS = 400


@dataclass
class Analysis:
    """All that was found and done; ``next_steps`` are commands that work when typed."""

    named: Sequence[Path]
    found: Recognised
    inputs: Inputs | None = None
    answer: Answer | None = None
    conclusion: Conclusion | None = None
    run_pages: dict[Path, str] = field(default_factory=dict)
    paced: dict[Path, list[tuple[str, str, str, str]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def words(self) -> str:
        """The names of what the user named, as one types them."""
        return shlex.join(str(path) for path in self.named)

    def next_steps(self) -> list[str]:
        """Commands, the most useful first."""
        steps: list[str] = []
        words = self.words
        if self.conclusion is not None and self.answer is not None and self.answer.diagnosis is not None:
            causes = [cause.cause for cause in self.answer.diagnosis.causes]
            worst = self.answer.diagnosis.attribution
            if causes[:1] == [SLOW_RANK] and worst is not None and worst.rank and not self.found.runs:
                rank = max(worst.rank, key=lambda r: worst.rank[r])
                steps.append(f"paceenv whatif {words} --replace-rank {rank}")
            if self.conclusion.verdict.claim in {"helps", "is open"} and not self.found.runs:
                steps.append(f"paceenv tailor {words} -o policy.safetensors")
        steps += [f"paceenv live trace {shlex.quote(str(run))} -o trace.parquet" for run in self.found.runs]
        if self.answer is not None and (self.answer.matrix is not None or len(self.answer.steps) == 1):
            steps.append(f"paceenv report {words} -o report.html" if not self.found.runs else "")
        if self.answer is not None and self.answer.hangs:
            steps.append(f"paceenv diagnose {words} --json hang.json")
        if self.inputs is not None:
            tables = dict.fromkeys(table.source.partition(", table ")[0] for table in self.inputs.tables)
            steps += [f"paceenv calibrate {shlex.quote(source)} -o links.yaml" for source in list(tables)[:1]]
        return [*filter(None, steps), *self.found.next_steps()]

    def listed(self) -> list[str]:
        """What lies there, a line for each kind."""
        inputs, lines = self.inputs, []
        if inputs is not None:
            if inputs.trace is not None:
                lines.append(f"a trace of {len(inputs.trace.metadata.ranks)} ranks ({inputs.trace.metadata.source})")
            counted = (
                (len(inputs.dumps), "Flight Recorder dump"), (len(inputs.steps), "log with step times"),
                (len(inputs.tables), "table of nccl-tests"), (len(inputs.inspected), "log of NCCL Inspector"),
            )  # fmt: skip
            lines += [f"{n} x {what}" for n, what in counted if n]
        lines += [f"the folder of a live run: {run}" for run in self.found.runs]
        lines += [f"{kind}: {path}" for kind, path in self.found.configs]
        return lines + [f"policy file: {path}" for path in self.found.policies]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        done = self.answer.to_json() if self.answer is not None else {}
        done |= self.conclusion.to_json() if self.conclusion is not None else {}
        names = ("policy", "gain", "low", "high")
        paced = {str(path): [dict(zip(names, row, strict=True)) for row in of] for path, of in self.paced.items()}
        return {"found": self.listed(), "notes": self.notes, "diagnosis": done, "pacing": paced} | {
            "runs": {str(run): page for run, page in self.run_pages.items()},
            "next": self.next_steps(),
        }


def analyse(
    paths: Annotated[list[Path], typer.Argument(help="Files, folders and patterns: whatever a job left behind.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write a page (HTML).")] = None,
    job: Annotated[str | None, typer.Option(help="Which job, where a trace holds several.")] = None,
    pattern: Annotated[str | None, typer.Option(help=PATTERN_HELP)] = None,
    flops_per_step: Annotated[float | None, typer.Option(help=FLOPS_HELP)] = None,
    peak_flops: Annotated[float | None, typer.Option(help=PEAK_HELP)] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Recognise what lies in a folder, do what can be done with it, and say the next step as a command.

    Traces and profiles: why steps take so long, whether pacing helps. Flight Recorder dumps: which rank a hung job
    waits for. Logs with step times: how much there is to win at most. Output of nccl-tests: the law of the links.
    Folders of live runs: their summary and their trace. Clusters: what pacing gains on them. Scenarios, suites,
    trainings, policy files: the command that takes them.

    The bare command does the same: paceenv runs/job-17

    Examples: paceenv analyse runs/job-17 -- paceenv analyse /tmp/dumps -o hang.html -- paceenv analyse trace.parquet
    all_reduce_perf.log --json -
    """
    if out is not None and (out.suffix.lower() not in {".html", ".htm"} or out.is_dir()):
        raise InputError(f"--out {out}: allowed: a file that ends in .html")
    done = Analysis(paths, recognise(paths))
    with tempfile.TemporaryDirectory() as folder:
        recorded = [*done.found.recorded, *_merged_runs(done, Path(folder))]
        _read(done, recorded, pattern)
    if done.inputs is not None and _has_answer(done.inputs):
        done.answer = find_answer(done.inputs, job)
        done.notes = [*done.notes, *done.answer.notes]
        source, flops = str(paths[0]), Flops(flops_per_step, peak_flops)
        done.conclusion = conclude_inputs(done.inputs, done.answer, source, job, POLICIES, flops)
    elif done.inputs is not None:
        done.notes += done.inputs.notes
    for kind, path in done.found.configs:
        if kind == "cluster":
            try:
                done.paced[path] = _paced(path)
            except InputError as error:
                done.notes.append(f"{path}: {error}")
    for note in done.notes:
        output.say(note)
    if json_ is not None:
        output.write_json(done.to_json(), json_)
    if json_ != "-":
        _print(done)
    if out is not None:
        atomic_write(out, _page(done, out, job).encode())
        output.say(f"wrote {out}")


def _merged_runs(done: Analysis, folder: Path) -> list[Path]:
    """The traces of live runs, merged into a temporary folder; their summaries."""
    from paceenv.live.record.merge_segments import write_merged
    from paceenv.live.record.run_folder import RunFolder
    from paceenv.live.record.summary import summarise

    written = []
    for k, path in enumerate(done.found.runs):
        run, trace = RunFolder(path), folder / str(k) / f"{path.name or 'run'}.parquet"
        trace.parent.mkdir()
        try:
            snapshots = run.statuses(run.latest())
            if snapshots:
                done.run_pages[path] = summarise(snapshots)
            write_merged(run, trace)
            written.append(trace)
        except InputError as error:
            done.notes.append(f"{path}: {error}")
        done.notes += run.notes
    return written


def _read(done: Analysis, recorded: list[Path], pattern: str | None) -> None:
    if not recorded:
        return
    try:
        done.inputs = read_inputs(recorded, pattern=pattern, max_rows=MAX_ROWS)
    except InputError as error:
        if not (done.found.configs or done.found.policies or done.run_pages):
            raise
        done.notes.append(str(error))


def _has_answer(inputs: Inputs) -> bool:
    return inputs.trace is not None or bool(inputs.dumps or inputs.steps or inputs.inspected)


def _paced(path: Path) -> list[tuple[str, str, str, str]]:
    """What policies gain on a cluster, as ``paceenv whatif`` predicts it."""
    from paceenv.policies.whatif.baseline import of_config
    from paceenv.policies.whatif.change import Change
    from paceenv.policies.whatif.simulated import MIN_SEEDS, predict

    changes = [Change(pacing=policy) for policy in POLICIES]
    with output.progress(f"simulate {path.name}", 1) as done:
        answer = predict(
            of_config(str(path)), changes, seeds=8 * MIN_SEEDS, first_seed=0, iterations=_ITERATIONS, on_done=done
        )
    found = ((row.change.pacing, row.against_today.throughput) for row in answer.changed)
    return [(policy, *(f"{x:+.1%}" for x in gain)) for policy, gain in found]  # type: ignore[misc]


def _print(done: Analysis) -> None:
    output.print_table(f"Found in {done.words}", (), (), "\n".join(done.listed()))
    for page in done.run_pages.values():
        sys.stdout.write(page)
    if done.answer is not None and done.inputs is not None:
        print_answer(done.inputs, done.answer, done.conclusion, done.words)
    if done.inputs is not None and done.inputs.tables:
        calibrate_links(_fits(done.inputs), None, None, None, None, None)
    for path, of in done.paced.items():
        output.print_table(f"Pacing on {path}, against none", COLUMNS, of, "simulated, on the same noise")
    output.print_table("Next", (), (), "\n".join(done.next_steps()))


def _fits(inputs: Inputs) -> list[Any]:
    from paceenv.calibration.fits.bandwidth import fit_bandwidth

    return [fit_bandwidth(table) for table in inputs.tables]


def _page(done: Analysis, out: Path, job: str | None) -> str:
    """The report of a trace or a log where there is one, and everything else below it."""
    from paceenv.trainers.report import log_page
    from paceenv.trainers.report.report_command import make_report

    more = [html_page.heading("Found"), html_page.bullets(done.listed())]
    for hang in done.answer.hangs if done.answer is not None else ():
        more += [
            html_page.heading(f"Flight Recorder: {hang.name}"),
            html_page.paragraph(sentence(hang.verdict), "verdict"),
        ]
        more += [html_page.table(WAIT_COLUMNS, hang.waiting_rows())] if hang.hangs else []
    for run, page in done.run_pages.items():
        more += [html_page.heading(f"Live run {run}"), html_page.preformatted(page)]
    for fit in _fits(done.inputs) if done.inputs is not None else ():
        more += [html_page.heading(f"Links of {fit.table.source}"), html_page.paragraph(fit.text)]
    for path, of in done.paced.items():
        more += [html_page.heading(f"Pacing on {path}"), html_page.table(COLUMNS, of)]
    more += [html_page.heading("Next"), *(html_page.preformatted(step) for step in done.next_steps())]
    if done.inputs is not None and done.answer is not None and done.answer.matrix is not None:
        report = make_report(done.inputs, done.named, POLICIES, job, conclusion=done.conclusion)
        return replace(report, more=more).html(out.parent)
    for steps in done.answer.steps[:1] if done.answer is not None else ():
        return log_page.page(steps, rows(steps), tuple(done.notes), more)
    return html_page.page(f"Analysis of {done.words}", more)
