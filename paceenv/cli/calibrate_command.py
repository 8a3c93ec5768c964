"""``paceenv calibrate``: a cluster config from a trace, measurements or a scaling table; a link from nccl-tests."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceenv.calibration.cluster_builder import JobFit
from paceenv.calibration.fit_trace import fit_trace
from paceenv.calibration.heldout import HeldOutCheck, check_stage
from paceenv.calibration.measurements import NoiseMeasurements, measure_noise, stage_times
from paceenv.calibration.noise_fit import NoiseFit, fit_noise
from paceenv.calibration.parameters import Parameter
from paceenv.calibration.posterior import TRAIN, write_posterior
from paceenv.calibration.scaling_table import ScalingTarget, fit_scaling
from paceenv.calibration.throughput_fit import ThroughputTarget, fit_throughput
from paceenv.cli.calibrate_links import calibrate_links
from paceenv.core.errors import InputError
from paceenv.core.trace import Trace
from paceenv.diagnosis.clocks import trace_on_one_clock
from paceenv.importers.inputs import Inputs
from paceenv.report.recordings import find_recordings
from paceenv.report.step_log_output import PATTERN_HELP, calibrate_log
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.ui import config_files, output

BASE = "null-jitter"
GENERATIONS = 40
"""Length of the search that fits a scaling table."""


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
    pattern: Annotated[str | None, typer.Option(help=PATTERN_HELP)] = None,
    program: Annotated[
        bool | None,
        typer.Option(
            "--program/--no-program",
            help="Describe the step of a job as a program of transfers, or as one collective. Default: a program where "
            "transfers of several communicators overlap, or one collective leaves the mean step more than 5 % off.",
        ),
    ] = None,
    posterior: Annotated[
        Path | None,
        typer.Option(
            help="A folder to write clusters to that are drawn from the errors, with a suite of them and a config "
            f"for paceenv train ({TRAIN})."
        ),
    ] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Fit a cluster config to a trace or to published numbers, with error bars.

    From the trace of a job: the whole cluster. Process groups, collective and payload,
    post-collective work, noise of compute, links, incast, a tenant; each with its evidence, or why it cannot be
    identified. A second fit to the first two thirds of the steps is compared with the rest: step time, its variation
    and tail, the slowest of n ranks, arrival skew.

    Where transfers of several communicators overlap, or one collective leaves the mean step more than 5 % off, the
    step is fitted as a program: its transfers in order, what runs in the background, compute between them.

    From a trace of pipeline stages, or with --stage: the noise of compute (mean, persistent, common-mode and
    idiosyncratic parts, tail). The config is a plain barrier job of as many nodes as the trace has workers; --base
    gives it another fabric or other tenants.

    From a scaling table: what the table frees, within its bounds, fitted to the rows it marks.

    From a table of throughputs of a described workload: the hardware parameters that it frees, likewise.

    From nccl-tests output: the law latency + size/bandwidth + sqrt(size) of the links it ran on, as a cluster's fabric.
    Rows that failed their own check are left out. With --out: a cluster with these links, which paceenv simulate takes;
    with --base that cluster, on these links.

    From a text log of a training program: a model of its step times, and how far (Kolmogorov-Smirnov) it is from step
    times that it has not seen. Step times alone give no cluster.

    Examples: paceenv calibrate trace.parquet -o mine.yaml -- paceenv calibrate rank*.json.gz -o mine.yaml --
    paceenv calibrate all_reduce_perf.log -o links.yaml -- paceenv calibrate log.txt
    """
    if posterior is not None and posterior.exists() and not posterior.is_dir():
        raise InputError(f"--posterior {posterior}: is a file; allowed: a folder")
    path = _find_config(source)
    trace: Trace | None = None
    if path is None:
        inputs = find_recordings(source).read(pattern)
        for note in inputs.notes:
            output.say(note)
        if inputs.trace is None and (inputs.tables or inputs.steps):
            _refuse({"--probe": probe, "--stage": stage, "--program": program}, f"{source[0]} is no trace")
            _without_trace(inputs, source[0], out, posterior, json_, base, ranks_per_node)
            return
        trace = inputs.require_trace()
    if out is None:
        raise InputError("--out is missing; allowed: the file to write the cluster config to")
    if trace is not None and stage is None and len(set(trace.metadata.of_ranks("stage", 0).values())) <= 1:
        cluster = _fit_job(trace, out, base=base, probe=probe, json_=json_, program=program)
    else:
        _refuse({"--program": program, "--probe": probe}, f"{source[0]} is no trace of a job without stages")
        cluster, fit, check = (
            _fit_config(path or Path(source[0]), stage, base, out.stem)
            if trace is None
            else _fit_stage(measure_noise(trace), trace, stage, load_cluster(base or BASE), out.stem)
        )
        config_files.write_yaml(out, cluster.model_dump(exclude_defaults=True))
        if json_ is not None:
            output.write_json(cluster.model_dump(exclude_defaults=True), json_)
        if json_ != "-":
            _print_fitted(cluster, fit)
            print_check(check)
    if json_ != "-":
        output.say(f"wrote {out}")
    if posterior is not None:
        written = write_posterior(posterior, cluster)
        output.say(f"wrote {len(written) - 2} drawn clusters, {written[-2]} and {written[-1]}")


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raise InputError for the first of these options that was given."""
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} {value}: {why}; allowed: only with one")


def _without_trace(
    inputs: Inputs,
    name: str,
    out: Path | None,
    posterior: Path | None,
    json_: str | None,
    base: str | None,
    ranks_per_node: int | None,
) -> None:
    """Fit links to tables, or a model to step times."""
    if posterior is not None or (out is not None and not inputs.tables):
        option, what = ("--posterior", "links") if inputs.tables else ("--out or --posterior", "step times")
        raise InputError(f"{option}: {name} tells {what}, not a cluster; allowed: with a trace or a table")
    if inputs.tables:
        calibrate_links(inputs.tables, out, json_, base, ranks_per_node)
    elif (log := inputs.one_log()) is not None:
        calibrate_log(log, json_)


def _fit_config(
    path: Path, stage: int | None, base: str | None, name: str
) -> tuple[Cluster, NoiseFit | None, HeldOutCheck | str | None]:
    """Fit what a YAML file has: throughputs, a scaling table, or measurements of noise."""
    content = config_files.read_yaml(path)
    if content.get("kind") == "throughput":
        throughputs = config_files.load(ThroughputTarget, "targets", str(path))
        with output.progress(f"fit {throughputs.name}"):
            return fit_throughput(throughputs, load_cluster(base or throughputs.cluster)), None, None
    if "rows" in content:
        target = config_files.load(ScalingTarget, "targets", str(path))
        start = load_cluster(base or target.cluster)
        with output.progress(f"fit {target.name}", GENERATIONS) as done:
            cluster = fit_scaling(target, start, generations=GENERATIONS, on_generation=lambda n, cost: done(n))
        return cluster, None, None
    return _fit_stage(NoiseMeasurements.load(path), None, stage, load_cluster(base or BASE), name)


def _fit_stage(
    measurements: NoiseMeasurements, trace: Trace | None, stage: int | None, base: Cluster, name: str
) -> tuple[Cluster, NoiseFit, HeldOutCheck | str | None]:
    """Fit the noise of one stage; of a trace also to its first steps, for a check with the others."""
    with output.progress(f"fit the noise of {name}"):
        fit = fit_noise(measurements, stage=stage or 0)
        cluster, check = noise_cluster(fit, base, name), None
        if trace is not None:
            stages = {one.stage: one for one in stage_times(trace)}
            if len(stages) > 1:
                said = "only the noise of compute is fitted; sends and receives between stages are not"
                output.say(f"a pipeline of {len(stages)} stages: {said}")
            check = check_stage(stages[fit.stage], lambda part: noise_cluster(part, base, name))
            cluster = _with_check(cluster, check)
    return cluster, fit, check


def noise_cluster(fit: NoiseFit, base: Cluster, name: str) -> Cluster:
    """``base`` with the measured compute time and noise, one node per measured worker."""
    found, data = fit.to_config(), base.model_dump()
    data["name"], data["description"] = name, f"Noise of compute fitted to {fit.source}, stage {fit.stage}."
    data["job"] |= {"nodes": fit.workers, "compute_s": found["mean_compute_s"]}
    data["noise"] |= found["noise"]
    data["calibration"] = found["calibration"]
    return config_files.parse(Cluster, data, f"calibration of {fit.source}")


def _fit_job(
    trace: Trace, out: Path, *, base: str | None, probe: Path | None, json_: str | None, program: bool | None
) -> Cluster:
    """Fit a cluster to a trace, write it and print the result; a second fit is compared with unseen steps."""
    known = None if base is None else load_cluster(base)
    trace, clocks = trace_on_one_clock(trace)
    probed = None if probe is None else trace_on_one_clock(find_recordings([probe]).read().require_trace())[0]
    with output.progress(f"fit {out.stem}, then compare with unseen steps", 1) as done:
        found = fit_trace(trace, base=known, name=out.stem, probe=probed, program=program, check=True)
        done(1)
    notes = [*filter(None, [clocks]), *found.notes]
    for note in notes:
        output.say(note)
    fit = replace(found, cluster=_with_check(found.cluster, found.check))
    config = fit.cluster.model_dump(exclude_defaults=True)
    config_files.write_yaml(out, config)
    if json_ is not None:
        held_out = {"held_out_steps": fit.cluster.calibration["held_out_steps"]}
        output.write_json({"cluster": config} | fit.to_json() | held_out | {"notes": notes}, json_)
    if json_ != "-":
        _print_job(fit)
        print_check(found.check)
    return fit.cluster


def _with_check(cluster: Cluster, check: HeldOutCheck | str) -> Cluster:
    """The cluster with a check on held-out steps in its record, or the reason why there is none."""
    record = {"cannot_tell": check} if isinstance(check, str) else check.to_record()
    return cluster.model_copy(update={"calibration": cluster.calibration | {"held_out_steps": record}})


def print_check(check: HeldOutCheck | str | None) -> None:
    """Print a check on held-out steps, or the reason why there is none."""
    if check is None:
        return
    if isinstance(check, str):
        output.say(f"not compared with unseen steps: {check}")
        return
    rows = [
        (
            f"{x.quantity}{x.unit and f', {x.unit}'}",
            *map(_number, (x.held_out, *x.simulated)),
            f"{x.error:+.3f}" if x.is_absolute else f"{x.error:+.1%}",
            x.verdict,
        )
        for x in check.lines
    ]
    output.print_table(
        f"Steps not seen: {check.held_out_steps} held out, fitted to the {check.fitted_steps} before",
        ("quantity", "held out", "simulated", "95 % low", "high", "error", "verdict"),
        rows,
        "the interval holds single simulated runs of that length, of clusters drawn from the errors of that fit; "
        "close: outside of it but not by much. The written cluster is fitted to all steps.",
    )
    for distance in check.distances:
        output.print_table(distance.text, (), ())


def _print_job(fit: JobFit) -> None:
    source = fit.cluster.calibration["source"]
    identified = [p for p in fit.parameters if p.is_identified]
    output.print_table(
        f"{fit.cluster.name}: fitted to {source}",
        ("parameter", "value", "standard error", "95 % low", "high", "evidence"),
        [(p.key, *map(_number, (p.value, p.se, p.lo, p.hi)), p.evidence) for p in identified],
        f"mean step {fit.measured.mean_s:.4g} s, simulated {fit.simulated.mean_s:.4g} s ({fit.mean_error:+.1%}); "
        f"CV {fit.measured.cv:.3f}, simulated {fit.simulated.cv:.3f}",
    )
    rows = [(p.key, _number(p.value), _bounds(p), p.reason) for p in fit.parameters if not p.is_identified]
    output.print_table("Cannot be identified from this trace", ("parameter", "value used", "bounds", "why"), rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _bounds(parameter: Parameter) -> str:
    low = "" if parameter.lo is None else f"at least {parameter.lo:.4g}"
    high = "" if parameter.hi is None else f"at most {parameter.hi:.4g}"
    return " ".join(part for part in (low, high) if part)


def _print_fitted(cluster: Cluster, fit: NoiseFit | None) -> None:
    fitted: dict[str, Any] = cluster.calibration["fitted"]
    rows = [(key, *(f"{v[part]:.4g}" for part in ("value", "se", "lo", "hi"))) for key, v in fitted.items()]
    title = f"{cluster.name}: fitted to {cluster.calibration['source']}"
    output.print_table(title, ("parameter", "value", "standard error", "95 % low", "high"), rows)
    if fit is None or "held_out_steps" in cluster.calibration:  # which says more
        return
    held_out = [
        (
            str(h.width),
            f"{h.measured:.3f}",
            f"{h.predicted:.3f}",
            f"{h.error:+.2%}",
            f"{h.error_even_to_odd:+.1%} / {h.error_odd_to_even:+.1%}",
        )
        for h in fit.held_out
    ]
    output.print_table(
        "E[max]/mean of compute on held-out steps",
        ("workers", "measured", "predicted", "error", "each direction"),
        held_out,
        "half of the steps predicts the other half, both ways averaged; a single direction also carries the "
        "difference between the halves",
    )


def _find_config(sources: list[str]) -> Path | None:
    """The YAML file that is named, by itself or as a packaged source; None for anything that was recorded."""
    path = Path(sources[0])
    if len(sources) > 1 or path.exists() or path.suffix or glob.has_magic(sources[0]):
        return path if len(sources) == 1 and path.suffix in {".yaml", ".yml"} else None
    for kind in ("measurements", "targets"):
        if sources[0] in config_files.names(kind):
            return config_files.packaged(kind) / f"{sources[0]}.yaml"
    known = [*config_files.names("measurements"), *config_files.names("targets")]
    raise InputError(f"{sources[0]}: neither a file nor one of the packaged sources {', '.join(known)}")
