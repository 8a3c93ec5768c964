"""Which learner belongs to which ``algorithm:`` of a training config."""

from __future__ import annotations

from collections.abc import Mapping

from paceenv.sim.cluster import Cluster
from paceenv.trainers.training.algorithms.learner import Curve, Learner
from paceenv.trainers.training.algorithms.sb3_learner import pairs as pairs
from paceenv.trainers.training.algorithms.sb3_learner import under as under
from paceenv.trainers.training.train_config import TrainConfig


def make_learner(config: TrainConfig, clusters: Mapping[str, Cluster] | None, curve: Curve) -> Learner:
    """The learner of a config's algorithm; only its own libraries are imported.

    Args:
        config: of the training.
        clusters: replaces configs by name, for example by a fresh calibration.
        curve: where the rows of its learning curve go.
    """
    if config.algorithm == "ppo":
        from paceenv.trainers.training.algorithms.ppo_learner import PpoLearner

        return PpoLearner(config, clusters, curve)
    if config.algorithm == "recurrent_ppo":
        from paceenv.trainers.training.algorithms.ppo_learner import RecurrentPpoLearner

        return RecurrentPpoLearner(config, clusters, curve)
    if config.algorithm == "distill":
        from paceenv.trainers.training.algorithms.distill import DistillLearner

        return DistillLearner(config, clusters, curve)
    if config.algorithm == "cma_es":
        from paceenv.trainers.training.algorithms.evolution import CmaEsLearner

        return CmaEsLearner(config, clusters, curve)
    if config.algorithm == "ars":
        from paceenv.trainers.training.algorithms.random_search import ArsLearner

        return ArsLearner(config, clusters, curve)
    from paceenv.trainers.training.algorithms.off_policy import OFF_POLICY

    return OFF_POLICY[config.algorithm](config, clusters, curve)
