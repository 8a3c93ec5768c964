"""``paceenv calibrate``: a cluster config from a trace, or from nccl-tests output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from paceenv.calibration.bandwidth import fit_bandwidth
from paceenv.calibration.compute_noise import noise_cluster
from paceenv.calibration.fit_trace import fit_trace
from paceenv.calibration.noise_fit import fit_noise, stage_times
from paceenv.core.errors import InputError
from paceenv.core.trace import Trace
from paceenv.diagnosis.clocks import trace_on_one_clock
from paceenv.importers.nccl_tests import Table
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
    stages = set() if inputs.trace is None else set(inputs.trace.metadata.of_ranks("stage", 0).values())
    with output.progress(f"fit {out.stem}"):
        if inputs.trace is None and inputs.tables:
            _refuse(source, "nccl-tests output", {"--probe": probe, "--program": program})
            cluster, notes = _fit_links(inputs.tables, known, out.stem)
        elif len(stages) > 1:
            _refuse(source, "a trace of pipeline stages", {"--probe": probe, "--program": program})
            cluster, notes = _fit_stage(inputs.require_trace(), known or load_cluster(BASE), out.stem)
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


def _refuse(source: Sequence[str], kind: str, options: Mapping[str, object]) -> None:
    """Raise InputError for an option that does not act on this kind of source."""
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} {value}: {source[0]} is {kind}; allowed: the trace of a job")


def _fit_links(tables: Sequence[Table], base: Cluster | None, name: str) -> tuple[Cluster, list[str]]:
    if len(tables) > 1:
        raise InputError(f"{len(tables)} tables ({', '.join(one.source for one in tables[:4])}); allowed: one")
    fit = fit_bandwidth(tables[0])
    notes = [fit.text]
    if not fit.table.nodes:
        where = "inside one node" if fit.nodes == 1 else "across nodes"
        notes.append(f"{fit.table.source}: lists no hosts; {fit.table.members} ranks are taken to be {where}")
    if base is None:
        notes.append("the table has no compute: job.compute_s is a stand-in; set yours with --set job.compute_s=...")
    return fit.to_cluster(name, base), notes


def _fit_job(
    trace: Trace, base: Cluster | None, name: str, probe: Path | None, program: bool | None
) -> tuple[Cluster, list[str]]:
    trace, clocks = trace_on_one_clock(trace)
    probed = None if probe is None else trace_on_one_clock(find_recordings([probe]).read().require_trace())[0]
    fit = fit_trace(trace, base=base, name=name, probe=probed, program=program, check=True)
    check = {"cannot_tell": fit.check} if isinstance(fit.check, str) else fit.check
    cluster = fit.cluster.model_copy(update={"calibration": fit.cluster.calibration | {"held_out_steps": check}})
    return cluster, [*filter(None, [clocks]), *fit.notes]


def _fit_stage(trace: Trace, base: Cluster, name: str) -> tuple[Cluster, list[str]]:
    """``base`` with the noise of the first stage of a pipeline."""
    stages = stage_times(trace)
    first = min(stages)
    source = f"derived statistics of {trace.job_name(None)} ({trace.metadata.source}), stage {first}"
    cluster = noise_cluster(fit_noise(stages[first]), stages[first].shape[1], base, name, source)
    said = f"only the noise of compute of stage {first} is fitted; sends and receives between stages are not"
    return cluster, [f"a pipeline of {len(stages)} stages: {said}"]
