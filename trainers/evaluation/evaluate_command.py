"""``paceenv evaluate``: policies compared on suites of clusters."""

from __future__ import annotations

from typing import Annotated

import typer

from paceenv.core.files import atomic_write, check_file_name
from paceenv.core.limits import LIMIT_HELP
from paceenv.policies.select import NAMES, POLICY_HELP, select_policy
from paceenv.trainers.evaluation import score_table
from paceenv.trainers.evaluation.evaluate import evaluate as compare
from paceenv.trainers.evaluation.static_search import search_static
from paceenv.trainers.evaluation.suites import Split, load_suite
from paceenv.ui import output
from paceenv.ui.json_option import JsonFile


def evaluate(
    policies: Annotated[
        list[str],
        typer.Argument(
            metavar="POLICY...",
            help=f"{POLICY_HELP}; or best-static.",
        ),
    ],
    suite: Annotated[
        str | None, typer.Option(help="A suite: a file, a name in configs/suites, or all. Default: demo.")
    ] = None,
    split: Annotated[Split | None, typer.Option(help="Only the clusters of this split. Default: of all.")] = None,
    seeds: Annotated[int | None, typer.Option(min=2, help="Seeds per cluster, instead of the suite's.")] = None,
    iterations: Annotated[
        int | None,
        typer.Option("--iterations", "-i", min=40, help="Iterations of each episode, instead of the suite's."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help=LIMIT_HELP),
    ] = None,
    watch: Annotated[
        str | None, typer.Option(metavar="PAGE", help="Also draw what ranks do under each policy, as one HTML file.")
    ] = None,
    json_: JsonFile = None,
) -> None:
    """Compare policies on a suite of clusters against passive, paired on the same noise, with 95 % intervals.

    best-static searches the best single static setting of the suite's mechanisms, on other seeds. Below the table
    stands the paired difference of the first policy to each other one. The gap closed is shown where clairvoyant is
    among them.

    Examples: paceenv evaluate paper adaptive -- paceenv evaluate learned best-static --suite all --split validation
    -- paceenv evaluate learned best-static --watch side-by-side.html
    """
    for path in (watch, json_ if json_ != "-" else None):
        if path is not None:
            check_file_name(path)
    update = {k: v for k, v in (("seeds", seeds), ("iterations", iterations)) if v is not None}
    names, chosen = list(policies), load_suite(suite or "demo")
    chosen = chosen.model_copy(update={**update, "limits": chosen.limits.changed(limit or [])})
    chosen = chosen.only([split]) if split else chosen
    for name in names:
        if name != "best-static":  # a wrong name is refused before anything is compiled
            select_policy(name, chosen.cases[0].load(), (*NAMES, "best-static"))
    note = ""
    if "best-static" in names:
        best = search_static(chosen, "best static setting").best()
        names, note = [best if name == "best-static" else name for name in names], f"best-static is {best}"
    result = compare(names, chosen, f"evaluate on {chosen.name}")
    for line in result.outside():
        output.say(line)
    if output.write_json(score_table.as_json(result, names), json_):
        score_table.show(result, names, note)
    if watch is not None:
        from paceenv.trainers.evaluation.result_plots import side_by_side_page  # Matplotlib doubles the time of --help

        with output.progress("draw", len(chosen.cases)) as done:
            atomic_write(watch, side_by_side_page(result, done))
        output.say(f"wrote {watch}")
