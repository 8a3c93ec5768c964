"""The student of a distillation: a network that estimates every candidate's gain from a rank's own view and memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from paceenv.trainers.training.algorithm_configs import Distill
from paceenv.trainers.training.algorithms.learner import Layers
from paceenv.trainers.training.algorithms.sb3_learner import linear_layers
from paceenv.trainers.training.algorithms.teacher import Answers

ROBUST = 1.0
"""Error, % of the step, beyond which it counts absolutely, no longer squared: answers have long tails."""
LOW_PREFERENCES = 3
"""Power that makes low preferences more frequent than high ones: most jobs care for throughput."""
MIN_SCALE = 0.02
"""Inputs that vary less than this are not blown up."""


class Student:
    """Fits the network to answers; each fit goes on from the last one's weights.

    Inputs are standardised by the first fit's mean and spread, which are folded into the first layer of what is
    deployed.

    Args:
        inputs: of the network.
        outputs: what the teacher says of a situation: one number a candidate, or two.
        section: hyperparameters.
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

    def fit(
        self, answers: Answers, weight_K: NDArray[np.float32], on_epoch: Callable[[int], None] = lambda epoch: None
    ) -> float:
        """Fit to all answers so far, with torch's and numpy's global generators; the mean loss of the last epoch.

        Args:
            answers: of the teacher.
            weight_K: how much an error counts on each cluster.
            on_epoch: called after each epoch.
        """
        if self._is_new:
            self.mean_I = answers.inputs_NI.mean(axis=0)
            self.spread_I, self._is_new = np.maximum(answers.inputs_NI.std(axis=0), np.float32(MIN_SCALE)), False
        section, N = self.section, len(answers.inputs_NI)
        x_NI = torch.from_numpy((answers.inputs_NI - self.mean_I) / self.spread_I)
        y_NX, w_N = torch.from_numpy(answers.gain_NX), torch.from_numpy(weight_K[answers.cluster_N])
        optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=section.learning_rate, weight_decay=section.weight_decay
        )
        batches = -(-N // section.batch_size)
        epochs = max(section.n_epochs, -(-section.min_updates // batches))
        steps = epochs * batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1.0 - step / steps, 0.0))
        loss_sum = 0.0
        for epoch in range(epochs):
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
            on_epoch(epoch)
        return loss_sum / N

    def loss(self, said_NX: torch.Tensor, true_NX: torch.Tensor) -> torch.Tensor:
        """How wrong the estimates are, and what the choices that they lead to miss; ``(N,)``, in % of the step.

        The first part alone does not do: gains have long tails, so the middle of what is likely, which a robust fit
        finds, is near zero where a rare collapse decides the mean. The second is the mean gain of the choices that the
        estimates lead to, with chances that grow with each estimate. It needs no model of noise: the teacher has said
        of every candidate what it would have gained.

        Args:
            said_NX: outputs of the network.
            true_NX: what the teacher said.
        """
        error_N = torch.nn.functional.smooth_l1_loss(said_NX, true_NX, beta=ROBUST, reduction="none").mean(dim=1)
        if not self.section.decision_weight:
            return error_N
        said_NC, true_NC = said_NX, true_NX
        if self.preference_range is not None:
            low, high = self.preference_range
            preference_N1 = low + (high - low) * torch.rand(len(said_NX), 1) ** LOW_PREFERENCES
            (said_NC, said_less_NC), (true_NC, true_less_NC) = said_NX.chunk(2, dim=1), true_NX.chunk(2, dim=1)
            said_NC, true_NC = said_NC + preference_N1 * said_less_NC, true_NC + preference_N1 * true_less_NC
        off_N1 = torch.zeros(len(said_NX), 1)
        margin = min(self.section.margins)
        chance_NC = torch.softmax(
            torch.cat([off_N1, said_NC - margin], dim=1) / self.section.decision_temperature, dim=1
        )[:, 1:]
        return error_N - self.section.decision_weight * (chance_NC * true_NC).sum(dim=1)

    def layers(self) -> Layers:
        """What is deployed: the layers with the standardisation folded into the first one."""
        layers = linear_layers(*self.network)
        weight, bias = layers[0]
        folded = weight / self.spread_I
        layers[0] = (folded.astype(np.float32), (bias - folded @ self.mean_I).astype(np.float32))
        return layers

    def state(self) -> dict[str, NDArray[np.float32]]:
        """Weights and standardisation by name."""
        weights = {f"network.{name}": value.numpy() for name, value in self.network.state_dict().items()}
        return weights if self._is_new else {**weights, "mean": self.mean_I, "spread": self.spread_I}

    def restore(self, arrays: dict[str, NDArray[np.float32]]) -> None:
        """Go on from :meth:`state`."""
        names = self.network.state_dict()
        self.network.load_state_dict({name: torch.from_numpy(arrays[f"network.{name}"].copy()) for name in names})
        if "mean" in arrays:
            self.mean_I, self.spread_I, self._is_new = arrays["mean"].copy(), arrays["spread"].copy(), False
