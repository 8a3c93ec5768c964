"""``paceenv simulate``: run one job at one size under one policy and print its statistics."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from paceenv.core import metrics
from paceenv.core.errors import out_of_range
from paceenv.policies.base import Policy
from paceenv.policies.rollout import run
from paceenv.policies.select import POLICY_HELP, select_policy
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import start
from paceenv.sim.engine.recording import RecordingWriter
from paceenv.ui import output
from paceenv.ui.json_option import JsonFile

MAX_RANK_ITERATIONS = 10**11


def simulate(
    cluster: Annotated[str, typer.Argument(help="A cluster config: a file, or a name in configs/clusters.")],
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of the job, instead of the config's.")] = None,
    policy: Annotated[str, typer.Option("--policy", "-p", help=POLICY_HELP)] = "passive",
    iterations: Annotated[int, typer.Option("--iterations", "-i", min=1, help="Iterations of each run.")] = 5000,
    seeds: Annotated[int, typer.Option(min=1, help="How many runs with different noise.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a config value: noise.jitter_cv=0.02")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the first seed's run as a trace (Parquet).")] = None,
    json_: JsonFile = None,
) -> None:
    """Run a job on a simulated cluster and print its step-time statistics.

    The same seeds give every policy the same noise, so two runs with different policies can be compared directly.
    For several sizes, changed configs and scaling curves see paceenv whatif.

    Examples: paceenv simulate null-jitter -- paceenv simulate when-scaling-fails --nodes 32 --policy static --json -
    """
    config = load_cluster(cluster).changed(set_ or [], cluster)
    if nodes is not None:
        config = config.with_nodes(nodes)
    if iterations * seeds * config.job.ranks > MAX_RANK_ITERATIONS:
        asked = f"{iterations} x {seeds} seeds x {config.job.ranks} ranks"
        raise out_of_range("iterations x seeds x ranks", asked, f"at most {MAX_RANK_ITERATIONS:.0e}", "simulate")
    chosen = select_policy(policy, config)
    simulator = start(config, np.arange(seed, seed + seeds), threads=len(os.sched_getaffinity(0)))
    with output.progress(f"{config.name}, {config.job.nodes} nodes, {policy}", iterations) as done:
        if trace is None:
            result = run(chosen, simulator, iterations, on_interval=done)
        else:
            with RecordingWriter(trace, simulator, config.name) as writer:
                result = run(chosen, simulator, iterations, on_interval=done, on_recording=writer.add)
    statistics, outcome = metrics.step_statistics(result.step_ET), result.outcome
    samples = config.samples_per_step
    throughput = metrics.mean_interval(samples / result.useful_step_E)
    useful = samples * outcome.useful_iterations
    summary: dict[str, Any] = {
        "cluster": config.name,
        "nodes": config.job.nodes,
        "ranks": config.job.ranks,
        "policy": policy,
        "iterations": iterations,
        "seeds": seeds,
        "seed": seed,
        "throughput_samples_per_s": samples / float(result.useful_step_E.mean()),
        "throughput_ci95": list(throughput[1:]),
        "step_time_s": statistics,
        "ideal_step_time_s": float(result.ideal_step_E.mean()),
        "mean_delay_s": float(result.mean_delay_E.mean()),
        "failures": float(outcome.failures.mean()),
        "rerun_share": float((outcome.rerun_iterations / iterations).mean()),
        "energy_j_per_sample": float((outcome.energy_j / np.maximum(useful, samples)).mean()),
    }
    summary["stand_ins"] = config.stand_ins
    summary["outside_calibrated_range"] = result.outside
    if result.outside is not None:
        output.say(f"policy {policy}: {result.outside}")
    if output.write_json(summary, json_):
        _print(summary, throughput, is_bound=not isinstance(chosen, Policy))


def _print(summary: dict[str, Any], throughput: tuple[float, float, float], *, is_bound: bool) -> None:
    step, ideal = summary["step_time_s"], summary["ideal_step_time_s"]
    stand_ins: dict[str, float] = summary["stand_ins"]
    is_known = "job.compute_s" not in stand_ins
    rows = [
        *([("throughput, samples/s", f"{summary['throughput_samples_per_s']:.4g}")] if is_known else []),
        ("step time, s", f"{step['mean']:.4g}"),
        ("  coefficient of variation", f"{step['cv']:.3f}"),
        ("  p50 / p95 / p99, s", " / ".join(f"{step[p]:.4g}" for p in ("p50", "p95", "p99"))),
        ("step without noise and other jobs, s", f"{ideal:.4g}"),
        ("  step time against that", f"{step['mean'] / ideal - 1:+z.1%}"),
        ("mean pacing delay, s", f"{summary['mean_delay_s']:.4g}"),
    ]
    if summary["seeds"] > 1 and is_known:
        rows.insert(1, ("  95 % interval over seeds", f"{throughput[1]:.4g} to {throughput[2]:.4g}"))
    if summary["energy_j_per_sample"] > 0.0:
        rows.append(("energy, J/sample", f"{summary['energy_j_per_sample']:.4g}"))
    if summary["failures"] > 0.0:
        rows += [
            ("failures in a run", f"{summary['failures']:.1f}"),
            ("  iterations run again", f"{summary['rerun_share']:.1%}"),
        ]
    title = f"{summary['cluster']}: {summary['nodes']} nodes, {summary['ranks']} ranks, policy {summary['policy']}"
    note = f"{summary['seeds']} seeds x {summary['iterations']} iterations"
    if is_bound:
        note += "; clairvoyant looks ahead and cannot be deployed"
    if stand_ins:
        named = ", ".join(f"{key} = {value:g}" for key, value in stand_ins.items())
        note += f"; not measured, but put there: {named}; set them with --set KEY=VALUE"
        note += "" if is_known else "; step times rest on them, and there is no throughput without job.compute_s"
    output.print_table(title, ("quantity", "value"), rows, note)
