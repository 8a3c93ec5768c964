"""The constraint on nulls: multipliers follow what pacing costs there, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.trainers.training.train_config import Constraint
from paceenv.trainers.training.training_envs import NativeVecEnv, NullConstraint


def test_a_multiplier_grows_while_its_null_costs_too_much_and_falls_after() -> None:
    constraint = NullConstraint(Constraint(limit=0.01, rate=10.0, most=0.5), ["a", "b", "null"], [False, False, True])
    rows, costs = np.array([0, 2, 2]), np.array([0.5, 0.02, 0.04])
    np.testing.assert_array_equal(constraint.penalty(rows, costs), 0.0)
    said = constraint.update()
    assert said == {
        "null_cost": pytest.approx(0.03),
        "null_cost_worst": pytest.approx(0.03),
        "multiplier": pytest.approx(0.2),
    }
    np.testing.assert_allclose(constraint.penalty(rows, costs), [0.0, 0.2 * 0.02, 0.2 * 0.04])
    for _ in range(9):
        constraint.penalty(rows, costs)
        constraint.update()
    assert constraint.multiplier_C.tolist() == [0.0, 0.0, 0.5], "positives are never limited, and there is a most"
    constraint.penalty(rows, np.zeros(3))
    assert constraint.update()["multiplier"] == pytest.approx(0.4)
    assert constraint.update() == {}, "nothing seen, nothing said"


def test_the_adapter_charges_the_rows_of_null_clusters() -> None:
    """Two batches: the second one's rows pay the multiplier times their own cost on top, the first one's do not."""

    def make(cluster: str) -> PacingVectorEnv:
        mode = AutoresetMode.SAME_STEP
        return PacingVectorEnv(
            4, cluster, mechanisms="paper", episode_intervals=9, autoreset_mode=mode, warn_null=False
        )

    def rewards(multiplier: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        constraint = NullConstraint(Constraint(), ["two-jobs", "null-jitter"], [False, True])
        constraint.multiplier_C[:] = multiplier
        envs = NativeVecEnv([make("two-jobs"), make("null-jitter")], 0, constraint)
        envs.reset()
        return np.stack([envs.step(np.tile([-1.0, 1.0], (8, 1)).astype(np.float32))[1] for _ in range(5)])

    free, charged = rewards(0.0), rewards(2.0)
    np.testing.assert_array_equal(free[:, :4], charged[:, :4])
    assert (charged[1:, 4:] < free[1:, 4:]).all()
    envs = NativeVecEnv([make("null-jitter")], 0)
    assert envs.num_envs == 4
