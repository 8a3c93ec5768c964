"""``paceenv diagnose``: why a job's steps take as long as they do, and what would change it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceenv.cli.activity_text import print_activity
from paceenv.cli.diagnosis_text import print_diagnosis
from paceenv.cli.hang_text import print_hang
from paceenv.cli.inspector_text import print_times
from paceenv.cli.step_log_output import PATTERN_HELP, from_logs, print_steps
from paceenv.diagnosis.answer import Answer, find_answer
from paceenv.diagnosis.sources import MAX_ROWS
from paceenv.importers.inputs import Inputs, read_inputs
from paceenv.trainers.report.conclusion import NO_FLOPS, POLICIES, Conclusion, Flops, conclude_answer
from paceenv.ui import output

FLOPS_HELP = "Floating-point operations of the model in a step of the whole job; with --peak-flops the MFU is checked."
PEAK_HELP = "What one rank's device can do in a second, such as 989e12 (H100, bf16)."


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
    simulate: Annotated[
        bool,
        typer.Option(help="Fit a cluster to the trace and simulate pacing on it; --no-simulate saves its seconds."),
    ] = True,
    flops_per_step: Annotated[float | None, typer.Option(help=FLOPS_HELP)] = None,
    peak_flops: Annotated[float | None, typer.Option(help=PEAK_HELP)] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Find what a job loses against its ideal step, where, and why, and whether pacing would gain any of it.

    Reads traces in Parquet, profiles of PyTorch and dumps of its Flight Recorder (one file per rank). A file's content
    decides its format; other files are named and skipped.

    The ideal step: every worker and operation of a kind equal. Slowdown and its attribution to ranks, stages and
    operations come from replaying the steps' dependencies; causes are named with their share of the lost time, the
    evidence, and what to do, which is often not pacing. It says so where a trace does not identify the cause.

    The headline comes from the causes and from pacing policies simulated on clusters that are fitted to the trace. A
    trace cannot show a slowdown of all ranks alike: name nccl-tests output beside it, or give the FLOPs of a step, and
    the job is compared with what its hardware can do.

    Profiles of GPU jobs: where each device's step went, and why a rank is late: its host (and what it did longer than
    its peers), its kernels or its copies.

    Dumps of a job that hangs or died: which ranks it waits for in the end, what each of the others waits for, and what
    the missing ones were last seen doing. Logs of NCCL Inspector: bandwidths, and which rank arrives last.

    From a text log of a training program (Megatron-LM, torchtitan, nanoGPT, MLPerf, ..., or any with --pattern) it
    gives what step times alone allow: how they vary, what recurs, and how much there is to win at most.

    Examples: paceenv diagnose trace.parquet -- paceenv diagnose rank*.json.gz --json - -- paceenv diagnose profiles/ --
    paceenv diagnose trace.parquet all_reduce_perf.log -- paceenv diagnose trace.parquet --flops-per-step 3e15
    --peak-flops 989e12 -- paceenv diagnose /tmp/nccl_trace_rank_* -- paceenv diagnose log.txt -- paceenv diagnose
    log.txt --pattern '(?P<step>\\d+) took (?P<ms>[\\d.]+)' -- paceenv diagnose log4.txt log8.txt --sizes 4,8
    --predict 16
    """
    if sizes is not None or predict is not None:
        from_logs(traces, sizes, predict, pattern, json_)
        return
    inputs = read_inputs(traces, pattern=pattern, max_rows=MAX_ROWS)
    with output.progress("replay the steps"):
        found = find_answer(inputs, job)
    for note in found.notes:
        output.say(note)
    policies = POLICIES if simulate else ()
    conclusion = conclude_inputs(inputs, found, str(traces[0]), job, policies, Flops(flops_per_step, peak_flops))
    if json_ is not None:
        output.write_json(found.to_json() | (conclusion.to_json() if conclusion else {}), json_)
    if json_ != "-":
        print_answer(inputs, found, conclusion, str(traces[0]))


def conclude_inputs(
    inputs: Inputs,
    found: Answer,
    source: str,
    job: str | None = None,
    policies: tuple[str, ...] = POLICIES,
    flops: Flops = NO_FLOPS,
) -> Conclusion | None:
    """The conclusion with a progress bar; None where there is no trace.

    Args:
        inputs: what was read.
        found: the answer on it.
        source: its name, for messages.
        job: which job, where the trace holds several.
        policies: to simulate.
        flops: for the share of the peak.
    """
    if found.diagnosis is None or inputs.trace is None:
        return None
    with output.progress("fit a cluster, simulate pacing", max(len(policies), 1), shown=bool(policies)) as done:
        conclusion = conclude_answer(
            found, inputs.trace, source, job, policies=policies, tables=inputs.tables, flops=flops, on_done=done
        )
    if inputs.tables and not any(check.what.endswith("nccl-tests") for check in conclusion.checks):
        output.say("not compared with nccl-tests: no collective here is of a table's kind, number of ranks and sizes")
    return conclusion


def print_answer(inputs: Inputs, found: Answer, conclusion: Conclusion | None, name: str) -> None:
    """Print all that was found, for people.

    Args:
        inputs: what was read.
        found: the answer on it.
        conclusion: the verdict on a trace.
        name: of the trace.
    """
    for hang in found.hangs:
        print_hang(hang)
    if found.times is not None:
        print_times(found.times)
    if found.diagnosis is not None and conclusion is not None:
        print_diagnosis(found.diagnosis, conclusion.verdict, name)
    if found.lateness is not None and not found.lateness.why_not:
        output.print_table("When which rank was late", (), (), "\n".join(found.lateness.text()))
    print_activity(inputs.activity, found.late_hosts, found.diagnosis)
    for steps in found.steps:
        print_steps(steps)
