"""``paceenv validate``: the simulator held against published numbers."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paceenv import configs, output
from paceenv.calibration.scaling import ScalingTarget, compare
from paceenv.cluster import load_cluster

TOLERANCE = {"baseline throughput": 0.03, "coordination throughput": 0.04, "baseline cv": 0.03, "coordination cv": 0.03}
"""What counts as a match: relative for throughput, absolute for CV."""
HEADER = ("row", "quantity", "published", "simulated", "error", "kind", "within")


def validate(
    target: Annotated[
        str | None, typer.Argument(help="A target: a file, or a name in configs/targets. Default: all.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Hold this cluster against it, instead of the target's own.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with different noise per number.")] = 16,
    iterations: Annotated[int, typer.Option("--iterations", "-i", min=100, help="Iterations of each run.")] = 10_000,
    write: Annotated[str | None, typer.Option(help="Also write the table as Markdown to this file.")] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Hold the simulator against published numbers, line by line, and say which were fitted and which predicted.

    Pacing acts in the simulation only by moving ranks in time.
    """
    rows: list[dict[str, Any]] = []
    for name in [target] if target else configs.names("targets"):
        rows += _rows(configs.load(ScalingTarget, "targets", name), cluster, seeds, iterations)
    if json_ is not None:
        output.write_json(rows, json_)
    if write is not None:
        configs.write_text(write, _markdown(rows, seeds, iterations))
    if json_ != "-":
        output.print_table("Simulated beside published", HEADER, [_cells(row) for row in rows], _note(rows))


def _rows(target: ScalingTarget, cluster: str | None, seeds: int, iterations: int) -> list[dict[str, Any]]:
    config = load_cluster(cluster or target.cluster)
    rows = []
    with output.progress(f"validate {target.name}", 4 * len(target.rows)) as done:
        for item in compare(target, config, seeds=seeds, iterations=iterations):
            rows.append(
                {
                    "target": target.name,
                    "row": f"{item.nodes} nodes",
                    "quantity": item.quantity,
                    "expected": item.expected,
                    "simulated": item.simulated,
                    "error": item.error,
                    "fit": item.fit,
                    "within": abs(item.error) <= TOLERANCE[item.quantity],
                }
            )
            done(len(rows))
    return rows


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['target']}, {row['row']}",
        row["quantity"],
        f"{row['expected']:g}",
        f"{row['simulated']:.4g}",
        f"{row['error']:+.1%}" if row["quantity"].endswith("throughput") else f"{row['error']:+.3f}",
        "fitted" if row["fit"] else "predicted",
        "yes" if row["within"] else "NO",
    )


def _note(rows: list[dict[str, Any]]) -> str:
    within = sum(row["within"] for row in rows)
    return f"{within} of {len(rows)} within tolerance: throughput 3 % (coordination 4 %), CV 0.03."


def _markdown(rows: list[dict[str, Any]], seeds: int, iterations: int) -> str:
    lines = [
        "# Validation",
        "",
        f"Simulated beside published; {seeds} seeds of {iterations} iterations. Rows marked *fitted* were seen by the",
        "fit, all others are predictions. Pacing acts in the simulation only by moving ranks in time. Rebuild with",
        "`paceenv validate --write docs/validation.md`.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "| --- | --- | ---: | ---: | ---: | --- | --- |",
        *["| " + " | ".join(_cells(row)) + " |" for row in rows],
        "",
        _note(rows),
        "",
    ]
    return "\n".join(lines)
