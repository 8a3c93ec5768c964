"""``paceenv calibrate``: a cluster config from a trace, or from nccl-tests output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from paceenv.calibration.bandwidth import fit_table
from paceenv.calibration.compute_noise import fit_stage
from paceenv.calibration.fit_trace import fit_trace
from paceenv.core.errors import InputError
from paceenv.core.trace import Trace
from paceenv.diagnosis.clocks import trace_on_one_clock
from paceenv.report.fit_sections import fit_sections
from paceenv.report.recordings import find_recordings
from paceenv.report.section import print_sections
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.ui import config_files, output
from paceenv.ui.json_option import JsonFile

BASE: Final = "null-jitter"


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
    inputs = find_recordings(source).read()
    for note in inputs.notes:
        output.say(note)
    known = None if base is None else load_cluster(base)
    is_pipeline = inputs.trace is not None and len(set(inputs.trace.metadata.of_ranks("stage", 0).values())) > 1
    kind = "a trace of pipeline stages" if is_pipeline else "nccl-tests output"
    for option, value in (("--probe", probe), ("--program", program)):
        if value is not None and (is_pipeline or (inputs.trace is None and inputs.tables)):
            raise InputError(f"{option} {value}: {source[0]} is {kind}; allowed: the trace of a job")
    with output.progress(f"fit {out.stem}"):
        if inputs.trace is None and inputs.tables:
            cluster, notes = fit_table(inputs.tables, known, out.stem)
        elif is_pipeline:
            cluster, *notes = fit_stage(inputs.require_trace(), known or load_cluster(BASE), out.stem)
        else:
            cluster, notes = _fit_job(inputs.require_trace(), known, out.stem, probe, program)
    config = cluster.model_dump(exclude_defaults=True)
    config_files.write_yaml(out, config)
    for note in notes:
        output.say(note)
    if json_ is not None:
        output.write_json({"cluster": config, "notes": notes}, json_)
    if json_ != "-":
        print_sections(fit_sections(cluster))
        output.say(f"wrote {out}")


def _fit_job(
    trace: Trace, base: Cluster | None, name: str, probe: Path | None, program: bool | None
) -> tuple[Cluster, list[str]]:
    trace, clocks = trace_on_one_clock(trace)
    probed = None if probe is None else trace_on_one_clock(find_recordings([probe]).read().require_trace())[0]
    fit = fit_trace(trace, base=base, name=name, probe=probed, program=program, check=True)
    return fit.cluster, [*filter(None, [clocks]), *fit.notes]
