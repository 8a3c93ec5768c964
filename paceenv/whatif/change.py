"""A change of a job: nodes, oversubscription, ranks, pacing, settings; and the cluster with that change."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Final, TypeVar

from paceenv.core.errors import InputError, out_of_range
from paceenv.sim.cluster import Cluster

WHERE: Final = "whatif"
MAX_ROWS: Final = 64
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Change:
    """One row of the answer; a field that is None or empty stays as it is.

    ``removed`` ranks are taken out, ``replaced`` ones become like their peers. ``settings`` are ``key=value`` of the
    cluster config.
    """

    nodes: int | None = None
    oversubscription: float | None = None
    removed: tuple[int, ...] = ()
    replaced: tuple[int, ...] = ()
    pacing: str = "passive"
    settings: tuple[str, ...] = ()
    SHOWN: ClassVar = ("label", "nodes", "oversubscription", "removed", "replaced", "pacing", "settings")

    @property
    def label(self) -> str:
        """In words, for tables and legends."""
        parts = [f"{self.nodes} nodes"] if self.nodes is not None else []
        if self.oversubscription is not None:
            parts.append(f"oversubscription {self.oversubscription:g}")
        if self.removed:
            parts.append(f"without {_ranks_text(self.removed)}")
        if self.replaced:
            parts.append(f"{_ranks_text(self.replaced)} replaced")
        return ", ".join([*parts, *self.settings, *([] if self.pacing == "passive" else [self.pacing])])


def _ranks_text(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"


def combinations(
    nodes: str | None,
    oversubscription: str | None,
    removed: str | None,
    replaced: str | None,
    pacing: Sequence[str],
    settings: Sequence[str],
) -> list[Change]:
    """Every combination of what the options name, one row each; ``settings`` are applied to every row."""
    sizes = _listed("--nodes", nodes, _size, "numbers of at least 1, with commas between")
    ratios = _listed("--oversubscription", oversubscription, _ratio, "positive numbers, with commas between")
    ranks = "ranks, one row each (0,3), or together (0+3)"
    without, others = (
        _listed("--remove-rank", removed, _ranks, ranks),
        _listed("--replace-rank", replaced, _ranks, ranks),
    )
    policies = list(dict.fromkeys(pacing)) or ["passive"]
    rows = [
        Change(n, o, gone or (), new or (), policy, tuple(settings))
        for n, o, gone, new, policy in product(sizes, ratios, without, others, policies)
    ]
    if rows == [Change()]:
        options = "--nodes, --oversubscription, --remove-rank, --replace-rank, --pacing, --set"
        raise InputError(f"nothing to change; allowed: at least one of {options}")
    if len(rows) > MAX_ROWS:
        raise out_of_range("combinations", len(rows), f"at most {MAX_ROWS}", WHERE)
    for row in rows:
        if set(row.removed) & set(row.replaced):
            raise InputError(f"{row.label}: the same rank taken out and replaced; allowed: one of the two")
    return rows


def _listed(
    option: str, text: str | None, read: Callable[[str], _Value], allowed: str
) -> Sequence[_Value] | Sequence[None]:
    if text is None:
        return (None,)
    try:
        return list(dict.fromkeys(read(part.strip()) for part in text.split(",")))
    except ValueError:
        raise out_of_range(option, text, allowed, WHERE) from None


def _size(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d{0,6}", text, re.ASCII):
        raise ValueError
    return int(text)


def _ratio(text: str) -> float:
    value = float(text)
    if not 0.0 < value < 1e9:
        raise ValueError
    return value


def _ranks(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,9}(\+\d{1,9})*", text, re.ASCII):
        raise ValueError
    return tuple(sorted({int(part) for part in text.split("+")}))


def apply(change: Change, cluster: Cluster, slow: Collection[int] | None) -> Cluster:
    """The changed cluster.

    A job of one process group keeps one. Several groups keep their size and become more, except those of a program
    that grow. Every rank keeps its batch.
    """
    job, where = cluster.job, f"{cluster.name}, {change.label}"
    gone, both = len(change.removed), (*change.removed, *change.replaced)
    if both and cluster.noise.slow_ranks and slow is None:
        raise InputError(
            f"{where}: which ranks of {cluster.name} are slow is drawn anew in every run; allowed: --set "
            "noise.slow_ranks=0"
        )
    if (change.removed or change.replaced) and cluster.program is not None and cluster.program.has_own_ranks:
        raise InputError(
            f"{where}: ranks differ by phases of the program, so nothing says what the others would do; allowed: a "
            "program whose ranks all do the same"
        )
    if gone and job.ranks_per_node > 1:
        raise InputError(f"{where}: a node has {job.ranks_per_node} ranks; allowed: --nodes, which removes whole nodes")
    if gone and change.nodes is None and job.groups > 1:
        raise InputError(
            f"{where}: a process group of {job.group_nodes} nodes would have fewer than the others; allowed: with "
            f"--nodes, a multiple of {job.group_nodes}"
        )
    if gone and job.nodes - gone < 2:
        raise out_of_range("ranks taken out", gone, f"such that two of the {job.nodes} are left", where)
    assignments: list[str] = []
    nodes = change.nodes if change.nodes is not None else job.nodes - gone
    if nodes != job.nodes:
        assignments.append(f"job.nodes={nodes}")
        if job.nodes_per_group is not None and job.groups == 1:
            assignments.append("job.nodes_per_group=null")
    if healed := len(set(both) & set(slow or ())):
        assignments.append(f"noise.slow_ranks={cluster.noise.slow_ranks - healed}")
    if change.oversubscription is not None:
        assignments += [f"fabric.oversubscription={change.oversubscription!r}", "fabric.uplink_gbps=null"]
    assignments += change.settings
    return cluster.changed(assignments, cluster.name, "--set") if assignments else cluster
