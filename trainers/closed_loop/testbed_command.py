"""``paceenv testbed``: the commands of ``live.testbed``, and ``loop``, which needs the simulator too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceenv.core.errors import InputError
from paceenv.live.testbed.testbed_network_commands import BackendName, application
from paceenv.ui import output

STAGES_HELP = "observe, probe, calibrate, tailor, predict, choose, contest, active, report"


@application.command()
def loop(
    scenario: Annotated[str, typer.Argument(help="A scenario: a file, or a name in configs/testbed.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The loop's folder. Default: runs/loop/SCENARIO.")
    ] = None,
    stop_after: Annotated[str, typer.Option(help=f"The last stage to run: {STAGES_HELP}.")] = "report",
    iterations: Annotated[
        int | None, typer.Option(min=20, help="Iterations to observe, instead of the scenario's.")
    ] = None,
    pairs: Annotated[
        int | None, typer.Option(min=2, help="Pairs of blocks of each candidate, instead of the scenario's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of the blocks and of the simulated noise.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Simulated episodes for each of 16 drawn clusters.")] = 8,
    candidates: Annotated[
        str | None,
        typer.Option(
            help="Who competes, separated by semicolons: constant (the best static setting of a search), default (the "
            "mechanism's rule), tailored (trained for this job), or any policy. Default: those three, adaptive, paper "
            "and learned."
        ),
    ] = None,
    tailor: Annotated[
        float,
        typer.Option(
            min=0,
            max=86_400,
            help="Seconds to train the tailored policy on the calibrated cluster, at least 5; 0: none.",
        ),
    ] = 60.0,
    active: Annotated[
        int,
        typer.Option(min=0, help="Then run constant, learned and tailored always on, with so many held-out pairs."),
    ] = 0,
    backend: BackendName = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Discard the results of a loop in this folder and start anew.")
    ] = False,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Close the loop on real sockets: predict the effect of pacing on a job, measure it, and compare both.

    observe: the real job, watched by the agent. Then the loop says how long its other runs take.

    probe: the same with tiny random delays, where the scenario asks for it.

    calibrate: a cluster config from those traces, with errors, and the parameters they do not identify.

    tailor: the best static setting, and a policy trained for this job, on clusters drawn from those errors.

    predict: the effect of each candidate, simulated on those clusters.

    choose: the candidate whose predicted effect is best and excludes 0, else no pacing.

    contest: the real job, on which all candidates take turns in paired blocks with and without pacing.

    active: the same with nine of ten blocks paced, with --active.

    report: report.md, report.json and pictures in the folder.

    The same command resumes a killed loop after its last finished stage.

    Examples: paceenv testbed loop unequal-slack -- paceenv testbed loop two-jobs --pairs 16 -o runs/mine --json -
    """
    from paceenv.calibration.fit_trace import calibrate_trace
    from paceenv.live.decide.live_policy import SEPARATOR
    from paceenv.live.testbed.testbed_run import run_scenario
    from paceenv.live.testbed.testbed_scenario import load_scenario
    from paceenv.trainers.closed_loop import sim_to_real_report
    from paceenv.trainers.closed_loop.closed_loop import CANDIDATES, STAGES, ClosedLoop, LoopOptions

    if stop_after not in STAGES:
        raise InputError(f"--stop-after {stop_after}: no such stage; allowed: {', '.join(STAGES)}")
    chosen = load_scenario(scenario, backend)
    changes = {k: v for k, v in (("observe_iterations", iterations), ("pairs", pairs)) if v is not None}
    chosen = chosen.model_copy(update={"loop": chosen.loop.model_copy(update=changes)})
    folder = out or Path("runs/loop") / chosen.name
    names = [part.strip() for part in (candidates or SEPARATOR.join(CANDIDATES)).split(SEPARATOR)]
    options = LoopOptions(seed=seed, seeds=seeds, tailor_s=tailor, active=active, candidates=tuple(names))
    closed = ClosedLoop(chosen, folder, options, run=run_scenario, calibrate=calibrate_trace)
    found = closed.go(stop_after, fresh=fresh)
    if json_ is not None:
        output.write_json(found, json_)
    if json_ == "-":
        return
    if stop_after == "report":
        sim_to_real_report.show(found)
        output.say(f"report, pictures and all runs are in {folder}/")
    else:
        output.say(f"{stop_after} is done; its result is in {closed.folder.of(stop_after)}/")
