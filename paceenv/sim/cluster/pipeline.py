"""The order of a pipeline stage's passes: one forward, one backward (Narayanan et al. 2019, PipeDream-flush)."""

from __future__ import annotations


def warm_up(stage: int, stages: int, micro_batches: int, parts: int = 1) -> int:
    """Forward passes of a stage, each of one part, before forward and backward take turns."""
    if parts == 1:
        return min(stages - 1 - stage, micro_batches)
    total = micro_batches * parts
    return total if micro_batches == stages else min((stages - stage - 1) * 2 + (parts - 1) * stages, total)


def in_flight(stage: int, stages: int, micro_batches: int, parts: int = 1) -> float:
    """Micro-batches that a stage holds at most between their forward and backward passes; of one part, 1 / parts.

    Interleaved, a first stage holds ``1 + (p - 1) / (p v)`` of all p stages' layers (Korthikanti et al. 2022, section
    4.2.3). Arguments as in :func:`warm_up`.
    """
    return min(warm_up(stage, stages, micro_batches, parts) + 1, micro_batches * parts) / parts


def interleaved(stage: int, stages: int, micro_batches: int, parts: int = 1) -> list[tuple[bool, int, int]]:
    """Operations of a stage in order, as (is backward, micro-batch, part of the stage): fill, alternate, drain.

    With several parts it is Megatron-LM's interleaved schedule (Narayanan et al. 2021, section 2.2): the bubble is
    ``(p - 1)(f + b)`` divided by the parts.

    Args:
        parts: of each stage; part k of stage s is stage ``k * stages + s`` of the model.
    """

    def place(k: int, backward: bool) -> tuple[bool, int, int]:
        part = k % (stages * parts) // stages
        micro_batch = k // (stages * parts) * stages + k % stages
        return backward, micro_batch, parts - 1 - part if backward else part

    total, ahead = micro_batches * parts, warm_up(stage, stages, micro_batches, parts)
    operations = [place(k, False) for k in range(ahead)]
    for k in range(total - ahead):
        operations += [place(ahead + k, False), place(k, True)]
    return operations + [place(k, True) for k in range(total - ahead, total)]
