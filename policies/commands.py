"""``paceenv simulate``: run one job under one policy and print what a person or a machine wants to know."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from paceenv import metrics, output
from paceenv.cluster import load_cluster
from paceenv.engine.traces import RecordingWriter
from paceenv.errors import InputError, out_of_range
from policies.base import Policy
from policies.rollout import run, start
from policies.select import POLICY_HELP, select_policy

MAX_RANK_ITERATIONS = 10**11


def simulate(
    cluster: Annotated[str, typer.Argument(help="A cluster config: a file, or a name in configs/clusters.")],
    nodes: Annotated[int | None, typer.Option(help="Nodes of the job, instead of the config's.")] = None,
    policy: Annotated[str, typer.Option("--policy", "-p", help=POLICY_HELP)] = "passive",
    threshold: Annotated[float | None, typer.Option(help="Threshold of the static policy.")] = None,
    window: Annotated[
        float | None, typer.Option(help="Delay window of the static policy, as a share of the step.")
    ] = None,
    iterations: Annotated[int, typer.Option("--iterations", "-i", min=1, help="Iterations of each run.")] = 5000,
    seeds: Annotated[int, typer.Option(min=1, help="How many runs with different noise.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a config value: noise.jitter_cv=0.02")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the first seed's run as a trace (Parquet).")] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Run a job on a simulated cluster and print its step-time statistics.

    The same seeds give every policy the same noise, so two runs with different policies can be compared directly.

    Examples: paceenv simulate null-jitter -- paceenv simulate when-scaling-fails --nodes 32 --policy static --json -
    """
    config = load_cluster(cluster).changed(
        [*([f"job.nodes={nodes}"] if nodes is not None else []), *(set_ or [])], cluster
    )
    options = [f"{k}={v!r}" for k, v in (("threshold", threshold), ("window", window)) if v is not None]
    if options and policy.partition(":")[0] != "static":
        raise InputError(f"--threshold and --window belong to the static policy; the policy is {policy}")
    if options:
        policy = f"{policy}{',' if ':' in policy else ':'}{','.join(options)}"
    if iterations * seeds * config.job.ranks > MAX_RANK_ITERATIONS:
        asked = f"{iterations} x {seeds} seeds x {config.job.ranks} ranks"
        raise out_of_range("iterations x seeds x ranks", asked, f"at most {MAX_RANK_ITERATIONS:.0e}", "simulate")
    chosen = select_policy(policy, config)
    simulator = start(config, np.arange(seed, seed + seeds), threads=os.cpu_count() or 1)
    with output.progress(f"{config.name}, {config.job.nodes} nodes, {policy}", iterations) as done:
        if trace is None:
            result = run(chosen, simulator, iterations, on_interval=done)
        else:
            with RecordingWriter(trace, simulator, config.name) as writer:
                result = run(chosen, simulator, iterations, on_interval=done, on_recording=writer.append)
    statistics = metrics.step_statistics(result.step_ET)
    samples = config.job.samples_per_node * config.job.nodes
    throughput = metrics.bootstrap_interval(samples / result.step_ET.mean(axis=1))
    summary: dict[str, Any] = {
        "cluster": config.name,
        "nodes": config.job.nodes,
        "ranks": config.job.ranks,
        "policy": policy,
        "iterations": iterations,
        "seeds": seeds,
        "seed": seed,
        "throughput_samples_per_s": samples / statistics["mean"],
        "throughput_ci95": list(throughput[1:]),
        "step_time_s": statistics,
        "ideal_step_time_s": float(result.ideal_step_E.mean()),
        "mean_delay_s": float(result.mean_delay_E.mean()),
    }
    if json_ is not None:
        output.write_json(summary, json_)
    if json_ != "-":
        _print(summary, throughput, is_bound=not isinstance(chosen, Policy))


def _print(summary: dict[str, Any], throughput: tuple[float, float, float], *, is_bound: bool) -> None:
    step, ideal = summary["step_time_s"], summary["ideal_step_time_s"]
    rows = [
        ("throughput, samples/s", f"{summary['throughput_samples_per_s']:.4g}"),
        ("  95 % interval over seeds", f"{throughput[1]:.4g} to {throughput[2]:.4g}"),
        ("step time, s", f"{step['mean']:.4g}"),
        ("  coefficient of variation", f"{step['cv']:.3f}"),
        ("  p50 / p95 / p99, s", " / ".join(f"{step[p]:.4g}" for p in ("p50", "p95", "p99"))),
        ("ideal step time, s", f"{ideal:.4g}"),
        ("  lost to noise, contention, waits", f"{step['mean'] / ideal - 1:.1%}"),
        ("mean pacing delay, s", f"{summary['mean_delay_s']:.4g}"),
    ]
    title = f"{summary['cluster']}: {summary['nodes']} nodes, {summary['ranks']} ranks, policy {summary['policy']}"
    note = f"{summary['seeds']} seeds x {summary['iterations']} iterations"
    if is_bound:
        note += "; clairvoyant looks ahead and cannot be deployed"
    output.print_table(title, ("quantity", "value"), rows, note)
