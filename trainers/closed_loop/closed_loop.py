"""The closed loop on a testbed scenario: observe, calibrate, tailor, predict, contest; resumable.

Every stage has a folder of its own, and is done when its ``done.json`` exists, which is written last. Talks to the
testbed, which runs real jobs, to the calibration, the simulator and the report.
``paceenv.trainers.closed_loop.paired_blocks`` computes the effect of blocks with pacing from the steps that the job
itself recorded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field

from paceenv.calibration.fit_trace import JobFit
from paceenv.calibration.parameters import Parameter
from paceenv.calibration.posterior import DRAWS, drawn_clusters
from paceenv.core.errors import InputError, out_of_range
from paceenv.core.intervals import Interval
from paceenv.core.trace import read_trace
from paceenv.live.decide.blocks import BLOCK_ITERATIONS
from paceenv.live.decide.live_policy import SEPARATOR, find_policy
from paceenv.live.testbed.testbed_run import RunResult, agent_options
from paceenv.live.testbed.testbed_scenario import Scenario
from paceenv.policies.base import INTERVAL_ITERATIONS
from paceenv.policies.names import DEFER_DEFAULT, STATIC_DEFAULTS, spelled
from paceenv.policies.policy_file import PolicyFile, save_policy
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.trainers.closed_loop import sim_to_real_report
from paceenv.trainers.closed_loop.paired_blocks import Found, contest_results, mean_step
from paceenv.trainers.closed_loop.predict import Prediction, Predictor, predicted_differences
from paceenv.trainers.closed_loop.scenario_program import known_cluster, needs_program
from paceenv.trainers.evaluation.static_search import search_static
from paceenv.trainers.evaluation.suites import Case, Suite
from paceenv.ui import config_files, output
from paceenv.ui.config_files import Config
from paceenv.ui.run_directory import LOCK, first_difference, locked

STAGES = ("observe", "probe", "calibrate", "tailor", "predict", "contest")
CONSTANT, DEFAULT, TAILORED = "constant", "default", "tailored"
CANDIDATES = (CONSTANT, DEFAULT, "adaptive", "paper", "learned", TAILORED)
"""In the contest by default: the best static setting of a search on the calibrated cluster, the mechanism's default
rule, two hand-written rules, the released policy, and one trained on clusters drawn from this job's calibration."""
RUN, RECORD, DONE = "run", "loop.json", "done.json"
"""The folder of a real run inside its stage's; what a loop is about; what a stage has found."""
SEARCH_SEED, DRAWS_SEED = 2_000_000, 3_000_000
"""Far from each other and from the seeds of the predictions: a setting meets other noise than in its search."""
TAILOR_S = 60.0
"""Seconds to train a policy for this job."""
WARM_SHARE = 0.1
"""Of an observed run the first tenth is warm-up: connections, buffers, caches."""


class LoopOptions(Config):
    """Options that are not part of the scenario: seeds, and the amount of simulation."""

    seed: int = Field(0, ge=0, description="of the order of the blocks and of the simulated noise")
    seeds: int = Field(8, ge=1, le=1000, description=f"simulated episodes for each of {DRAWS} drawn clusters")
    candidates: tuple[str, ...] = Field(
        CANDIDATES,
        min_length=1,
        description="constant, default, tailored, or policies by name or file",
    )


@dataclass(frozen=True)
class ClosedLoop:
    """One loop in one run directory.

    ``run`` is ``paceenv.live.testbed.testbed_run.run_scenario``, ``calibrate`` is
    ``paceenv.calibration.fit_trace.fit_trace``, or what stands in for them.
    """

    scenario: Scenario
    out: Path
    options: LoopOptions
    run: Callable[..., RunResult]
    calibrate: Callable[..., JobFit]

    def go(self) -> Found:
        """Run the stages that are not done yet; returns the report. Raises InputError."""
        # raises for options that the agent or the prediction would refuse, before anything starts
        plan = self.scenario.loop
        agent_options(plan, "observe")
        block = plan.block_iterations
        if block is not None and block % INTERVAL_ITERATIONS:
            allowed = f"a multiple of the policies' control interval, {INTERVAL_ITERATIONS}"
            raise out_of_range("block_iterations", block, allowed, f"scenario {self.scenario.name}: loop")
        known_cluster(self.scenario)
        if plan.probe_s and needs_program(self.scenario.job(plan.job)):
            allowed = "0, as a job with transfers in the background is not calibrated with a probe"
            raise out_of_range("probe_s", plan.probe_s, allowed, f"scenario {self.scenario.name}: loop")
        for role in self.options.candidates:
            if role not in CANDIDATES and (fault := find_policy(role).fault):
                raise InputError(f"candidate {role}: {fault}; allowed: {', '.join(CANDIDATES)}, or a policy")
        with locked(self.out, "loop"):
            self._claim({"scenario": self.scenario.model_dump(mode="json"), "options": self.options.model_dump()})
            work: dict[str, Callable[[Path], Found]] = {
                "observe": self._observe,
                "probe": self._probe,
                "calibrate": self._calibrate,
                "tailor": self._tailor,
                "predict": self._predict,
                "contest": self._contest,
            }
            for stage in STAGES:
                if not self._done(stage).is_file():
                    output.write_json(work[stage](self._begin(stage)), str(self._done(stage)))
            report = sim_to_real_report.build(self.scenario, {stage: self._result(stage) for stage in STAGES})
            sim_to_real_report.write(report, self.out)
            return report

    def _folder(self, stage: str) -> Path:
        return self.out / f"{1 + STAGES.index(stage)}-{stage}"

    def _done(self, stage: str) -> Path:
        return self._folder(stage) / DONE

    def _result(self, stage: str) -> Found:
        """The result of a finished stage."""
        return _read(self._done(stage))

    def _begin(self, stage: str) -> Path:
        """An empty folder for a stage, without what a loop that was killed in it left there.

        Stages behind it rest on what it will find, so they are no longer done.
        """
        for later in reversed(STAGES[STAGES.index(stage) + 1 :]):
            self._done(later).unlink(missing_ok=True)
        folder = self._folder(stage)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder

    def _claim(self, record: Mapping[str, Any]) -> None:
        """Make a new folder this loop's, or make sure that it is. Raises InputError where it is another's.

        ``record`` is plain data that says what the loop is about; with another one its stages would not fit together.
        """
        path = self.out / RECORD
        if not path.exists():
            begun = (LOCK, f".{RECORD}.")  # and a record that a loop was killed over
            if any(not one.name.startswith(begun) for one in self.out.iterdir()):
                raise InputError(f"{self.out}: holds something else; allowed: a new folder, or one of a loop")
        elif changed := first_difference(_read(path), json.loads(json.dumps(record))):
            raise InputError(f"{self.out}: begun with {changed}; allowed: the same, or another folder")
        output.write_json(dict(record), str(path))

    def _observe(self, place: Path) -> Found:
        plan = self.scenario.loop
        result = self._real(place, "observe", plan.observe_iterations)
        return {"jobs": _settled(result)}

    def _probe(self, place: Path) -> Found:
        plan = self.scenario.loop
        if not plan.probe_s:
            return {"skipped": "the scenario asks for no probe (loop.probe_s)"}
        result = self._real(place, "probe", plan.probe_iterations, "--probe-s", f"{plan.probe_s!r}")
        return {"jobs": _settled(result)}

    def _calibrate(self, place: Path) -> Found:
        observed = read_trace(self._run_of("observe") / "trace.parquet")
        probed = None if "skipped" in self._result("probe") else read_trace(self._run_of("probe") / "trace.parquet")
        name = f"{self.scenario.name}-calibrated"
        fit = self.calibrate(observed, base=known_cluster(self.scenario), name=name, probe=probed)
        config_files.write_yaml(place / "cluster.yaml", fit.cluster.model_dump(exclude_defaults=True))
        return {"parameters": [asdict(parameter) for parameter in fit.parameters]}

    def _tailor(self, place: Path) -> Found:
        """What is fitted to this very job: the best constant, and a policy trained on the drawn clusters."""
        clusters, tailored = self._drawn(), Found(constant=None, policy=None, note="")
        if CONSTANT in self.options.candidates:
            tailored["constant"] = self._search(clusters)
        if TAILORED in self.options.candidates:
            path = place / "tailored.safetensors"
            if (trained := self._train(clusters)) is not None:
                save_policy(path, trained)
                tailored["policy"] = str(path.absolute())
            else:
                tailored["note"] = "no policy was tailored: no setting gains anything on the calibrated cluster"
        return tailored

    def _predict(self, place: Path) -> Found:
        clusters, names = self._drawn(), list(self._candidates())
        if not names:
            raise InputError(f"{self.out}: no candidate is left to measure: nothing is better than no pacing here")
        contests = {name: self.scenario.loop.contest([name], self.options.seed) for name in names}
        plan, options = self.scenario.loop, self.options
        iterations = max(contest.after(plan.pairs) for contest in contests.values())
        predictor = Predictor(clusters, plan, options.seeds, 1000 * options.seed, iterations)
        predictions = list[Prediction]()
        with output.progress("predict", len(names)) as done:
            for name in names:
                predictions.append(predictor.predict(name, contests[name]))
                done(len(predictions))
        fitted = self._fitted()
        passive = Predictor([fitted], plan, DRAWS * options.seeds, 1000 * options.seed, iterations).passive
        return {
            "passive": passive,
            "policies": [
                {**prediction.as_dict(), "sha256": find_policy(prediction.policy).sha256} for prediction in predictions
            ],
            "differences": predicted_differences(predictions),
        }

    def _contest(self, place: Path) -> Found:
        """Run the real job with candidates that take turns; returns what each of them did to its steps."""
        plan, seed, roles = self.scenario.loop, 2 * self.options.seed, self._candidates()
        policies = list(roles)
        for row in self._result("predict")["policies"]:
            policy, digest = row["policy"], row.get("sha256")
            if policy in policies and digest is not None and find_policy(policy).sha256 != digest:
                raise InputError(f"candidate {policy}: another file than the one predicted; allowed: another folder")
        more = ("--candidates", SEPARATOR.join(policies), "--seed", str(seed))
        result = self._real(place, "canary", plan.contest_iterations(policies, plan.pairs), *more)
        ranks = self.scenario.job(plan.job).ranks
        contest = contest_results(result, plan.job, plan.contest(policies, seed), policies, ranks)
        for row in contest["candidates"]:
            row.update(roles=roles[row["policy"]], sha256=find_policy(row["policy"]).sha256)
        return {**contest, "seed": seed, **_version()}

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
        return self._folder(stage) / RUN / self.scenario.loop.job

    def _fitted(self) -> Cluster:
        """The calibrated cluster."""
        cluster = load_cluster(self._folder("calibrate") / "cluster.yaml")
        return cluster.changed([f"pacing.mechanism={self.scenario.loop.mechanism}"], "loop")

    def _drawn(self) -> list[Cluster]:
        """Clusters that may be the real one, drawn from the errors of the calibration."""
        plan, observed, fitted = self.scenario.loop, self._result("observe"), self._fitted()
        parameters = [Parameter(**known) for known in self._result("calibrate")["parameters"]]
        measured = Interval(*(observed["jobs"][plan.job][name] for name in ("mean_s", "low_s", "high_s")))
        return drawn_clusters(fitted, parameters, measured, DRAWS_SEED + self.options.seed)

    def _candidates(self) -> dict[str, list[str]]:
        """The policies of the contest, each with its roles; a policy may have several."""
        fitted, roles_of = self._result("tailor"), dict[str, list[str]]()
        known = {CONSTANT: fitted["constant"], DEFAULT: default_rule(self.scenario), TAILORED: fitted["policy"]}
        for role in self.options.candidates:
            if (policy := known.get(role, role)) is not None:
                roles_of.setdefault(policy, []).append(role)
        return roles_of

    def _search(self, clusters: Sequence[Cluster]) -> str:
        """The best static setting of the mechanism on the mean of the drawn clusters."""
        plan = self.scenario.loop
        suite = Suite(
            name=self.scenario.name,
            cases=[Case(name=f"{cluster.name}-{d}", cluster=cluster) for d, cluster in enumerate(clusters)],
            mechanisms=[plan.mechanism],
            iterations=max(plan.pairs * (plan.block_iterations or BLOCK_ITERATIONS), 40),
            seeds=2 * self.options.seeds,
            first_seed=SEARCH_SEED + self.options.seed,
            limits=plan.limits,
        )
        with output.progress("best static setting", 1) as done:
            return search_static(suite, on_done=done).best()

    def _train(self, clusters: Sequence[Cluster]) -> PolicyFile | None:
        """A policy trained on the drawn clusters for :data:`TAILOR_S`; None where no setting gains anything on them."""
        from paceenv.trainers.training.job_training import train_for_job  # PyTorch: slow to import

        plan = self.scenario.loop
        with output.progress("tailor", TAILOR_S) as done:
            trained = train_for_job(
                clusters,
                seconds=TAILOR_S,
                seed=self.options.seed,
                mechanisms=[plan.mechanism],
                limits=plan.limits,
                on_progress=done,
            )
        return trained.student


def _read(path: Path) -> Found:
    try:
        result: Found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}; allowed: remove it, and its stage runs again") from None
    return result


def default_rule(scenario: Scenario) -> str:
    """The mechanism's rule with its default settings."""
    mechanism = scenario.loop.mechanism
    return spelled({mechanism: STATIC_DEFAULTS.get(mechanism, DEFER_DEFAULT)})


def _version() -> dict[str, str]:
    """When this is, and the commit of the code."""
    from paceenv.trainers.training.training_run import git_commit

    return {"date": datetime.now(UTC).date().isoformat(), "commit": git_commit()}


def _settled(result: RunResult) -> dict[str, dict[str, float]]:
    """Mean step and CV of every job, without its warm-up."""
    settled = {}
    for name, job in result.jobs.items():
        kept = job.step_s_T[int(WARM_SHARE * len(job.step_s_T)) :]
        settled[name] = {**mean_step(kept), "iterations": len(kept)}
    return settled
