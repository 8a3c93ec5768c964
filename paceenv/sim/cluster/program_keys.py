"""Keys of a workload that only a step as a program knows, and which of them fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceenv.sim.cluster.workload import Workload

PROGRAM_KEYS = (
    "virtual_stages", "sequence_parallel", "context_parallel", "experts", "expert_parallel", "expert_every",
    "top_k", "capacity_imbalance", "shard_group", "all_gather_group", "outer_every", "length_cv", "checkpoint_every",
)  # fmt: skip
"""Keys of a workload that need ``step: program``."""


def check_program_keys(one: Workload) -> None:
    """Keys that only a program knows, and what fits together."""
    if one.step == "folded":
        for key in PROGRAM_KEYS:
            if getattr(one, key) != type(one).model_fields[key].default:
                raise ValueError(f"{key} with step: program, and only with it")
        return
    if one.model.kind == "generic" and (one.experts > 1 or one.context_parallel > 1):
        raise ValueError("experts 1 and context_parallel 1 for a generic model")
    if one.virtual_stages > 1:
        _check_virtual_stages(one)
    parts = one.context_parallel * (one.tensor_parallel if one.sequence_parallel else 1)
    if one.model.kind == "transformer" and one.model.sequence % parts:
        raise ValueError(
            f"context_parallel, times tensor_parallel where sequences are cut, to divide the "
            f"{one.model.sequence} tokens"
        )
    _check_experts(one)
    if one.zero_stage < 3 and (one.shard_group is not None or one.all_gather_group):
        raise ValueError("zero_stage 3 with shard_group or all_gather_group")
    if one.shard_group is not None and one.pipeline_parallel > 1:
        raise ValueError("no shard_group with pipeline_parallel, where all replicas share the shards")
    if one.outer_every > 1 and one.shard_group is None and (one.zero_stage or one.experts > 1):
        raise ValueError("zero_stage 0 and experts 1, or a shard_group, with outer_every")
    if one.outer_every > 1 and not one.accumulate:
        raise ValueError("accumulate: true with outer_every")


def _check_virtual_stages(one: Workload) -> None:
    p, v = one.pipeline_parallel, one.virtual_stages
    if p == 1:
        raise ValueError("virtual_stages 1 without pipeline_parallel")
    if one.model.layers % (p * v) or one.micro_batches % p:
        raise ValueError(
            f"pipeline_parallel x virtual_stages to divide the {one.model.layers} layers, and pipeline_parallel "
            f"the {one.micro_batches} micro_batches"
        )


def _check_experts(one: Workload) -> None:
    if one.experts == 1:
        if one.expert_parallel > 1 or one.expert_every > 1 or one.top_k > 1 or one.capacity_imbalance > 1.0:
            raise ValueError("experts with expert_parallel, expert_every, top_k or capacity_imbalance")
        return
    layers = one.model.layers // (one.pipeline_parallel * one.virtual_stages)
    if layers % one.expert_every:
        raise ValueError(f"expert_every to divide the {layers} layers of each stage, or part of one")
    if one.experts % one.expert_parallel or one.top_k > one.experts:
        raise ValueError(f"expert_parallel to divide the {one.experts} experts, and top_k at most that many")
    if one.shard_group is not None:
        raise ValueError("no shard_group with experts, whose shards are those of their own replicas")
