"""``paceenv explain``: a policy's decisions as pictures, as a trace for a viewer, and as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from paceenv.core import pacing, signals
from paceenv.core.errors import out_of_range
from paceenv.policies.base import INTERVAL_ITERATIONS, Policy
from paceenv.policies.explain import explain_plots
from paceenv.policies.explain.slices import HOLD_INTERVALS, Box, Slice, cut, positions
from paceenv.policies.explain.watched_rollout import Watched, watch
from paceenv.policies.learned import Learned
from paceenv.policies.rules import passive
from paceenv.policies.select import POLICY_HELP, select_policy
from paceenv.sim.cluster import load_cluster
from paceenv.sim.engine.phases import shares
from paceenv.ui import figures, output
from paceenv.ui.chrome_trace import ChromeTraceWriter
from paceenv.ui.run_directory import prepare_folder

MAX_RANK_ITERATIONS = 4 * 10**6
"""Of the rollout; all stamps and phases stay in memory, about 500 bytes for each."""
TIMELINE_ITERATIONS, TIMELINE_RANKS = 6, 16
TRACE_EVENTS = 200_000
"""A viewer stays fast with about this many; a trace ends with the timeline and starts as early as they allow."""


def explain(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help=POLICY_HELP)],
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="A cluster config: a file, or a name in configs/clusters.")
    ] = "unequal-slack",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pictures and the trace.")] = Path(
        "runs/explain"
    ),
    iterations: Annotated[int, typer.Option("--iterations", "-i", help="Iterations of the rollout.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the rollout's noise.")] = 0,
    at: Annotated[
        int | None,
        typer.Option(help="First iteration of the timeline. Default: around the last one with a long delay."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of the job, instead of the config's.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a config value: noise.jitter_cv=0.02")] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Draw a policy's settings over its observations, and a rollout beside one without pacing.

    Writes into the folder slices.png (each mechanism's delay window and threshold over a rank's slack and the inflation
    of its collective, other signals at the rollout's median), timeline.png (a few iterations of the ranks, and
    the whole rollout), timeline.trace.json.gz (the same for chrome://tracing or ui.perfetto.dev).
    Passive runs on the same noise. This is one seed; paceenv evaluate shows whether a gain is real.

    Examples: paceenv explain adaptive -- paceenv explain static --cluster incast-shallow --at 500
    -- paceenv explain runs/demo/policy.safetensors --cluster two-jobs -o runs/explain/two-jobs --json -
    """
    config = load_cluster(cluster).changed(set_ or [], cluster)
    config = config if nodes is None else config.with_nodes(nodes)
    chosen = select_policy(policy, config)
    interval = chosen.interval_iterations if isinstance(chosen, Policy) else INTERVAL_ITERATIONS
    least, most = 2 * max(interval, INTERVAL_ITERATIONS), MAX_RANK_ITERATIONS // config.job.ranks
    if not least <= iterations <= most:
        allowed = f"{least} to {most} with {config.job.ranks} ranks and a decision every {interval} iterations"
        raise out_of_range("--iterations", iterations, allowed, "explain")
    if at is not None and not 0 <= at <= iterations - TIMELINE_ITERATIONS:
        raise out_of_range("--at", at, f"0 to {iterations - TIMELINE_ITERATIONS}, within the rollout", "explain")
    prepare_folder(out)
    with output.progress(f"{config.name}, {policy} and passive", 2 * iterations) as done:
        paced = watch(chosen, config, seed, iterations, name=_name(policy), on_interval=done)
        unpaced = watch(passive(), config, seed, iterations, on_interval=lambda n: done(iterations + n))
    where = f"{config.name}, {config.job.nodes} nodes, {config.job.ranks} ranks, seed {seed}"
    result = _summary(config.name, seed, paced, unpaced)
    if paced.outside is not None:
        output.say(f"{paced.policy}: {paced.outside}")
    result["slices"] = None
    if isinstance(chosen, Policy):
        box = Box.of(chosen.calibrated_range) if isinstance(chosen, Learned) else None
        result["slices"] = _slices(chosen, paced, box, config.pacing.mechanism, where, out / "slices.png")
    else:
        output.say("clairvoyant decides on the future and not on what a rank sees: there are no slices of it")
    result["timeline"] = _timeline(paced, unpaced, _first(paced) if at is None else at, where, out)
    if json_ is not None:
        output.write_json(result, json_)
    if json_ != "-":
        _print(result, where, out)


def _first(paced: Watched) -> int:
    """Where a timeline shows the policy at work: around the last iteration with at least half of the longest delay."""
    last, delay_T = len(paced.step_T) - TIMELINE_ITERATIONS, paced.delay_TR.mean(axis=1)
    if not delay_T.any():
        return last
    return min(last, int(np.flatnonzero(delay_T >= 0.5 * delay_T.max())[-1]) - 1)


def _name(text: str) -> str:
    """A policy as a title has room for: a file by its folder and name."""
    return "/".join(Path(text).parts[-2:]) if ".safetensors" in text else text


def _summary(cluster: str, seed: int, paced: Watched, unpaced: Watched) -> dict[str, Any]:
    """The rollout in numbers; seconds and shares."""
    both = {"paced": paced, "passive": unpaced}
    return {
        "policy": paced.policy,
        "cluster": cluster,
        "ranks": paced.batch.ranks,
        "seed": seed,
        "iterations": len(paced.step_T),
        "step_mean_s": {name: float(one.step_T.mean()) for name, one in both.items()},
        "step_cv": {name: float(one.step_T.std() / one.step_T.mean()) for name, one in both.items()},
        "throughput_gain": float(unpaced.step_T.mean() / paced.step_T.mean() - 1.0),
        "mean_delay_s": float(paced.delay_TR.mean()),
        "delayed_share": float((paced.delay_TR > 0.0).mean()),
        "phase_share": {name: shares(one.phases) for name, one in both.items()},
        "on_share": paced.on_share(),
        "outside_calibrated_range": asdict(paced.outside) if paced.outside else None,
    }


def _slices(chosen: Policy, paced: Watched, box: Box | None, usual: str, where: str, path: Path) -> dict[str, Any]:
    """Draw the slices; their numbers. Where nothing is ever on, the cluster's usual mechanism is drawn as off."""
    found = cut(chosen, paced.views_BO, box)
    ever_on = found.ever_on()
    in_rollout = [name for name, share in paced.on_share().items() if share > 0.0]
    drawn = [name for name in pacing.MECHANISMS if name in {*ever_on, *in_rollout}] or [usual]
    explain_plots.draw_slices(found, drawn, paced.views_BO, box, f"{paced.policy} on {where}", path)
    if found.is_flat:
        said = ", ".join(_setting(found.settings_YXM2[0, 0], name) for name in ever_on) or "everything off"
        output.say(f"{paced.policy} decides the same everywhere in the slice: {said}")
    outside = None if box is None else float(box.outside(*positions(paced.views_BO)).mean())
    return _slice_numbers(found, drawn) | {
        "calibrated": None if box is None else {"slack_share": box.slack, "comm_inflation": box.inflation},
        "views_outside_share": outside,
    }


def _setting(settings_M2: NDArray[np.float64], mechanism: str) -> str:
    threshold, window = settings_M2[pacing.MECHANISMS.index(mechanism)]
    return f"{mechanism} with threshold {threshold:.3g}, window {window:.3g}"


def _slice_numbers(found: Slice, drawn: list[str]) -> dict[str, Any]:
    settings = {name: found.settings_YXM2[:, :, pacing.MECHANISMS.index(name)] for name in drawn}
    typical = zip(signals.NAMES, found.typical_O, strict=True)
    return {
        "slack_share": found.slack_X.tolist(),
        "comm_inflation": found.inflation_Y.tolist(),
        "typical": {name: float(signals.unsquash(name, entry)) for name, entry in typical},
        "flat": found.is_flat,
        "held_intervals": HOLD_INTERVALS if found.remembers else 1,
        "mechanisms": {
            name: {
                "window": one_YX2[..., pacing.WINDOW].tolist(),
                "threshold": one_YX2[..., pacing.THRESHOLD].tolist(),
            }
            for name, one_YX2 in settings.items()
        },
    }


def _timeline(paced: Watched, unpaced: Watched, first: int, where: str, out: Path) -> dict[str, Any]:
    """Draw the timeline and write its trace; what they show."""
    count = min(TIMELINE_ITERATIONS, len(paced.step_T) - first)
    ranks_N = figures.representative(unpaced.wait_s_R(slice(first, first + count)), TIMELINE_RANKS)
    title = f"{paced.policy} and passive on the same noise: {where}"
    if len(ranks_N) < paced.batch.ranks:
        chosen = f"{len(ranks_N)} of {paced.batch.ranks} ranks"
        title += f"\n{chosen}, evenly from the shortest wait to the longest without pacing"
    explain_plots.draw_timeline(paced, unpaced, ranks_N, first, count, title, out / "timeline.png")
    per_iteration = 2 * paced.batch.ranks * len(paced.phases)
    begin = max(0, first + count - max(count, TRACE_EVENTS // per_iteration))
    about = {"job": where, "policy": paced.policy, "first iteration": begin}
    with ChromeTraceWriter(out / "timeline.trace.json.gz", about) as writer:
        for pid, one in enumerate((paced, unpaced), 1):
            _trace(writer, pid, one, slice(begin, first + count))
    return {
        "first_iteration": first,
        "iterations": count,
        "ranks": ranks_N.tolist(),
        "trace_iterations": [begin, first + count - 1],
    }


def _trace(writer: ChromeTraceWriter, pid: int, one: Watched, shown: slice) -> None:
    """One job's phases, every rank, and its step time and mean delay as counters; time runs from the first step."""
    step_T = one.step_T[shown]
    begin_T = np.concatenate([[0.0], np.cumsum(step_T)[:-1]])
    lead_s = max(0.0, -float(one.phases[0].start_TR[shown][0].min()))  # of ranks that run ahead; times start at 0
    begin_T1, iteration_T1 = begin_T[:, None] + lead_s, np.arange(shown.start, shown.stop)[:, None]
    rank_R = np.arange(one.batch.ranks)
    writer.process(pid, one.policy, {r: f"rank {r}" for r in rank_R.tolist()})
    rows = [
        {
            "rank": np.broadcast_to(rank_R, (len(step_T), len(rank_R))),
            "op": np.full((len(step_T), len(rank_R)), phase.name),
            "start_s": begin_T1 + phase.start_TR[shown],
            "end_s": begin_T1 + phase.end_TR[shown],
            "iteration": np.broadcast_to(iteration_T1, (len(step_T), len(rank_R))),
        }
        for phase in one.phases
    ]
    writer.operations(pid, {key: np.concatenate([row[key].ravel() for row in rows]) for key in rows[0]})
    writer.counter(pid, "step time, ms", begin_T + lead_s, {"step": 1e3 * step_T})
    writer.counter(pid, "mean delay, ms", begin_T + lead_s, {"delay": 1e3 * one.delay_TR[shown].mean(axis=1)})


def _print(result: Mapping[str, Any], where: str, out: Path) -> None:
    step, phase, on = result["step_mean_s"], result["phase_share"], result["on_share"]
    rows = [
        ("mean step, s", f"{step['paced']:.4g}", f"{step['passive']:.4g}"),
        ("  coefficient of variation", *(f"{result['step_cv'][name]:.3f}" for name in ("paced", "passive"))),
        ("throughput against passive", f"{result['throughput_gain']:+.1%}", ""),
        ("mean delay, s", f"{result['mean_delay_s']:.4g}", "0"),
        ("  share of starts delayed", f"{result['delayed_share']:.1%}", ""),
        *(
            (f"time in {name}", f"{share:.1%}", f"{phase['passive'][name]:.1%}")
            for name, share in phase["paced"].items()
            if share or phase["passive"][name]
        ),
        *((f"{name} on, share of decisions", f"{share:.1%}", "") for name, share in on.items() if share),
    ]
    files = ["slices.png"] * (result["slices"] is not None) + ["timeline.png", "timeline.trace.json.gz"]
    note = f"one seed, {result['iterations']} iterations; written to {out}: {', '.join(files)}"
    output.print_table(f"{result['policy']} on {where}", ("quantity", result["policy"], "passive"), rows, note)
