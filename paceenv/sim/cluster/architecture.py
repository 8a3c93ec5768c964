"""Models: how many parameters and FLOPs a transformer has.

FLOPs count a multiply and an add as two. Sources: Narayanan et al. 2021 (Efficient Large-Scale Language Model Training,
appendix) and Kaplan et al. 2020.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import Field, model_validator

from paceenv.ui import config_files
from paceenv.ui.config_files import Config

BACKWARD = 2.0
"""Backward kernels relative to forward ones: a gradient for the input and one for the weights."""


class Tensor(NamedTuple):
    """Weights whose gradients are ready together."""

    parameters: float
    flops: float
    """Forward and backward of one sample."""


class Transformer(Config):
    """A decoder of equal layers: attention and a two-layer MLP, biases and layer norms as in GPT-2."""

    name: str = ""
    description: str = ""
    layers: int = Field(ge=1, description="layers of the decoder")
    hidden: int = Field(ge=1, description="width of a layer")
    heads: int = Field(ge=1, description="attention heads")
    vocab: int = Field(ge=1, description="tokens of the vocabulary")
    sequence: int = Field(ge=1, description="tokens of a sample")
    mlp_hidden: int | None = Field(None, ge=1, description="width of the MLP; empty: four times hidden")
    positions: int | None = Field(None, ge=0, description="learned position embeddings; empty: sequence")
    tied_embeddings: bool = Field(True, description="whether the output layer uses the token embedding")

    @model_validator(mode="after")
    def _adds_up(self) -> Transformer:
        if self.hidden % self.heads:
            raise ValueError(f"heads to divide hidden ({self.heads} and {self.hidden})")
        return self

    @property
    def mlp(self) -> int:
        return self.mlp_hidden or 4 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """The token embedding; the output layer is as large, and the same one if tied."""
        return self.vocab * self.hidden

    @property
    def position_parameters(self) -> int:
        return (self.sequence if self.positions is None else self.positions) * self.hidden

    @property
    def attention_flops(self) -> float:
        """Forward FLOPs of a layer's scores and weighted sums for one sample: ``4 s^2 h``, not halved by causality."""
        return 4.0 * self.sequence**2 * self.hidden

    @property
    def head_flops(self) -> float:
        """Forward FLOPs of the output layer for one sample."""
        return 2.0 * self.sequence * self.embedding_parameters

    def layer_tensors(self) -> list[Tensor]:
        """Of one layer, from output to input: the MLP, then attention; norms and biases go with their matrices."""
        h, m, per_weight = self.hidden, self.mlp, 2.0 * (1.0 + BACKWARD) * self.sequence
        return [
            Tensor(h * m + h, per_weight * h * m),
            Tensor(h * m + m + 2 * h, per_weight * h * m),
            Tensor(h * h + h, per_weight * h * h),
            Tensor(3 * h * h + 5 * h, per_weight * 3 * h * h + (1.0 + BACKWARD) * self.attention_flops),
        ]


def model_by_name(value: Any) -> Any:
    """A model given by name is read from ``configs/workloads``."""
    return config_files.read_yaml(config_files.find("workloads", value)) if isinstance(value, str) else value
