"""``paceenv whatif``: what a job would do on other nodes, another fabric, with a rank replaced, or paced."""

from __future__ import annotations

from typing import Annotated

import typer

from paceenv.cli.simulate_command import MAX_RANK_ITERATIONS
from paceenv.core.errors import out_of_range
from paceenv.policies.select import POLICY_HELP
from paceenv.report.fitted import baseline_of
from paceenv.ui import output
from paceenv.ui.json_option import JsonFile
from paceenv.whatif.change import WHERE, combinations
from paceenv.whatif.predictions import print_prediction
from paceenv.whatif.simulated import SEEDS, predict


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
    baseline = baseline_of(source, changes, base, job)
    cluster, rows = baseline.cluster, 1 + len(changes)
    ranks = max([cluster.ranks, *((change.nodes or 0) * cluster.job.ranks_per_node for change in changes)])
    if iterations * SEEDS * ranks * rows > MAX_RANK_ITERATIONS:
        asked = f"{iterations} x {SEEDS} seeds x {ranks} ranks x {rows} rows"
        raise out_of_range("iterations x seeds x ranks x rows", asked, f"at most {MAX_RANK_ITERATIONS:.0e}", WHERE)
    with output.progress(f"{cluster.name}: {len(changes)} changes", 1) as done:
        answer = predict(baseline, changes, iterations=iterations, on_done=done)
    if output.write_json(answer, json_):
        print_prediction(answer)
    for row in answer.changed:
        if row.outside is not None:
            output.say(f"{row.change.label}: policy {row.change.pacing}: {row.outside}")
