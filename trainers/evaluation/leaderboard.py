"""The leaderboard: rows of a folder checked and merged into one table; a new draw of clusters for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceenv.core.errors import InputError
from paceenv.trainers.evaluation import score_row
from paceenv.trainers.evaluation.evaluate import AHEAD
from paceenv.trainers.evaluation.protocol import NAME, SCORED_SPLITS, Protocol, ScoredSplit
from paceenv.trainers.evaluation.score_row import Gains, Row
from paceenv.ui import config_files, output

HEADER = """# Leaderboard

Here you find how well agents pace on clusters that none of them could know, and how to add your own.
`make leaderboard` makes this page from the rows in `configs/leaderboard`.

Protocol, version {version}: {seeds} episodes of {iterations} iterations on each cluster, paired with the same episodes
without pacing; every rank decides for itself, within the limits of a live job.
`held-out` are {clusters} relatives of the clusters by hand, `random` {clusters} clusters of any kind.
Both are drawn by a seed that is the hash of the digests of the policies that were final before the draw.
`validation` are the clusters on which trainings select; no row is sorted by it.

*Gap closed* is the gain as a share of the best gain of any row on a cluster, over the clusters on which anything is
gained. Of several training seeds it is the median, with the lowest and the highest in brackets: all seeds count, not
the best one. Of one policy the brackets are its 95 % interval over clusters and episodes.
*Worst null* is the least gain where pacing cannot help. `clairvoyant` knows the noise to come and cannot be deployed.
CPU-minutes are of one core for one training.
"""
COLUMNS = (
    "agent",
    "algorithm",
    "seeds",
    "held-out",
    "random",
    "validation",
    "worst null",
    "CPU-minutes",
    "final before the draw",
)


@dataclass(frozen=True)
class Board:
    """The rows that count, and for each file that does not the reason."""

    protocol: Protocol
    rows: list[Row]
    refused: dict[str, str]


def read_board(
    folder: Path,
    protocol: Protocol,
    *,
    clusters: int,
    seed: int = 0,
    on_done: Callable[[float], None] = lambda done: None,
) -> Board:
    """Read and check all rows of a folder.

    Args:
        folder: of ``.json`` files.
        protocol: rows of another one are refused.
        clusters: on how many of its clusters each row is made again; 0: none.
        seed: draws them.
        on_done: called with the number of rows done.
    """
    rows, refused = list[Row](), dict[str, str]()
    for n, path in enumerate(sorted(folder.glob("*.json")), 1):
        try:
            row = score_row.load_row(path)
            score_row.check(row, protocol, folder, clusters, seed)
            if any((row.name, row.split) == (other.name, other.split) for other in rows):
                raise InputError(f"a second row named {row.name}; allowed: one for each split")
            rows.append(row)
        except InputError as error:
            refused[path.name] = str(error).removeprefix(f"{path}: ")
        on_done(n)
    return Board(protocol, rows, refused)


def bound_of(folder: Path, protocol: Protocol, split: ScoredSplit) -> Gains | None:
    """The gains of the policy that looks ahead, from its row in a folder; None where there is none of this protocol.

    Args:
        folder: of the rows.
        protocol: the one that counts.
        split: which clusters.
    """
    path = folder / f"{AHEAD}.{split}.json"
    if not path.is_file():
        return None
    row = score_row.load_row(path)
    if row.fingerprint != protocol.fingerprint(split):
        return None
    try:
        score_row.check_shape(row, protocol)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return row.policies[0].arrays()


def table(board: Board) -> list[tuple[str, ...]]:
    """A row an agent, by what it closes of the gap on the held-out clusters, then on the random ones."""
    cells: dict[str, dict[str, str]] = {}
    order: dict[str, list[float]] = {}
    for split in SCORED_SPLITS:
        rows = [row for row in board.rows if row.split == split]
        suite, everybody = board.protocol.suite(split), [one.arrays() for row in rows for one in row.policies]
        for row in rows:
            found = [score_row.summarise(one.arrays(), everybody, suite) for one in row.policies]
            closed = [one["gap_closed"] or 0.0 for one in found]
            low, high = (min(closed), max(closed)) if len(closed) > 1 else found[0]["gap_ci95"] or (0.0, 0.0)
            middle = float(np.median(closed))
            own = cells.setdefault(row.name, _facts(row, board.protocol))
            own[split] = f"{middle:.0%} [{100 * low:.0f}, {100 * high:.0f}]"
            nulls = [one["worst_null"] for one in found if one["worst_null"] is not None]
            if nulls and split != "validation":
                worst = min(
                    [*nulls, *([(own["null on"], float(own["null"]))] if "null" in own else [])], key=lambda n: n[1]
                )
                own |= {"null on": worst[0], "null": str(worst[1])}
            if split != "validation":
                order.setdefault(row.name, [1.0, 1.0])[split == "random"] = -middle
    last = [1.0, 1.0]
    names = sorted(cells, key=lambda name: (order.get(name, last), name))
    return [tuple(_worst(cells[n]) if c == "worst null" else cells[n].get(c, "") for c in COLUMNS) for n in names]


def _worst(own: dict[str, str]) -> str:
    return f"{float(own['null']):+.2%} on {own['null on']}" if "null" in own else ""


def _facts(row: Row, protocol: Protocol) -> dict[str, str]:
    """What does not depend on the split."""
    minutes = [one.cpu_minutes for one in row.policies if one.cpu_minutes is not None]
    digests = [one.sha256 for one in row.policies]
    final = "by hand" if None in digests else "yes" if set(digests) <= set(protocol.drawn_from) else "**no**"
    return {
        "agent": row.name,
        "algorithm": row.policies[0].algorithm,
        "seeds": str(len(row.policies)) if any(digests) else "",
        "CPU-minutes": f"{np.median(minutes):.1f}" if minutes else "",
        "final before the draw": final,
    }


def page(board: Board) -> str:
    """The leaderboard's page."""
    facts = board.protocol.model_dump(include={"version", "seeds", "iterations", "clusters"})
    lines = [HEADER.format(**facts), *output.markdown_table(COLUMNS, table(board)), ""]
    if board.refused:
        lines += ["Not in the table:", "", *(f"- `{name}`: {reason}" for name, reason in board.refused.items()), ""]
    lines += ["[Score an agent of your own](../how-to/score-your-agent.md).", ""]
    return "\n".join(lines)


def draw(folder: Path, protocol: Protocol) -> Protocol:
    """The next version of the protocol, with clusters drawn from the digests of all policies of a folder's rows.

    Args:
        folder: of the rows.
        protocol: the present version.
    """
    rows = [score_row.load_row(path) for path in sorted(folder.glob("*.json"))]
    digests = sorted({one.sha256 for row in rows for one in row.policies if one.sha256 is not None})
    if not digests:
        raise InputError(f"{folder}: no policy with a digest; allowed: a folder with rows of policy files")
    new = protocol.model_copy(update={"version": protocol.version + 1, "drawn_from": digests})
    return config_files.parse(Protocol, new.model_dump(mode="json"), str(folder))


def write_protocol(folder: Path, protocol: Protocol) -> None:
    """Replace a folder's protocol, after its rows: what was cut short in between is made again by the next draw.

    Args:
        folder: of the rows.
        protocol: by which they were scored.
    """
    config_files.write_yaml(folder / f"{NAME}.yaml", protocol.model_dump(mode="json"))


def score_again(folder: Path, protocol: Protocol, on_done: Callable[[float], None]) -> None:
    """Score every row of a folder by a protocol, the one that looks ahead first.

    Args:
        folder: with the rows, which are replaced.
        protocol: the new one.
        on_done: called with the number of rows done.
    """
    paths = sorted(folder.glob("*.json"), key=lambda path: (not path.name.startswith(f"{AHEAD}."), path.name))
    rows = [score_row.load_row(path) for path in paths]
    located = [[score_row.located(one, folder) for one in row.policies] for row in rows]  # before any row is replaced
    for n, (path, row, texts) in enumerate(zip(paths, rows, located, strict=True), 1):
        bound = bound_of(folder, protocol, row.split)
        again = score_row.score(texts, row.split, protocol, name=row.name, bound=bound)
        told = ("algorithm", "training_seed", "decisions", "cpu_minutes")
        kept = [
            new.model_copy(update={key: getattr(old, key) for key in told} | {"policy": old.policy})
            for new, old in zip(again.policies, row.policies, strict=True)
        ]
        score_row.write_row(again.model_copy(update={"policies": kept}), path)
        on_done(n)
