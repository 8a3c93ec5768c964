"""``paceenv calibrate``: a cluster config from a trace, measurements or a scaling table; a link from nccl-tests."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paceenv.calibration.fits.bandwidth import BandwidthFit, fit_bandwidth
from paceenv.calibration.fits.noise_fit import NoiseFit, fit_noise
from paceenv.calibration.fits.scaling_table import ScalingTarget, fit_scaling
from paceenv.calibration.fits.throughput_fit import ThroughputTarget, fit_throughput
from paceenv.calibration.heldout import HeldOutCheck, check_stage
from paceenv.calibration.measurements import NoiseMeasurements, StageTimes, measure_noise, stage_times
from paceenv.calibration.posterior import TRAIN, write_posterior
from paceenv.cli.calibrate_job import fit_job, is_job, print_check, with_check
from paceenv.cli.step_log_output import PATTERN_HELP, calibrate_log
from paceenv.core.errors import InputError
from paceenv.core.trace import Trace
from paceenv.importers.inputs import Inputs, read_inputs
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.ui import config_files, output

BASE = "null-jitter"


def _times_of_stage(trace: Trace, stage: int) -> StageTimes:
    """Compute of a stage of a trace; of a pipeline, a line on what is left out.

    Args:
        trace: the trace.
        stage: its number.
    """
    found = stage_times(trace)
    if len(found) > 1:
        said = "only the noise of compute is fitted; sends and receives between stages are not"
        output.say(f"a pipeline of {len(found)} stages: {said}")
    return next(one for one in found if one.stage == stage)


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
    generations: Annotated[int, typer.Option(min=1, help="Length of the search that fits a scaling table.")] = 40,
    inside: Annotated[
        bool | None,
        typer.Option(
            "--inside/--across",
            help="nccl-tests output: run inside one node, or across nodes. Default: as its header lists hosts.",
        ),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="nccl-tests output: ranks on each node. Default: as its header lists hosts."),
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
        inputs = read_inputs(source, pattern=pattern)
        for note in inputs.notes:
            output.say(note)
        if inputs.trace is None and (inputs.tables or inputs.steps):
            _refuse({"--probe": probe, "--stage": stage, "--program": program}, f"{source[0]} is no trace")
        if _without_trace(inputs, source[0], out, posterior, json_, base, inside, ranks_per_node):
            return
        trace = inputs.require_trace()
    if out is None:
        raise InputError("--out is missing; allowed: the file to write the cluster config to")
    if trace is not None and stage is None and is_job(trace):
        _draw(fit_job(trace, out, base=base, probe=probe, json_=json_, program=program), posterior)
        return
    _refuse({"--program": program, "--probe": probe}, f"{source[0]} is no trace of a job without stages")
    check: HeldOutCheck | str | None = None
    if path is not None and config_files.read_yaml(path).get("kind") == "throughput":
        throughputs = config_files.load(ThroughputTarget, "targets", str(path))
        with output.progress(f"fit {throughputs.name}"):
            cluster, fit = fit_throughput(throughputs, load_cluster(base or throughputs.cluster)), None
    elif path is not None and "rows" in config_files.read_yaml(path):
        target = config_files.load(ScalingTarget, "targets", str(path))
        start = load_cluster(base or target.cluster)
        with output.progress(f"fit {target.name}", generations) as done:
            cluster = fit_scaling(target, start, generations=generations, on_generation=lambda n, cost: done(n))
        fit = None
    else:
        start = load_cluster(base or BASE)
        with output.progress(f"fit the noise of {out.stem}"):
            measurements = measure_noise(trace) if trace is not None else NoiseMeasurements.load(path or source[0])
            fit = fit_noise(measurements, stage=stage or 0)
            cluster = noise_cluster(fit, start, out.stem)
            if trace is not None:
                times = _times_of_stage(trace, fit.stage)
                check = check_stage(times, lambda part: noise_cluster(part, start, out.stem))
                cluster = with_check(cluster, check)
    config_files.write_yaml(out, cluster.model_dump(exclude_defaults=True))
    if json_ is not None:
        output.write_json(cluster.model_dump(exclude_defaults=True), json_)
    if json_ != "-":
        _print(cluster, fit)
        if check is not None:
            print_check(check)
        output.say(f"wrote {out}")
    _draw(cluster, posterior)


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
    inside: bool | None,
    ranks_per_node: int | None,
) -> bool:
    """Fit what there is where there is no trace: links to a table, or a model to step times; False where neither is."""
    if inputs.trace is not None or not (inputs.tables or inputs.steps):
        return False
    if posterior is not None or (out is not None and not inputs.tables):
        option, what = ("--posterior", "links") if inputs.tables else ("--out or --posterior", "step times")
        raise InputError(f"{option}: {name} tells {what}, not a cluster; allowed: with a trace or a table")
    if inputs.tables:
        calibrate_links([fit_bandwidth(table) for table in inputs.tables], out, json_, base, inside, ranks_per_node)
    elif (log := inputs.one_log()) is not None:
        calibrate_log(log, json_)
    return True


def _draw(cluster: Cluster, folder: Path | None) -> None:
    if folder is not None:
        written = write_posterior(folder, cluster)
        output.say(f"wrote {len(written) - 2} drawn clusters, {written[-2]} and {written[-1]}")


def calibrate_links(
    fits: list[BandwidthFit],
    out: Path | None,
    json_: str | None,
    base: str | None,
    asked: bool | None,
    per_node: int | None,
) -> None:
    """Print the laws of tables, and write the cluster of one.

    Args:
        fits: the laws.
        out: the config to write; None: none.
        json_: where JSON goes.
        base: the cluster that gets the links; None: a stand-in.
        asked: whether they are inside a node, as the user says.
        per_node: ranks on each node, as the user says.
    """
    counts = [fit.ranks_per_node(per_node) for fit in fits]
    if per_node is not None and asked is None:
        asked = None if len(fits) > 1 else per_node == fits[0].table.members
    places = [fit.is_inside(asked) for fit in fits]
    for warning in (line for fit in fits for line in fit.warnings(asked)):
        output.say(f"warning: {warning}")
    if out is not None:
        if len(fits) > 1:
            named = ", ".join(fit.table.source for fit in fits[:4])
            raise InputError(f"--out: {len(fits)} tables ({named}); allowed: one, whose law is written")
        config_files.write_yaml(
            out, _linked(fits[0], places[0], counts[0], out.stem, base).model_dump(exclude_defaults=True)
        )
    if json_ is not None:
        results = [_links_json(*one) for one in zip(fits, places, counts, strict=True)]
        output.write_json(results[0] if len(results) == 1 else {"tables": results}, json_)
    if json_ != "-":
        for one in zip(fits, places, counts, strict=True):
            _print_links(*one)
        if out is not None:
            if base is None:
                output.say(
                    "the table has no compute: job.compute_s is a stand-in; set yours with --set job.compute_s=..."
                )
            output.say(f"wrote {out}; next: paceenv simulate {shlex.quote(str(out))}")


def _linked(fit: BandwidthFit, inside: bool, per_node: int, name: str, base: str | None) -> Cluster:
    """A cluster with the measured links: a stand-in of its own, or ``base`` with these keys of its fabric."""
    if base is None:
        return fit.to_cluster(inside, name, per_node)
    values = fit.to_config(inside).items()
    return load_cluster(base).changed([f"fabric.{key}={value}" for key, value in values], base)


def _links_json(fit: BandwidthFit, inside: bool, per_node: int) -> dict[str, Any]:
    table, law = fit.table, fit.law
    sizes = zip(table.size_bytes.tolist(), fit.residual.tolist(), strict=True)
    return {
        "source": table.source,
        "op": table.op,
        "members": table.members,
        "hop_s": {"value": law.hop_s, "se": fit.hop_se},
        "bandwidth_Bps": {"value": law.bandwidth_Bps, "se": fit.bandwidth_se},
        "sqrt_s": {"value": law.sqrt_s, "se": fit.sqrt_se},
        "nodes": _nodes(fit, inside, per_node) or None,
        "ranks_per_node": table.members // nodes if (nodes := _nodes(fit, inside, per_node)) else None,
        "place": "inside" if inside else "across",
        "left_out": list(table.notes),
        "warnings": list(fit.warnings(inside)),
        "misfit": fit.misfit,
        "misfit_without_sqrt": fit.plain_misfit,
        "residuals": [{"size_bytes": size, "relative": residual} for size, residual in sizes],
        "fabric": fit.to_config(inside),
    }


def _nodes(fit: BandwidthFit, inside: bool, per_node: int) -> int:
    """Nodes of a table; 0 where neither its header nor the user says how many."""
    if inside:
        return 1
    return fit.table.nodes or (fit.table.members // per_node if per_node > 1 else 0)


def _print_links(fit: BandwidthFit, inside: bool, per_node: int) -> None:
    table, law = fit.table, fit.law
    place = "inside a node" if inside else f"across {_nodes(fit, inside, per_node) or 'several'} nodes"
    title = f"{table.op} among {table.members} {place}: fitted to {table.source}"
    if fit.is_bandwidth_only:
        rate = f"{law.bandwidth_Bps / 1e9:.4g}", f"{fit.bandwidth_se / 1e9:.2g}"
        note = f"{len(table.time_s)} runs of too few sizes: latency cannot be identified"
        output.print_table(title, ("term", "value", "standard error"), [("bandwidth, GB/s", *rate)], note)
        return
    rows = [
        ("latency of a round, us", f"{law.hop_s * 1e6:.4g}", f"{fit.hop_se * 1e6:.2g}"),
        ("bandwidth, GB/s", f"{law.bandwidth_Bps / 1e9:.4g}", f"{fit.bandwidth_se / 1e9:.2g}"),
        ("us per square root of a MB", f"{law.sqrt_s * 1e9:.4g}", f"{fit.sqrt_se * 1e9:.2g}"),
    ]
    output.print_table(title, ("term", "value", "standard error"), rows)
    lines = zip(table.size_bytes, table.time_s, fit.residual, fit.plain_residual, strict=True)
    output.print_table(
        "Residuals",
        ("bytes", "measured us", "law", "without square root"),
        [(f"{size:.0f}", f"{time_s * 1e6:.4g}", f"{a:+.1%}", f"{b:+.1%}") for size, time_s, a, b in lines],
        f"root mean square {fit.misfit:.1%} with the square root, {fit.plain_misfit:.1%} without",
    )


def noise_cluster(fit: NoiseFit, base: Cluster, name: str) -> Cluster:
    """``base`` with the measured compute time and noise, one node per measured worker.

    Args:
        fit: the noise of one stage.
        base: the cluster to change.
        name: name of the new config.
    """
    found, data = fit.to_config(), base.model_dump()
    data["name"], data["description"] = name, f"Noise of compute fitted to {fit.source}, stage {fit.stage}."
    data["job"] |= {"nodes": fit.workers, "compute_s": found["mean_compute_s"]}
    data["noise"] |= found["noise"]
    data["calibration"] = found["calibration"]
    return config_files.parse(Cluster, data, f"calibration of {fit.source}")


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


def _print(cluster: Cluster, fit: NoiseFit | None) -> None:
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
