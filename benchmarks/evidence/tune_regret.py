"""Mode tune in simulation: regret once decided, wrong decisions against the stated error, loss while searching.

Drives the tuner and the plan of the live agent (``paceenv.live.decide.tune``, ``tune_plan``) on the clusters of the
suites, under the agent's default limits. Every candidate's own gain is measured apart, always on, on the same noise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from paceenv.core import pacing, standing, timing
from paceenv.live.decide.canary import block_plan
from paceenv.live.decide.live_policy import DEFAULT_CONSTANTS, find_candidates
from paceenv.live.decide.tune import ERROR, TOLERANCE, Tuner
from paceenv.live.decide.tune_plan import TunePlan
from paceenv.live.options import Options
from paceenv.policies.base import Policy
from paceenv.policies.rollout import start
from paceenv.sim.engine.simulator import Simulator
from paceenv.trainers.evaluation.suites import ALL, Case, load_suite
from paceenv.ui import output
from paceenv.ui.config_files import write_text
from paceenv.ui.output import markdown_table

CANDIDATES = ";".join([*DEFAULT_CONSTANTS, "adaptive", "learned"])
INTERVAL = 20
TRUTH_ITERATIONS, TRUTH_FROM = 6000, 1000
QUIET, MOST_ITERATIONS = 60, 150_000
WORD_S, LEAD_S = 60.0, 20.0
FIRST_SEED = 5_000_000
"""Far from the seeds of training, evaluation and the closed loop."""
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "policies" / "tune-regret.md"
BEGIN, END = "<!-- begin: python -m benchmarks.evidence.tune_regret --write -->", "<!-- end -->"


@dataclass(frozen=True)
class Search:
    """One search on one cluster.

    Attributes:
        suite: of the case.
        case: its name.
        seed: of the noise.
        gains: true relative gain of each candidate, always on.
        winner: number of the deployed candidate; None: none.
        decided: whether the search ended in time.
        iterations: until the decision.
        seconds: the same in the job's time.
        loss: share of that time lost against no pacing on the same noise.
        said: the loss that the tuner itself prints.
    """

    suite: str
    case: str
    seed: int
    gains: tuple[float, ...]
    winner: int | None
    decided: bool
    iterations: int
    seconds: float
    loss: float
    said: float

    @property
    def best(self) -> float:
        """Gain of the best choice, no pacing included."""
        return max(0.0, *self.gains)

    @property
    def got(self) -> float:
        return 0.0 if self.winner is None else self.gains[self.winner]

    @property
    def wrong(self) -> bool:
        """The winner does not help, or another candidate is better by more than the tuner tolerates."""
        return self.winner is not None and (self.got <= 0.0 or self.best - self.got > max(0.01, TOLERANCE * self.best))


class _Turns:
    """Candidates that take turns on one simulated job, each with its unbroken history; every rank on its own view."""

    def __init__(self, simulator: Simulator, policies: Sequence[Policy]) -> None:
        self._simulator, self._policies = simulator, policies
        self._settings = [simulator.off()] * len(policies)
        self._left: list[standing.Left | None] = [None] * len(policies)
        self._acting: int | None = None
        for policy in policies:
            policy.reset(simulator.batch.ranks)

    def run(self, acting: int | None, iterations: int) -> NDArray[np.float64]:
        """Step times of one interval in which that candidate may act."""
        simulator, state = self._simulator, self._simulator.state
        if acting != self._acting:
            if self._acting is not None:
                self._left[self._acting] = standing.leave(state.rank_EFR, state.tick_EK)
            elif all(left is None for left in self._left):
                self._left = [standing.begin(state.rank_EFR, state.tick_EK)] * len(self._left)
            if acting is not None and (left := self._left[acting]) is not None:
                standing.resume(state.rank_EFR, state.tick_EK, left)
            self._acting = acting
        if acting is None:
            state.rank_EFR[:, timing.DELAY_S] = 0.0
            return np.asarray(simulator.run(simulator.off(), iterations)[0])
        step_s_T = np.asarray(simulator.run(self._settings[acting], iterations)[0])
        policy, ranks = self._policies[acting], simulator.batch.ranks
        fixed = policy.constant()
        if fixed is not None:
            self._settings[acting] = fixed[None, None]
        else:
            view = simulator.observe(every_rank=True).reshape(ranks, -1)
            self._settings[acting] = policy.act(view).reshape(1, ranks, len(pacing.MECHANISMS), 2)
        return step_s_T


def _policies() -> list[Policy]:
    return [one.policy for one in find_candidates(CANDIDATES).candidates]


def true_gains(case: Case, seed: int) -> tuple[float, ...]:
    """Relative fall of the mean step by each candidate, always on, against no pacing on the same noise."""
    plain = start(case.load(), np.array([seed]))
    plain_s = plain.run(plain.off(), TRUTH_ITERATIONS)[0, TRUTH_FROM:].mean()
    found = []
    for policy in _policies():
        turns = _Turns(start(case.load(), np.array([seed])), [policy])
        step_s_T = np.concatenate([turns.run(0, INTERVAL) for _ in range(TRUTH_ITERATIONS // INTERVAL)])
        found.append(float(1.0 - step_s_T[TRUTH_FROM:].mean() / plain_s))
    return tuple(found)


def search(case: Case, seed: int) -> Search:
    """One search, from the start of the job to its first decision."""
    policies, simulator = _policies(), start(case.load(), np.array([seed]))
    plan = TunePlan(seed, [block_plan([policy]) for policy in policies])
    options = Options()
    tuner = Tuner(
        CANDIDATES.split(";"),
        plan,
        min_gain=options.min_gain,
        most_loss=options.most_loss,
        most_pairs=options.most_pairs,
    )
    turns, now, next_word, steps = _Turns(simulator, policies), 0, QUIET, list[NDArray[np.float64]]()
    began = QUIET
    while tuner.searches == 0 and now < MOST_ITERATIONS:
        if now >= next_word:
            step_s = float(steps[-1].mean())
            lead = math.ceil(LEAD_S / step_s)
            if tuner.decide(now, lead, 1 << 40) is not None:
                next_word = now + math.ceil(WORD_S / step_s)
                began = plan.words[0].begin
        first = plan.turn(now)
        length = 1
        while length < INTERVAL and plan.turn(now + length).arm == first.arm:
            length += 1
        if first.pair is None and (later := plan.words) and now < later[-1].begin < now + length:
            length = later[-1].begin - now
        step_s_T = turns.run(first.arm, length)
        for i, step_s in enumerate(step_s_T.tolist()):
            tuner.add(now + i, plan.turn(now + i), step_s)
        steps.append(step_s_T)
        now += length
    plain = start(case.load(), np.array([seed]))
    plain_s_T = plain.run(plain.off(), now)[0]
    step_s_T = np.concatenate(steps)
    searched_s = float(step_s_T[began:].sum())
    return Search(
        suite=case.suite,
        case=case.name,
        seed=seed,
        gains=true_gains(case, seed),
        winner=tuner.winner,
        decided=tuner.searches > 0,
        iterations=now,
        seconds=float(step_s_T.sum()),
        loss=(searched_s - float(plain_s_T[began:].sum())) / searched_s if now > began else 0.0,
        said=tuner.loss_share,
    )


def _one(given: tuple[Case, int]) -> Search:
    return search(*given)


def table(found: Sequence[Search]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """One row a suite, and one for all."""
    columns = (
        "suite",
        "searches",
        "best gain",
        "gain of the winner",
        "share of the best",
        "wrong",
        "none deployed",
        "iterations, median",
        "hours, median",
        "loss, mean",
        "loss, worst",
    )
    rows = list[tuple[str, ...]]()
    for suite in [*dict.fromkeys(one.suite for one in found), "all"]:
        part = [one for one in found if suite in ("all", one.suite)]
        best, got = (float(np.mean([getattr(one, name) for one in part])) for name in ("best", "got"))
        rows.append(
            (
                suite,
                str(len(part)),
                f"{100 * best:.2f} %",
                f"{100 * got:.2f} %",
                f"{100 * got / best:.0f} %" if best > 1e-3 else "-",
                f"{sum(one.wrong for one in part)} ({100 * np.mean([one.wrong for one in part]):.1f} %)",
                f"{sum(one.winner is None for one in part)}",
                f"{np.median([one.iterations for one in part]):,.0f}",
                f"{np.median([one.seconds for one in part]) / 3600.0:.2g}",
                f"{100 * np.mean([one.loss for one in part]):+.2f} %",
                f"{100 * max(one.loss for one in part):+.2f} %",
            )
        )
    return columns, rows


def main(
    suite: Annotated[str, typer.Option(help="A suite by name or file.")] = ALL,
    seeds: Annotated[int, typer.Option(min=1, help="Searches on every cluster.")] = 2,
    most_ranks: Annotated[int, typer.Option(min=2, help="Larger clusters are left out.")] = 64,
    processes: Annotated[int, typer.Option(min=1, help="Searches at a time.")] = os.cpu_count() or 1,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Replace the table in docs/evidence/policies/tune-regret.md.")
    ] = False,
) -> None:
    """Search on every cluster of a suite and print the table."""
    cases = [case for case in load_suite(suite).cases if start(case.load(), np.array([0])).batch.ranks <= most_ranks]
    work = [(case, FIRST_SEED + seed) for case in cases for seed in range(seeds)]
    with output.progress("searches", len(work)) as done, ProcessPoolExecutor(processes) as pool:
        found = []
        for one in pool.map(partial(_one), work):
            found.append(one)
            done(len(found))
    columns, rows = table(found)
    data: list[dict[str, Any]] = [asdict(one) | {"wrong": one.wrong} for one in found]
    if json_ is not None:
        output.write_json({"searches": data, "candidates": CANDIDATES.split(";"), "error": ERROR}, json_)
    if json_ != "-":
        output.print_table("Searches of mode tune", columns, rows)
    if write:
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        lines = "\n".join(markdown_table(columns, rows))
        write_text(DOCUMENT, f"{before}{BEGIN}\n\n{lines}\n\n{END}{after}")


if __name__ == "__main__":
    typer.run(main)
