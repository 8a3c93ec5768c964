"""``paceenv calibrate``: a cluster config from a trace, measurements or a scaling table; a link from nccl-tests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceenv.cli.calibrate_links import calibrate_links
from paceenv.cli.calibrate_sources import BASE, LINKS, fit_source, recognise
from paceenv.report.fit_sections import fit_sections
from paceenv.report.section import print_sections
from paceenv.ui import config_files, output
from paceenv.ui.json_option import JsonFile


def calibrate(
    source: Annotated[
        list[str],
        typer.Argument(
            help="A trace of any format that paceenv diagnose reads (files, folders, patterns), a measurements file, a "
            "scaling table such as configs/targets/*.yaml, or the text output of nccl-tests."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The cluster config to write (YAML); optional for nccl-tests output."),
    ] = None,
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
    stage: Annotated[
        int | None, typer.Option(min=0, help="Fit the noise of this pipeline stage only. Default, with stages: 0.")
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="nccl-tests output: ranks on each node (all of them: inside one). Default: as its header lists hosts.",
        ),
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
    """Fit a cluster config to a trace or to published numbers, with error bars.

    From the trace of a job: the whole cluster, each parameter with its evidence, or why it cannot be identified. Where
    one collective does not describe the step, it is fitted as a program. A second fit to the first two thirds of the
    steps is compared with the rest.

    From a trace of pipeline stages, or with --stage: the noise of compute, in a plain barrier job of as many nodes as
    the trace has ranks; --base gives it another fabric or other tenants.

    From a scaling table or a table of throughputs: what it frees, within its bounds, fitted to the rows it marks.

    From nccl-tests output: the law latency + size/bandwidth + sqrt(size) of the links it ran on. With --out: a cluster
    with these links, which paceenv simulate takes; with --base that cluster, on these links.

    Examples: paceenv calibrate trace.parquet -o mine.yaml -- paceenv calibrate rank*.json.gz -o mine.yaml --
    paceenv calibrate all_reduce_perf.log -o links.yaml
    """
    options = {"--out": out, "--base": base, "--probe": probe, "--stage": stage, "--ranks-per-node": ranks_per_node}
    options |= {"--program": program}
    kind, content = recognise(source, options)
    if kind == LINKS or out is None:
        calibrate_links(content, out, json_, base, ranks_per_node)
    else:
        cluster, notes = fit_source(kind, content, options)
        config = cluster.model_dump(exclude_defaults=True)
        config_files.write_yaml(out, config)
        if json_ is not None:
            output.write_json({"cluster": config, "notes": notes}, json_)
        if json_ != "-":
            print_sections(fit_sections(cluster))
            output.say(f"wrote {out}")
