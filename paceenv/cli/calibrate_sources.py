"""What ``paceenv calibrate`` was given, by its content; which options act on it; and the cluster fitted to it."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from paceenv.calibration.compute_noise import noise_cluster
from paceenv.calibration.distances import HeldOutCheck
from paceenv.calibration.fit_trace import fit_trace
from paceenv.calibration.heldout import check_stage
from paceenv.calibration.measurements import NoiseMeasurements, chosen, measure_stage, stage_times
from paceenv.calibration.noise_fit import fit_noise
from paceenv.calibration.published_tables import ScalingTarget, ThroughputTarget, fit_table
from paceenv.core.errors import InputError
from paceenv.core.trace import Trace
from paceenv.diagnosis.clocks import trace_on_one_clock
from paceenv.report.recordings import find_recordings
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.ui import config_files, output

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

Options = Mapping[str, Any]
"""By their names on the command line; None where not given."""


def recognise(names: Sequence[str], options: Options) -> tuple[str, Any]:
    """What lies there, by its content, with options that all act on it."""
    kind, content = _recognised(names, options)
    for option, value in options.items():
        if value is not None and option not in ACT_ON[kind]:
            raise InputError(f"{option} {value}: {names[0]} is {kind}; allowed: {', '.join(ACT_ON[kind])}")
    if options["--out"] is None and kind != LINKS:
        raise InputError("--out is missing; allowed: the file to write the cluster config to")
    return kind, content


def _recognised(names: Sequence[str], options: Options) -> tuple[str, Any]:
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
    has_stages = options["--stage"] is not None or len(set(trace.metadata.of_ranks("stage", 0).values())) > 1
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


def fit_source(kind: str, content: Any, options: Options) -> tuple[Cluster, list[str]]:
    """The cluster fitted to a source, and notes on the fit."""
    name, base = options["--out"].stem, options["--base"]
    if kind == JOB:
        return _fit_job(content, options, name)
    if kind == STAGE:
        return _fit_stage(content, options["--stage"] or 0, load_cluster(base or BASE), name), []
    with output.progress(f"fit {name}"):
        if kind == TABLE:
            return fit_table(content, load_cluster(base or content.cluster)), []
        fit = fit_noise(content.stage(options["--stage"] or 0), content.source)
        return noise_cluster(fit, load_cluster(base or BASE), name), []


def _fit_job(trace: Trace, options: Options, name: str) -> tuple[Cluster, list[str]]:
    trace, clocks = trace_on_one_clock(trace)
    base = None if options["--base"] is None else load_cluster(options["--base"])
    probe = None
    if options["--probe"] is not None:
        probe = trace_on_one_clock(find_recordings([options["--probe"]]).read().require_trace())[0]
    with output.progress(f"fit {name}, then compare with unseen steps", 1) as done:
        fit = fit_trace(trace, base=base, name=name, probe=probe, program=options["--program"], check=True)
        done(1)
    notes = [*filter(None, [clocks]), *fit.notes]
    for note in notes:
        output.say(note)
    return _with_check(fit.cluster, fit.check), notes


def _fit_stage(trace: Trace, stage: int, base: Cluster, name: str) -> Cluster:
    """``base`` with the noise of one stage; a fit to its first steps is compared with the others."""
    with output.progress(f"fit the noise of {name}"):
        stages, source = stage_times(trace), f"derived statistics of {trace.job_name(None)} ({trace.metadata.source})"
        compute_s_TR = chosen(stages, stage, source)
        fit = fit_noise(measure_stage(compute_s_TR, stage=stage), source)
        check = check_stage(compute_s_TR, lambda part: noise_cluster(part, base, name))
    if len(stages) > 1:
        said = "only the noise of compute is fitted; sends and receives between stages are not"
        output.say(f"a pipeline of {len(stages)} stages: {said}")
    return _with_check(noise_cluster(fit, base, name), check)


def _with_check(cluster: Cluster, check: HeldOutCheck | str) -> Cluster:
    """The cluster with a check on held-out steps in its record, or the reason why there is none."""
    record = {"cannot_tell": check} if isinstance(check, str) else check.to_record()
    return cluster.model_copy(update={"calibration": cluster.calibration | {"held_out_steps": record}})
