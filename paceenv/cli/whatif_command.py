"""``paceenv whatif``: what a job would do on other nodes, another fabric, with a rank replaced, or paced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceenv.cli.simulate_command import MAX_RANK_ITERATIONS
from paceenv.core.errors import InputError, out_of_range
from paceenv.core.intervals import Interval
from paceenv.policies.select import POLICY_HELP
from paceenv.report.recordings import read_trace
from paceenv.ui import output
from paceenv.ui.json_option import JsonFile
from paceenv.whatif import simulated
from paceenv.whatif.baseline import Baseline, check_ranks, is_config, of_config, of_trace
from paceenv.whatif.change import WHERE, Change, combinations
from paceenv.whatif.predictions import Numbers, Prediction

SEEDS = 32
"""Runs of each row; two or more of each drawn cluster."""


def whatif(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG_OR_TRACE...",
            help="A cluster config (a file, or a name in configs/clusters), or a trace as paceenv diagnose reads it: "
            "files, folders (also of live runs), patterns.",
        ),
    ],
    nodes: Annotated[str | None, typer.Option(help="Nodes of the job in all, instead: 128, or 32,64,128.")] = None,
    oversubscription: Annotated[
        str | None, typer.Option(help="Rate of a leaf's nodes over the rate of its uplinks: 1 is non-blocking.")
    ] = None,
    replace_rank: Annotated[
        str | None, typer.Option(help="Replace this rank by one like its peers: 0; 0,3: one row each; 0+3: both.")
    ] = None,
    pacing: Annotated[
        list[str] | None,
        typer.Option("--pacing", "-p", help=f"Pace with this policy; repeatable, a row each: {POLICY_HELP}."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change any other value of the cluster, in every row: fabric.nic_gbps=400"),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="With a trace: a cluster config for what the trace does not identify.")
    ] = None,
    job: Annotated[str | None, typer.Option(help="With a trace of several jobs: this one.")] = None,
    iterations: Annotated[int, typer.Option("--iterations", "-i", min=40, help="Iterations of each run.")] = 2000,
    json_: JsonFile = None,
) -> None:
    """Predict a job after a change: step time, throughput, CV and energy, beside today's, with 95 % intervals.

    Options combine; several values give a row each. Today's job is the job without pacing.

    From a cluster config: simulated, with the same noise for all rows. An interval holds the result of one run. If the
    config was calibrated from a job's trace, the interval also holds the errors of the calibration.

    From a trace: simulated on the cluster that the trace calibrates to. A question that depends on something that the
    trace does not identify is refused.

    Examples: paceenv whatif when-scaling-fails --nodes 32,64,128 -p passive -p static --
    paceenv whatif trace.parquet --replace-rank 0 -- paceenv whatif trace.parquet --nodes 128 --oversubscription 1
    --pacing learned --json -
    """
    changes = combinations(nodes, oversubscription, replace_rank, pacing or [], set_ or [])
    answer = _answer(source, changes, base, job, iterations)
    if output.write_json(answer, json_):
        _print(answer)
    for row in answer.changed:
        if row.outside is not None:
            output.say(f"{row.change.label}: policy {row.change.pacing}: {row.outside}")


def _answer(
    source: Sequence[str], changes: Sequence[Change], base: str | None, job: str | None, iterations: int
) -> Prediction:
    if is_config(source):
        for option, value in (("--base", base), ("--job", job)):
            if value is not None:
                raise InputError(f"{option} {value}: {source[0]} is a cluster config; allowed: only with a trace")
        return _simulate(of_config(source[0]), changes, iterations)
    trace = read_trace(source)
    has = frozenset(trace.column("rank")[trace.isin("job", trace.job_name(job))].tolist())
    for change in changes:  # before a calibration, which takes its time
        check_ranks(change, has, source[0])
    with output.progress(f"calibrate {Path(source[0]).name}", 1):
        baseline = of_trace(trace, source[0], base, job)
    return _simulate(baseline, changes, iterations)


def _simulate(baseline: Baseline, changes: Sequence[Change], iterations: int) -> Prediction:
    ranks = max([baseline.cluster.ranks, *((c.nodes or 0) * baseline.cluster.job.ranks_per_node for c in changes)])
    if iterations * SEEDS * ranks * (1 + len(changes)) > MAX_RANK_ITERATIONS:
        asked = f"{iterations} x {SEEDS} seeds x {ranks} ranks x {1 + len(changes)} rows"
        raise out_of_range("iterations x seeds x ranks x rows", asked, f"at most {MAX_RANK_ITERATIONS:.0e}", WHERE)
    with output.progress(f"{baseline.cluster.name}: {len(changes)} changes", 1) as done:
        return simulated.predict(baseline, changes, seeds=SEEDS, iterations=iterations, on_done=done)


def _print(answer: Prediction) -> None:
    rows, note = answer.changed, "differences run by run, on the same noise; intervals of 95 %"
    jobs = [("today", answer.today), *((row.change.label, row) for row in rows)]
    columns = ("step, s", f"{answer.unit}/s", "CV", "J/sample")
    title = f"What if: {answer.source}"
    _table(title, columns, [(name, str(row.nodes), row.job) for name, row in jobs], (".4g", ".3f"), answer.method)
    columns, digits = ("step", "throughput", "CV", "energy a sample"), ("+z.1%", "+z.3f")
    _table("Against today", columns, [(r.change.label, "", r.against_today) for r in rows], digits, note)
    paced = [(r.change.label, "", r.against_unpaced) for r in rows if r.against_unpaced is not None]
    if paced and any(r.change != Change(pacing=r.change.pacing) for r in rows):
        _table("Against the same without pacing", columns, paced, digits, note)
    for line in _remarks(answer):
        output.say(line)


def _table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, str, Numbers | None]],
    digits: tuple[str, str],
    note: str,
) -> None:
    """Rows of label, nodes and numbers; ``digits`` of all numbers but the CV, and of the CV."""
    cells = []
    for label, nodes, n in rows:
        assert n is not None
        energy = () if n.energy is None else (_plain(n.energy, digits[0]),)
        numbers = (_plain(n.step, digits[0]), _plain(n.throughput, digits[0]), _plain(n.cv, digits[1]), *energy)
        cells.append((label, *([nodes] if nodes else []), *numbers))
    first = ("", "nodes") if rows[0][1] else ("",)
    output.print_table(title, (*first, *columns)[: len(cells[0])], cells, note)


def _remarks(answer: Prediction) -> list[str]:
    lines = []
    if answer.measured_step_s is not None and answer.measured_cv is not None:
        lines.append(f"measured: step {_plain(answer.measured_step_s)} s, CV {_plain(answer.measured_cv, '.3f')}")
    lines += [f"open, inside the intervals: {line}" for line in answer.left_open]
    lines += [f"assumed: {line}" for line in answer.assumes]
    return lines + [f"not identified: {line}" for line in answer.cannot_tell]


def _plain(estimate: Interval, digits: str = ".4g") -> str:
    value, low, high = (format(x, digits) for x in (estimate.value, estimate.low, estimate.high))
    return value if math.isnan(estimate.low) else f"{value} [{low}, {high}]"
