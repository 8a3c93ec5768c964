"""``paceenv diagnose``: why a job's steps take as long as they do, and what would change it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceenv.cli.activity_text import print_activity
from paceenv.cli.hang_text import print_hang
from paceenv.cli.inspector_text import print_times
from paceenv.cli.step_log_output import PATTERN_HELP, from_logs, print_steps
from paceenv.diagnosis.answer import find_answer
from paceenv.diagnosis.diagnose import Diagnosis
from paceenv.diagnosis.sources import MAX_ROWS
from paceenv.importers.inputs import read_inputs
from paceenv.ui import output

_MAX_ROWS = 8


def diagnose(
    traces: Annotated[
        list[Path],
        typer.Argument(help="Files, folders and patterns, of any supported format."),
    ],
    pattern: Annotated[str | None, typer.Option(help=PATTERN_HELP)] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Text logs of a job at several sizes: the size of each, as 4,8 (nodes or ranks).")
    ] = None,
    predict: Annotated[str | None, typer.Option(help="Sizes to predict step times for, as 16,32.")] = None,
    job: Annotated[str | None, typer.Option(help="Which job, where the trace holds several.")] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Find what a job loses against its ideal step, where, and why.

    Reads traces in Parquet, profiles of PyTorch and dumps of its Flight Recorder (one file per rank). A file's content
    decides its format; other files are named and skipped.

    The ideal step: every worker and operation of a kind equal. Slowdown and its attribution to ranks, stages and
    operations come from replaying the steps' dependencies; causes are named with their share of the lost time, the
    evidence, and what to do, which is often not pacing. It says so where a trace does not identify the cause.

    Dumps of a job that hangs or died: which ranks it waits for in the end, what each of the others waits for, and what
    the missing ones were last seen doing. Logs of NCCL Inspector: bandwidths, and which rank arrives last.

    From a text log of a training program (Megatron-LM, torchtitan, nanoGPT, MLPerf, ..., or any with --pattern) it
    gives what step times alone allow: how they vary, what recurs, and how much there is to win at most.

    Examples: paceenv diagnose trace.parquet -- paceenv diagnose rank*.json.gz --json - -- paceenv diagnose profiles/ --
    paceenv diagnose /tmp/nccl_trace_rank_* -- paceenv diagnose log.txt -- paceenv diagnose log.txt --pattern
    '(?P<step>\\d+) took (?P<ms>[\\d.]+)' -- paceenv diagnose log4.txt log8.txt --sizes 4,8 --predict 16
    """
    if sizes is not None or predict is not None:
        from_logs(traces, sizes, predict, pattern, json_)
        return
    inputs = read_inputs(traces, pattern=pattern, max_rows=MAX_ROWS)
    found = find_answer(inputs, job)
    for note in found.notes:
        output.say(note)
    if json_ is not None:
        output.write_json(found.to_json(), json_)
    if json_ == "-":
        return
    for hang in found.hangs:
        print_hang(hang)
    if found.times is not None:
        print_times(found.times)
    if found.diagnosis is not None:
        _print(found.diagnosis, str(traces[0]))
    if found.lateness is not None and not found.lateness.why_not:
        output.print_table("When which rank was late", (), (), "\n".join(found.lateness.text()))
    print_activity(inputs.activity, found.late_hosts)
    for steps in found.steps:
        print_steps(steps)


def _print(found: Diagnosis, name: str) -> None:
    rows = [(c.cause, f"{c.share:.0%}", f"{c.lost_s:.4g}", c.evidence, c.advice) for c in found.causes]
    known = found.bare_step_s is not None and found.causes
    bare = f" ({found.bare_step_s:.4g} s without any cause)" if known else ""
    ideal = ""
    if found.ideal_step_time_s is not None:
        ideal = (
            f"{bare}, with all workers equal {found.ideal_step_time_s:.4g} s (slowdown {found.slowdown:.3f}; "
            f"replayed within {max(abs(found.replay_error), 1e-3):.1%})"
        )
    for note in found.notes:
        output.say(note)
    title = f"{name}: mean step {found.step_time_s:.4g} s{ideal}"
    output.print_table(title, ("cause", "of lost time", "s a step", "evidence", "advice"), rows, found.verdict)
    a = found.attribution
    if a is None:
        return
    for what, values in (("rank", a.rank), ("stage", a.stage), ("operation", a.operation)):
        worst = sorted(values.items(), key=lambda item: -item[1])[:_MAX_ROWS]
        if len(values) > 1:
            output.print_table(
                f"Slowdown with only one {what}'s own durations",
                (what, "slowdown"),
                [(str(k), f"{v:.3f}") for k, v in worst],
            )
