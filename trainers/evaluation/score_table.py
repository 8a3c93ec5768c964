"""The score table (Markdown, JSON, terminal) and the verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceenv.trainers.evaluation.evaluate import NULL_LIMIT, Score, SuiteResult
from paceenv.ui.output import markdown_table

HEADER = (  # gains of throughput over passive, ours and the tenants'
    "policy",
    "cluster",
    "gain",
    "95 % interval",
    "gap closed",
    "tenants",
    "CV",
    "delay / ideal",
)


def scores(result: SuiteResult) -> list[Score]:
    """The suite's total first, then every cluster, policies in their order."""
    rows = [result.total(policy) for policy in result.policies]
    for case in result.suite.cases:
        rows += [result.score(policy, case) for policy in result.policies]
    return rows


def label(policy: str) -> str:
    """A policy as a table names it: a file by its name alone, with its options."""
    file, suffix, options = policy.rpartition(".safetensors")
    return f"{Path(file).name}{options}" if suffix else policy


def labels(policies: Iterable[str]) -> dict[str, str]:
    """Their labels, by policy; files whose names alone are the same keep their paths."""
    short = {policy: label(policy) for policy in policies}
    seen = Counter(short.values())
    return {policy: name if seen[name] == 1 else policy for policy, name in short.items()}


def cells(rows: Sequence[Score]) -> list[tuple[str, ...]]:
    """Rows of the table as text."""
    names = labels(score.policy for score in rows)
    return [_cells(score, names[score.policy]) for score in rows]


def _cells(score: Score, name: str) -> tuple[str, ...]:
    interval = "" if score.policy == "passive" else f"{score.gain_ci95[0]:+.1%} to {score.gain_ci95[1]:+.1%}"
    where = f"{score.cluster} (null)" if score.null_case else score.cluster
    return (
        name,
        where,
        f"{score.gain:+.2%}",
        interval,
        gap(score),
        "" if score.tenants_gain is None else f"{score.tenants_gain:+.2%}",
        f"{score.cv:.3f}",
        f"{score.mean_delay_share:.3f}",
    )


def as_json(result: SuiteResult, names: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """The table as plain data, a row a cluster and policy; ``names`` gives policies the names that the rows carry.

    Args:
        result: all policies on a suite.
        names: by the name in the result; None keeps those.
    """
    rows, names = [], labels(result.policies) | (names or {})
    for case in result.suite.cases:
        passive = result.score("passive", case)
        for policy in result.policies:
            score = result.score(policy, case)
            rows.append(
                {
                    "suite": case.suite or result.suite.name,
                    "cluster": case.name,
                    "ranks": result.ranks[case.name],
                    "split": case.split,
                    "null": case.null_case,
                    "policy": names[policy],
                    "throughput_gain": score.gain,
                    "ci95": list(score.gain_ci95),
                    "cv": score.cv,
                    "cv_passive": passive.cv,
                    "tenants_gain": score.tenants_gain,
                    "gap_closed": score.gap_closed.value if score.gap_closed else None,
                    "gap_ci95": list(score.gap_closed[1:]) if score.gap_closed else None,
                    "limits": asdict(result.suite.limits),
                }
            )
    return rows


def gap(score: Score) -> str:
    """The share of the gap that a policy closes, with its interval; empty where there is none."""
    if score.gap_closed is None:
        return ""
    value, low, high = score.gap_closed
    return f"{value:.0%} [{100 * low:.0f}, {100 * high:.0f}]"


def table(rows: Sequence[Score]) -> list[str]:
    """Rows of scores as a Markdown table."""
    return markdown_table(HEADER, cells(rows))


def markdown(result: SuiteResult, verdicts: Sequence[str] = ()) -> str:
    """The table as Markdown, with verdicts in words.

    Args:
        result: all policies on a suite.
        verdicts: a sentence each.
    """
    suite = result.suite
    lines = [
        f"## Suite {suite.name}",
        "",
        suite.description.strip(),
        "",
        f"{suite.seeds} seeds of {suite.iterations} iterations each, paired on common random numbers; every rank runs "
        "its own copy of the policy on its own view. Clairvoyant looks ahead on the true noise and cannot be deployed. "
        "Gap closed is a gain as a share of the best in the table.",
        "",
        *table(scores(result)),
    ]
    return "\n".join([*lines, "", *[f"- {verdict}" for verdict in verdicts], ""])


def verdicts(result: SuiteResult, policy: str, static: str) -> list[str]:
    """Plain sentences: does the policy help, does it beat the best static setting, does it leave the nulls alone.

    Args:
        result: policies on a suite, both of these among them.
        policy: the policy.
        static: the best single static setting.
    """
    total, beats = result.total(policy), result.total(policy, against=static)
    name = label(policy)
    sentences = [f"{name} {_effect(total)} against no pacing: {interval(total)}."]
    low, high = beats.gain_ci95
    word = "beats" if low > 0 else "loses to" if high < 0 else "is not distinguishable from"
    sentences.append(f"{name} {word} the best single static setting ({static}): {interval(beats)}.")
    for case in result.suite.cases:
        score = result.score(policy, case)
        if case.null_case:
            fine = "within" if -score.gain <= NULL_LIMIT else "OUTSIDE"
            sentences.append(
                f"On {case.name}, where pacing cannot help, it is {fine} the limit of -0.5 %: {interval(score)}."
            )
    return sentences


def _effect(score: Score) -> str:
    low, high = score.gain_ci95
    return "helps" if low > 0 else "costs" if high < 0 else "makes no difference that these seeds show"


def interval(score: Score) -> str:
    """A gain with its interval."""
    return f"{score.gain:+.2%} [{score.gain_ci95[0]:+.2%}, {score.gain_ci95[1]:+.2%}]"
