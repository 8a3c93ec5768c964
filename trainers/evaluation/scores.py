"""``SCORES.md`` and ``SCORES.json``: every suite of the table, every policy that ships, rebuilt by one command."""

from __future__ import annotations

import json
from pathlib import Path

from paceenv.trainers.evaluation import score_table
from paceenv.trainers.evaluation.comparison import load_comparison
from paceenv.trainers.evaluation.evaluate import NULL_LIMIT, TUNED, SuiteResult, evaluate
from paceenv.trainers.evaluation.suites import ALL, SPLITS, Split, Suite, load_suite
from paceenv.ui import config_files, output

CHANGING = "mixed"
"""The suite of clusters that change in the middle of an episode."""
POLICIES = ("paper", "adaptive", "projection", "learned", "clairvoyant")
HEADER = """# Scores

Rebuilt by `make scores` from the committed configs, which also writes SCORES.json. Throughput against passive, mean
over {seeds} seeds of {iterations} iterations with 95 % bootstrap intervals, paired on common random numbers; every rank
runs its own copy of a policy on its own view. A CV is never a result by itself.

`static` is the single setting that is best for a whole split, found by the sweep `static-SPLIT` on the clusters of that
split themselves, on other seeds: the bar to beat. `static-tuned` is tuned for each cluster by the sweep `tuned`. What
they found is committed in `configs/contests` (`make tuned` finds it again). `projection` is given the
config of the cluster it runs on, but neither its draws nor its noise. `clairvoyant` looks ahead on the true noise and
cannot be deployed. Gap closed is a gain as a share of the bound, which is the best gain of any policy or setting in the
table on that cluster, as `clairvoyant` is exceeded now and then. Its interval is over seeds and, for a split, over
clusters. `learned` is the released policy: trained on the clusters of split train and selected on those of split
validation. Those of split held-out were run for this table, and before with earlier policies; what those failed on
became clusters of the other two splits, and others of the same kinds took their place here (docs/decisions.md).
"""


def rebuild(out: Path, splits: tuple[Split, ...] = SPLITS) -> None:
    """Evaluate every policy on every case of the suites and write both files."""
    suite = load_suite(ALL)
    parts, rows = [HEADER.format(seeds=suite.seeds, iterations=suite.iterations)], []
    for split in reversed(splits):  # the most important first
        result, static = compare(suite.only([split]).model_copy(update={"name": split}))
        parts += _section(result, static)
        rows += score_table.as_json(result, {static: "static"})
    config_files.write_text(out / "SCORES.md", "\n".join(parts))
    config_files.write_text(out / "SCORES.json", json.dumps(rows, indent=1) + "\n")
    output.say(f"wrote {out / 'SCORES.md'} and {out / 'SCORES.json'}")


def compare(suite: Suite) -> tuple[SuiteResult, str]:
    """All policies on a split's clusters; also the best single static setting, which a sweep found, as did tuned ones.

    Raises InputError where a cluster is no longer the one that was searched.
    """
    best = load_comparison(f"static-{suite.name}")
    best.check(suite)
    static, tuned = best.policies[0], load_comparison("tuned").tuned_for(suite)
    with output.progress(f"{suite.name}: compare", len(suite.cases) * (len(POLICIES) + 3)) as done:
        return evaluate([static, *POLICIES], suite, on_done=done, tuned=tuned), static


def _section(result: SuiteResult, static: str) -> list[str]:
    """One split: its totals, what they mean, and every cluster."""
    suite = result.suite
    positive = [case for case in suite.cases if not case.null_case]
    nulls = [case for case in suite.cases if case.null_case]
    totals = [result.total(policy, cases=positive) for policy in result.policies]
    lines = [f"## {suite.name}: {len(positive)} clusters where pacing may pay, {len(nulls)} nulls", ""]
    lines += [f"The best single static setting is `{static}`.", ""]
    rows = []
    for total in totals:
        worst = min((result.score(total.policy, case) for case in nulls), key=lambda s: s.gain)
        name = "static" if total.policy == static else total.policy
        closed = score_table.gap(total)
        interval = f"{total.gain_ci95[0]:+.2%} to {total.gain_ci95[1]:+.2%}"
        rows.append((name, f"{total.gain:+.2%}", interval, closed, f"{worst.gain:+.2%} on {worst.cluster}"))
    lines += output.markdown_table(
        ("policy", "gain, mean of positives", "95 % interval", "gap closed", "worst null"), rows
    )
    lines += ["", *[f"- {said}" for said in verdicts(result, "learned", static)], ""]
    for case in suite.cases:
        kind = "null" if case.null_case else "positive"
        lines += [f"### {case.name} ({case.suite}, {result.ranks[case.name]} ranks, {kind})", ""]
        lines += [*score_table.table([result.score(policy, case) for policy in result.policies]), ""]
    return lines


def verdicts(result: SuiteResult, policy: str, static: str) -> list[str]:
    """What the table says of a policy, in sentences: against static, against tuned settings, on nulls.

    Args:
        result: policies on a split, with the tuned settings.
        policy: the policy.
        static: the best single static setting.
    """
    positive = [case for case in result.suite.cases if not case.null_case]
    nulls = [case for case in result.suite.cases if case.null_case]
    against = result.total(policy, against=static)
    said = [f"{policy} against the best single static setting, all clusters: {score_table.interval(against)}."]
    behind = [(result.score(TUNED, c).gain - result.score(policy, c).gain, c.name) for c in positive]
    gap, where = max(behind)
    said.append(f"{policy} is at most {100 * gap:.1f} points behind the setting tuned for a cluster ({where}).")
    for case in positive:
        if case.suite == CHANGING:
            score = result.total(policy, against=TUNED, cases=[case])
            said.append(
                f"On {case.name}, which changes meanwhile, {policy} against the tuned one: "
                f"{score_table.interval(score)}."
            )
    losing = [s for s in (result.score(policy, case) for case in nulls) if s.gain < -NULL_LIMIT]
    outside = ", ".join(f"{s.cluster} {s.gain:+.2%}" for s in losing)
    where = f" ({outside})" if outside else ""
    said.append(f"{policy} loses more than {NULL_LIMIT:.1%} on {len(losing)} of {len(nulls)} nulls{where}.")
    return said
