"""Stands in for the testbed in tests of the closed loop: the simulator runs the jobs and writes what a run would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from paceenv.calibration.cluster_builder import Steps
from paceenv.calibration.fit_trace import JobFit
from paceenv.calibration.parameters import Parameter, not_identifiable
from paceenv.live.decide.experiment import Experiment
from paceenv.live.decide.live_policy import SEPARATOR
from paceenv.live.testbed.testbed_run import JobResult
from paceenv.live.testbed.testbed_scenario import Scenario
from paceenv.policies.base import Policy
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.cluster.derive import start
from paceenv.sim.engine.recording import RecordingWriter
from paceenv.trainers.closed_loop.closed_loop import CANDIDATES, TAILORED
from paceenv.trainers.closed_loop.paired_blocks import paired_blocks
from paceenv.trainers.closed_loop.predict import run_in_blocks

TRUTH = "unequal-slack"
SCENARIO: dict[str, Any] = yaml.safe_load("""
name: double
description: Pairs with unequal slack.
network: {hosts: 8, racks: 2, uplink_mbps: 200}
jobs:
- name: pairs
  hosts: [0, 1, 2, 3, 4, 5, 6, 7]
  program:
    communicators: {pairs: {size: 2}}
    step: [{all_reduce: {bytes: 1.0e+6, communicator: pairs}}, {all_reduce: {bytes: 0}}]
loop:
  job: pairs
  mechanism: slack
  expect: helps
  observe_iterations: 60
  probe_s: 0.01
  probe_iterations: 30
  pairs: 6
  block_iterations: 40
  quiet_first: 20
  known: {fabric.buffer_kb: 250}
""")
PARAMETERS = (
    Parameter("job.compute_s", 0.06, 0.0005, 0.059, 0.061, "compute rows"),
    Parameter("fabric.uplink_gbps", 0.4, 0.004, 0.392, 0.408, "collectives together and alone"),
    not_identifiable("fabric.buffer_kb", None, "nothing collapses", "assumed lossless"),
)


QUICK = [name for name in CANDIDATES if name != TAILORED]
"""Without training a policy."""


def scenario(**loop: Any) -> Scenario:
    """The double's scenario, with changes of its plan."""
    return Scenario.model_validate({**SCENARIO, "loop": {**SCENARIO["loop"], **loop}})


def calibrate(trace: Any, *, base: Cluster | None, name: str, probe: Any) -> JobFit:
    """Finds the very cluster that the double runs on."""
    assert base is not None
    assert (base.job.nodes, base.fabric.buffer_kb, base.fabric.uplink_gbps) == (8, 250, 0.4)
    assert probe is not None
    cluster = load_cluster(TRUTH).model_copy(update={"name": name})
    return JobFit(cluster, PARAMETERS, Steps(0.34, 0.01), Steps(0.34, 0.01))


class SimulatedTestbed:
    """``run_scenario`` on the simulator; ``runs`` has the options of the agents so far."""

    def __init__(self) -> None:
        self.runs: list[dict[str, str]] = []

    def __call__(
        self,
        scenario: Scenario,
        out: Path,
        *,
        agents: Mapping[str, Sequence[str]],
        iterations: int,
        on_progress: Callable[[float], None],
    ) -> dict[str, JobResult]:
        ((job, given),) = agents.items()
        options = dict(zip(given[::2], given[1::2], strict=True))
        self.runs.append(options)
        assert not out.exists(), "a run needs a new folder"
        if "--candidates" in options:
            step_s_T, snapshots = _measure(scenario, load_cluster(TRUTH), options, iterations - 1)
        else:
            (out / job).mkdir(parents=True)
            simulator = start(load_cluster(TRUTH), np.array([len(options)]))
            with RecordingWriter(out / job / "trace.parquet", simulator, job) as writer:
                recording = simulator.record(simulator.off(), iterations - 1)
                writer.add(recording)
            step_s_T, snapshots = recording.step_ET[0], []
        on_progress(iterations)
        end_s_T = 1000.0 + np.r_[0.0, np.cumsum(step_s_T)]
        return {job: JobResult(np.repeat(end_s_T[:, None], 2, axis=1), tuple(snapshots), None)}


def _measure(
    scenario: Scenario, cluster: Cluster, options: Mapping[str, str], iterations: int
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Every candidate on a simulator of its own, on the same noise; its turns are taken from that run."""
    names = options["--candidates"].split(SEPARATOR)
    plan = scenario.loop
    schedule = plan.schedule(names, int(options["--seed"]))
    step_s_T = np.empty(iterations)
    for k, name in enumerate(names):
        # with the limits that the agents' guard has
        policy, simulator = select_policy(name, cluster), start(cluster, np.array([len(options)]), limits=plan.limits)
        assert isinstance(policy, Policy)
        on_T, pair_T = paired_blocks(schedule, iterations, k)[0], [schedule.turn(i).pair for i in range(iterations)]
        own_T = on_T | [pair is not None and pair[1] == k for pair in pair_T] | (k == 0)  # the first has what is left
        step_s_T[own_T] = run_in_blocks(policy, simulator, on_T, plan.quiet_first)[0][0][own_T]
    experiment = Experiment(names, schedule)
    for i, step_s in enumerate(step_s_T.tolist()):
        experiment.add(i, step_s, 0.01 * (schedule.turn(i).arm is not None))
    experiment.final()
    pacing = {"taken": 10, "total_s": 0.1, "cut": {"cap": 1}}
    return step_s_T, [{"state": options["--mode"], **experiment.as_dict(), "pacing": pacing, "reason": ""}] * 8
