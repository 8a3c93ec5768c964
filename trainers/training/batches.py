"""The batches that a training run steps: its clusters by shape, as a batch has one number of ranks and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gymnasium.vector import AutoresetMode

from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import shape_of, typical
from paceenv.trainers.evaluation.suites import ClusterShare
from paceenv.trainers.training.train_config import Environment, TrainConfig
from paceenv.trainers.training.vec_env import NativeVecEnv, NullConstraint


@dataclass(frozen=True)
class EnvGroup:
    """One batch and the clusters it draws from, in its own order."""

    env: PacingVectorEnv
    names: tuple[str, ...]
    is_null: tuple[bool, ...]


def make_groups(
    config: Environment, clusters: Mapping[str, Cluster] | None = None, *, has_twins: bool = False
) -> list[EnvGroup]:
    """One batch for each shape of cluster (ranks, process groups, program).

    Rows are in proportion to the weights of a batch's clusters, with at least one row for each cluster. One environment
    over all shapes would draw them by chance instead, which is noisier where few rows share many clusters.

    Args:
        config: environment of the training.
        clusters: replaces configs by name, for example by a fresh calibration.
        has_twins: whether unpaced twins run although rewards are not paired.
    """
    given = clusters or {}
    shapes: dict[tuple[int, int, str], list[tuple[ClusterShare, Cluster]]] = {}
    for share in config.shares():
        cluster = given.get(_name(share)) or share.load()
        cluster = cluster if config.randomize else typical(cluster)
        shapes.setdefault(shape_of(cluster), []).append((share, cluster))
    weights = [sum(share.weight for share, _ in members) for members in shapes.values()]
    rows = _apportioned(config.environments, weights, [len(members) for members in shapes.values()])
    groups = []
    for members, count in zip(shapes.values(), rows, strict=True):
        env = PacingVectorEnv(
            count,
            [cluster for _, cluster in members],
            weights=[share.weight for share, _ in members],
            mechanisms=config.mechanisms,
            interval_iterations=config.interval_iterations,
            episode_intervals=config.episode_intervals,
            cv_weight=config.cv_weight,
            threads=config.threads,
            reward="paired" if config.paired else "raw",
            twin=True if has_twins else None,
            limits=config.limits,
            autoreset_mode=AutoresetMode.SAME_STEP,
            warn_null=False,  # nulls are among the clusters on purpose
        )
        if config.pool_segments:
            env.keep_episodes()
        names = tuple(_name(share) for share, _ in members)
        groups.append(EnvGroup(env, names, tuple(share.null_case for share, _ in members)))
    return groups


def training_envs(config: TrainConfig, clusters: Mapping[str, Cluster] | None = None) -> NativeVecEnv:
    """The environments of a training, with unpaced twins and a constraint where the config asks for them.

    Args:
        config: of the training.
        clusters: as in :func:`make_groups`.
    """
    environment, constraint = config.environment, None
    groups = make_groups(environment, clusters, has_twins=config.constraint is not None)
    if config.constraint is not None:
        names, flags = [n for g in groups for n in g.names], [f for g in groups for f in g.is_null]
        constraint = NullConstraint(config.constraint, names, flags)
    return NativeVecEnv(
        [group.env for group in groups],
        config.seed << 32,
        constraint,
        memory_intervals=environment.memory_intervals,
        change_intervals=environment.change_intervals,
    )


def _apportioned(total: int, weights: Sequence[float], least: Sequence[int]) -> list[int]:
    """``total`` rows in proportion to ``weights``, by largest remainder, but no part with fewer than its ``least``."""
    if total <= sum(least):
        return list(least)
    spare = total - sum(least)
    exact = [spare * weight / sum(weights) for weight in weights]
    rows = [low + int(share) for low, share in zip(least, exact, strict=True)]
    by_remainder = sorted(range(len(rows)), key=lambda i: int(exact[i]) - exact[i])
    for i in by_remainder[: total - sum(rows)]:
        rows[i] += 1
    return rows


def _name(share: ClusterShare) -> str:
    return getattr(share, "name", "") or share.cluster_name
