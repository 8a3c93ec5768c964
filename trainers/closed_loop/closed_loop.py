"""The closed loop on a testbed scenario: observe, probe, calibrate, train, predict, measure.

Talks to the testbed, which runs real jobs, to the calibration, the simulator and the report.
``paceenv.trainers.closed_loop.paired_blocks`` computes the effect of blocks with pacing from the steps that the job
itself recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from paceenv.calibration.fit_trace import JobFit
from paceenv.calibration.posterior import DRAWS, drawn_clusters
from paceenv.core.errors import InputError
from paceenv.core.trace import read_trace
from paceenv.live.decide.blocks import BLOCK_ITERATIONS
from paceenv.live.decide.live_policy import SEPARATOR, find_policy
from paceenv.live.testbed.testbed_run import JobResult, agent_options
from paceenv.live.testbed.testbed_scenario import Scenario
from paceenv.policies.names import DEFER_DEFAULT, STATIC_DEFAULTS, spelled
from paceenv.policies.policy_file import save_policy
from paceenv.sim.cluster import Cluster
from paceenv.trainers.closed_loop import sim_to_real_report
from paceenv.trainers.closed_loop.paired_blocks import Candidate, Found, mean_step, measure
from paceenv.trainers.closed_loop.predict import Predictor
from paceenv.trainers.closed_loop.scenario_cluster import known_cluster, left_out
from paceenv.trainers.evaluation.static_search import search_static
from paceenv.trainers.evaluation.suites import Case, Suite
from paceenv.ui import config_files, output
from paceenv.ui.run_directory import prepare_folder

STAGES = ("observe", "probe", "calibrate", "train", "predict", "measure")
"""The stages; those with a real run have a folder of that name."""
CONSTANT, DEFAULT, TAILORED = "constant", "default", "tailored"
CANDIDATES = (CONSTANT, DEFAULT, "adaptive", "paper", "learned", TAILORED)
"""Measured by default: the best static setting of a search on the calibrated cluster, the mechanism's default
rule, two hand-written rules, the released policy, and one trained on clusters drawn from this job's calibration."""
SEARCH_SEED, DRAWS_SEED = 2_000_000, 3_000_000
"""Far from each other and from the seeds of the predictions: a setting meets other noise than in its search."""
TRAIN_S = 60.0
"""Seconds to train a policy for this job."""
WARM_SHARE = 0.1
"""Of an observed run the first tenth is warm-up: connections, buffers, caches."""


@dataclass(frozen=True)
class ClosedLoop:
    """One loop in a new folder: a scenario, seed of blocks and noise, and roles or policies to compare.

    ``run`` is ``paceenv.live.testbed.testbed_run.run_scenario``, ``calibrate`` is
    ``paceenv.calibration.fit_trace.fit_trace``, or what stands in for them; ``seeds`` are simulated episodes for each
    drawn cluster.
    """

    scenario: Scenario
    out: Path
    run: Callable[..., dict[str, JobResult]]
    calibrate: Callable[..., JobFit]
    seed: int = 0
    candidates: Sequence[str] = CANDIDATES
    seeds: int = 8

    def go(self) -> Found:
        """Run all stages; returns the report. Raises InputError."""
        self._check()
        plan = self.scenario.loop
        observed, probed = self._settled("observe", plan.observe_iterations), None
        if plan.probe_s:
            probed = self._settled("probe", plan.probe_iterations, "--probe-s", f"{plan.probe_s!r}")
        fit = self._fit(has_probe=probed is not None)
        fitted = fit.cluster.changed([f"pacing.mechanism={plan.mechanism}"], "loop")
        # clusters that may be the real one, drawn from the errors of the calibration
        clusters = drawn_clusters(fitted, fit.parameters, observed["step_s"], DRAWS_SEED + self.seed)
        roles = self._roles(clusters)
        passive, candidates = self._predict(fitted, clusters, roles)
        notes = left_out(self.scenario)
        if TAILORED in self.candidates and not any(TAILORED in of_policy for of_policy in roles.values()):
            notes.insert(0, "no policy was trained: no setting gains anything on the calibrated cluster")
        stages = {"observed": observed, "probe": probed, "simulated": passive, "calibration": fit.parameters}
        report = sim_to_real_report.build(self.scenario, stages, candidates, self._measure(candidates), notes)
        sim_to_real_report.write(report, self.out)
        return report

    def _check(self) -> None:
        """Raises InputError for what the agent or the prediction would refuse, before anything starts."""
        known_cluster(self.scenario)
        for role in self.candidates:
            if role not in CANDIDATES and (fault := find_policy(role).fault):
                raise InputError(f"candidate {role}: {fault}; allowed: {', '.join(CANDIDATES)}, or a policy")
        if any(prepare_folder(self.out).iterdir()):
            raise InputError(f"{self.out}: holds something; allowed: a new folder")

    def _real(self, stage: str, iterations: int, *more: str) -> JobResult:
        """Run the real job with the agent."""
        plan, mode = self.scenario.loop, "canary" if stage == "measure" else stage
        agents = {plan.job: [*agent_options(plan, mode), *more]}
        with output.progress(f"{self.scenario.name}: {stage}", iterations) as done:
            # noise of its own for every run: a policy meets other noise than the calibration
            seed = self.scenario.seed + len(STAGES) * self.seed + STAGES.index(stage)
            scenario = self.scenario.model_copy(update={"seed": seed})
            jobs = self.run(scenario, self.out / stage, agents=agents, iterations=iterations, on_progress=done)
            return jobs[plan.job]

    def _settled(self, stage: str, iterations: int, *more: str) -> Found:
        """Mean step and CV of the real job in a stage, without its warm-up."""
        step_s_T = self._real(stage, iterations, *more).step_s_T
        kept = step_s_T[int(WARM_SHARE * len(step_s_T)) :]
        return {**mean_step(kept), "iterations": len(kept)}

    def _fit(self, *, has_probe: bool) -> JobFit:
        """Calibrate a cluster to the runs."""
        observed, probe = (self.out / stage / self.scenario.loop.job / "trace.parquet" for stage in STAGES[:2])
        fit = self.calibrate(
            read_trace(observed),
            base=known_cluster(self.scenario),
            name=f"{self.scenario.name}-calibrated",
            probe=read_trace(probe) if has_probe else None,
        )
        config_files.write_yaml(self.out / "cluster.yaml", fit.cluster.model_dump(exclude_defaults=True))
        return fit

    def _roles(self, clusters: Sequence[Cluster]) -> dict[str, list[str]]:
        """The policies to measure, each with its roles; a policy may have several. Raises InputError for none."""
        makers = {CONSTANT: self._search, DEFAULT: lambda _: default_rule(self.scenario), TAILORED: self._tailored}
        roles_of = dict[str, list[str]]()
        for role in self.candidates:
            policy = makers[role](clusters) if role in makers else role
            if policy is not None:
                roles_of.setdefault(policy, []).append(role)
        if not roles_of:
            raise InputError(f"{self.out}: no candidate is left to measure: nothing is better than no pacing here")
        return roles_of

    def _search(self, clusters: Sequence[Cluster]) -> str:
        """The best static setting of the mechanism on the mean of the drawn clusters."""
        plan = self.scenario.loop
        suite = Suite(
            name=self.scenario.name,
            cases=[Case(name=f"{cluster.name}-{d}", cluster=cluster) for d, cluster in enumerate(clusters)],
            mechanisms=[plan.mechanism],
            iterations=max(plan.pairs * (plan.block_iterations or BLOCK_ITERATIONS), 40),
            seeds=2 * self.seeds,
            first_seed=SEARCH_SEED + self.seed,
            limits=plan.limits,
        )
        return search_static(suite, "best static setting").best()

    def _tailored(self, clusters: Sequence[Cluster]) -> str | None:
        """A policy trained on the drawn clusters for :data:`TRAIN_S`; None where no setting gains anything on them."""
        from paceenv.trainers.training.job_training import train_for_job  # PyTorch: slow to import

        plan = self.scenario.loop
        with output.progress("train", TRAIN_S) as done:
            trained = train_for_job(
                clusters,
                seconds=TRAIN_S,
                seed=self.seed,
                mechanisms=[plan.mechanism],
                limits=plan.limits,
                on_progress=done,
            )
        if trained.student is None:
            return None
        path = self.out / "tailored.safetensors"
        save_policy(path, trained.student)
        return str(path.absolute())

    def _predict(
        self, fitted: Cluster, clusters: Sequence[Cluster], roles: Mapping[str, Sequence[str]]
    ) -> tuple[Found, list[Candidate]]:
        """The job without pacing, and what each candidate does to its step, simulated."""
        plan, candidates = self.scenario.loop, list[Candidate]()
        schedules = {policy: plan.schedule([policy], self.seed) for policy in roles}
        iterations = max(schedule.after(plan.pairs) for schedule in schedules.values())
        predictor = Predictor(clusters, plan, self.seeds, 1000 * self.seed, iterations)
        with output.progress("predict", len(roles)) as done:
            for policy, schedule in schedules.items():
                predicted = predictor.predict(policy, schedule)
                candidates.append(replace(predicted, roles=roles[policy], sha256=find_policy(policy).sha256))
                done(len(candidates))
        return Predictor([fitted], plan, DRAWS * self.seeds, 1000 * self.seed, iterations).passive, candidates

    def _measure(self, candidates: Sequence[Candidate]) -> Found:
        """Run the real job with candidates that take turns, and measure what each of them does to its steps."""
        from paceenv.trainers.training.training_run import git_commit

        plan, seed, policies = self.scenario.loop, 2 * self.seed, [one.policy for one in candidates]
        more = ("--candidates", SEPARATOR.join(policies), "--seed", str(seed))
        result = self._real("measure", plan.measure_iterations(policies, plan.pairs), *more)
        measured = measure(result, plan.schedule(policies, seed), candidates, self.scenario.job(plan.job).ranks)
        return {**measured, "seed": seed, "date": datetime.now(UTC).date().isoformat(), "commit": git_commit()}


def default_rule(scenario: Scenario) -> str:
    """The mechanism's rule with its default settings."""
    mechanism = scenario.loop.mechanism
    return spelled({mechanism: STATIC_DEFAULTS.get(mechanism, DEFER_DEFAULT)})
