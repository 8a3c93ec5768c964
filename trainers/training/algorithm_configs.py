"""Hyperparameters of every algorithm, one section of a training config each, by the names of its library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from paceenv.ui.config_files import AnyMechanism, Config

Algorithm = Literal["ppo", "recurrent_ppo", "distill", "sac", "tqc", "crossq", "cma_es", "ars"]
_Timesteps = Annotated[int, Field(ge=1, description="decisions, summed over rows")]
_Share = Annotated[float, Field(ge=0, lt=1)]
_Percent = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_AVERAGE = "the policy is the mean of the actor over this last share"
_FALLS = "at the start; falls linearly to zero"


class Ppo(Config):
    """Hyperparameters of Stable-Baselines3's PPO, by its own names."""

    total_timesteps: _Timesteps = 1_000_000
    n_steps: int = Field(32, ge=1)
    batch_size: int = Field(2048, ge=2)
    n_epochs: int = Field(4, ge=1)
    learning_rate: float = Field(1e-3, gt=0, le=1, description=_FALLS)
    gamma: float = Field(0.9, ge=0, le=1)
    gae_lambda: float = Field(0.9, ge=0, le=1)
    ent_coef: float = Field(0.0, ge=0)
    log_std_init: float = -0.5
    average_last: _Share = Field(0.3, description=_AVERAGE)
    net_arch: list[int] = Field([64, 64], min_length=1)


class RecurrentPpo(Ppo):
    """Hyperparameters of sb3-contrib's RecurrentPPO: those of PPO, and of the LSTM before ``net_arch``."""

    lstm_hidden_size: int = Field(32, ge=1, le=1024)
    enable_critic_lstm: bool = Field(False, description="an LSTM of the critic's own, which is not deployed")
    net_arch: list[int] = Field([32], description="hidden layers after the LSTM")


class Sac(Config):
    """Hyperparameters of Stable-Baselines3's SAC, by its own names; a step of the batch is ``environments`` decisions.

    ``train_freq`` counts steps of the batch, so 256 rows with one gradient step each are 256 decisions an update.
    """

    total_timesteps: _Timesteps = 600_000
    learning_rate: float = Field(1e-3, gt=0, le=1, description=_FALLS)
    buffer_size: int = Field(200_000, ge=1)
    learning_starts: int = Field(10_000, ge=0, description="decisions at random before the first update")
    batch_size: int = Field(512, ge=2)
    tau: float = Field(0.01, gt=0, le=1)
    gamma: float = Field(0.9, ge=0, le=1)
    train_freq: int = Field(1, ge=1, description="steps of the batch between two trainings")
    gradient_steps: int = Field(4, ge=1, description="updates in a training")
    ent_coef: float | str = Field("auto_0.05", description="a number, or auto with its start: auto_0.05")
    target_entropy: float | Literal["auto"] = "auto"
    average_last: _Share = Field(0.3, description=_AVERAGE)
    net_arch: list[int] = Field([64, 64], min_length=1)

    @model_validator(mode="after")
    def _coefficient(self) -> Sac:
        if isinstance(self.ent_coef, str):
            start, separator, value = self.ent_coef.partition("_")
            try:
                valid = start == "auto" and (not separator or float(value) > 0.0)
            except ValueError:
                valid = False
        else:
            valid = self.ent_coef >= 0.0
        if not valid:
            raise ValueError(f"ent_coef = {self.ent_coef}; allowed: a number of at least 0, auto, or such as auto_0.05")
        return self


class Tqc(Sac):
    """Hyperparameters of sb3-contrib's TQC: those of SAC and the critics' quantiles."""

    top_quantiles_to_drop_per_net: int = Field(2, ge=0)
    n_quantiles: int = Field(25, ge=1)
    n_critics: int = Field(2, ge=1)


class CrossQ(Sac):
    """Hyperparameters of sb3-contrib's CrossQ, which has no target network, so that ``tau`` is not used."""

    policy_delay: int = Field(3, ge=1)
    renorm_warmup_steps: int = Field(2_000, ge=0, description="updates until its batch renormalisation is in force")


class Search(Config):
    """What searches without gradients share: a generation tries networks, all on the same episodes of one batch."""

    total_timesteps: _Timesteps = 2_000_000
    intervals: int = Field(12, ge=1, description="control intervals that every network of a generation is tried for")
    net_arch: list[int] = Field([], description="hidden layers; none: linear")


class CmaEs(Search):
    """Hyperparameters of CMA-ES (package ``cmaes``)."""

    population_size: int = Field(24, ge=4, description="networks of a generation")
    sigma: float = Field(0.2, gt=0, description="step size at the start")
    separable: bool = Field(True, description="a diagonal covariance: for hundreds of weights")


class Ars(Search):
    """Hyperparameters of augmented random search, version V2, by the names of sb3-contrib's ARS."""

    n_delta: int = Field(8, ge=1, description="directions of a generation; each is tried both ways")
    n_top: int = Field(4, ge=1, description="best directions that move the weights, at most n_delta")
    learning_rate: float = Field(0.05, gt=0)
    delta_std: float = Field(0.1, gt=0, description="how far a direction is tried")

    @model_validator(mode="after")
    def _top_of_them(self) -> Ars:
        if self.n_top > self.n_delta:
            raise ValueError(f"n_top = {self.n_top}; allowed: 1 to {self.n_delta}, which is n_delta")
        return self


class Distill(Config):
    """Distillation of a teacher that knows the future, by rounds of DAgger; see ``algorithms.distill``."""

    total_timesteps: _Timesteps = 480_000
    rounds: int = Field(16, ge=1, description="the first is driven at random, the others by the student")
    candidates: int = Field(24, ge=1, le=200, description="settings that the student chooses from, without off")
    horizon_intervals: int = Field(6, ge=1, description="how long the teacher holds a setting on the true future")
    episode_intervals: int = Field(80, ge=2)
    every_intervals: int = Field(8, ge=1, description="control intervals between two questions to the teacher")
    watched_ranks: int = Field(8, ge=1, description="ranks of a job whose views are kept at each question")
    explore_share: float = Field(0.25, ge=0, le=1, description="episodes after the first round that drive at random")
    n_epochs: int = Field(4, ge=1, description="in each round, over the views of all rounds so far")
    min_updates: int = Field(600, ge=1, description="in each round, by more epochs while there are few views")
    batch_size: int = Field(1024, ge=2)
    learning_rate: float = Field(2e-3, gt=0, le=1, description="at the start of a round; falls linearly to zero")
    weight_decay: float = Field(1e-4, ge=0)
    decision_weight: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="of the gain that the student's choices miss, against the error of estimates; 0: only the error",
    )
    decision_temperature: float = Field(
        0.5,
        gt=0,
        allow_inf_nan=False,
        description="% of the step by which an estimate is higher where a choice is e times as likely, in the fit",
    )
    always: Mapping[AnyMechanism, tuple[float, float]] = Field(
        {},
        description="threshold and window of mechanisms that hold whatever the student chooses, such as defer, which "
        "judges itself and does nothing where no transfer can wait",
    )
    net_arch: list[int] = Field([128, 128], min_length=1)
    margins: list[_Percent] = Field(
        [0.05, 0.1, 0.2, 0.4],
        min_length=1,
        description="% of the step, increasing; the first one is taken with which the training nulls hold null_limit",
    )
    hysteresis: _Percent = Field(0.1, description="% of the step")
    null_limit: float = Field(0.002, ge=0, le=1, description="most that a training null may lose, share of mean step")


SECTIONS: dict[Algorithm, type[Config]] = {
    "ppo": Ppo,
    "recurrent_ppo": RecurrentPpo,
    "distill": Distill,
    "sac": Sac,
    "tqc": Tqc,
    "crossq": CrossQ,
    "cma_es": CmaEs,
    "ars": Ars,
}
"""The section of each algorithm; it has the algorithm's name."""
