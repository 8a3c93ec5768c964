"""The closed loop on a testbed scenario: observe, probe, calibrate, predict, choose, canary, report; resumable.

Every stage has a directory of its own (``paceenv.trainers.closed_loop.loop_directory``). Talks to the testbed, which
runs real jobs, to the calibration, the simulator and the report. ``paceenv.trainers.closed_loop.paired_blocks``
computes the effect of blocks with pacing from the steps that the job itself recorded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from pydantic import Field

from paceenv.calibration.job_fit import JobFit
from paceenv.calibration.parameters import Parameter
from paceenv.calibration.posterior import DRAWS, drawn_clusters
from paceenv.calibration.response import measure_response
from paceenv.core.errors import out_of_range
from paceenv.core.trace import Trace, read_trace
from paceenv.live.decide.canary import BLOCK_ITERATIONS, Schedule
from paceenv.live.record.snapshot import Snapshot, entry, number, text
from paceenv.live.testbed.testbed_run import RunResult, agent_options
from paceenv.live.testbed.testbed_scenario import Scenario
from paceenv.policies.base import INTERVAL_ITERATIONS
from paceenv.policies.names import STATIC_DEFAULTS
from paceenv.policies.policy_file import save_policy
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.trainers.closed_loop import sim_to_real_report
from paceenv.trainers.closed_loop.loop_directory import Found, LoopDirectory
from paceenv.trainers.closed_loop.paired_blocks import (
    Array,
    Effect,
    PairedBlocks,
    effect,
    job_steps,
    log_ratios,
    mean_step,
    other_log_ratios,
)
from paceenv.trainers.closed_loop.predict import Predictor
from paceenv.trainers.evaluation.suites import Case, ClusterShare, Suite
from paceenv.trainers.sweep.static_search import search_static
from paceenv.trainers.training.train_config import load_train_config
from paceenv.ui import config_files, output
from paceenv.ui.config_files import Config

STAGES = ("observe", "probe", "calibrate", "predict", "choose", "canary-ours", "canary-paper", "report")
RUN = "run"
"""The folder of a real run inside its stage's."""
SEARCH_SEED, DRAWS_SEED = 2_000_000, 3_000_000
"""Far from each other and from the seeds of the predictions: a setting meets other noise than in its search."""
WARM_SHARE = 0.1
"""Of an observed run the first tenth is warm-up: connections, buffers, caches."""


class Runner(Protocol):
    """``paceenv.live.testbed.testbed_run.run_scenario``, or what stands in for it."""

    def __call__(
        self,
        scenario: Scenario,
        out: Path,
        *,
        agents: Mapping[str, Sequence[str]],
        iterations: int,
        on_progress: Callable[[float], None],
    ) -> RunResult: ...


class Calibrator(Protocol):
    """``paceenv.calibration.job_fit.calibrate_job``, or what stands in for it."""

    def __call__(self, trace: Trace, *, base: Cluster | None, name: str, probe: Trace | None) -> JobFit: ...


class LoopOptions(Config):
    """Options that are not part of the scenario: seeds, and the amount of simulation."""

    seed: int = Field(0, ge=0, description="of the order of the canary's blocks and of the simulated noise")
    seeds: int = Field(8, ge=1, le=1000, description=f"simulated episodes for each of {DRAWS} drawn clusters")
    train: int = Field(0, ge=0, description="decisions to train a policy with; 0: no training")


@dataclass(frozen=True)
class ClosedLoop:
    """One loop in one run directory.

    Args:
        scenario: with the plan of its loop.
        out: the run directory.
        options: seeds and sizes.
        run: the testbed.
        calibrate: the calibration.
    """

    scenario: Scenario
    out: Path
    options: LoopOptions
    run: Runner
    calibrate: Calibrator

    @property
    def folder(self) -> LoopDirectory:
        """The run directory with the stages done so far."""
        return LoopDirectory(self.out, STAGES, sim_to_real_report.FILES)

    def go(self, stop_after: str = STAGES[-1], *, fresh: bool = False) -> Found:
        """Run the stages that are not done yet, up to ``stop_after``; returns its result. Raises InputError."""
        # raises for options that the agent or the prediction would refuse, before anything starts
        agent_options(self.scenario.loop, "observe")
        block = self.scenario.loop.block_iterations
        if block is not None and block % INTERVAL_ITERATIONS:
            allowed = f"a multiple of the policies' control interval, {INTERVAL_ITERATIONS}"
            raise out_of_range("block_iterations", block, allowed, f"scenario {self.scenario.name}: loop")
        known_cluster(self.scenario)
        folder = self.folder
        with folder.locked():
            record = {"scenario": self.scenario.model_dump(mode="json"), "options": self.options.model_dump()}
            folder.claim(record, fresh=fresh)
            work: dict[str, Callable[[Path], Found]] = {
                "observe": self._observe,
                "probe": self._probe,
                "calibrate": self._calibrate,
                "predict": self._predict,
                "choose": self._choose,
                "canary-ours": lambda place: self._canary(place, "canary-ours", folder.found("choose")["run"]),
                "canary-paper": lambda place: self._canary(place, "canary-paper", "paper"),
                "report": self._report,
            }
            for stage in STAGES[: STAGES.index(stop_after) + 1]:
                if not folder.is_done(stage) or stage == "report":  # cheap, and another version may report more
                    folder.finish(stage, work[stage](folder.begin(stage)))
            return folder.found(stop_after)

    def _observe(self, place: Path) -> Found:
        plan = self.scenario.loop
        result = self._real(place, "observe", plan.observe_iterations)
        mine = result.jobs[plan.job]
        baseline = baseline_s(mine.snapshots, job_steps(mine.steps_s_TR)[1])
        return {"jobs": _settled(result), "baseline_s": baseline}

    def _probe(self, place: Path) -> Found:
        plan = self.scenario.loop
        if not plan.probe_s:
            return {"skipped": "the scenario asks for no probe (loop.probe_s)"}
        result = self._real(place, "probe", plan.probe_iterations, "--probe-s", f"{plan.probe_s!r}")
        trace = read_trace(place / RUN / plan.job / "trace.parquet")
        return {"jobs": _settled(result), "response": measure_response(trace).to_json()}

    def _calibrate(self, place: Path) -> Found:
        observed = read_trace(self._run_of("observe") / "trace.parquet")
        probed = (
            None if "skipped" in self.folder.found("probe") else read_trace(self._run_of("probe") / "trace.parquet")
        )
        name = f"{self.scenario.name}-calibrated"
        fit = self.calibrate(observed, base=known_cluster(self.scenario), name=name, probe=probed)
        config_files.write_yaml(place / "cluster.yaml", fit.cluster.model_dump(exclude_defaults=True))
        return {"parameters": [asdict(parameter) for parameter in fit.parameters]}

    def _predict(self, place: Path) -> Found:
        plan, observed = self.scenario.loop, self.folder.found("observe")
        fitted = load_cluster(self.folder.of("calibrate") / "cluster.yaml")
        fitted = fitted.changed([f"pacing.mechanism={plan.mechanism}"], "loop")
        parameters = [Parameter(**known) for known in self.folder.found("calibrate")["parameters"]]
        clusters = drawn_clusters(fitted, parameters, observed["jobs"][plan.job], DRAWS_SEED + self.options.seed)
        policies = [self._search(clusters), default_rule(self.scenario), "adaptive", "paper"]
        if self.options.train:
            policies.insert(0, self._train(clusters, place))
        names, rows = list(dict.fromkeys(policies)), []
        schedules = {name: self._schedule("canary-paper" if name == "paper" else "canary-ours", name) for name in names}
        iterations = max(schedule.after(plan.pairs) for schedule in schedules.values())
        with output.progress("predict", len(names)) as done:
            predictor = Predictor(clusters, plan, self.options.seeds, 1000 * self.options.seed, iterations)
            for name in names:
                rows.append(predictor.predict(name, schedules[name]).as_dict())
                done(len(rows))
        passive = Predictor([fitted], plan, DRAWS * self.options.seeds, 1000 * self.options.seed, iterations).passive
        return {"passive": passive, "policies": rows}

    def _choose(self, place: Path) -> Found:
        return choose(
            [row for row in self.folder.found("predict")["policies"] if row["policy"] != "paper"], self.scenario
        )

    def _canary(self, place: Path, stage: str, policy: str) -> Found:
        """Run the real job in paired blocks; returns the measured effect and the agents' reports."""
        plan, schedule, seed = self.scenario.loop, self._schedule(stage, policy), str(self._block_seed(stage))
        result = self._real(place, "canary", plan.canary_iterations(policy), "--policy", policy, "--seed", seed)
        mine = result.jobs[plan.job]
        agents = summarize_agents(mine.snapshots, self.scenario.job(plan.job).ranks)
        return {"policy": policy, **measured(result, plan.job, schedule, agents["paced_pairs"]), "agents": agents}

    def _report(self, place: Path) -> Found:
        report = sim_to_real_report.build(self.scenario, {stage: self.folder.found(stage) for stage in STAGES[:-1]})
        runs = {
            stage: (
                np.asarray(np.load(self._run_of(stage) / "steps.npy"), np.float64),
                self._schedule(stage, self.folder.found(stage)["policy"]),
            )
            for stage in sim_to_real_report.CANARIES
        }
        sim_to_real_report.write(report, runs, self.out)
        return report

    def _real(self, place: Path, mode: str, iterations: int, *more: str) -> RunResult:
        plan = self.scenario.loop
        agents = {plan.job: [*agent_options(plan, mode), *more]}
        with output.progress(f"{self.scenario.name}: {place.name}", iterations) as done:
            # noise of its own for every run: a policy meets other noise than the calibration
            seed = self.scenario.seed + len(STAGES) * self.options.seed + STAGES.index(place.name.partition("-")[2])
            scenario = self.scenario.model_copy(update={"seed": seed})
            return self.run(scenario, place / RUN, agents=agents, iterations=iterations, on_progress=done)

    def _run_of(self, stage: str) -> Path:
        """The files of a stage's real run, of the job with the agent."""
        return self.folder.of(stage) / RUN / self.scenario.loop.job

    def _block_seed(self, stage: str) -> int:
        return 2 * self.options.seed + (stage == "canary-paper")

    def _schedule(self, stage: str, policy: str) -> Schedule:
        """The schedule by which the agent runs that policy."""
        return self.scenario.loop.schedule(policy, self._block_seed(stage))

    def _search(self, clusters: Sequence[Cluster]) -> str:
        """The best static setting of the mechanism on the mean of the drawn clusters."""
        plan, drawn = self.scenario.loop, _numbered(clusters)
        suite = Suite(
            name=self.scenario.name,
            cases=[Case(cluster=name) for name in drawn],
            mechanisms=[plan.mechanism],
            iterations=max(plan.pairs * (plan.block_iterations or BLOCK_ITERATIONS), 40),
            seeds=2 * self.options.seeds,
            first_seed=SEARCH_SEED + self.options.seed,
        )
        with output.progress("best static setting", 1) as done:
            return search_static(suite, drawn, on_done=done).best()

    def _train(self, clusters: Sequence[Cluster], place: Path) -> str:
        """A policy trained on the drawn clusters, as the path of its file."""
        from paceenv.trainers.training import training_run  # PyTorch, which nothing else of a prediction needs

        plan, base, drawn = self.scenario.loop, load_train_config("demo"), _numbered(clusters)
        changes: dict[str, Any] = {
            "clusters": [ClusterShare(cluster=name) for name in drawn],
            "mechanisms": [plan.mechanism],
        }
        config = base.model_copy(
            update={
                "name": self.scenario.name,
                "seed": self.options.seed,
                "environment": base.environment.model_copy(update=changes),
            }
        ).with_timesteps(self.options.train)
        with output.progress("train", self.options.train) as done:
            trained = training_run.train(config, drawn, on_progress=done)
        save_policy(place / "policy.safetensors", trained.file)
        return str((place / "policy.safetensors").absolute())


def known_cluster(scenario: Scenario) -> Cluster | None:
    """The operator's knowledge of the cluster: ``loop.known`` with nominal rates; None where the plan gives nothing."""
    plan, network = scenario.loop, scenario.network
    if not plan.known:
        return None
    uplink_gbps = 2e-3 * (network.uplink_mbps or network.hosts * network.host_mbps)  # both directions
    base: dict[str, Any] = {
        "name": f"{scenario.name}-known",
        "job": {"nodes": scenario.job(plan.job).ranks, "compute_s": 1.0, "gradient_bytes": 1e6},
        "fabric": {"nic_gbps": 1e-3 * network.host_mbps, "nodes_per_leaf": 1, "uplink_gbps": uplink_gbps},
    }
    for key, value in plan.known.items():
        config_files.set_value(base, f"{key}={json.dumps(value)}", "loop.known")
    return config_files.parse(Cluster, base, f"scenario {scenario.name}: loop.known")


def default_rule(scenario: Scenario) -> str:
    """The mechanism's rule with its default settings, spelled out."""
    mechanism = scenario.loop.mechanism
    threshold, window = STATIC_DEFAULTS[mechanism]
    return f"static:mechanism={mechanism},threshold={threshold},window={window}"


def choose(predicted: Sequence[Found], scenario: Scenario) -> Found:
    """The policy with the best predicted effect, always on, whose interval excludes 0; else passive.

    ``run`` is the canary's policy. Where no help is predicted it is the mechanism's default rule, which checks the
    prediction.
    """
    helping = [(Effect.of(row["always"]), row["policy"]) for row in predicted]
    helping = [(found, policy) for found, policy in helping if found.high < 0.0]
    if not helping:
        why = "pacing is not predicted to help; the canary runs the default rule to check that"
        return {"policy": "passive", "run": default_rule(scenario), "why": why}
    best, policy = min(helping, key=lambda one: one[0].change)
    return {"policy": policy, "run": policy, "why": f"the best predicted effect, {best}"}


def measured(result: RunResult, job: str, schedule: Schedule, pairs: int | None) -> Found:
    """The measured effect on mean step time, of the job itself and of the jobs beside it.

    Args:
        result: the real run.
        job: name of the job with the agent.
        schedule: which iterations were paced.
        pairs: how many pairs of blocks count; None for all.
    """
    end_s_T, step_s_T = job_steps(result.jobs[job].steps_s_TR)
    blocks = PairedBlocks.of(schedule, len(step_s_T)).first(pairs)
    beside = {name: job_steps(other.steps_s_TR)[0] for name, other in result.jobs.items() if name != job}
    others = {name: effect(other_log_ratios(end_s_T, ends, blocks)).as_dict() for name, ends in beside.items()}
    steps = {name: mean_step(step_s_T[at]) for name, at in zip(("unpaced", "paced"), blocks.both(), strict=True)}
    return {"measured": effect(log_ratios(step_s_T[None], blocks)[0]).as_dict(), "others": others, "steps": steps}


def summarize_agents(snapshots: Sequence[Snapshot], ranks: int) -> dict[str, Any]:
    """What the ranks' agents reported, what limited them, and for how many pairs all of them paced.

    ``paced_pairs`` is None where all paced to the end. A rank that rolled back stopped after the evaluation that caused
    it; later blocks compare nothing. Where one of the ``ranks`` reported nothing at all, no block compares anything.
    """
    stopped = [s for s in snapshots if text(s, "state") != "canary"]
    silent = ranks - len(snapshots)
    paced_pairs = min((int(number(s, "canary", "pairs") or 0) for s in stopped), default=None)
    reasons = {text(s, "reason") for s in stopped} | (
        {f"{silent} of {ranks} agents reported nothing"} if silent else set()
    )
    taken = sum(number(s, "pacing", "taken") or 0.0 for s in snapshots)
    total_s = sum(number(s, "pacing", "total_s") or 0.0 for s in snapshots)
    cut: Counter[str] = Counter()
    for snapshot in snapshots:
        cut.update({name: int(count) for name, count in (entry(snapshot, "pacing", "cut") or {}).items()})
    return {
        "verdicts": dict(Counter(text(s, "canary", "verdict") or "no verdict" for s in snapshots)),
        "texts": sorted({text(s, "canary", "text") for s in snapshots}),
        "stopped": sorted(reasons),
        "paced_pairs": 0 if silent else paced_pairs,
        "mean_delay_s": total_s / taken if taken else 0.0,
        "delays": int(taken),
        "cut": dict(cut),
    }


def baseline_s(snapshots: Sequence[Snapshot], step_s_T: Array) -> float:
    """The step to which the guard's cap is relative: the agents' own baseline, else the median step."""
    reported = [s for snapshot in snapshots if (s := number(snapshot, "step", "baseline_s")) is not None]
    return float(np.median(reported) if reported else np.median(step_s_T))


def _numbered(clusters: Sequence[Cluster]) -> dict[str, Cluster]:
    """Drawn clusters by names of their own."""
    return {f"{cluster.name}-{d}": cluster for d, cluster in enumerate(clusters)}


def _settled(result: RunResult) -> dict[str, dict[str, float]]:
    """Mean step and CV of every job, without its warm-up."""
    found = {}
    for name, job in result.jobs.items():
        step_s_T: Array = job_steps(job.steps_s_TR)[1]
        kept = step_s_T[int(WARM_SHARE * len(step_s_T)) :]
        found[name] = {**mean_step(kept), "iterations": len(kept)}
    return found
