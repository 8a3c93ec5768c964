"""``paceenv simulate``: run one job under one policy and print what a person or a machine wants to know."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from paceenv.core import metrics
from paceenv.core.errors import InputError, out_of_range
from paceenv.policies import scaling
from paceenv.policies.base import Policy
from paceenv.policies.rollout import Engine, run, start_engine
from paceenv.policies.select import POLICY_HELP, select_policy
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.cluster.derive import drawn
from paceenv.sim.engine.recording import RecordingWriter
from paceenv.sim.engine.simulator import episode_keys
from paceenv.sim.reference import Setup, check_size
from paceenv.ui import figures, output

MAX_RANK_ITERATIONS = 10**11


def simulate(
    cluster: Annotated[str, typer.Argument(help="A cluster config: a file, or a name in configs/clusters.")],
    nodes: Annotated[
        str | None,
        typer.Option(help="Nodes of the job, instead of the config's; several (4,8,16) give a scaling curve."),
    ] = None,
    policy: Annotated[str, typer.Option("--policy", "-p", help=POLICY_HELP)] = "passive",
    threshold: Annotated[float | None, typer.Option(help="Threshold of the static policy.")] = None,
    window: Annotated[
        float | None, typer.Option(help="Delay window of the static policy, as a share of the step.")
    ] = None,
    iterations: Annotated[int, typer.Option("--iterations", "-i", min=1, help="Iterations of each run.")] = 5000,
    seeds: Annotated[int, typer.Option(min=1, help="How many runs with different noise.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    engine: Annotated[
        Engine, typer.Option(help="reference: every message by itself, slow, to check the fast one by.")
    ] = "fast",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a config value: noise.jitter_cv=0.02")] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help="Also draw the curve with this changed: fabric.nic_gbps=10 (several, with commas between)."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the scaling curve, without and with pacing, to this file (png, svg, pdf).")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the first seed's run as a trace (Parquet).")] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Run a job on a simulated cluster and print its step-time statistics, or its scaling curve.

    The same seeds give every policy the same noise, so two runs with different policies can be compared directly.
    Several --nodes, a --what-if or a --plot give a curve: each size without pacing and with the policy (static, unless
    --policy names another).

    Examples: paceenv simulate null-jitter -- paceenv simulate when-scaling-fails --nodes 32 --policy static --json -
    -- paceenv simulate when-scaling-fails --nodes 4,8,16,32,64 --plot scaling.png
    """
    options = [f"{k}={v!r}" for k, v in (("threshold", threshold), ("window", window)) if v is not None]
    if options and policy.partition(":")[0] != "static":
        raise InputError(f"--threshold and --window belong to the static policy; the policy is {policy}")
    if options:
        policy = f"{policy}{',' if ':' in policy else ':'}{','.join(options)}"
    config, sizes = load_cluster(cluster).changed(set_ or [], cluster), _sizes(nodes)
    is_curve = len(sizes) > 1 or plot is not None or bool(what_if)
    if is_curve and trace is not None:
        raise InputError("--trace: is of one run; allowed: one number of nodes, without --plot and --what-if")
    sized = [config.with_nodes(n) for n in sizes] or [config]
    work = iterations * seeds * max(one.job.ranks for one in sized)
    if work > MAX_RANK_ITERATIONS:
        asked = f"{iterations} x {seeds} seeds x {max(one.job.ranks for one in sized)} ranks"
        raise out_of_range("iterations x seeds x ranks", asked, f"at most {MAX_RANK_ITERATIONS:.0e}", "simulate")
    run_seeds = range(seed, seed + seeds)
    if engine == "reference":
        for one in sized:
            check_size(Setup.of(drawn(one, episode_keys([seed])[0])), iterations, seeds)
    if is_curve:
        paced = "static" if policy == "passive" else policy
        _curve(config, sizes or [config.job.nodes], paced, what_if or [], run_seeds, iterations, engine, plot, json_)
    else:
        _one(sized[0], policy, run_seeds, iterations, engine, trace, json_)


def _sizes(nodes: str | None) -> list[int]:
    found = [] if nodes is None else [part.strip() for part in nodes.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in found):
        raise out_of_range("--nodes", nodes, "a number of at least 1, or several with commas between", "simulate")
    return sorted({int(part) for part in found})


def _curve(
    config: Cluster,
    sizes: list[int],
    policy: str,
    what_ifs: list[str],
    seeds: range,
    iterations: int,
    engine: Engine,
    plot: Path | None,
    json_: str | None,
) -> None:
    if plot is not None:
        figures.check_path(plot)
    total = 2 * len(sizes) * (1 + len(what_ifs))
    with output.progress(f"{config.name}, {len(sizes)} sizes", total) as done:
        points = scaling.curves(
            config,
            sizes,
            ["passive", policy],
            what_ifs,
            seeds=seeds,
            iterations=iterations,
            threads=os.cpu_count() or 1,
            engine=engine,
            on_point=done,
        )
    if plot is not None:
        scaling.draw(points, f"{config.name}: simulated, {len(seeds)} seeds x {iterations} iterations", plot)
    if json_ is not None:
        output.write_json([point.as_dict() for point in points], json_)
    if json_ != "-":
        rows = [
            (
                f"{p.nodes}",
                p.what_if or "as configured",
                p.policy,
                f"{p.throughput_samples_per_s:.4g}",
                f"{p.throughput_ci95[0]:.4g} to {p.throughput_ci95[1]:.4g}",
                f"{p.cv:.3f}",
                f"{p.step_time_s:.4g}",
                f"{p.efficiency:.0%}",
            )
            for p in points
        ]
        columns = ("nodes", "what if", "policy", "samples/s", "95 % interval", "CV", "step, s", "compute / step")
        output.print_table(f"{config.name}: scaling", columns, rows, f"drawn in {plot}" if plot else "")
    outside = [p for p in points if p.outside is not None]
    if outside:
        worst = max(outside, key=lambda p: p.outside.share if p.outside else 0.0)
        case = f"{worst.nodes} nodes{f', {worst.what_if}' if worst.what_if else ''}"
        output.say(f"policy {worst.policy}: at {len(outside)} of {len(points)} points, most at {case}: {worst.outside}")


def _one(
    config: Cluster,
    policy: str,
    seeds: range,
    iterations: int,
    engine: Engine,
    trace: Path | None,
    json_: str | None,
) -> None:
    chosen = select_policy(policy, config)
    simulator = start_engine(engine, config, np.asarray(seeds), threads=os.cpu_count() or 1)
    with output.progress(f"{config.name}, {config.job.nodes} nodes, {policy}", iterations) as done:
        if trace is None:
            result = run(chosen, simulator, iterations, on_interval=done)
        else:
            with RecordingWriter(trace, simulator, config.name) as writer:
                result = run(chosen, simulator, iterations, on_interval=done, on_recording=writer.append)
    statistics, outcome = metrics.step_statistics(result.step_ET), result.outcome
    samples = config.samples_per_step
    throughput = metrics.bootstrap_interval(samples / result.step_ET.mean(axis=1))
    useful = samples * outcome.useful_iterations
    summary: dict[str, Any] = {
        "cluster": config.name,
        "nodes": config.job.nodes,
        "ranks": config.job.ranks,
        "policy": policy,
        "engine": engine,
        "iterations": iterations,
        "seeds": len(seeds),
        "seed": seeds[0],
        "throughput_samples_per_s": samples / statistics["mean"],
        "throughput_ci95": list(throughput[1:]),
        "step_time_s": statistics,
        "ideal_step_time_s": float(result.ideal_step_E.mean()),
        "mean_delay_s": float(result.mean_delay_E.mean()),
        "goodput_samples_per_s": float((useful / outcome.time_s).mean()),
        "failures": float(outcome.failures.mean()),
        "rerun_share": float((outcome.rerun_iterations / iterations).mean()),
        "energy_j_per_sample": float((outcome.energy_j / np.maximum(useful, samples)).mean()),
    }
    summary["outside_calibrated_range"] = asdict(result.outside) if result.outside else None
    if result.outside is not None:
        output.say(f"policy {policy}: {result.outside}")
    if json_ is not None:
        output.write_json(summary, json_)
    if json_ != "-":
        _print(summary, throughput, is_bound=not isinstance(chosen, Policy))


def _print(summary: dict[str, Any], throughput: tuple[float, float, float], *, is_bound: bool) -> None:
    step, ideal = summary["step_time_s"], summary["ideal_step_time_s"]
    rows = [
        ("throughput, samples/s", f"{summary['throughput_samples_per_s']:.4g}"),
        ("step time, s", f"{step['mean']:.4g}"),
        ("  coefficient of variation", f"{step['cv']:.3f}"),
        ("  p50 / p95 / p99, s", " / ".join(f"{step[p]:.4g}" for p in ("p50", "p95", "p99"))),
        ("ideal step time, s", f"{ideal:.4g}"),
        ("  lost to noise, contention, waits", f"{step['mean'] / ideal - 1:.1%}"),
        ("mean pacing delay, s", f"{summary['mean_delay_s']:.4g}"),
    ]
    if summary["seeds"] > 1:
        rows.insert(1, ("  95 % interval over seeds", f"{throughput[1]:.4g} to {throughput[2]:.4g}"))
    if summary["energy_j_per_sample"] > 0.0:
        rows.append(("energy, J/sample", f"{summary['energy_j_per_sample']:.4g}"))
    if summary["failures"] > 0.0:
        rows += [
            ("failures in a run", f"{summary['failures']:.1f}"),
            ("  iterations run again", f"{summary['rerun_share']:.1%}"),
            ("goodput, samples/s", f"{summary['goodput_samples_per_s']:.4g}"),
        ]
    title = f"{summary['cluster']}: {summary['nodes']} nodes, {summary['ranks']} ranks, policy {summary['policy']}"
    note = f"{summary['seeds']} seeds x {summary['iterations']} iterations"
    if is_bound:
        note += "; clairvoyant looks ahead and cannot be deployed"
    output.print_table(title, ("quantity", "value"), rows, note)
