"""The model, its GPUs, and how it is split: the ``workload`` and ``gpu`` sections of a cluster config.

Frozen and validated. Parameters, FLOPs, payloads and memory are derived from the description;
:mod:`paceenv.sim.cluster.step_time` makes a step of them. FLOPs count a multiply and an add as two.

Sources: parameters and FLOPs of a transformer, Narayanan et al. 2021 (Efficient Large-Scale Language Model Training,
appendix) and Kaplan et al. 2020; activation memory, Korthikanti et al. 2022 (Reducing Activation Recomputation), with
their tensor and sequence parallelism; optimizer memory and ZeRO stages, Rajbhandari et al. 2020. That operations other
than matrix products take the time of their bytes in memory: Ivanov et al. 2021 (Data Movement Is All You Need).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from paceenv.sim.cluster.pipeline import in_flight
from paceenv.sim.cluster.program_keys import check_program_keys
from paceenv.ui import config_files
from paceenv.ui.config_files import Config

Dtype = Literal["fp32", "bf16", "fp16", "fp8"]
BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
BACKWARD = 2.0
"""Backward kernels relative to forward ones: a gradient for the input and one for the weights."""
TOTAL_TOLERANCE = 0.02
"""A typed-in number of parameters is a check: it may differ by this much from the derived one."""
BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
"""PyTorch's ``DistributedDataParallel``: a small first bucket, then up to 25 MiB each."""
ADAM_BYTES, MASTER_BYTES = 8, 4
"""Per parameter: two fp32 moments, and an fp32 copy where the weights themselves are smaller."""


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
    reserved_gb: float = Field(1.0, ge=0, description="of that for context, communication buffers and workspace, GB")

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


class Tensor(NamedTuple):
    """Weights whose gradients are ready together."""

    parameters: float
    flops: float
    """Forward and backward of one sample."""


class Transformer(Config):
    """A decoder of equal layers: attention and a two-layer MLP, biases and layer norms as in GPT-2."""

    kind: Literal["transformer"] = Field("transformer", description="says which kind of model this is")
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
    parameters_total: float | None = Field(None, gt=0, description="checked against the derived number (2 %)")

    @model_validator(mode="after")
    def _adds_up(self) -> Transformer:
        if self.hidden % self.heads:
            raise ValueError(f"heads to divide hidden ({self.heads} and {self.hidden})")
        total = self.parameters_total
        if total is not None and abs(self.parameters / total - 1.0) > TOTAL_TOLERANCE:
            raise ValueError(
                f"parameters_total within {TOTAL_TOLERANCE:.0%} of the {self.parameters:.4g} that follow from the "
                f"layers ({total:.4g})"
            )
        return self

    @property
    def mlp(self) -> int:
        return self.mlp_hidden or 4 * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Four attention matrices, two of the MLP, their biases, and two layer norms."""
        h, m = self.hidden, self.mlp
        return 4 * h * h + 2 * h * m + 9 * h + m

    @property
    def embedding_parameters(self) -> int:
        """The token embedding; the output layer is as large, and the same one if tied."""
        return self.vocab * self.hidden

    @property
    def position_parameters(self) -> int:
        return (self.sequence if self.positions is None else self.positions) * self.hidden

    @property
    def parameters(self) -> int:
        embeddings = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return self.layers * self.layer_parameters + embeddings + self.position_parameters + 2 * self.hidden

    @property
    def attention_flops(self) -> float:
        """Forward FLOPs of a layer's scores and weighted sums for one sample: ``4 s^2 h``, not halved by causality."""
        return 4.0 * self.sequence**2 * self.hidden

    @property
    def layer_flops(self) -> float:
        """Forward FLOPs of one layer for one sample: two per weight and token, and attention."""
        weights = 4 * self.hidden**2 + 2 * self.hidden * self.mlp
        return 2.0 * self.sequence * weights + self.attention_flops

    @property
    def head_flops(self) -> float:
        """Forward FLOPs of the output layer for one sample."""
        return 2.0 * self.sequence * self.embedding_parameters

    @property
    def flops(self) -> float:
        """Forward and backward of one sample, FLOPs: ``6 N s + 12 L h s^2``, N without embeddings only looked up."""
        return (1.0 + BACKWARD) * (self.layers * self.layer_flops + self.head_flops)

    def layer_tensors(self) -> list[Tensor]:
        """Of one layer, from output to input; norms and biases go with their matrices."""
        h, m, per_weight = self.hidden, self.mlp, 2.0 * (1.0 + BACKWARD) * self.sequence
        return [
            Tensor(h * m + h, per_weight * h * m),
            Tensor(h * m + m + 2 * h, per_weight * h * m),
            Tensor(h * h + h, per_weight * h * h),
            Tensor(3 * h * h + 5 * h, per_weight * 3 * h * h + (1.0 + BACKWARD) * self.attention_flops),
        ]


class Generic(Config):
    """A model known by its totals: it can be replicated or sharded over data-parallel ranks, but not cut."""

    kind: Literal["generic"] = Field(description="says which kind of model this is")
    name: str = ""
    description: str = ""
    layers: int = Field(ge=1, description="equal layers")
    parameters: float = Field(gt=0, allow_inf_nan=False, description="trained numbers in all")
    flops: float = Field(gt=0, allow_inf_nan=False, description="forward and backward of one sample, FLOPs")
    activation_bytes: float = Field(0.0, ge=0, description="kept per sample between forward and backward, bytes")
    tensors: list[Tensor] = Field([], description="parameters and flops of each, input to output; empty: equal layers")

    @model_validator(mode="after")
    def _adds_up(self) -> Generic:
        for index, key in enumerate(("parameters", "flops")):
            total, found = getattr(self, key), sum(tensor[index] for tensor in self.tensors)
            if self.tensors and abs(found / total - 1.0) > TOTAL_TOLERANCE:
                raise ValueError(
                    f"tensors whose {key} add up to {total:.4g} within {TOTAL_TOLERANCE:.0%} ({found:.4g})"
                )
        return self


Model = Transformer | Generic


def _named(value: Any) -> Any:
    """A model given by name is read from ``configs/workloads``; a section without a kind is a transformer."""
    if isinstance(value, str):
        value = config_files.read_yaml(config_files.find("workloads", value))
    if isinstance(value, dict):
        return {"kind": "transformer"} | value
    return value


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
        Annotated[Model, Field(discriminator="kind")], BeforeValidator(_named), Field(description="or its name")
    ]
    data_parallel: int | None = Field(None, ge=1, description="replicas; empty: as many as the GPUs hold")
    tensor_parallel: int = Field(1, ge=1, description="GPUs that share every layer, next to each other")
    pipeline_parallel: int = Field(1, ge=1, description="stages, each with as many layers")
    batch: int = Field(ge=1, description="samples per replica and optimizer step")
    micro_batches: int = Field(1, ge=1, description="parts of the batch that pass one after the other")
    accumulate: bool = Field(True, description="reduce gradients once per step; false: after every micro-batch")
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
    step: Literal["folded", "program"] = Field(
        "folded", description="folded: one collective ends the step; program: every collective where it happens"
    )
    virtual_stages: int = Field(1, ge=1, le=64, description="parts of each stage, interleaved; needs step: program")
    sequence_parallel: bool = Field(
        False, description="tensor parallelism by reduce-scatter and all-gather; needs step: program"
    )
    context_parallel: int = Field(1, ge=1, description="GPUs that share each sequence; needs step: program")
    experts: int = Field(1, ge=1, le=65_536, description="experts of an MLP; needs step: program")
    expert_every: int = Field(1, ge=1, description="layers from one with experts to the next; 1: every layer has them")
    expert_parallel: int = Field(1, ge=1, description="replicas that share the experts of a layer")
    top_k: int = Field(1, ge=1, description="experts that a token goes to")
    capacity_imbalance: float = Field(
        1.0, ge=1, le=100, allow_inf_nan=False, description="tokens of the busiest GPU's experts over the mean"
    )
    shard_group: int | None = Field(
        None, ge=1, description="replicas that shard parameters under zero_stage 3 (HSDP); empty: all"
    )
    all_gather_group: bool = Field(
        False, description="whether all-gathers of zero_stage 3 have a communicator of their own; needs step: program"
    )
    outer_every: int = Field(
        1, ge=1, le=1_000_000, description="steps from one reduction between replicas to the next (local SGD, DiLoCo)"
    )
    length_cv: float = Field(0.0, ge=0, le=1, description="variation of a micro-batch's length; needs step: program")
    checkpoint_every: int = Field(
        0, ge=0, le=1_000_000, description="steps from one checkpoint over the network to the next; 0: none"
    )

    @model_validator(mode="after")
    def _divides(self) -> Workload:
        model, t, p = self.model, self.tensor_parallel, self.pipeline_parallel
        if self.batch % self.micro_batches:
            raise ValueError(f"micro_batches to divide the batch ({self.micro_batches} and {self.batch})")
        if p > 1 and (self.zero_stage == 2 or (self.zero_stage == 3 and self.step == "folded")):
            raise ValueError(
                "zero_stage 0, 1, or 3 under step: program, with pipeline_parallel, whose micro-batches accumulate "
                "gradients"
            )
        if p > 1 and not self.accumulate:
            raise ValueError("accumulate: true with pipeline_parallel")
        if self.zero_stage == 3 and not self.overlap:
            raise ValueError("overlap: true with zero_stage 3, which prefetches weights")
        if model.layers % p:
            raise ValueError(f"pipeline_parallel to divide the {model.layers} layers ({p})")
        if isinstance(model, Generic):
            if t > 1 or p > 1 or self.recompute != "none":
                raise ValueError("tensor_parallel 1, pipeline_parallel 1 and recompute none for a generic model")
        elif model.heads % t or model.mlp % t:
            raise ValueError(f"tensor_parallel to divide the {model.heads} heads and the MLP's {model.mlp} ({t})")
        check_program_keys(self)
        return self

    @property
    def micro_batch(self) -> int:
        """Samples that pass together."""
        return self.batch // self.micro_batches

    @property
    def activation_bytes(self) -> float:
        """One micro-batch's activations between layers: what a stage sends and tensor parallelism all-reduces."""
        model = self.model
        if isinstance(model, Generic):
            return 0.0
        tokens = self.micro_batch * model.sequence / self.context_parallel
        return tokens * model.hidden * BYTES[self.activation_dtype]

    def moved(self, *, backward: bool) -> Moved:
        """Bytes of one layer and token in memory, without what backward computes anew, and with one expert.

        With b bytes a number over 2: forward has per width two norms of 4 and two dropouts of 7, per score 4 and 5,
        per inner width 4; backward 6, 5 and a residual sum of 6, twice; 6 and 5; and 6.
        """
        model, t = self.model, self.tensor_parallel
        if isinstance(model, Generic):
            return Moved(0.0, 0.0, 0.0)
        outer, score, inner = (34.0, 11.0, 6.0) if backward else (22.0, 9.0, 4.0)
        scale = BYTES[self.activation_dtype] / 2
        return Moved(
            scale * outer * model.hidden / (t if self.sequence_parallel else 1),
            0.0 if self.recompute == "selective" else scale * score * model.heads * model.sequence / t,
            scale * inner * model.mlp / t,
        )

    def moved_logits(self, *, backward: bool) -> float:
        """Bytes of one token's logits on one GPU: their fp32 copy and its softmax, and the gradient in 16 bit."""
        model = self.model
        if isinstance(model, Generic):
            return 0.0
        return (6.0 if backward else 14.0) * model.vocab / self.tensor_parallel

    @property
    def sample_flops(self) -> float:
        """Forward and backward of one sample, FLOPs, with as many experts as a token goes to."""
        model = self.model
        return model.flops + (1.0 + BACKWARD) * (model.layers // self.expert_every) * self.expert_flops

    @property
    def expert_flops(self) -> float:
        """Forward FLOPs of a layer with experts and a sample, beyond those of one expert."""
        model = self.model
        if isinstance(model, Generic):
            return 0.0
        return (self.top_k - 1) * 4.0 * model.sequence * model.hidden * model.mlp

    @property
    def expert_parameters(self) -> float:
        """Of one layer with experts on one GPU, before tensor parallelism, beside those of a layer without."""
        if isinstance(self.model, Generic) or self.experts == 1:
            return 0.0
        mlp = 2 * self.model.hidden * self.model.mlp + self.model.hidden + self.model.mlp
        return (self.experts / self.expert_parallel - 1.0) * mlp + self.experts * self.model.hidden

    @property
    def sparse_parameters(self) -> float:
        """Experts of one layer that has them on one GPU, before tensor parallelism and sharding; 0 without experts."""
        if isinstance(self.model, Generic) or self.experts == 1:
            return 0.0
        return self.expert_parameters + self.mlp_parameters * self.tensor_parallel

    @property
    def mlp_parameters(self) -> float:
        """Of one layer without experts on one GPU, before any sharding over replicas."""
        if isinstance(self.model, Generic):
            return 0.0
        return sum(n for n, _ in self.model.layer_tensors()[:2]) / self.tensor_parallel

    @property
    def stage_sparse_parameters(self) -> float:
        """Experts of a pipeline stage on one GPU, before any sharding over replicas."""
        layers = self.model.layers // self.pipeline_parallel // self.expert_every
        return layers * self.sparse_parameters / self.tensor_parallel

    def stage_parameters(self, stage: int) -> float:
        """Parameters of one GPU of a pipeline stage, before any sharding over replicas.

        Layer norms and biases count as cut by tensor parallelism, which they are not: less than 0.1 %.
        """
        model, p = self.model, self.pipeline_parallel
        if isinstance(model, Generic):
            return model.parameters
        layers = model.layers // p
        total = layers * model.layer_parameters + layers // self.expert_every * self.expert_parameters
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
        kept, at_once = layers * dense + layers // self.expert_every * (sparse - dense), 0.0
        if self.recompute == "full":  # only each layer's input, and one layer at a time in full
            kept, at_once = layers * self.activation_bytes / (t if self.sequence_parallel else 1), sparse
        total = in_flight(stage, p, self.micro_batches, self.virtual_stages) * kept + at_once
        if stage == p - 1:  # logits, their fp32 copy for the loss, and its gradient
            tokens = self.micro_batch * model.sequence / self.context_parallel
            total += tokens * model.vocab / t * (BYTES[self.activation_dtype] + 8.0)
        return total
