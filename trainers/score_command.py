"""``paceenv score`` and ``paceenv leaderboard``: an agent by the fixed protocol, and all of them in one table."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Annotated

import typer

from paceenv.core.errors import InputError
from paceenv.core.files import check_file_name
from paceenv.policies.select import POLICY_HELP
from paceenv.trainers.evaluation import leaderboard as boards
from paceenv.trainers.evaluation import score_row
from paceenv.trainers.evaluation.protocol import KIND, NAME, Protocol, ScoredSplit, load_protocol
from paceenv.ui import config_files, output


def _folder(given: Path | None) -> Path:
    """The folder of rows: as given, or the one of the package."""
    return given if given is not None else config_files.find(KIND, NAME).parent


def _protocol(folder: Path | None) -> Protocol:
    """The protocol of a folder of rows; that of the package where it has none."""
    own = folder is not None and (folder / f"{NAME}.yaml").is_file()
    return load_protocol(folder if own else None)


def score(
    policy: Annotated[
        list[str],
        typer.Option(
            "--policy",
            "-p",
            help=f"{POLICY_HELP}; or a folder of paceenv train, with all its seeds. Repeatable, for more seeds.",
        ),
    ],
    split: Annotated[ScoredSplit, typer.Option(help="Which clusters.")] = "held-out",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the row to this JSON file.")] = None,
    enter: Annotated[
        Path | None,
        typer.Option(help="Put the row and copies of its policies into this folder, by its protocol."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the row; default: the first policy's.")] = None,
    cpu_minutes: Annotated[
        float | None, typer.Option(min=0, help="Of each training, one core; default: what its folder says.")
    ] = None,
) -> None:
    """Score an agent by the leaderboard's protocol: fixed clusters, seeds and length, the limits of a live job.

    Prints the gain on all clusters, on those where any policy wins something and on the others, the share of the gap
    that it closes, and the worst null; the row holds every cluster and seed. Use --split validation while you develop:
    held-out clusters tell the truth only of agents that were never tuned on them.

    Takes 2 to 4 seconds of a core for a rule, 3 to 15 for a network, half a minute more the first time, when the engine
    is compiled; with a protocol of your own without a row of clairvoyant, one to two minutes more.

    Examples: paceenv score -p mine.safetensors -o mine.json -- paceenv score -p runs/ppo --split random
    -- paceenv score -p agent.zip:mechanisms=slack -- paceenv score -p runs/ppo --enter configs/leaderboard --name ppo
    """
    protocol, texts = _protocol(enter), score_row.members(policy)
    title = name or score_row.title_of(policy[0])
    if not re.fullmatch(score_row.NAMES, title):
        raise InputError(f"--name {title}: allowed: 1 to 80 letters, digits, spaces and any of . : / = , + - _")
    if out is not None:
        check_file_name(out)
    if enter is not None:
        score_row.check_entry(texts, title, split, enter, named=name is not None)
    bound = next(filter(None, (boards.bound_of(_folder(one), protocol, split) for one in (enter, None))), None)
    with output.progress(f"score {title} on {split}", 100) as done:
        row = score_row.score(
            texts,
            split,
            protocol,
            name=title,
            bound=bound,
            cpu_minutes=cpu_minutes,
            on_done=lambda share: done(int(100 * share)),
        )
    if out is not None:
        score_row.write_row(row, out)
    if enter is not None:
        output.say(f"wrote {score_row.enter(row, enter)}")
    suite = protocol.suite(split)
    winnable = sum("gap_closed" in facts for facts in row.policies[0].clusters.values())
    output.print_table(
        f"Split {split}, protocol {protocol.version}",
        ("policy", "gain", "where any wins", "elsewhere", "gap closed", "95 % interval", "worst null"),
        [_shown(one) for one in row.policies],
        f"{len(suite.cases)} clusters, {suite.seeds} seeds x {suite.iterations} iterations; {suite.limits}\n"
        f"Some policy wins something on {winnable} of them. Gap closed is the mean share there of the best gain: each "
        "cluster counts\nalike, however much there is to win, so its sign can differ from the gain's. "
        "Elsewhere a policy can only lose.",
    )


def _shown(one: score_row.Scored) -> tuple[str, ...]:
    """A policy's row of the table."""

    def mean_gain(winnable: bool) -> str:
        gains = [facts["gain"] for facts in one.clusters.values() if ("gap_closed" in facts) == winnable]
        return f"{sum(gains) / len(gains):+.2%}" if gains else ""

    return (
        one.policy,
        f"{one.gain:+.2%}",
        mean_gain(winnable=True),
        mean_gain(winnable=False),
        "" if one.gap_closed is None else f"{one.gap_closed:.0%}",
        "" if one.gap_ci95 is None else f"{one.gap_ci95[0]:.0%} to {one.gap_ci95[1]:.0%}",
        "" if one.worst_null is None else f"{one.worst_null[1]:+.2%} on {one.worst_null[0]}",
    )


def leaderboard(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder of rows and their protocol; default: that of the package.")
    ] = None,
    check: Annotated[int, typer.Option(min=0, help="Make each row again on so many clusters; 0: on none.")] = 3,
    check_seed: Annotated[
        int | None, typer.Option(min=0, help="Draws those clusters; default: another one each time.")
    ] = None,
    draw: Annotated[
        bool, typer.Option(help="First draw new clusters from the digests of all rows, and score all again.")
    ] = False,
    write: Annotated[Path | None, typer.Option(help="Write the table as Markdown to this file.")] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Merge the rows of a folder into one table; a row that says what its policies do not do is named, not shown.

    Exit code 2 where a row was refused. Making rows again takes time in proportion to --check: for the rows of the
    package about a minute of a core at 3, ten minutes at 40. --check 0 compares only digests. --draw scores all rows
    again, ten minutes.

    Examples: paceenv leaderboard -- paceenv leaderboard configs/leaderboard --check 40 --write board.md
    -- paceenv leaderboard configs/leaderboard --draw
    """
    rows = _folder(folder)
    if not rows.is_dir():
        raise InputError(f"{rows}: no such folder; allowed: a folder of rows and {NAME}.yaml")
    protocol = _protocol(rows)
    seed = secrets.randbelow(1 << 32) if check_seed is None else check_seed
    if draw:
        protocol = boards.draw(rows, protocol)
        with output.progress("score rows on new clusters", len(list(rows.glob("*.json")))) as done:
            boards.score_again(rows, protocol, done)
        boards.write_protocol(rows, protocol)
    with output.progress("check rows", len(list(rows.glob("*.json")))) as done:
        board = boards.read_board(rows, protocol, clusters=check, seed=seed, on_done=done)
    if write is not None:
        config_files.write_text(write, boards.page(board))
    found = boards.table(board)
    if json_ is not None:
        shown = [dict(zip(boards.COLUMNS, cells, strict=True)) for cells in found]
        output.write_json({"protocol": protocol.version, "rows": shown, "refused": board.refused}, json_)
    if json_ != "-":
        drawn = f", drawn by --check-seed {seed}" if check else ""
        note = f"Protocol {protocol.version}; each row was made again on {check} clusters of its split{drawn}"
        output.print_table("Leaderboard", boards.COLUMNS, found, note)
    if board.refused:
        first, reason = next(iter(board.refused.items()))
        more = f"; {len(board.refused)} rows in all" if len(board.refused) > 1 else ""
        raise InputError(f"{rows / first}: {reason}{more}")
