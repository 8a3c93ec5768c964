"""The batches that a training run steps: its clusters by shape, as a batch has one number of ranks and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceenv.cluster import Cluster
from paceenv.env import PacingVectorEnv
from trainers.config import Environment
from trainers.suites import ClusterShare


@dataclass(frozen=True)
class Part:
    """One batch and the clusters it draws from, in its own order."""

    env: PacingVectorEnv
    names: tuple[str, ...]
    is_null: tuple[bool, ...]


def make_parts(config: Environment, clusters: Mapping[str, Cluster] | None = None) -> list[Part]:
    """A batch for each shape, rows in proportion to the weights of its clusters and at least one for each of them.

    ``clusters`` replaces configs by name (a fresh calibration, say).
    """
    given = clusters or {}
    shapes: dict[tuple[int, int], list[tuple[ClusterShare, Cluster]]] = {}
    for share in config.shares():
        cluster = given.get(_name(share)) or share.load()
        shapes.setdefault((cluster.ranks, cluster.groups), []).append((share, cluster))
    total = sum(share.weight for members in shapes.values() for share, _ in members)
    parts = []
    for members in shapes.values():
        weight = sum(share.weight for share, _ in members)
        env = PacingVectorEnv(
            max(round(config.environments * weight / total), len(members)) if len(shapes) > 1 else config.environments,
            [cluster for _, cluster in members],
            weights=[share.weight for share, _ in members],
            mechanisms=config.mechanisms,
            interval_iterations=config.interval_iterations,
            episode_intervals=config.episode_intervals,
            cv_weight=config.cv_weight,
            threads=config.threads,
        )
        names = tuple(_name(share) for share, _ in members)
        parts.append(Part(env, names, tuple(share.null_case for share, _ in members)))
    return parts


def _name(share: ClusterShare) -> str:
    return getattr(share, "name", "") or share.cluster
