"""``paceenv calibrate``: a cluster config from a trace, measurements or a scaling table; a link from nccl-tests."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from paceenv.calibration.compute_noise import noise_cluster
from paceenv.calibration.fit_trace import fit_trace
from paceenv.calibration.heldout import HeldOutCheck, check_stage
from paceenv.calibration.noise_fit import NoiseMeasurements, chosen, fit_noise, measure_stage, stage_times
from paceenv.calibration.published_tables import ScalingTarget, ThroughputTarget, fit_table
from paceenv.cli.calibrate_links import calibrate_links
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
LINKS: Final = "nccl-tests output, which tells links, not a cluster"
JOB: Final = "the trace of a job"
STAGE: Final = "a trace of which the compute of a stage is fitted"
NOISE, TABLE = "measurements of noise", "a table of published numbers"
_CLUSTER = ("--out", "--base")
ACT_ON: Final = {
    JOB: (*_CLUSTER, "--probe", "--program"),
    STAGE: (*_CLUSTER, "--stage"),
    NOISE: (*_CLUSTER, "--stage"),
    TABLE: _CLUSTER,
    LINKS: ("--out", "--base", "--ranks-per-node"),
}
"""The options that act on each kind of source."""


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
    kind, content = _recognise(source, stage)
    options = {"--out": out, "--base": base, "--probe": probe, "--stage": stage, "--ranks-per-node": ranks_per_node}
    for option, value in (options | {"--program": program}).items():
        if value is not None and option not in ACT_ON[kind]:
            raise InputError(f"{option} {value}: {source[0]} is {kind}; allowed: {', '.join(ACT_ON[kind])}")
    if kind == LINKS:
        calibrate_links(content, out, json_, base, ranks_per_node)
        return
    if out is None:
        raise InputError("--out is missing; allowed: the file to write the cluster config to")
    notes: list[str] = []
    known = None if base is None else load_cluster(base)
    with output.progress(f"fit {out.stem}"):
        if kind == JOB:
            cluster, notes = _fit_job(content, known, out.stem, probe, program)
        elif kind == TABLE:
            cluster = fit_table(content, known or load_cluster(content.cluster))
        elif kind == STAGE:
            cluster, notes = _fit_stage(content, stage or 0, known or load_cluster(BASE), out.stem)
        else:
            fit = fit_noise(content.stage(stage or 0), content.source)
            cluster = noise_cluster(fit, known or load_cluster(BASE), out.stem)
    config = cluster.model_dump(exclude_defaults=True)
    config_files.write_yaml(out, config)
    for note in notes:
        output.say(note)
    if json_ is not None:
        output.write_json({"cluster": config, "notes": notes}, json_)
    if json_ != "-":
        print_sections(fit_sections(cluster))
        output.say(f"wrote {out}")


def _recognise(names: Sequence[str], stage: int | None) -> tuple[str, Any]:
    """What lies there, by its content."""
    path = _config(names)
    if path is not None:
        content = config_files.read_yaml(path)
        if "rows" in content:
            target = ThroughputTarget if content.get("kind") == "throughput" else ScalingTarget
            return TABLE, config_files.load(target, "targets", path)
        return NOISE, config_files.load(NoiseMeasurements, "measurements", path)
    inputs = find_recordings(names).read()
    for note in inputs.notes:
        output.say(note)
    if inputs.trace is None and inputs.tables:
        return LINKS, inputs.tables
    trace = inputs.require_trace()
    has_stages = stage is not None or len(set(trace.metadata.of_ranks("stage", 0).values())) > 1
    return STAGE if has_stages else JOB, trace


def _config(names: Sequence[str]) -> Path | None:
    """The YAML file that is named, by itself or as a packaged source; None for anything that was recorded."""
    path = Path(names[0])
    if len(names) > 1 or path.exists() or path.suffix or glob.has_magic(names[0]):
        return path if len(names) == 1 and path.suffix in {".yaml", ".yml"} else None
    for kind in ("measurements", "targets"):
        if names[0] in config_files.names(kind):
            return config_files.packaged(kind) / f"{names[0]}.yaml"
    known = [*config_files.names("measurements"), *config_files.names("targets")]
    raise InputError(f"{names[0]}: neither a file nor one of the packaged sources {', '.join(known)}")


def _fit_job(
    trace: Trace, base: Cluster | None, name: str, probe: Path | None, program: bool | None
) -> tuple[Cluster, list[str]]:
    """The cluster fitted to the trace of a job, and what to know of it."""
    trace, clocks = trace_on_one_clock(trace)
    probed = None if probe is None else trace_on_one_clock(find_recordings([probe]).read().require_trace())[0]
    fit = fit_trace(trace, base=base, name=name, probe=probed, program=program, check=True)
    return _with_check(fit.cluster, fit.check), [*filter(None, [clocks]), *fit.notes]


def _fit_stage(trace: Trace, stage: int, base: Cluster, name: str) -> tuple[Cluster, list[str]]:
    """``base`` with the noise of one stage; a fit to its first steps is compared with the others."""
    stages, source = stage_times(trace), f"derived statistics of {trace.job_name(None)} ({trace.metadata.source})"
    compute_s_TR = chosen(stages, stage, source)
    fit = fit_noise(measure_stage(compute_s_TR, stage=stage), source)
    check = check_stage(compute_s_TR, lambda part: noise_cluster(part, base, name))
    said = "only the noise of compute is fitted; sends and receives between stages are not"
    notes = [f"a pipeline of {len(stages)} stages: {said}"] if len(stages) > 1 else []
    return _with_check(noise_cluster(fit, base, name), check), notes


def _with_check(cluster: Cluster, check: HeldOutCheck | str) -> Cluster:
    """The cluster with a check on held-out steps in its record, or the reason why there is none."""
    record = {"cannot_tell": check} if isinstance(check, str) else check.to_record()
    return cluster.model_copy(update={"calibration": cluster.calibration | {"held_out_steps": record}})
