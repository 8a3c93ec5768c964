"""A model, its GPUs, and how it is split: the ``workload`` and ``gpu`` sections of a cluster config.

Payloads follow from the description; :mod:`~.program.described_steps` makes a step of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from paceenv.sim.cluster.architecture import BACKWARD, Tensor, Transformer, model_by_name
from paceenv.ui.config_files import Config

Dtype = Literal["fp32", "bf16", "fp16", "fp8"]
BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
"""PyTorch's ``DistributedDataParallel``: a small first bucket, then up to 25 MiB each."""


class Gpu(Config):
    """One accelerator."""

    name: str = ""
    achievable_tflops: float = Field(
        gt=0, allow_inf_nan=False, description="rate of this workload's kernels without any communication, TFLOP/s"
    )


class Workload(Config):
    """A model, how it is spread over the GPUs, and what a step processes; what is left of the GPUs are replicas."""

    model: Annotated[Transformer, BeforeValidator(model_by_name), Field(description="or its name")]
    tensor_parallel: int = Field(1, ge=1, description="GPUs that share every layer, next to each other")
    pipeline_parallel: int = Field(1, ge=1, description="stages, each with as many layers")
    batch: int = Field(ge=1, description="samples per replica and optimizer step")
    micro_batches: int = Field(1, ge=1, description="parts of the batch that pass one after the other")
    parameter_dtype: Dtype = Field("fp16", description="of the weights")
    gradient_dtype: Dtype = Field("fp16", description="of the gradients that are reduced")
    activation_dtype: Dtype = Field("fp16", description="of activations that are sent")
    zero_stage: int = Field(0, ge=0, le=3, description="sharded over replicas: optimizer, gradients, parameters")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="in backward: nothing, attention's core (as flash attention does), or all of a layer"
    )
    overlap: bool = Field(True, description="whether gradients are reduced during backward")
    bucket_bytes: float = Field(BUCKET_BYTES, gt=0, description="gradients reduced together, at least")
    first_bucket_bytes: float = Field(FIRST_BUCKET_BYTES, gt=0, description="the first bucket of gradients, bytes")
    host_overhead_s: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="per layer and micro-batch, forward and backward, no kernel running"
    )

    @model_validator(mode="after")
    def _divides(self) -> Workload:
        model, t, p = self.model, self.tensor_parallel, self.pipeline_parallel
        if self.batch % self.micro_batches:
            raise ValueError(f"micro_batches to divide the batch ({self.micro_batches} and {self.batch})")
        if p > 1 and self.zero_stage > 1:
            raise ValueError("zero_stage 0 or 1 with pipeline_parallel, whose micro-batches accumulate gradients")
        if self.zero_stage == 3 and not self.overlap:
            raise ValueError("overlap: true with zero_stage 3, which prefetches weights")
        if model.layers % p:
            raise ValueError(f"pipeline_parallel to divide the {model.layers} layers ({p})")
        if model.heads % t or model.mlp % t:
            raise ValueError(f"tensor_parallel to divide the {model.heads} heads and the MLP's {model.mlp} ({t})")
        return self

    @property
    def micro_batch(self) -> int:
        """Samples that pass together."""
        return self.batch // self.micro_batches

    @property
    def activation_bytes(self) -> float:
        """One micro-batch's activations between layers: what a stage sends and tensor parallelism all-reduces."""
        return self.micro_batch * self.model.sequence * self.model.hidden * BYTES[self.activation_dtype]

    def stage_parameters(self, stage: int) -> float:
        """Parameters of one GPU of a pipeline stage, before any sharding over replicas."""
        return sum(tensor.parameters for tensor in self.gradients(stage))

    def gradients(self, stage: int) -> list[Tensor]:
        """Gradients of one GPU of a stage as backward makes them ready, from output to input.

        Flops are of the whole stage. A tied embedding is only complete at the end. Layer norms and biases count as cut
        by tensor parallelism, which they are not: less than 0.1 %.
        """
        model, p, t = self.model, self.pipeline_parallel, self.tensor_parallel
        tensors = [Tensor(n / t, flops) for n, flops in model.layer_tensors()] * (model.layers // p)
        if stage == p - 1:
            norm = 2 * model.hidden / t
            head = Tensor(norm, (1.0 + BACKWARD) * model.head_flops)
            if p > 1 or not model.tied_embeddings:
                head = Tensor(norm + model.embedding_parameters / t, head.flops)
            tensors.insert(0, head)
        if stage == 0:
            tensors.append(Tensor((model.embedding_parameters + model.position_parameters) / t, 0.0))
        return tensors
