"""Distillation: rounds of asking the teacher where the student goes, and fitting the student to all it said (DAgger).

A round is a rollout, and the first of a run also chooses the candidate settings. After every round the margin is the
smallest one of the config with which no null of the *training* clusters loses more than its limit, every rank deciding
for itself; validation and held-out clusters have no part in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceenv.core import signals
from paceenv.core.errors import out_of_range
from paceenv.core.pacing import Candidate
from paceenv.policies.base import Policy
from paceenv.policies.distilled import Distilled
from paceenv.policies.learned import Learned
from paceenv.policies.networks import ObservationEMA
from paceenv.policies.rollout import Rollout, run
from paceenv.policies.rules import passive
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import start
from paceenv.sim.engine.simulator import training_seeds
from paceenv.trainers.evaluation.random_clusters import random_cluster
from paceenv.trainers.training.learner import Curve, Layers, Learner, Saved
from paceenv.trainers.training.sb3_learner import ranges_of
from paceenv.trainers.training.teacher import Answers, ask, choose_candidates
from paceenv.trainers.training.train_config import Distill, TrainConfig

FIRST_SEED, CHECK_SEED = 1 << 31, 7 << 29
"""Within the episodes of a run: far above those of evaluation, so that no number of rounds reaches them."""
CHECK_SEEDS, CHECK_INTERVALS = 8, 60
"""Episodes on a training cluster on which a margin is tried."""
CHECK_CLUSTERS = 16
"""Most of the given clusters on which it is tried in a round, and most of those that it drew."""
RANDOM_SEED, RANDOM_RANKS, RANDOM_WEIGHT = 1, 64, 0.3
"""Of the clusters that rounds draw: those of suite random that are for training, and as many after them as it takes."""
MIN_EPISODES = 4
PRESSURE, MAX_PRESSURE = 2.0, 8.0
"""By how much more the episodes and errors of a cluster count while it loses more than a null may: the constraint."""
MIN_WEIGHT_SCALE = 1.0
"""Gains of a cluster, % of the step, below which its errors count no more: nulls, and what is hardly worth it."""
ROBUST = 1.0
"""Error, % of the step, beyond which it counts absolutely, no longer squared: answers have long tails."""
LOW_PREFERENCES = 3
"""Power that makes low preferences more frequent than high ones: most jobs care for throughput."""
EXPLORE_SHARE = 0.25
"""Share of the episodes after the first round that drive at random."""
MIN_UPDATES = 600
"""In each round, by more epochs while there are few views."""
WEIGHT_DECAY = 1e-4
DECISION_TEMPERATURE = 1.0
"""% of the step by which an estimate is higher where a choice is e times as likely, in the fit."""
TRAINING_LIMIT = 0.002
"""Most that a training null may lose, as a share of its mean step."""
MIN_SCALE = 0.02
"""Inputs that vary less than this are not blown up."""


class DistillLearner(Learner):
    """Teacher, student, and their answers so far."""

    label = "distillation of a privileged teacher, paceenv"

    def __init__(self, config: TrainConfig, curve: Curve) -> None:
        self.config, self.curve, environment = config, curve, config.environment
        assert config.distill is not None  # as the config has filled in
        self.section: Distill = config.distill
        if both := self.section.always.keys() & set(environment.mechanisms):
            allowed = f"mechanisms that the student does not set ({', '.join(environment.mechanisms)})"
            raise out_of_range("distill.always", ", ".join(sorted(both)), allowed, f"config {config.name}")
        shares = environment.shares()
        self.clusters, self.given = [share.load() for share in shares], len(shares)
        slots, most = self.given + self.section.random_clusters, (CHECK_SEED - FIRST_SEED) >> 16
        if self.section.random_clusters and self.section.rounds * slots > most:
            raise out_of_range("distill.rounds", self.section.rounds, f"1 to {most // slots}", f"config {config.name}")
        self.is_null_K = np.array([share.null_case for share in shares])
        self.weight_K = np.array([share.weight for share in shares])
        self.rollout_timesteps = -(-self.config.total_timesteps // self.section.rounds)
        self._memory = (environment.memory_intervals, environment.change_intervals)
        self.round, self.candidates, self.margin = 0, list[Candidate](), 0.0
        self.scale_K, self.pressure_K = np.zeros(len(shares)), np.ones(len(shares))
        self.student: Student | None = None
        self.answers: list[Answers] = []
        self._passive_s: dict[int, NDArray[np.float64]] = {}

    @property
    def timesteps(self) -> int:  # type: ignore[override]
        return min(self.round * self.rollout_timesteps, self.config.total_timesteps)

    def advance(self, segment: int, rollouts: int) -> None:
        for _ in range(rollouts):
            self._advance()

    def _advance(self) -> None:
        """One round: ask, fit, choose the margin."""
        section, environment = self.section, self.config.environment
        if self.student is None:
            self.choose_candidates()
            self.student = self._new_student(len(self.candidates))
        self._draw_clusters(self.round)
        rng, driver = np.random.default_rng([self.config.seed, self.round]), self.policy()
        explore_share = EXPLORE_SHARE if self.round else 1.0
        for k, (cluster, episodes) in enumerate(zip(self.clusters, self._episodes(rng), strict=True)):
            if not episodes:
                continue
            place = k if k < self.given else k - self.round * section.random_clusters
            first = FIRST_SEED + ((self.round * (self.given + section.random_clusters) + place) << 16)
            seeds = training_seeds(self.config.seed, first, episodes)
            x, gain = ask(cluster, seeds, driver, environment, section, rng, explore_share)
            if k >= self.given:
                self.scale_K[k] = max(float(gain[:, : len(self.candidates)].mean(axis=0).max()), 0.0)
            self.answers.append(Answers(x, gain, np.full(len(x), k)))
            share = 0.8 * (k + 1) / len(self.clusters)
            self.curve.on_progress(self.timesteps + share * self.rollout_timesteps)
        self.answers = [Answers.joined(self.answers)]
        weight_K = (self.pressure_K / np.maximum(self.scale_K, MIN_WEIGHT_SCALE)).astype(np.float32)
        loss = self.student.fit(self.answers[0], weight_K)
        self.round += 1
        curve_row = self._choose_margin(rng)
        views = len(self.answers[0].inputs_NI)
        self.curve.add(self.timesteps, **curve_row, margin=self.margin, loss=loss, views=views)
        self.curve.logger.dump(self.timesteps)

    def _draw_clusters(self, number: int) -> None:
        """Add the random clusters of a round: what few clusters teach does not carry over to others."""
        count = self.section.random_clusters
        drawn = [random_cluster(RANDOM_SEED, number * count + n, RANDOM_RANKS) for n in range(count)]
        self.clusters += [cluster for cluster, _ in drawn]
        self.is_null_K = np.append(self.is_null_K, [null for _, null in drawn]).astype(np.bool_)
        self.weight_K = np.append(self.weight_K, np.full(count, RANDOM_WEIGHT))
        missing = max(len(self.clusters) - len(self.scale_K), 0)  # a checkpoint has them already
        self.scale_K, self.pressure_K = np.pad(self.scale_K, (0, missing)), np.append(self.pressure_K, np.ones(missing))

    def choose_candidates(self) -> list[Candidate]:
        """The settings that the student will choose from; found once."""
        if not self.candidates:
            chosen = choose_candidates(self.clusters, self.config.environment, self.section, self.config.seed)
            self.candidates, self.scale_K = chosen
        return self.candidates

    def _episodes(self, rng: np.random.Generator) -> list[int]:
        """Episodes of a round by cluster, in proportion to weight and pressure, fewer of large jobs by a root.

        Clusters whose part is less than :data:`MIN_EPISODES` take turns, with chances in proportion to it. Random ones
        have an episode in their own round.
        """
        given, count = self.clusters[: self.given], self.section.random_clusters
        size_K = np.array([max(cluster.ranks, 16) / 16 for cluster in given]) ** 0.5
        part_K = self.weight_K[: self.given] * self.pressure_K[: self.given] / size_K
        episodes = self.rollout_timesteps / self.section.episode_intervals - count
        wanted_K = episodes * part_K / part_K.sum()
        takes_turn_K = rng.random(len(wanted_K)) < wanted_K / MIN_EPISODES
        if not takes_turn_K.any():  # a round of few decisions has one cluster
            takes_turn_K[rng.choice(len(wanted_K), p=wanted_K / wanted_K.sum())] = True
        episodes_K = [
            round(float(wanted)) if wanted >= MIN_EPISODES else MIN_EPISODES * int(turn)
            for wanted, turn in zip(wanted_K, takes_turn_K, strict=True)
        ]
        return episodes_K + [0] * (self.round * count) + [1] * count

    def _new_student(self, candidates: int) -> Student:
        environment, section = self.config.environment, self.section
        outputs = candidates * (1 if environment.preference_range is None else 2)
        inputs = signals.SIGNALS + ObservationEMA(*self._memory).entries
        return Student(inputs, outputs, section, environment.preference_range)

    def _choose_margin(self, rng: np.random.Generator) -> dict[str, float]:
        """Take the smallest margin that the training nulls allow; what was found with it, for the curve."""
        K = len(self.clusters)
        checked_K, drawn = np.zeros(K, np.bool_), self.section.random_clusters
        checked_K[rng.permutation(self.given)[:CHECK_CLUSTERS]] = True
        checked_K[K - drawn + rng.permutation(drawn)[:CHECK_CLUSTERS]] = True
        for k in np.flatnonzero(checked_K).tolist():
            if k not in self._passive_s:
                self._passive_s[k] = self._drive(passive(), self.clusters[k]).useful_step_E
        rewards_K, loss_K = np.zeros((2, K))

        def check(which_K: NDArray[np.bool_]) -> None:
            policy = self.policy()
            for k in np.flatnonzero(which_K).tolist():
                done = self._drive(policy, self.clusters[k])
                step_s_E = done.useful_step_E
                rewards_K[k] = (done.ideal_step_E / step_s_E - done.ideal_step_E / self._passive_s[k]).mean()
                loss_K[k] = 1.0 - (self._passive_s[k] / step_s_E).mean()

        nulls_K = checked_K & self.is_null_K
        for place, margin in enumerate(sorted(self.section.margins)):
            self.margin = margin
            check(nulls_K if place else checked_K)
            if place == 0:  # whatever the margin will be: it should not have to be large
                factor_K = np.where(loss_K > TRAINING_LIMIT, PRESSURE, 1.0 / PRESSURE)
                self.pressure_K = np.clip(self.pressure_K * np.where(checked_K, factor_K, 1.0), 1.0, MAX_PRESSURE)
            if not (nulls_K & (loss_K > TRAINING_LIMIT)).any():
                break
        if place:
            check(checked_K & ~nulls_K)
        curve_row = {"reward": float(np.average(rewards_K[checked_K], weights=self.weight_K[checked_K]))}
        curve_row["pressure"] = float(self.pressure_K.max())
        if nulls_K.any():
            curve_row |= {"null_cost": float(loss_K[nulls_K].mean()), "null_cost_worst": float(loss_K[nulls_K].max())}
        return curve_row

    def _drive(self, policy: Policy, cluster: Cluster) -> Rollout:
        """The episodes on which margins are tried, every rank deciding for itself."""
        environment = self.config.environment
        seeds = training_seeds(self.config.seed, CHECK_SEED, CHECK_SEEDS)
        simulator = start(cluster, seeds, environment.threads, environment.limits)
        interval = environment.interval_iterations
        return run(policy, simulator, CHECK_INTERVALS * interval, interval_iterations=interval)

    def policy(self) -> Distilled:
        assert self.student is not None, "a run trains at least one round"
        return self.with_layers(self.student.layers(), {"margin": self.margin})

    def with_layers(self, layers: Layers, options: Mapping[str, Any]) -> Distilled:
        memory, change = self._memory
        return Distilled(
            layers,
            self.candidates,
            margin=float(options["margin"]),
            hysteresis=self.section.hysteresis,
            preference=self.config.environment.default_preference,
            preference_range=self.config.environment.preference_range,
            memory_intervals=memory,
            change_intervals=change,
            interval_iterations=self.config.environment.interval_iterations,
            always=dict(self.section.always.items()),
        )

    def options(self, policy: Learned) -> dict[str, Any]:
        assert isinstance(policy, Distilled)
        return {"margin": policy.margin}

    def calibrated_range(self, policy: Learned) -> dict[str, tuple[float, float]]:
        return ranges_of(self.answers[0].inputs_NI[:, : signals.SIGNALS])

    def state(self) -> Saved:
        assert self.student is not None, "a run trains at least one round"
        plain = {"round": self.round, "candidates": self.candidates, "margin": self.margin}
        plain |= {"scale": self.scale_K.tolist(), "pressure": self.pressure_K.tolist()}
        said, arrays = self.answers[0], dict[str, NDArray[Any]](self.student.state())
        arrays |= {"inputs": said.inputs_NI, "gain": said.gain_NX, "cluster": said.cluster_N}
        return Saved(arrays, plain)

    def restore(self, saved: Saved) -> None:
        self.round, self.margin = int(saved.plain["round"]), float(saved.plain["margin"])
        self.candidates = [{m: (t, w) for m, (t, w) in one.items()} for one in saved.plain["candidates"]]
        self.scale_K, self.pressure_K = np.array(saved.plain["scale"]), np.array(saved.plain["pressure"])
        for number in range(self.round):
            self._draw_clusters(number)
        self.answers = [Answers(*(saved.arrays[name] for name in ("inputs", "gain", "cluster")))]
        self.student = self._new_student(len(self.candidates))
        self.student.restore(saved.arrays)


class Student:
    """Fits the network to answers; each fit goes on from the last one's weights.

    Inputs are standardised by the first fit's mean and spread, which are folded into the first layer of what is
    deployed.

    Args:
        preference_range: of the preferences that it will serve; None: the outputs are gains in throughput only.
    """

    def __init__(
        self, inputs: int, outputs: int, section: Distill, preference_range: tuple[float, float] | None
    ) -> None:
        self.section, self.preference_range = section, preference_range
        widths, modules = (inputs, *section.net_arch, outputs), list[torch.nn.Module]()
        for a, b in itertools.pairwise(widths):
            modules += [torch.nn.Linear(a, b), torch.nn.Tanh()]
        self.network = torch.nn.Sequential(*modules[:-1])
        last = modules[-2]
        assert isinstance(last, torch.nn.Linear)
        torch.nn.init.zeros_(last.weight)  # nothing learned yet: nothing gains
        torch.nn.init.zeros_(last.bias)
        self.mean_I, self.spread_I = np.zeros(inputs, np.float32), np.ones(inputs, np.float32)
        self._is_new = True

    def fit(self, answers: Answers, weight_K: NDArray[np.float32]) -> float:
        """Fit to all answers so far, with torch's and numpy's global generators; the mean loss of the last epoch."""
        if self._is_new:
            self.mean_I = answers.inputs_NI.mean(axis=0)
            self.spread_I, self._is_new = np.maximum(answers.inputs_NI.std(axis=0), np.float32(MIN_SCALE)), False
        section, N = self.section, len(answers.inputs_NI)
        x_NI = torch.from_numpy((answers.inputs_NI - self.mean_I) / self.spread_I)
        y_NX, w_N = torch.from_numpy(answers.gain_NX), torch.from_numpy(weight_K[answers.cluster_N])
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=section.learning_rate, weight_decay=WEIGHT_DECAY)
        batches = -(-N // section.batch_size)
        epochs = max(section.n_epochs, -(-MIN_UPDATES // batches))
        steps = epochs * batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1.0 - step / steps, 0.0))
        loss_sum = 0.0
        for _ in range(epochs):
            loss_sum = 0.0
            order = torch.randperm(N)
            for at in range(0, N, section.batch_size):
                picked = order[at : at + section.batch_size]
                loss = (self.loss(self.network(x_NI[picked]), y_NX[picked]) * w_N[picked]).mean()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                loss_sum += float(loss.detach()) * len(picked)
        return loss_sum / N

    def loss(self, said_NX: torch.Tensor, true_NX: torch.Tensor) -> torch.Tensor:
        """How wrong the estimates are, and what the choices that they lead to miss; ``(N,)``, in % of the step.

        The first part alone does not do: gains have long tails, so the middle of what is likely, which a robust fit
        finds, is near zero where a rare collapse decides the mean. The second is the mean gain of the choices that the
        estimates lead to, with chances that grow with each estimate. It needs no model of noise: the teacher has said
        of every candidate what it would have gained.
        """
        error_N = torch.nn.functional.smooth_l1_loss(said_NX, true_NX, beta=ROBUST, reduction="none").mean(dim=1)
        said_NC, true_NC = said_NX, true_NX
        if self.preference_range is not None:
            low, high = self.preference_range
            preference_N1 = low + (high - low) * torch.rand(len(said_NX), 1) ** LOW_PREFERENCES
            (said_NC, said_less_NC), (true_NC, true_less_NC) = said_NX.chunk(2, dim=1), true_NX.chunk(2, dim=1)
            said_NC, true_NC = said_NC + preference_N1 * said_less_NC, true_NC + preference_N1 * true_less_NC
        off_N1 = torch.zeros(len(said_NX), 1)
        margin = min(self.section.margins)
        chance_NC = torch.softmax(torch.cat([off_N1, said_NC - margin], dim=1) / DECISION_TEMPERATURE, dim=1)[:, 1:]
        return error_N - (chance_NC * true_NC).sum(dim=1)

    def layers(self) -> Layers:
        """What is deployed: the layers with the standardisation folded into the first one."""
        linear = [one for one in self.network if isinstance(one, torch.nn.Linear)]
        layers = [(one.weight.detach().numpy().copy(), one.bias.detach().numpy().copy()) for one in linear]
        weight, bias = layers[0]
        folded = weight / self.spread_I
        layers[0] = (folded.astype(np.float32), (bias - folded @ self.mean_I).astype(np.float32))
        return layers

    def state(self) -> dict[str, NDArray[np.float32]]:
        """Weights and standardisation by name."""
        weights = {f"network.{name}": value.numpy() for name, value in self.network.state_dict().items()}
        return {**weights, "mean": self.mean_I, "spread": self.spread_I}

    def restore(self, arrays: dict[str, NDArray[np.float32]]) -> None:
        """Go on from :meth:`state`."""
        names = self.network.state_dict()
        self.network.load_state_dict({name: torch.from_numpy(arrays[f"network.{name}"].copy()) for name in names})
        self.mean_I, self.spread_I, self._is_new = arrays["mean"].copy(), arrays["spread"].copy(), False
