"""``paceenv calibrate``: a cluster config from a trace, or from nccl-tests output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceenv.report.fit_sections import fit_sections
from paceenv.report.fitted import BASE, fit_recordings
from paceenv.report.section import print_sections
from paceenv.sim.cluster import load_cluster
from paceenv.ui import config_files, output
from paceenv.ui.json_option import JsonFile


def calibrate(
    source: Annotated[
        list[str],
        typer.Argument(
            help="A trace of any format that paceenv diagnose reads, or the text output of nccl-tests: files, folders, "
            "patterns."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The cluster config to write (YAML)."),
    ],
    base: Annotated[
        str | None,
        typer.Option(
            help="The cluster that gives parameters that the source does not identify. "
            f"Default: {BASE} where only noise is fitted; for a job's trace values that limit nothing."
        ),
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(help="A second trace of the same job, with the probe's random delays: links are fitted to it."),
    ] = None,
    program: Annotated[
        bool | None,
        typer.Option(
            "--program/--no-program",
            help="Describe the step of a job as a program of transfers, or as one collective. Default: a program where "
            "transfers of several communicators overlap, or one collective leaves the mean step more than 5 % off.",
        ),
    ] = None,
    json_: JsonFile = None,
) -> None:
    """Fit a cluster config to a trace, with error bars.

    From the trace of a job: the whole cluster, each parameter with its evidence, or why it cannot be identified. Where
    one collective does not describe the step, it is fitted as a program. A second fit to the first two thirds of the
    steps is compared with the rest.

    From a trace of pipeline stages: the noise of the first one's compute, in a plain barrier job of as many nodes as
    the stage has ranks; --base gives it another fabric or other tenants.

    From nccl-tests output: the law latency + size/bandwidth + sqrt(size) of the links it ran on, as a cluster with
    these links, which paceenv simulate takes; with --base that cluster, on these links.

    Examples: paceenv calibrate trace.parquet -o mine.yaml -- paceenv calibrate rank*.json.gz -o mine.yaml --
    paceenv calibrate all_reduce_perf.log -o links.yaml
    """
    known = None if base is None else load_cluster(base)
    cluster, notes = fit_recordings(source, known, out.stem, probe, program)
    config = cluster.model_dump(exclude_defaults=True)
    config_files.write_yaml(out, config)
    for note in notes:
        output.say(note)
    if output.write_json({"cluster": config, "notes": notes}, json_):
        print_sections(fit_sections(cluster))
        output.say(f"wrote {out}")
