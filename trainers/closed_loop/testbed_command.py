"""``paceenv testbed``: real jobs on network namespaces of this machine, once or as a closed loop with the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceenv.core.errors import InputError, out_of_range
from paceenv.core.metrics import step_statistics
from paceenv.live.decide.live_policy import SEPARATOR
from paceenv.live.testbed import testbed_run
from paceenv.live.testbed.testbed_run import JobResult
from paceenv.live.testbed.testbed_scenario import Scenario, load_scenario
from paceenv.report.section import print_sections
from paceenv.ui import config_files, output
from paceenv.ui.json_option import JsonFile

FEWEST = 20
"""Iterations from which a cluster is calibrated."""


def run_on_testbed(
    scenario: Annotated[
        str | None, typer.Argument(help="A file, or a name in configs/testbed. Without one: the list of these.")
    ] = None,
    loop: Annotated[
        bool, typer.Option("--loop", help="The closed loop: predict the effect of pacing, measure it, compare.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The run's folder. Default: runs/testbed/SCENARIO, runs/loop/SCENARIO."),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(min=2, help="Iterations of the main job, or of its observation. Default: the scenario's."),
    ] = None,
    candidates: Annotated[
        str | None,
        typer.Option(
            help="With --loop: policies, separated by semicolons; also constant (the best static setting of a search), "
            "default (the mechanism's rule), tailored (trained for this job). Default: those three, adaptive, paper "
            "and learned."
        ),
    ] = None,
    pairs: Annotated[
        int | None,
        typer.Option(min=2, help="With --loop: pairs of blocks of each candidate. Default: the scenario's."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of the blocks and of the simulated noise.")] = 0,
    json_: JsonFile = None,
) -> None:
    """Run real PyTorch jobs on a small cluster on this machine: namespaces as hosts, token buckets as links.

    Needs Linux, root and Debian's iproute2. It touches nothing outside its own namespaces, and the kernel removes all
    of it, however it ends.

    With --loop the stages are: observe (the real job, watched by the agent), probe (the same with tiny random delays,
    where the scenario asks for it), calibrate (a cluster with errors from those traces), train (the best static
    setting, and a policy trained for this job), predict (each candidate, simulated; the best one whose predicted effect
    excludes 0 is chosen), measure (the real job, on which all candidates take turns in paired blocks with and without
    pacing).

    Examples: paceenv testbed -- paceenv testbed unequal-slack -o runs/observed
    -- paceenv testbed unequal-slack --loop --candidates "adaptive;learned"
    """
    if scenario is None:
        _list(json_)
        return
    chosen = load_scenario(scenario)
    changes = {name: n for name, n in (("observe_iterations", iterations), ("pairs", pairs)) if n is not None}
    if loop:
        if iterations is not None and iterations < FEWEST:
            raise out_of_range("--iterations", iterations, f"at least {FEWEST} with --loop", "testbed")
        chosen = chosen.model_copy(update={"loop": chosen.loop.model_copy(update=changes)})
        _loop(chosen, out or Path("runs/loop") / chosen.name, candidates, seed, json_)
        return
    if candidates is not None or pairs is not None:
        raise InputError("--candidates, --pairs: compare policies; allowed: with --loop")
    count = iterations or chosen.loop.observe_iterations
    agent = [*testbed_run.agent_options(chosen.loop, "observe"), "--seed", str(seed)]
    folder = out or Path("runs/testbed") / chosen.name
    with output.progress(chosen.name, count) as done:
        agents = {chosen.loop.job: agent}
        jobs = testbed_run.run_scenario(chosen, folder, agents=agents, iterations=count, on_progress=done)
    numbers = {name: _numbers(job) for name, job in jobs.items()}
    if output.write_json(numbers, json_):
        _print(chosen, numbers)
        output.say(f"logs, step times and trace are in {folder}/")


def _list(json_: str | None) -> None:
    scenarios = [load_scenario(name) for name in config_files.names("testbed")]
    if not output.write_json([scenario.model_dump() for scenario in scenarios], json_):
        return
    rows = [
        (s.name, s.loop.expect, "+".join(str(job.ranks) for job in s.jobs), s.description.split(". ")[0].strip(" .\n"))
        for s in scenarios
    ]
    output.print_table("Testbed scenarios", ("name", "pacing", "ranks", "about"), rows)
    if lacking := testbed_run.missing():
        output.say(f"cannot run here: missing {lacking}")


def _loop(scenario: Scenario, folder: Path, candidates: str | None, seed: int, json_: str | None) -> None:
    from paceenv.calibration.fit_trace import fit_trace
    from paceenv.trainers.closed_loop import sim_to_real_report
    from paceenv.trainers.closed_loop.closed_loop import CANDIDATES, ClosedLoop

    names = [part.strip() for part in (candidates or SEPARATOR.join(CANDIDATES)).split(SEPARATOR)]
    report = ClosedLoop(scenario, folder, testbed_run.run_scenario, fit_trace, seed, names).go()
    if output.write_json(report, json_):
        print_sections(sim_to_real_report.sections(report))
        print(report["verdict"])
        output.say(f"report, picture and all runs are in {folder}/")


def _print(scenario: Scenario, jobs: dict[str, dict[str, Any]]) -> None:
    def cell(x: float | None) -> str:
        return "–" if x is None else str(x) if isinstance(x, int) else f"{x:.3f}"

    rows = [(name, *map(cell, numbers.values())) for name, numbers in jobs.items()]
    columns = ("job", "ranks", "steps", "mean step s", "CV", "p99 s")
    network = scenario.network
    racks = f" in {network.racks} racks, uplinks {network.uplink_mbps:g}" if network.uplink_mbps else ""
    title = f"{scenario.name}: {network.hosts} hosts at {network.host_mbps:g}{racks} Mbit/s"
    output.print_table(title, columns, rows)


def _numbers(job: JobResult) -> dict[str, Any]:
    step_s_T = job.step_s_T
    numbers: dict[str, Any] = {"ranks": job.steps_s_TR.shape[1], "iterations": len(step_s_T)}
    if not len(step_s_T):  # a job beside the main one may have made one step
        return numbers | dict.fromkeys(("mean_s", "cv", "p99_s"))
    found = step_statistics(step_s_T)
    return numbers | {"mean_s": found["mean"], "cv": found["cv"], "p99_s": found["p99"]}
