"""Predictions from a trace's own operations: ranks replaced or taken out, everything else as it was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceenv.core.errors import InputError
from paceenv.diagnosis.rank_scenario import RankScenario
from paceenv.whatif.change import SLOW, Change
from paceenv.whatif.estimate import MIN_STEPS, Array, cv, mean, of_steps
from paceenv.whatif.predictions import Case, Differences, Prediction, Row


def predict(scenario: RankScenario, source: str, changes: Sequence[Change]) -> Prediction:
    """Today's steps as measured, and the steps after every change, from the trace's own operations.

    Args:
        changes: rows of the answer; only ranks may change.

    Raises:
        InputError: for a question that the trace cannot answer.
    """
    today_s_T = scenario.matrix.step_s_T
    rows = [_row(scenario, change, today_s_T) for change in changes]
    open_ = ["energy: a trace has no power figures"]
    if scenario.matrix.steps < MIN_STEPS:
        open_.append(f"intervals: {scenario.matrix.steps} steps are too few, at least {MIN_STEPS} are needed")
    explained = float((scenario.replayed_s_T / today_s_T).mean())
    return Prediction(
        source=source,
        basis="replay",
        method=f"replay of {scenario.matrix.steps} steps' own operations, which explain {explained:.1%} of a step",
        unit="batches of a data-parallel rank",
        today=_case(scenario, today_s_T, scenario.replicas),
        changed=rows,
        assumes=_assumes(changes),
        cannot_tell=open_,
        measured_step_s=of_steps(mean(today_s_T), len(today_s_T)),
        measured_cv=of_steps(cv(today_s_T), len(today_s_T), positive=True),
    )


def _row(scenario: RankScenario, change: Change, today_s_T: Array) -> Row:
    if SLOW in (change.removed, change.replaced):
        raise InputError(
            "slow: a replay needs numbers of ranks; allowed: numbers, and paceenv diagnose names the slow ranks"
        )
    removed, replaced = (tuple(ranks) for ranks in (change.removed, change.replaced) if not isinstance(ranks, str))
    changed_s_T = scenario.steps(replaced, removed)
    left = scenario.replicas - len(scenario.replicas_of(removed))
    after_s, before_s = mean(changed_s_T), mean(today_s_T)
    after_cv, before_cv = cv(changed_s_T), cv(today_s_T)
    T = len(today_s_T)
    return Row(
        change,
        _case(scenario, changed_s_T, left),
        Differences(
            step=of_steps(lambda w: after_s(w) / before_s(w) - 1.0, T),
            throughput=of_steps(lambda w: left / scenario.replicas * before_s(w) / after_s(w) - 1.0, T),
            cv=of_steps(lambda w: after_cv(w) - before_cv(w), T),
        ),
    )


def _case(scenario: RankScenario, step_s_T: Array, replicas: int) -> Case:
    mean_s, T = mean(step_s_T), len(step_s_T)
    ranks = int(np.unique(scenario.matrix.rank_N).size * replicas / scenario.replicas)
    throughput = of_steps(lambda w: replicas / mean_s(w), T)
    return Case(ranks, ranks, "as traced", of_steps(mean_s, T), throughput, of_steps(cv(step_s_T), T, positive=True))


def _assumes(changes: Sequence[Change]) -> list[str]:
    lines = ["collectives and transfers take as long as in the trace; waits follow from the replay"]
    if any(c.replaced for c in changes):
        lines.append("ranks replaced: they compute like the ranks of their stage, with the same variation")
    if any(c.removed for c in changes):
        lines.append("ranks taken out: with all stages of their data-parallel rank; a stage cannot go alone")
        lines.append("the others keep their batch, so a step does less work")
    return lines
