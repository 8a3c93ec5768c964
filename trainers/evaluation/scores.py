"""``SCORES.md`` and ``SCORES.json``: every suite of the table, every policy that ships, rebuilt by one command."""

from __future__ import annotations

from pathlib import Path

from paceenv.policies.names import STATIC_DEFAULTS
from paceenv.sim.cluster import Cluster
from paceenv.trainers.evaluation import score_table
from paceenv.trainers.evaluation.comparison import load_comparison
from paceenv.trainers.evaluation.evaluate import NULL_LIMIT, TUNED, SuiteResult, evaluate
from paceenv.trainers.evaluation.suites import ALL, Split, Suite, load_suite
from paceenv.ui import config_files, output

CHANGING = "mixed"
"""The suite of clusters that change in the middle of an episode."""
POLICIES = ("paper", "adaptive", "projection", "learned", "clairvoyant")
HEADER = """# Scores

Rebuilt by `make scores` from the committed configs, which also writes SCORES.json. Throughput against passive, mean
over {seeds} seeds of {iterations} iterations with 95 % bootstrap intervals, paired on common random numbers; every rank
runs its own copy of a policy on its own view, within the limits that a live job has by default:
{limits}.
A CV is never a result by itself.

`static` is the single setting that is best for a whole split, found by the sweep `static-SPLIT` on the clusters of that
split themselves, on other seeds: the bar to beat. `static-tuned` is tuned for each cluster by the sweep `tuned`. What
they found is committed in `configs/contests` (`make tuned` finds it again). `projection` is given the
config of the cluster it runs on, but neither its draws nor its noise. `clairvoyant` looks ahead on the true noise and
cannot be deployed. Gap closed is a gain as a share of the bound, which is the best gain of any policy or setting in the
table on that cluster, as `clairvoyant` is exceeded now and then. Its interval is over seeds and, for a split, over
clusters. Tenants' throughput is that of the other jobs on the uplink, which pacing may help or cost, too.

`learned` is the released policy: trained on the clusters of split train and selected on those of split validation.
Those of split held-out and of the last section are drawn by a seed that is the beginning of the policy file's SHA-256
(`tests/test_suites.py`), so they were drawn after it was final and nobody chose them.
"""
RANDOM_TEXT = """## random: {clusters} clusters that nobody chose, {seeds} seeds of {iterations} iterations

Structure, sizes, noise and neighbours are drawn (`trainers/evaluation/random_clusters.py`).
On {worth} of them something in the table gains more than {least:.1%}; gap closed is over those.
"""


SCORED: tuple[Split, ...] = ("held-out",)
"""The splits of the table; scores on clusters that a policy was trained or selected on say little."""


def rebuild(out: Path, splits: tuple[Split, ...] = SCORED) -> None:
    """Evaluate every policy on every case of the suites and write both files.

    Args:
        out: folder of both files.
        splits: which clusters of the suites.
    """
    suite = load_suite(ALL)
    parts = [HEADER.format(seeds=suite.seeds, iterations=suite.iterations, limits=suite.limits)]
    rows = []
    for split in splits:
        result, static = compare(suite.only([split]).model_copy(update={"name": split}))
        parts += _section(result, static)
        rows += score_table.as_json(result, {static: "static"})
    result = compare_random(load_suite("random").only(["held-out"]))
    parts += _random_section(result)
    rows += score_table.as_json(result)
    config_files.write_text(out / "SCORES.md", "\n".join(parts))
    config_files.write_json(out / "SCORES.json", rows)
    output.say(f"wrote {out / 'SCORES.md'} and {out / 'SCORES.json'}")


def compare_random(suite: Suite) -> SuiteResult:
    """All policies on random clusters, and each mechanism's default constant."""
    constants = [f"static:{m}={threshold}/{window}" for m, (threshold, window) in STATIC_DEFAULTS.items()]
    policies = [*constants, *POLICIES]
    with output.progress("random: compare", len(suite.cases) * (len(policies) + 1)) as done:
        return evaluate(policies, suite, on_done=done)


def _random_section(result: SuiteResult) -> list[str]:
    """Random clusters: totals, and a row a cluster on which there is something to win or the policy loses."""
    suite = result.suite
    worth = [case for case in suite.cases if (result.bound(case) or 0.0) > NULL_LIMIT]
    rest = [case for case in suite.cases if case not in worth]
    rows = list[tuple[str, ...]]()
    for policy in result.policies:
        total = result.total(policy, cases=worth)
        worst = min((result.score(policy, case) for case in rest), key=lambda s: s.gain)
        rows.append((policy, f"{total.gain:+.2%}", score_table.gap(total), f"{worst.gain:+.2%} on {worst.cluster}"))
    text = RANDOM_TEXT.format(
        clusters=len(suite.cases), seeds=suite.seeds, iterations=suite.iterations, worth=len(worth), least=NULL_LIMIT
    )
    head: tuple[str, ...] = ("policy", "gain where there is any", "gap closed", "worst of the others")
    lines = [text, *output.markdown_table(head, rows), ""]
    scores = {case.name: {policy: result.score(policy, case) for policy in result.policies} for case in suite.cases}
    shown = [case for case in suite.cases if case in worth or scores[case.name]["learned"].gain < -NULL_LIMIT]
    rows = []
    for case in shown:
        by_policy = scores[case.name]
        cells = [f"{by_policy[policy].gain:+.2%}" for policy in ("learned", "adaptive", "paper", "clairvoyant")]
        cluster = case.cluster if isinstance(case.cluster, Cluster) else case.load()
        rows.append((case.name, cluster.description, *cells, score_table.gap(by_policy["learned"])))
    head = ("cluster", "what it is", "learned", "adaptive", "paper", "clairvoyant", "gap closed by learned")
    return [*lines, *output.markdown_table(head, rows), ""]


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
    lines += ["", *_by_kind(result), *[f"- {said}" for said in verdicts(result, "learned", static)], ""]
    for case in suite.cases:
        kind = "null" if case.null_case else "positive"
        lines += [f"### {case.name} ({case.suite}, {result.ranks[case.name]} ranks, {kind})", ""]
        lines += [*score_table.table([result.score(policy, case) for policy in result.policies]), ""]
    return lines


def _by_kind(result: SuiteResult) -> list[str]:
    """The totals of the positives with incast and of the others: gains of incast are several times as large."""
    incast = [c for c in result.suite.cases if not c.null_case and c.load().job.collective != "all_reduce"]
    other = [c for c in result.suite.cases if not c.null_case and c not in incast]
    rows = []
    for policy in ("learned", TUNED, "adaptive", "paper", "clairvoyant"):
        apart = [result.total(policy, cases=cases) for cases in (incast, other) if cases]
        rows.append((policy, *(cell for total in apart for cell in (f"{total.gain:+.2%}", score_table.gap(total)))))
    names = [f"{name} ({len(cases)})" for name, cases in (("incast", incast), ("the others", other)) if cases]
    head = ("policy", *(cell for name in names for cell in (f"{name}: gain", "gap closed")))
    return [*output.markdown_table(head, rows), ""]


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
