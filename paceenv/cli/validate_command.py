"""``paceenv validate``: the simulator compared with published and measured numbers."""

from __future__ import annotations

from typing import Annotated

import typer

from paceenv.calibration.fits.scaling_table import ScalingTarget
from paceenv.calibration.fits.throughput_fit import ThroughputTarget
from paceenv.core.errors import InputError, short_repr
from paceenv.sim.cluster import load_cluster
from paceenv.ui import config_files, output
from paceenv.validation import closed_forms, described, distributions, scaling, simulated_runs
from paceenv.validation.checks import Check
from paceenv.validation.closed_forms import ClosedFormTarget
from paceenv.validation.described import DescribedTarget
from paceenv.validation.distributions import DistributionTarget
from paceenv.validation.scaling import Table
from paceenv.validation.simulated_runs import SimulatedTarget

HEADER = ("row", "quantity", "expected", "tolerance", "found", "error", "kind", "within")


def validate(
    target: Annotated[
        str | None, typer.Argument(help="A target: a file, or a name in configs/targets. Default: all.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Hold this cluster against a scaling table, instead of the target's own.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with different noise per number.")] = 16,
    iterations: Annotated[
        int, typer.Option("--iterations", "-i", min=100, help="Iterations of each run (fewer of large jobs).")
    ] = 10_000,
    write: Annotated[str | None, typer.Option(help="Also write the tables as Markdown to this file.")] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Hold the simulator against published and measured numbers, and say which were fitted and which predicted.

    A target is a table of expectations: closed forms, runs of clusters, a published scaling table, throughputs of a
    workload, distances of distributions (Kolmogorov-Smirnov). Pacing acts in the simulation only by moving ranks in
    time.

    Examples: paceenv validate -- paceenv validate sockets --json - -- paceenv validate when-scaling-fails --seeds 32
    """
    found: list[Check] = []
    beside: dict[str, tuple[list[Table], list[str]]] = {}
    names = [target] if target else config_files.names("targets")
    with output.progress("validate", len(names)) as done:
        for i, name in enumerate(names):
            found += _checks(name, cluster, seeds, iterations, beside)
            done(i + 1)
    if json_ is not None:
        output.write_json([check.as_dict() for check in found], json_)
    if write is not None:
        config_files.write_text(write, _markdown(found, beside, seeds, iterations))
    if json_ != "-":
        for name in dict.fromkeys(check.target for check in found):
            part = [check for check in found if check.target == name]
            output.print_table(name, HEADER, [_cells(check) for check in part], _note(part))
            for table in beside.get(name, ([], []))[0]:
                output.print_table(table.title, table.header, table.rows)


def _checks(
    name: str,
    cluster: str | None,
    seeds: int,
    iterations: int,
    beside: dict[str, tuple[list[Table], list[str]]],
) -> list[Check]:
    """The checks of a target; tables and notes that belong beside them are added to ``beside``."""
    path = config_files.find("targets", name)
    data = config_files.read_yaml(path)
    kind = data.get("kind", "scaling")
    if cluster is not None and kind not in ("scaling", "throughput"):
        allowed = "allowed: with a target of kind scaling or throughput"
        raise InputError(f"--cluster {cluster}: {path} is of kind {kind}; {allowed}")
    match kind:
        case "scaling":
            scaling_target = config_files.parse(ScalingTarget, data, str(path))
            config = load_cluster(cluster or scaling_target.cluster)
            columns = scaling.simulate(scaling_target, config, seeds=seeds, iterations=iterations)
            tables = [scaling.predictors(scaling_target, columns)]
            structure = scaling.structure(scaling_target, config, seeds=seeds, iterations=iterations)
            beside[scaling_target.name] = [*tables, *([structure] if structure else [])], scaling_target.notes
            return list(scaling.checks(scaling_target, columns))
        case "simulated":
            target = config_files.parse(SimulatedTarget, data, str(path))
            return list(simulated_runs.checks(target, seeds=seeds, iterations=iterations))
        case "closed_form":
            return list(closed_forms.checks(config_files.parse(ClosedFormTarget, data, str(path))))
        case "throughput":
            return list(described.throughput_checks(config_files.parse(ThroughputTarget, data, str(path)), cluster))
        case "described":
            return list(described.checks(config_files.parse(DescribedTarget, data, str(path))))
        case "distribution":
            return list(distributions.checks(config_files.parse(DistributionTarget, data, str(path))))
        case _:
            kinds = "scaling, simulated, closed_form, throughput, described, distribution"
            raise InputError(f"{path}: kind = {short_repr(kind)}; allowed: {kinds}")


def _cells(check: Check) -> tuple[str, ...]:
    return (
        check.row,
        check.quantity,
        check.expected_text,
        check.tolerance_text,
        f"{check.found:.4g}",
        check.error_text,
        check.kind,
        "yes" if check.within else "NO",
    )


def _note(checks: list[Check]) -> str:
    misses = [f"{check.row} ({check.quantity})" for check in checks if not check.within]
    counted = f"{len(checks) - len(misses)} of {len(checks)} within tolerance."
    return counted if not misses else f"{counted} Missed: {'; '.join(misses)}."


def _markdown(
    checks: list[Check], beside: dict[str, tuple[list[Table], list[str]]], seeds: int, iterations: int
) -> str:
    lines = [
        "# Validation",
        "",
        "Here you can check the simulator against published and measured numbers. Each number is simulated with "
        f"{seeds} seeds of up to {iterations} iterations.",
        "Rebuild this page with `paceenv validate --write docs/evidence/validation.md`.",
        "",
        "| kind | meaning |",
        "| --- | --- |",
        "| fitted | a fit has used this number |",
        "| looked at | no fit has used it, but a person chose something of the model with it in view |",
        "| predicted | neither |",
        "| closed form | arithmetic, without simulation |",
        "",
        "Errors are relative where the tolerance is a percentage. "
        "Pacing acts in the simulation only by moving ranks in time.",
        "",
    ]
    for name in dict.fromkeys(check.target for check in checks):
        part = [check for check in checks if check.target == name]
        lines += [
            f"## {name}",
            "",
            "| " + " | ".join(HEADER) + " |",
            "| --- | --- | ---: | ---: | ---: | ---: | --- | --- |",
        ]
        lines += ["| " + " | ".join(_cells(check)) + " |" for check in part]
        lines += ["", *[f"- {check.row}: {check.remark}" for check in part if check.remark]]
        lines += ["", _note(part), ""] if any(check.remark for check in part) else [_note(part), ""]
        tables, notes = beside.get(name, ([], []))
        for table in tables:
            lines += [f"### {table.title[0].upper()}{table.title[1:]}", ""]
            lines += [*output.markdown_table(table.header, table.rows), ""]
        lines += [*[f"- {note}" for note in notes], ""] if notes else []
    return "\n".join(lines)
