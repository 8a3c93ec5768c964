"""``paceenv testbed``: a small cluster in network namespaces, and real jobs on it: list, run, up, exec, down."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from paceenv.core.errors import InputError
from paceenv.live.decide.live_policy import find_candidates
from paceenv.live.options import MODES
from paceenv.live.testbed import private_namespaces
from paceenv.live.testbed.standing import Standing, down, execute, standing, up
from paceenv.live.testbed.testbed_run import JobResult, RunResult, agent_options, run_scenario
from paceenv.live.testbed.testbed_scenario import Backend, Scenario, load_scenario
from paceenv.ui import config_files, output

application = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A small cluster on this machine: network namespaces as hosts, token-bucket links, real torchrun jobs. "
    "Needs Linux, root and Debian's iproute2. It touches nothing outside its own namespaces. The kernel removes all of "
    "it, however it ends.",
)

ScenarioName = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="A file, or a name in configs/testbed (paceenv testbed list).")
]
BackendName = Annotated[
    Backend | None,
    typer.Option(help="Of torch.distributed, instead of the scenario's. nccl shares this machine's GPUs."),
]
TUNE_ITERATIONS = 3000
"""Of a run in mode tune: a search among a few candidates on a quiet machine, and some of what follows."""
TestbedName = Annotated[str | None, typer.Argument(metavar="[SCENARIO]", help="The testbed, if several are up.")]


@application.command("list")
def list_(json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None) -> None:
    """The scenarios that ship with paceenv, and which testbeds are up."""
    scenarios = [load_scenario(name) for name in config_files.names("testbed")]
    running = {one.name for one in standing()}
    if json_ is not None:
        found = [scenario.model_dump() | {"up": scenario.name in running} for scenario in scenarios]
        output.write_json(found, json_)
    if json_ == "-":
        return
    rows = [
        (s.name, s.loop.expect, "+".join(str(job.ranks) for job in s.jobs), _first(s.description)) for s in scenarios
    ]
    note = f"up: {', '.join(sorted(running))}" if running else ""
    output.print_table("Testbed scenarios", ("name", "pacing", "ranks", "about"), rows, note)
    if lacking := private_namespaces.missing():
        output.say(f"cannot run here: missing {lacking}")


@application.command()
def run(
    scenario: ScenarioName,
    out: Annotated[Path, typer.Option("--out", "-o", help="A new folder for logs, step times and traces.")],
    iterations: Annotated[
        int | None, typer.Option(min=2, help="Of the main job. Default: those of the scenario.")
    ] = None,
    mode: Annotated[str, typer.Option(help=f"Mode of the agent in the main job: {', '.join(MODES)}.")] = "observe",
    policy: Annotated[
        str | None,
        typer.Option(help="For shadow, canary and active: a rule, static:my-cluster.yaml, or a policy file."),
    ] = None,
    candidates: Annotated[
        str | None,
        typer.Option(help="For tune, canary, active: several policies, separated by semicolons; also defaults."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of the blocks of canary and tune.")] = 0,
    backend: BackendName = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Run a scenario's jobs once: network up, real torchrun jobs, network down.

    Examples: paceenv testbed run unequal-slack -o runs/observed
    -- paceenv testbed run incast-shallow --mode canary --policy adaptive -o runs/canary
    """
    chosen = load_scenario(scenario, backend)
    plan = chosen.loop
    several = [*(one.source for one in find_candidates(candidates or "").candidates), *([policy] if policy else [])]
    usual = {
        "canary": plan.contest_iterations(list(dict.fromkeys(several)) or ["passive"], plan.pairs),
        "tune": TUNE_ITERATIONS,
    }
    count = iterations or usual.get(mode, plan.observe_iterations)
    agent = [*agent_options(plan, mode), "--seed", str(seed)]
    for option, value in (("--policy", policy), ("--candidates", candidates)):
        agent += [option, value] if value else []
    with output.progress(chosen.name, count) as done:
        result = run_scenario(
            chosen, out, agents={} if mode == "off" else {plan.job: agent}, iterations=count, on_progress=done
        )
    if json_ is not None:
        output.write_json({name: _numbers(job) for name, job in result.jobs.items()}, json_)
    if json_ != "-":
        _print(chosen, result)
        output.say(f"logs, step times{'' if mode == 'off' else ' and trace'} are in {out}/")


@application.command("up")
def up_(scenario: ScenarioName) -> None:
    """Bring a scenario's network up and leave it up, to inspect it."""
    chosen = load_scenario(scenario)
    one, took_s = up(chosen)
    output.say(f"{one.hosts} hosts up in {took_s:.1f} s")
    output.say(f"paceenv testbed exec 0 -- ip address    a command on a host, 0 to {one.hosts - 1}")
    output.say(f"paceenv testbed down {one.name}")


@application.command("exec", context_settings={"allow_interspersed_args": False})
def exec_(
    host: Annotated[int, typer.Argument(min=0, help="Number of the host.")],
    command: Annotated[list[str], typer.Argument(help="What to run there, behind --.")],
    name: Annotated[str | None, typer.Option("--on", help="Which testbed, if several are up.")] = None,
) -> None:
    """Run a command on a host of a testbed that is up."""
    sys.exit(execute(_chosen(name), host, command[1:] if command[0] == "--" else command))


@application.command("down")
def down_(
    name: TestbedName = None,
    every: Annotated[bool, typer.Option("--all", help="Every testbed that is up.")] = False,
) -> None:
    """Take a testbed down, with everything that runs in it."""
    for one in standing() if every else [_chosen(name)]:
        down(one)
        output.say(f"{one.name} is down")


def _chosen(name: str | None) -> Standing:
    there = standing()
    found = [one for one in there if name is None or one.name == name]
    if len(found) == 1:
        return found[0]
    known = ", ".join(one.name for one in there) or "none is up; paceenv testbed up SCENARIO"
    raise InputError(f"testbed {name or 'not named'}: allowed: {known}")


def _print(scenario: Scenario, result: RunResult) -> None:
    rows = [
        (name, *(_cell(_numbers(job)[key]) for key in ("ranks", "iterations", "mean_s", "cv", "p99_s")), _said(job))
        for name, job in result.jobs.items()
    ]
    columns = ("job", "ranks", "steps", "mean step s", "CV", "p99 s", "agent's verdict")
    output.print_table(f"{scenario.name}: {_network(scenario)}", columns, rows)


def _numbers(job: JobResult) -> dict[str, Any]:
    step_s_T = job.step_s_T
    some = len(step_s_T) > 0  # a job beside the main one may have made one step
    return {
        "ranks": job.steps_s_TR.shape[1],
        "iterations": len(step_s_T),
        "mean_s": float(step_s_T.mean()) if some else None,
        "cv": float(step_s_T.std() / step_s_T.mean()) if some else None,
        "p99_s": float(np.quantile(step_s_T, 0.99)) if some else None,
        "agents": [snapshot.get("canary") for snapshot in job.snapshots],
        "tune": job.snapshots[0].get("tune") if job.snapshots else None,
    }


def _said(job: JobResult) -> str:
    """The verdict of the job's first rank, or its state."""
    if not job.snapshots:
        return "-"
    canary = job.snapshots[0].get("canary") or job.snapshots[0].get("tune")
    return str(canary["text"].partition(";")[0]) if canary else str(job.snapshots[0].get("state", "-"))


def _cell(value: float | None) -> str:
    return "–" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"


def _network(scenario: Scenario) -> str:
    network = scenario.network
    racks = f" in {network.racks} racks, uplinks {network.uplink_mbps:g}" if network.uplink_mbps else ""
    return f"{network.hosts} hosts at {network.host_mbps:g}{racks} Mbit/s"


def _first(text: str) -> str:
    """The first sentence of a description."""
    return text.split(". ")[0].strip().removesuffix(".")
