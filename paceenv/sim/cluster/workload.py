"""A model, its GPUs, and how it is split: the ``workload`` and ``gpu`` sections of a cluster config.

Payloads and memory are derived from the description; :mod:`~.program.described_steps` makes a step of them.

Sources: activation memory, Korthikanti et al. 2022 (Reducing Activation Recomputation), with
their tensor and sequence parallelism; optimizer memory and ZeRO stages, Rajbhandari et al. 2020. That operations other
than matrix products take the time of their bytes in memory: Ivanov et al. 2021 (Data Movement Is All You Need).
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from paceenv.sim.cluster.architecture import BACKWARD, Generic, Model, Tensor, Transformer, model_by_name
from paceenv.sim.cluster.pipeline import in_flight
from paceenv.ui.config_files import Config

Dtype = Literal["fp32", "bf16", "fp16", "fp8"]
BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
"""PyTorch's ``DistributedDataParallel``: a small first bucket, then up to 25 MiB each."""
ADAM_BYTES, MASTER_BYTES = 8, 4
"""Per parameter: two fp32 moments, and an fp32 copy where the weights themselves are smaller."""


RESERVED_GB = 1.0
"""Memory of a GPU for context, communication buffers and workspace."""


class Gpu(Config):
    """One accelerator."""

    name: str = ""
    peak_tflops: float = Field(gt=0, allow_inf_nan=False, description="peak of the data type used, TFLOP/s")
    achievable_tflops: float = Field(
        gt=0, allow_inf_nan=False, description="rate of this workload's kernels without any communication, TFLOP/s"
    )
    memory_bytes_per_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="of its memory: the optimizer and a transformer's norms, softmax, dropout and activation functions "
        "then take time of their own, and achievable_tflops is of matrix products alone; empty: it is of all kernels",
    )
    memory_gb: float = Field(gt=0, allow_inf_nan=False, description="memory, GB (1e9 bytes)")

    @model_validator(mode="after")
    def _at_most_peak(self) -> Gpu:
        if self.achievable_tflops > self.peak_tflops:
            raise ValueError(f"achievable_tflops at most peak_tflops ({self.peak_tflops:g})")
        return self

    def memory_s(self, moved_bytes: float) -> float:
        """Seconds in which its memory reads or writes so many bytes; 0 where they are part of all kernels' rate."""
        return 0.0 if self.memory_bytes_per_s is None else moved_bytes / self.memory_bytes_per_s


class Moved(NamedTuple):
    """Bytes that operations other than matrix products read and write, of one layer, pass and token on one GPU.

    Counted are 16-bit operands that pass through memory once an operation, and dropout's masks of a byte, with the
    fusions of Megatron-LM: scale, mask and softmax; bias and activation function; bias, dropout and residual.
    """

    outer: float
    """Of norms, dropout and residual sums, as wide as the layer."""
    scores: float
    """Of softmax and dropout of attention; 0 where one kernel keeps scores on the chip."""
    inner: float
    """Of the activation function of the MLP."""


class Memory(NamedTuple):
    """What the fullest GPU holds, bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return sum(self)


class Workload(Config):
    """A model, how it is spread over the GPUs, and what a step processes."""

    model: Annotated[
        Annotated[Model, Field(discriminator="kind")], BeforeValidator(model_by_name), Field(description="or its name")
    ]
    data_parallel: int | None = Field(None, ge=1, description="replicas; empty: as many as the GPUs hold")
    tensor_parallel: int = Field(1, ge=1, description="GPUs that share every layer, next to each other")
    pipeline_parallel: int = Field(1, ge=1, description="stages, each with as many layers")
    batch: int = Field(ge=1, description="samples per replica and optimizer step")
    micro_batches: int = Field(1, ge=1, description="parts of the batch that pass one after the other")
    parameter_dtype: Dtype = Field("fp16", description="of the weights")
    gradient_dtype: Dtype = Field("fp16", description="of the gradients that are reduced")
    activation_dtype: Dtype = Field("fp16", description="of activations that are kept or sent")
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
    virtual_stages: int = Field(1, ge=1, le=64, description="parts of each stage, interleaved")
    sequence_parallel: bool = Field(False, description="tensor parallelism by reduce-scatter and all-gather")
    context_parallel: int = Field(1, ge=1, description="GPUs that share each sequence")
    experts: int = Field(1, ge=1, le=65_536, description="experts of every MLP")
    expert_parallel: int = Field(1, ge=1, description="replicas that share the experts of a layer")
    top_k: int = Field(1, ge=1, description="experts that a token goes to")
    shard_group: int | None = Field(
        None, ge=1, description="replicas that shard parameters under zero_stage 3 (HSDP); empty: all"
    )

    @model_validator(mode="after")
    def _divides(self) -> Workload:
        model, t, p = self.model, self.tensor_parallel, self.pipeline_parallel
        if self.batch % self.micro_batches:
            raise ValueError(f"micro_batches to divide the batch ({self.micro_batches} and {self.batch})")
        if p > 1 and self.zero_stage == 2:
            raise ValueError("zero_stage 0, 1 or 3 with pipeline_parallel, whose micro-batches accumulate gradients")
        if self.zero_stage == 3 and not self.overlap:
            raise ValueError("overlap: true with zero_stage 3, which prefetches weights")
        if model.layers % p:
            raise ValueError(f"pipeline_parallel to divide the {model.layers} layers ({p})")
        if isinstance(model, Generic):
            if t > 1 or p > 1 or self.recompute != "none":
                raise ValueError("tensor_parallel 1, pipeline_parallel 1 and recompute none for a generic model")
        elif model.heads % t or model.mlp % t:
            raise ValueError(f"tensor_parallel to divide the {model.heads} heads and the MLP's {model.mlp} ({t})")
        self._check_parts()
        return self

    def _check_parts(self) -> None:
        """Virtual stages, parts of sequences, experts and shards."""
        model, p, v = self.model, self.pipeline_parallel, self.virtual_stages
        if model.kind == "generic" and (self.experts > 1 or self.context_parallel > 1):
            raise ValueError("experts 1 and context_parallel 1 for a generic model")
        if v > 1 and p == 1:
            raise ValueError("virtual_stages 1 without pipeline_parallel")
        if v > 1 and (model.layers % (p * v) or self.micro_batches % p):
            raise ValueError(
                f"pipeline_parallel x virtual_stages to divide the {model.layers} layers, and pipeline_parallel "
                f"the {self.micro_batches} micro_batches"
            )
        parts = self.context_parallel * (self.tensor_parallel if self.sequence_parallel else 1)
        if model.kind == "transformer" and model.sequence % parts:
            raise ValueError(
                "context_parallel, times tensor_parallel where sequences are cut, to divide the "
                f"{model.sequence} tokens"
            )
        if self.experts == 1 and (self.expert_parallel > 1 or self.top_k > 1):
            raise ValueError("experts with expert_parallel or top_k")
        if self.experts % self.expert_parallel or self.top_k > self.experts:
            raise ValueError(f"expert_parallel to divide the {self.experts} experts, and top_k at most that many")
        if self.shard_group is not None and self.experts > 1:
            raise ValueError("no shard_group with experts, whose shards are those of their own replicas")
        if self.shard_group is not None and self.zero_stage < 3:
            raise ValueError("zero_stage 3 with shard_group")
        if self.shard_group is not None and p > 1:
            raise ValueError("no shard_group with pipeline_parallel, where all replicas share the shards")

    @property
    def micro_batch(self) -> int:
        """Samples that pass together."""
        return self.batch // self.micro_batches

    @property
    def activation_bytes(self) -> float:
        """One micro-batch's activations between layers: what a stage sends and tensor parallelism all-reduces."""
        tokens = self.micro_batch * self.model.sequence / self.context_parallel
        return tokens * self.model.hidden * BYTES[self.activation_dtype]

    def moved(self, *, backward: bool) -> Moved:
        """Bytes of one layer and token in memory, without what backward computes anew, and with one expert.

        With b bytes a number over 2: forward has per width two norms of 4 and two dropouts of 7, per score 4 and 5,
        per inner width 4; backward 6, 5 and a residual sum of 6, twice; 6 and 5; and 6.
        """
        model, t = self.model, self.tensor_parallel
        outer, score, inner = (34.0, 11.0, 6.0) if backward else (22.0, 9.0, 4.0)
        scale = BYTES[self.activation_dtype] / 2
        return Moved(
            scale * outer * model.hidden / (t if self.sequence_parallel else 1),
            0.0 if self.recompute == "selective" else scale * score * model.heads * model.sequence / t,
            scale * inner * model.mlp / t,
        )

    def moved_logits(self, *, backward: bool) -> float:
        """Bytes of one token's logits on one GPU: their fp32 copy and its softmax, and the gradient in 16 bit."""
        return (6.0 if backward else 14.0) * self.model.vocab / self.tensor_parallel

    @property
    def expert_flops(self) -> float:
        """Forward FLOPs of a layer and a sample, beyond those of one expert."""
        return (self.top_k - 1) * 4.0 * self.model.sequence * self.model.hidden * self.model.mlp

    @property
    def expert_parameters(self) -> float:
        """Of one layer on one GPU, before tensor parallelism, beside those of a layer without experts."""
        if self.experts == 1:
            return 0.0
        mlp = 2 * self.model.hidden * self.model.mlp + self.model.hidden + self.model.mlp
        return (self.experts / self.expert_parallel - 1.0) * mlp + self.experts * self.model.hidden

    @property
    def sparse_parameters(self) -> float:
        """Experts of one layer on one GPU, before tensor parallelism and sharding; 0 without experts."""
        return self.expert_parameters + self.mlp_parameters * self.tensor_parallel if self.experts > 1 else 0.0

    @property
    def mlp_parameters(self) -> float:
        """Of one layer without experts on one GPU, before any sharding over replicas."""
        if isinstance(self.model, Generic):
            return 0.0
        return sum(n for n, _ in self.model.layer_tensors()[:2]) / self.tensor_parallel

    @property
    def stage_sparse_parameters(self) -> float:
        """Experts of a pipeline stage on one GPU, before any sharding over replicas."""
        layers = self.model.layers // self.pipeline_parallel
        return layers * self.sparse_parameters / self.tensor_parallel

    def stage_parameters(self, stage: int) -> float:
        """Parameters of one GPU of a pipeline stage, before any sharding over replicas.

        Layer norms and biases count as cut by tensor parallelism, which they are not: less than 0.1 %.
        """
        model, p = self.model, self.pipeline_parallel
        if isinstance(model, Generic):
            return model.parameters
        layers = model.layers // p
        total = layers * model.layer_parameters + layers * self.expert_parameters
        if stage == 0:
            total += model.embedding_parameters + model.position_parameters
        if stage == p - 1:
            total += 2 * model.hidden
            if p > 1 or not model.tied_embeddings:
                total += model.embedding_parameters
        return total / self.tensor_parallel

    def gradients(self, stage: int) -> list[Tensor]:
        """Gradients of one GPU of a stage as backward makes them ready, from output to input.

        Flops are of the whole stage. A tied embedding is only complete at the end.
        """
        model, p, t = self.model, self.pipeline_parallel, self.tensor_parallel
        if isinstance(model, Generic):
            even = [Tensor(model.parameters / model.layers, model.flops / model.layers)] * model.layers
            return model.tensors[::-1] or even
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

    def memory(self, replicas: int) -> Memory:
        """Bytes on the fullest GPU with that many data-parallel replicas."""
        return max((self._stage_memory(s, replicas) for s in range(self.pipeline_parallel)), key=lambda m: m.total)

    def optimizer_bytes(self, stage: int, replicas: int) -> float:
        """What Adam reads and writes on one GPU of a pipeline stage in a step, where states lie in GPU memory, bytes.

        It reads gradients, moments and weights (their fp32 copy, if there is one), and writes all but gradients.
        """
        weight, gradient = BYTES[self.parameter_dtype], BYTES[self.gradient_dtype]
        copies = 2 * weight if weight >= MASTER_BYTES else 2 * MASTER_BYTES + weight
        share = self._sharing(stage, replicas) if self.zero_stage else 1.0
        return self.stage_parameters(stage) * (gradient + 2 * ADAM_BYTES + copies) / share

    def _sharing(self, stage: int, replicas: int) -> float:
        """How many GPUs share a stage's states where they are sharded."""
        n, sharing = self.stage_parameters(stage), float(self.shard_group or replicas)
        if self.experts > 1:  # fewer GPUs share an expert's states than a dense layer's
            sparse = self.stage_sparse_parameters
            sharing = n / ((n - sparse) / sharing + sparse * self.expert_parallel / replicas)
        return sharing

    def _stage_memory(self, stage: int, replicas: int) -> Memory:
        n, sharing = self.stage_parameters(stage), self._sharing(stage, replicas)
        stays = self.zero_stage == 3 and self.pipeline_parallel > 1  # gathered once a step, beside the own shard
        shard = [1.0 / sharing if self.zero_stage >= z and not (stays and z > 1) else 1.0 for z in range(4)]
        weight, gradient = BYTES[self.parameter_dtype], BYTES[self.gradient_dtype]
        optimizer = ADAM_BYTES + (MASTER_BYTES if weight < MASTER_BYTES else 0)
        weights, gradients = n * weight * shard[3], n * gradient * shard[2]
        if stays:
            weights += n * weight / sharing
        elif self.zero_stage == 3:  # two layers are whole at a time: the one in use and the one prefetched
            layer = n / self.model.layers
            weights, gradients = weights + 2 * layer * weight, gradients + layer * gradient
        return Memory(weights, gradients, n * optimizer * shard[1], self._kept_bytes(stage))

    def _layer_bytes(self, model: Transformer, experts: int) -> float:
        """Activations of a layer and micro-batch on one GPU, all of those that backward needs.

        Korthikanti et al. 2022, section 4: per token and width h, ``10 + (24 + 5 a s / h) / t`` bytes in 16 bit, with
        sequence parallelism ``(34 + 5 a s / h) / t``. Of the 24, 16 are the inputs of the activation function and of
        the second product of an MLP of width 4 h: 4 bytes a token and inner width, once for each expert of a token.
        """
        t, h, attention = self.tensor_parallel, model.hidden, 5.0 * model.heads * model.sequence / model.hidden
        cut = 8.0 + 4.0 * experts * model.mlp / h + (0.0 if self.recompute == "selective" else attention)
        per_width = (10.0 + cut) / t if self.sequence_parallel else 10.0 + cut / t
        return per_width * self.activation_bytes / 2

    def _kept_bytes(self, stage: int) -> float:
        """Activations kept for backward, of all micro-batches that a stage has in flight at once."""
        model, p, t = self.model, self.pipeline_parallel, self.tensor_parallel
        if isinstance(model, Generic):
            return self.micro_batch * model.activation_bytes
        layers = model.layers // p
        dense, sparse = self._layer_bytes(model, 1), self._layer_bytes(model, self.top_k)
        kept, at_once = layers * dense + layers * (sparse - dense), 0.0
        if self.recompute == "full":  # only each layer's input, and one layer at a time in full
            kept, at_once = layers * self.activation_bytes / (t if self.sequence_parallel else 1), sparse
        total = in_flight(stage, p, self.micro_batches, self.virtual_stages) * kept + at_once
        if stage == p - 1:  # logits, their fp32 copy for the loss, and its gradient
            tokens = self.micro_batch * model.sequence / self.context_parallel
            total += tokens * model.vocab / t * (BYTES[self.activation_dtype] + 8.0)
        return total
