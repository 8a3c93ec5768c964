"""The score table as text and as plain data, and the committed page ``SCORES.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from paceenv.policies.names import STATIC_DEFAULTS, spelled
from paceenv.trainers.evaluation.evaluate import NULL_LIMIT, TOTAL, Score, SuiteResult, evaluate
from paceenv.trainers.evaluation.static_search import search_static
from paceenv.trainers.evaluation.suites import ALL, Case, Split, Suite, load_suite
from paceenv.ui import output
from paceenv.ui.output import markdown_table

COLUMNS = (  # gains of throughput over passive, ours and the tenants'
    "policy",
    "cluster",
    "gain",
    "95 % interval",
    "gap closed",
    "tenants",
    "CV",
    "delay / ideal",
)
GAIN = "Gain: throughput against passive, ours and the tenants'. Delay: share of the ideal step."
GAP_CLOSED = "Gap closed is a gain as a share of the best in the table [95 % interval]; cannot tell: wider than 100 %."


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
    low, high = (100 * end for end in score.gain_ci95)
    interval = "" if score.policy == "passive" else f"{low:+z.2f} to {high:+z.2f}"
    where = f"{score.cluster} (null)" if score.null_case else score.cluster
    return (
        name,
        where,
        f"{score.gain:+z.2%}",
        interval,
        gap(score),
        "" if score.tenants_gain is None else f"{score.tenants_gain:+z.2%}",
        f"{score.cv:.3f}",
        f"{score.mean_delay_share:.3f}",
    )


def as_json(result: SuiteResult, compared: Sequence[str]) -> dict[str, Any]:
    """The table as plain data, a row per cluster and policy, their means, and the differences of those compared."""
    rows, names = [], labels(result.policies)
    for case in result.suite.cases:
        passive, ranks = result.score("passive", case), case.load().ranks
        for policy in result.policies:
            score = result.score(policy, case)
            rows.append(
                {
                    "suite": case.suite or result.suite.name,
                    "cluster": case.name,
                    "ranks": ranks,
                    "split": case.split,
                    "null": case.null_case,
                    **_as_row(score, names),
                    "gains": result.gain_E(policy, case).tolist(),
                    "cv_passive": passive.cv,
                    "tenants_gain": score.tenants_gain,
                    "limits": asdict(result.suite.limits),
                }
            )
    means = [_as_row(result.total(policy), names) for policy in result.policies]
    return {"rows": rows, "means": means, "paired": differences(result, compared)}


def _as_row(score: Score, names: dict[str, str]) -> dict[str, Any]:
    return {
        "policy": names[score.policy],
        "throughput_gain": score.gain,
        "ci95": list(score.gain_ci95),
        "cv": score.cv,
        "gap_closed": score.gap_closed.value if score.gap_closed else None,
        "gap_ci95": list(score.gap_closed[1:]) if score.gap_closed else None,
    }


def gap(score: Score) -> str:
    """The share of the gap that a policy closes, with its interval; empty where there is none."""
    if score.gap_closed is None:
        return ""
    value, low, high = score.gap_closed
    if high - low > 1.0:  # wider than the gap
        return "cannot tell"
    return f"{value:z.0%} [{100 * low:z.0f}, {100 * high:z.0f}]"


def differences(result: SuiteResult, policies: Sequence[str]) -> list[dict[str, Any]]:
    """The paired gain of the first policy over each of the others."""
    first, *others = dict.fromkeys(policies)
    names, found = labels(result.policies), [result.total(first, against=other) for other in others]
    return [
        {"policy": names[first], "against": names[other], "throughput_gain": one.gain, "ci95": list(one.gain_ci95)}
        for other, one in zip(others, found, strict=True)
    ]


def show(result: SuiteResult, compared: Sequence[str], note: str = "") -> None:
    """Print the policies below each cluster, without columns that are empty or for which the screen has no room.

    Below stand a note, the differences between those compared, and the two numbers of each that SCORES.md begins with.
    """
    columns, rows = ("policy", "gain [95 %]", "gap closed", "tenants", "CV", "delay"), list[tuple[str, ...]]()
    for cluster, of_cluster in groupby(cells(scores(result)), itemgetter(1)):
        rows.append((cluster, *("" for _ in columns[1:])))
        for name, _, gain, interval, *more in of_cluster:
            ends = f" [{interval.replace(' to ', ', ')}]" if interval else ""
            rows.append((" " + name.replace(",", ",\n  "), gain + ends, *more))  # where a long name may break
    kept = [c for c in range(len(columns)) if any(row[c] for row in rows)]
    suite, names = result.suite, labels(result.policies)
    length = f"{suite.seeds} seeds x {suite.iterations} iterations, paired on common random numbers; {suite.limits}"
    gap_closed = [GAP_CLOSED] if columns.index("gap closed") in kept else []
    notes = [GAIN, *gap_closed, length, *_splits(suite), *([note] if note else [])]
    for one in differences(result, compared):
        gain, low, high = (f"{x:+z.2%}" for x in (one["throughput_gain"], *one["ci95"]))
        notes.append(f"{one['policy']} against {one['against']}, paired, {TOTAL}: {gain} [{low}, {high}]")
    weights = {case.weight for case in suite.of_kind(False)}
    kind_of_mean = "mean" if len(weights) == 1 else "weighted mean"
    for policy in result.policies[1:]:
        mean, ends, _, worst = _headline(result, policy)
        ends = ends.replace(" to ", ", ")
        said = (mean and f"{kind_of_mean} gain where pacing may pay {mean} [{ends}]", worst and f"worst null {worst}")
        notes.append(f"{names[policy]}: {', '.join(filter(None, said))}")
    shown = [[row[c] for c in kept] for row in rows]
    output.print_table(f"Suite {result.suite.name}", [columns[c] for c in kept], shown, "\n".join(notes), columns[3:])


def _splits(suite: Suite) -> list[str]:
    """How many clusters are of each split; nothing where all are of one."""
    clusters = Counter(case.split for case in suite.cases)
    said = ", ".join(f"{count} {split}" for split, count in sorted(clusters.items()))
    unseen = "held-out" if "held-out" in clusters else "validation"
    trained = f"the policy may have been trained on those of train: --split {unseen}"
    return [f"{said} clusters; {trained}"] if len(clusters) > 1 else []


# The committed page

POLICIES = ("paper", "adaptive", "learned", "clairvoyant")
SCORED: Split = "held-out"
"""The split of the page; scores on clusters that a policy was trained or selected on say little."""
PAGE = """# Scores

Rebuilt by `make scores` from the committed configs. Throughput against passive, mean over {seeds} seeds of {iterations}
iterations with Student's 95 % intervals over seeds, paired on common random numbers; every rank runs its own copy of a
policy on its own view, within the limits that a live job has by default:
{limits}.
A CV is never a result by itself.

`static` is the single setting of a grid that is best for the whole split, chosen on the clusters of that split
themselves, on other seeds: the bar to beat. `static-tuned` is the best of the same grid for each cluster by itself.
`clairvoyant` looks ahead on the true noise and cannot be deployed. Gap closed is a gain as a share of the best known
one, which is the best gain of any policy or setting in the table on that cluster: `clairvoyant` is exceeded now and
then. Its interval is over seeds and, for a split, over clusters. The bound is the gain if every step were as without
noise and other jobs; only groups of one job that make room for each other can exceed it. Tenants' throughput is that of
the other jobs on the uplink, which pacing may help or cost, too.

`learned` is the released policy: trained on the clusters of split train and selected on those of split validation.
Those of split held-out and of the last section are drawn by a seed that is the beginning of the policy file's SHA-256
(`tests/test_suites.py`), so they were drawn after it was final and nobody chose them.
"""
RANDOM_TEXT = """## random: {clusters} clusters that nobody chose, {seeds} seeds of {iterations} iterations

Structure, sizes, noise and tenants are drawn (`trainers/evaluation/random_clusters.py`).
On {worth} of them something in the table gains more than {least:.1%}; gap closed is over those.
`paceenv evaluate learned adaptive --suite random --split held-out` parts them by structure instead, into {positive}
where pacing may pay and {nulls} nulls: its means and its worst null are others.
"""


def committed_page() -> str:
    """The page ``SCORES.md``: every policy that ships on every case of the suites, and on random clusters."""
    suite = load_suite(ALL)
    text = PAGE.format(seeds=suite.seeds, iterations=suite.iterations, limits=suite.limits)
    suite = suite.only([SCORED]).model_copy(update={"name": SCORED})
    searched = search_static(suite, f"{suite.name}: constant settings")
    static = searched.best()
    result = evaluate([static, *POLICIES], suite, f"{suite.name}: compare", searched.best_of_each())
    drawn = load_suite("random").only([SCORED])
    constants = [spelled({mechanism: pair}) for mechanism, pair in STATIC_DEFAULTS.items()]
    of_random = evaluate([*constants, *POLICIES], drawn, "random: compare")
    return "\n".join([text, *_section(result, static), *_random_section(of_random)])


def _section(result: SuiteResult, static: str) -> list[str]:
    """A split: its totals, and every cluster."""
    suite = result.suite
    positive, nulls = (len(suite.of_kind(is_null)) for is_null in (False, True))
    lines = [f"## {suite.name}: {positive} clusters where pacing may pay, {nulls} nulls", ""]
    lines += [
        f"The best single static setting is `{static}`.",
        f"Gap closed is over the {len(_worth(result))} clusters on which something gains more than {NULL_LIMIT:.1%}.",
        "",
    ]
    rows = [("static" if policy == static else policy, *_headline(result, policy)) for policy in result.policies]
    lines += markdown_table(("policy", "gain, mean of positives", "95 % interval", "gap closed", "worst null"), rows)
    lines.append("")
    for case in suite.cases:
        kind = "null" if case.null_case else "positive"
        bound = f"{kind}, bound {result.bound(case):+z.0%}"
        lines += [f"### {case.name} ({case.suite}, {case.load().ranks} ranks, {bound})", ""]
        of_case = [result.score(policy, case) for policy in result.policies]
        lines += [*markdown_table(COLUMNS, cells(of_case)), ""]
    return lines


def _headline(result: SuiteResult, policy: str) -> tuple[str, str, str, str]:
    """What a policy gains where pacing may pay, with the interval and the gap that it closes, and its worst null."""
    positive, nulls = (result.suite.of_kind(is_null) for is_null in (False, True))
    worst = _worst(result, policy, nulls) if nulls else ""
    if not positive:
        return "", "", "", worst
    total = result.total(policy, cases=positive)
    low, high = total.gain_ci95
    return f"{total.gain:+z.2%}", f"{low:+z.2%} to {high:+z.2%}", gap(total), worst


def _worst(result: SuiteResult, policy: str, cases: Sequence[Case]) -> str:
    worst = min((result.score(policy, case) for case in cases), key=lambda score: score.gain)
    return f"{worst.gain:+z.2%} on {worst.cluster}"


def _worth(result: SuiteResult) -> list[Case]:
    """The clusters on which something gains more than the limit of a null."""
    return [case for case in result.suite.cases if (result.best_known(case) or 0.0) > NULL_LIMIT]


def _random_section(result: SuiteResult) -> list[str]:
    """Random clusters: totals, and a row a cluster on which there is something to win or the policy loses."""
    suite, worth = result.suite, _worth(result)
    positive, nulls = (len(suite.of_kind(is_null)) for is_null in (False, True))
    rest = [case for case in suite.cases if case not in worth]
    length = {"clusters": len(suite.cases), "seeds": suite.seeds, "iterations": suite.iterations}
    text = RANDOM_TEXT.format(**length, worth=len(worth), least=NULL_LIMIT, positive=positive, nulls=nulls)
    totals = [result.total(policy, cases=worth) for policy in result.policies]
    rows = [(one.policy, f"{one.gain:+z.2%}", gap(one), _worst(result, one.policy, rest)) for one in totals]
    lines = [
        text,
        *markdown_table(("policy", "gain where there is any", "gap closed", "worst of the others"), rows),
        "",
    ]
    shown = ("learned", "adaptive", "paper", "clairvoyant")
    of_clusters = list[tuple[str, ...]]()
    for case in suite.cases:
        case_scores = [result.score(policy, case) for policy in shown]
        if case in worth or case_scores[0].gain < -NULL_LIMIT:
            gains = [f"{score.gain:+z.2%}" for score in case_scores]
            of_clusters.append((case.name, case.load().description, *gains, gap(case_scores[0])))
    return [*lines, *markdown_table(("cluster", "what it is", *shown, "gap closed by learned"), of_clusters), ""]
