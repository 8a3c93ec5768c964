"""The privileged teacher, its student, and the margin: each against what it should be by construction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.logger import Logger

from paceenv.core import metrics, signals
from paceenv.policies.clairvoyant import settings_of
from paceenv.policies.distilled import Distilled
from paceenv.sim.cluster import load_cluster
from paceenv.sim.cluster.derive import start
from paceenv.trainers.training.distill import TRAINING_LIMIT, DistillLearner, Student
from paceenv.trainers.training.learner import Curve
from paceenv.trainers.training.teacher import Answers, choose_candidates, gains
from paceenv.trainers.training.train_config import Distill, Environment, TrainConfig
from paceenv.ui import config_files


def test_the_teacher_s_answer_is_what_would_have_happened() -> None:
    """Each gain against a simulator that really goes on with the setting, whose past is played again."""
    cluster, seeds = load_cluster("two-jobs"), np.arange(4)
    settings = settings_of([{"phase_shift": (0.1, 0.2)}, {"slack": (0.0, 0.4), "phase_shift": (0.0, 0.05)}])

    def at_the_question() -> Any:
        simulator = start(cluster, seeds)
        simulator.run(np.broadcast_to(settings[1], (4, 1, *settings[1].shape)), 40)
        return simulator

    simulator = at_the_question()
    found = gains(simulator, np.array([2, 0]), settings, 60)
    step_s = []
    for setting in settings:
        goes_on = at_the_question()
        step_s.append(goes_on.run(np.broadcast_to(setting, (4, 1, *setting.shape)), 60).mean(axis=1)[[2, 0]])
    expected = np.stack([100.0 * (step_s[0] / one - 1.0) for one in step_s[1:]], axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.abs(found).max() > 0.1
    again = gains(simulator, np.array([2, 0]), settings, 60)
    np.testing.assert_array_equal(found, again)


def test_gain_and_less_variation_are_the_reward() -> None:
    """Their weighted sum against the reward of the same futures, computed interval by interval from their steps."""
    cluster, weight, settings = load_cluster("two-jobs"), 0.7, settings_of([{"phase_shift": (0.1, 0.2)}])
    simulator = start(cluster, np.arange(6))
    simulator.run(simulator.off(), 40)
    found = gains(simulator, np.arange(6), settings, 60, 20)
    assert found.shape == (6, 2)
    ideal_s_E, reward, mean_s = simulator.batch.jobs["ideal_step_s"], [], []
    for setting in settings:
        step_s_ET = simulator.fork(np.arange(6)).run(np.broadcast_to(setting, (6, 1, *setting.shape)), 60)
        sd_s_E = np.mean([part.std(axis=1) for part in np.split(step_s_ET, 3, axis=1)], axis=0)
        reward.append(metrics.reward(step_s_ET.mean(axis=1), sd_s_E, ideal_s_E, weight))  # type: ignore[arg-type]
        mean_s.append(step_s_ET.mean(axis=1))
    expected_E = 100.0 * (reward[1] - reward[0]) * mean_s[0] / ideal_s_E
    np.testing.assert_allclose(found[:, 0] + weight * found[:, 1], expected_E, rtol=1e-4, atol=1e-4)


def test_candidates_are_those_that_help_somewhere() -> None:
    clusters = [load_cluster(name) for name in ("two-jobs", "one-job")]
    environment = Environment.model_validate(
        {"clusters": [{"cluster": "two-jobs"}], "mechanisms": ["slack", "phase_shift"], "threads": 1}
    )
    section = Distill(candidates=3, horizon_intervals=3)
    chosen, scale_K = choose_candidates(clusters, environment, section, 5_000)
    assert 1 <= len(chosen) <= 3
    assert "phase_shift" in chosen[0]
    assert scale_K[0] > 2.0 > 0.1 > scale_K[1] >= 0.0, "a twin can be left; a job alone gains nothing"
    again, _ = choose_candidates(clusters, environment.model_copy(update={"threads": 2}), section, 5_000)
    assert chosen == again


def test_the_student_finds_a_known_function_and_deploys_it() -> None:
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    x = (rng.uniform(-1, 1, (3000, 5)) * [1.0, 0.1, 1.0, 1.0, 0.0] + 0.3).astype(np.float32)
    y = np.stack([3.0 * x[:, 0] + 10.0 * x[:, 1], -2.0 * x[:, 2]], axis=1).astype(np.float32)
    noisy = y + rng.normal(0.0, 0.5, y.shape).astype(np.float32)
    student = Student(5, 2, Distill(n_epochs=12, batch_size=128, net_arch=[24]), None)
    assert not student.network(torch.from_numpy(x)).detach().numpy().any(), "nothing learned yet: nothing gains"
    student.fit(Answers(x, noisy, np.zeros(3000, np.int64)), np.ones(1, np.float32))
    (hidden, bias), (out, out_bias) = student.layers()
    estimate = np.tanh(x @ hidden.T + bias) @ out.T + out_bias
    assert np.abs(estimate - y).mean() < 0.7 * np.abs(noisy - y).mean(), "closer to the truth than what it was told"
    with torch.no_grad():
        trained = student.network(torch.from_numpy((x - student.mean_I) / student.spread_I)).numpy()
    np.testing.assert_allclose(estimate, trained, atol=1e-3)


@pytest.mark.parametrize("preferences", [None, (0.0, 1.0)])
def test_rare_large_gains_count_where_choices_do(preferences: tuple[float, float] | None) -> None:
    """One setting always gains 1 %; another 40 % in one of ten futures, 4 % on average, and nothing otherwise."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    gain = np.stack([np.full(2000, 1.0), 40.0 * (rng.random(2000) < 0.1)], axis=1)
    less = np.zeros_like(gain) if preferences else np.zeros((2000, 0))
    answers = Answers(
        rng.normal(size=(2000, signals.SIGNALS)).astype(np.float32),
        np.concatenate([gain, less], axis=1).astype(np.float32),
        np.zeros(2000, np.int64),
    )
    section = Distill(n_epochs=8, batch_size=128, net_arch=[8])
    student = Student(signals.SIGNALS, answers.gain_NX.shape[1], section, preferences)
    student.fit(answers, np.ones(1, np.float32))
    policy = Distilled(
        student.layers(),
        [{"slack": (0.0, 0.1)}, {"slack": (0.0, 0.4)}],
        margin=0.05,
        hysteresis=0.0,
        preference=0.1 if preferences else None,
        preference_range=preferences,
    )
    chosen = policy.choose(policy.outputs(answers.inputs_NI[:64]))
    assert (chosen == 2).all()


@pytest.mark.parametrize(("estimate", "margin", "pressure"), [(0.0, 0.1, 1.0), (0.5, 1.0, 2.0), (9.0, 5.0, 2.0)])
def test_the_margin_is_the_smallest_that_training_nulls_allow(estimate: float, margin: float, pressure: float) -> None:
    """A student that promises ``estimate`` % of a stagger everywhere; on the null it only costs."""
    clusters = [{"cluster": "null-jitter", "null_case": True}, {"cluster": "two-jobs"}]
    data = {"name": "nulls", "algorithm": "distill", "distill": {"margins": [0.1, 1.0, 5.0], "hysteresis": 0.0}}
    data |= {"environment": {"clusters": clusters, "mechanisms": ["stagger"], "threads": 1}}
    learner = DistillLearner(config_files.parse(TrainConfig, data, "nulls"), Curve(Logger(None, [])))
    learner.candidates = [{"stagger": (0.0, 0.4)}]
    learner.student = learner._new_student(1)
    last: Any = learner.student.network[-1]  # type: ignore[union-attr]
    with torch.no_grad():
        last.bias.fill_(estimate)
    found = learner._choose_margin(np.random.default_rng(0))
    assert (learner.margin, found["pressure"]) == (margin, pressure)
    assert (found["null_cost_worst"] > TRAINING_LIMIT) == (estimate > 5.0)
    learner._choose_margin(np.random.default_rng(0))
    assert learner.pressure_K.tolist() == [pressure**2] * 2, "it grows while a cluster loses more than a null may"
