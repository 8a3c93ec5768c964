"""Calibration of a job for ``paceenv calibrate``: fit, write, print."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceenv.calibration.fit_trace import fit_trace
from paceenv.calibration.heldout import HeldOutCheck, Line
from paceenv.calibration.job_fit import JobFit
from paceenv.calibration.parameters import Parameter
from paceenv.core.trace import Trace
from paceenv.diagnosis.clocks import trace_on_one_clock
from paceenv.importers.inputs import read_inputs
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.ui import config_files, output


def is_job(trace: Trace) -> bool:
    """Whether a trace is one of a job without pipeline stages."""
    return len(set(trace.metadata.of_ranks("stage", 0).values())) <= 1


def fit_job(
    trace: Trace, out: Path, *, base: str | None, probe: Path | None, json_: str | None, program: bool | None = None
) -> Cluster:
    """Fit a cluster to a trace, write it and print the result; the cluster.

    A second fit, to the first steps only, is compared with the others.

    Args:
        trace: the trace.
        out: the cluster config to write.
        base: name or file of the known cluster, if any.
        probe: a second trace of the same job with random delays, if any.
        json_: file for the result as JSON, or ``-`` for standard output.
        program: whether the step is described as a program; None: where one collective does not describe it.
    """
    known = None if base is None else load_cluster(base)
    trace, clocks = trace_on_one_clock(trace)
    probed = None if probe is None else trace_on_one_clock(read_inputs([probe]).require_trace())[0]
    with output.progress(f"fit {out.stem}, then compare with unseen steps", 1) as done:
        found = fit_trace(trace, base=known, name=out.stem, probe=probed, program=program)
        done(1)
    notes = [*filter(None, [clocks]), *found.notes]
    for note in notes:
        output.say(note)
    fit = replace(found.fit, cluster=with_check(found.fit.cluster, found.check))
    config = fit.cluster.model_dump(exclude_defaults=True)
    config_files.write_yaml(out, config)
    if json_ is not None:
        held_out = {"held_out_steps": fit.cluster.calibration["held_out_steps"]}
        output.write_json({"cluster": config} | fit.to_json() | held_out | {"notes": notes}, json_)
    if json_ != "-":
        _print(fit)
        print_check(found.check)
        output.say(f"wrote {out}")
    return fit.cluster


def with_check(cluster: Cluster, check: HeldOutCheck | str) -> Cluster:
    """The cluster with a check on held-out steps in its record, or the reason why there is none.

    Args:
        cluster: the fitted config.
        check: the result of the check, or why it could not be made.
    """
    record = {"cannot_tell": check} if isinstance(check, str) else check.to_record()
    return cluster.model_copy(update={"calibration": cluster.calibration | {"held_out_steps": record}})


def print_check(check: HeldOutCheck | str) -> None:
    """Print a check on held-out steps, or the reason why there is none."""
    if isinstance(check, str):
        output.say(f"not compared with unseen steps: {check}")
        return
    rows = [
        (f"{x.quantity}{x.unit and f', {x.unit}'}", *map(_number, (x.held_out, *x.simulated)), _off(x), x.verdict)
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


def _print(fit: JobFit) -> None:
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


def _off(line: Line) -> str:
    return f"{line.error:+.3f}" if line.is_absolute else f"{line.error:+.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _bounds(parameter: Parameter) -> str:
    low = "" if parameter.lo is None else f"at least {parameter.lo:.4g}"
    high = "" if parameter.hi is None else f"at most {parameter.hi:.4g}"
    return " ".join(part for part in (low, high) if part)
