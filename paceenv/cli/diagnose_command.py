"""``paceenv diagnose`` and the bare ``paceenv PATH``: recognises what a job left behind, and says why it is slow."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceenv.report.examination import PATTERN_HELP, POLICIES, examine
from paceenv.report.section import print_sections
from paceenv.ui import output
from paceenv.ui.json_option import JsonFile


def diagnose(
    paths: Annotated[
        list[Path], typer.Argument(help="Files, folders and patterns of any supported format, folders of live runs.")
    ],
    pattern: Annotated[str | None, typer.Option(help=PATTERN_HELP)] = None,
    against: Annotated[
        Path | None, typer.Option(help="An earlier run to compare with: what changed, and whether it is noise.")
    ] = None,
    job: Annotated[str | None, typer.Option(help="Which job, where the trace holds several.")] = None,
    simulate: Annotated[
        bool,
        typer.Option(help="Fit a cluster to the trace and simulate pacing on it; --no-simulate saves its seconds."),
    ] = True,
    json_: JsonFile = None,
) -> None:
    """Find what a job loses against its ideal step, where, and why, whether pacing would gain any of it, what is next.

    Reads traces in Parquet, folders of live runs, profiles of PyTorch and dumps of its Flight Recorder (one file per
    rank), logs. A file's content decides its format; other files are named and skipped. The bare command does the same:
    paceenv runs/job-17

    The ideal step: every rank and operation of a kind equal. The slowdown comes from replaying the steps' dependencies;
    causes are named with their share of the lost time, the
    evidence, and what to do, which is often not pacing. It says so where a trace does not identify the cause.

    The headline comes from the causes and from pacing policies simulated on clusters that are fitted to the trace.

    Folders of live runs: their page first. Profiles of GPU jobs: where each device's step went, and why a rank is late:
    its host (and what it did longer than its peers), its kernels or its copies.

    Dumps of a job that hangs or died: which ranks it waits for in the end, what each of the others waits for, and what
    the missing ones were last seen doing. Output of nccl-tests: the law of the links.

    From a text log of a training program (Megatron-LM, torchtitan, nanoGPT, ..., or any with --pattern) it
    gives what step times alone allow: how they vary, what recurs, and how much there is to win at most.

    Examples: paceenv diagnose trace.parquet -- paceenv diagnose rank*.json.gz --json - -- paceenv diagnose runs/live --
    paceenv diagnose /tmp/nccl_trace_rank_* -- paceenv diagnose log.txt -- paceenv diagnose
    log.txt --pattern '(?P<step>\\d+) took (?P<ms>[\\d.]+)'
    """
    shown = partial(print, end="", flush=True) if json_ != "-" else lambda page: None
    policies = POLICIES if simulate else ()
    examination = examine(paths, pattern=pattern, against=against, job=job, policies=policies, on_page=shown)
    is_for_people = output.write_json(examination, json_)
    if is_for_people:
        print_sections(examination.sections())
    for note in examination.notes:
        output.say(note)
    if is_for_people and examination.next:
        output.print_table("With this input", (), ())
        sys.stdout.writelines(f"{command}\n" for command in examination.next)  # unwrapped, to be pasted
