"""``paceenv diagnose`` and the bare ``paceenv PATH``: recognises what a job left behind, and says why it is slow."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceenv.core.errors import InputError
from paceenv.diagnosis.answer import MAX_ROWS, Answer, find_answer
from paceenv.diagnosis.causes import SLOW_RANK
from paceenv.importers.inputs import Inputs
from paceenv.report.answer_text import print_answer, print_changes
from paceenv.report.conclusion import POLICIES, Conclusion, conclude_answer
from paceenv.report.recordings import find_recordings
from paceenv.report.step_log_output import PATTERN_HELP
from paceenv.ui import output
from paceenv.ui.json_option import JsonFile

if TYPE_CHECKING:
    from paceenv.diagnosis.two_runs import Change


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

    The headline comes from the causes and from pacing policies simulated on clusters that are fitted to the trace. A
    trace cannot show a slowdown of all ranks alike: name nccl-tests output beside it, and the job's
    collectives are compared with what its links can do.

    Folders of live runs: their page first. Profiles of GPU jobs: where each device's step went, and why a rank is late:
    its host (and what it did longer than its peers), its kernels or its copies.

    Dumps of a job that hangs or died: which ranks it waits for in the end, what each of the others waits for, and what
    the missing ones were last seen doing. Logs of NCCL Inspector: bandwidths, and which rank arrives last. Output of
    nccl-tests: the law of the links.

    From a text log of a training program (Megatron-LM, torchtitan, nanoGPT, MLPerf, ..., or any with --pattern) it
    gives what step times alone allow: how they vary, what recurs, and how much there is to win at most.

    Examples: paceenv diagnose trace.parquet -- paceenv diagnose rank*.json.gz --json - -- paceenv diagnose runs/live --
    paceenv diagnose trace.parquet all_reduce_perf.log --
    paceenv diagnose /tmp/nccl_trace_rank_* -- paceenv diagnose log.txt -- paceenv diagnose
    log.txt --pattern '(?P<step>\\d+) took (?P<ms>[\\d.]+)'
    """
    recordings = find_recordings(paths)
    pages = recordings.pages()
    if json_ != "-":
        sys.stdout.writelines(pages.values())
    inputs = recordings.read(pattern, MAX_ROWS)
    if inputs.apart and against is None and len(paths) == 2:
        against, paths = paths[0], paths[1:]
        inputs = find_recordings(paths).read(pattern, MAX_ROWS)
    if inputs.several_traces:
        raise InputError(f"{inputs.several_traces}, or two, which are compared")
    earlier = None if against is None else find_recordings([against]).read(pattern, MAX_ROWS)
    links = _links(inputs, earlier)
    answer, conclusion = None, None
    if (
        inputs.trace is not None
        or inputs.dumps
        or inputs.ended
        or inputs.steps
        or inputs.inspected
        or not (pages or links)
    ):
        with output.progress("replay the steps"):
            answer = find_answer(inputs, job)
        conclusion = _conclude(inputs, answer, str(paths[0]), job, POLICIES if simulate else ())
    changes, ranks = _changes(inputs, answer, earlier)
    for note in inputs.notes if answer is None else answer.notes:
        output.say(note)
    steps = _next_steps(paths, answer, conclusion, links)
    if json_ is not None:
        found: dict[str, Any] = {"notes": list(inputs.notes)} if answer is None else answer.to_json()
        found |= conclusion.to_json() if conclusion is not None else {}
        runs = {str(path): page for path, page in pages.items()}
        output.write_json(
            found
            | {"runs": runs, "links": links, "next": steps}
            | ({"changes": [one.to_json() for one in changes]} if changes else {}),
            json_,
        )
    if json_ == "-":
        return
    if answer is not None:
        print_answer(answer, conclusion.verdict if conclusion is not None else None, inputs.activity, str(paths[0]))
    if changes:
        named = [one.log.name for one in answer.steps] if answer is not None and against is None else []
        before, after = named or (str(against), str(paths[0]))
        print_changes(changes, before, after, ranks)
    if links:
        output.print_table("Links", (), (), "\n".join(f"{source}: {law}" for source, law in links.items()))
    if steps:
        output.print_table("Next", (), (), "\n".join(steps))


def _conclude(
    inputs: Inputs,
    found: Answer,
    source: str,
    job: str | None,
    policies: Sequence[str],
) -> Conclusion | None:
    """None where there is no trace that could be diagnosed."""
    if found.diagnosis is None:
        return None
    with output.progress("fit a cluster, simulate pacing", max(len(policies), 1), shown=bool(policies)) as done:
        conclusion = conclude_answer(found, inputs, source, job, policies=policies, on_done=done)
    if inputs.tables and not any(check.what.endswith("nccl-tests") for check in conclusion.checks):
        output.say("not compared with nccl-tests: no collective here is of a table's kind, number of ranks and sizes")
    return conclusion


def _changes(
    inputs: Inputs, answer: Answer | None, earlier: Inputs | None
) -> tuple[tuple[Change, ...], tuple[int, int]]:
    """Against an earlier run, or between the two logs that were given; and the numbers of ranks, 0 if unknown."""
    if answer is None or (earlier is None and len(answer.steps) != 2):
        return (), (0, 0)
    from paceenv.diagnosis.two_runs import compare, of_log, of_trace

    if earlier is None:
        logs = [one.log for one in answer.steps]
    else:
        before = find_answer(earlier)
        if before.matrix is not None and answer.matrix is not None:
            changes = compare(of_trace(before.matrix, earlier.activity), of_trace(answer.matrix, inputs.activity))
            return changes, (len(before.matrix.ranks), len(answer.matrix.ranks))
        logs = [log for log in (earlier.one_log(), inputs.one_log()) if log is not None]
    if len(logs) != 2:
        raise InputError("the runs are not of the same kind; allowed: two logs, two traces, or two tables")
    return compare(*map(of_log, logs)), (logs[0].world_size, logs[1].world_size)


def _links(inputs: Inputs, earlier: Inputs | None) -> dict[str, str]:
    """The law of each bandwidth table, whether it is normal for its NICs, and what differs between two."""
    tables = (*(earlier.tables if earlier is not None else ()), *inputs.tables)
    if not tables:
        return {}
    from paceenv.calibration.bandwidth import fit_bandwidth  # SciPy, which takes a second to import
    from paceenv.diagnosis.absolute import check_nics
    from paceenv.diagnosis.two_runs import compare_tables

    found = {}
    for table in tables:
        nics = check_nics(table, inputs.network) if inputs.network is not None else ""
        found[table.source] = fit_bandwidth(table).text + (f" {output.sentence(nics)}" if nics else "")
    if len(tables) == 2:
        found[f"{tables[0].source} and {tables[1].source}"] = output.sentence(compare_tables(*tables))
    return found


def _next_steps(
    paths: Sequence[Path], answer: Answer | None, conclusion: Conclusion | None, links: dict[str, str]
) -> list[str]:
    """Commands that work when typed, the most useful first."""
    words, steps = shlex.join(map(str, paths)), list[str]()
    if answer is not None and answer.diagnosis is not None and conclusion is not None:
        causes, matrix = answer.diagnosis.causes, answer.matrix
        late = answer.diagnosis.late or [one.rank for one in answer.diagnosis.arrivals.late]
        if causes and causes[0].cause == SLOW_RANK and late and matrix is not None and not matrix.stage_N.any():
            steps.append(f"paceenv whatif {words} --replace-rank {late[0]}")
        stands = bool(answer.ended) or any(hang.hangs for hang in answer.hangs) or bool(answer.diagnosis.refused)
        if conclusion.verdict.claim in {"helps", "is open"} and len(paths) == 1 and not stands:
            steps.append(f"paceenv train --job {words} -o runs/mine")
    if answer is not None and (answer.matrix is not None or len(answer.steps) == 1):
        steps.append(f"paceenv report {words} -o report.html")
    tables = [
        source.partition(", table ")[0] for source in list(links)[:1] if "law holds for neither" not in links[source]
    ]
    return [*steps, *(f"paceenv calibrate {shlex.quote(source)} -o links.yaml" for source in tables)]
